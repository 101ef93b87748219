"""Copies of the tree in which changes are tried: the tests of a change run there, against the changed package."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutations.change import ROOT, Change

FOLDERS = ("shardline", "tests", "configs", "docs", "benchmarks")
COPIED = (*FOLDERS, "pyproject.toml", "constraints.txt", "Makefile", "README.md")
FAILED = re.compile(r"^(FAILED|ERROR) ", re.MULTILINE)  # lines of pytest's summary
VERDICTS = {0: "survived", 1: "caught", None: "hung"}  # by pytest's exit code; others: no test ran, or none could


class Tree:
    """A copy of the working tree, which shares .venv with the original, and a process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, target)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SHARDLINE_"))}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.server"],
            cwd=folder,
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run_tests(self, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
        """Pytest's exit code, None where it took too long, and what it printed."""
        output = self.folder / "output.txt"
        words = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
        asks, answers = self._server.stdin, self._server.stdout
        assert asks is not None
        assert answers is not None
        asks.write(json.dumps([words, str(output)]) + "\n")
        asks.flush()
        code = json.loads(answers.readline())
        return code, output.read_text(encoding="utf-8", errors="replace")

    @contextlib.contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """The change is in the tree for the time of the block."""
        path = change.path(self.folder)
        before = path.read_text(encoding="utf-8")
        try:
            _write(path, change.applied_to(before))
            yield
        finally:
            _write(path, before)

    def verdict(self, change: Change) -> tuple[str, str]:
        """caught, survived or another word, and what the tests printed."""
        with self.changed(change):
            code, printed = self.run_tests(change.tests.split(), "-x")
        if code == 1 and not FAILED.search(printed):
            return "ended with 1, and no test failed", printed
        return VERDICTS.get(code, f"exit code {code}"), printed

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


def _write(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form: a change may keep size and second of the one before."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
