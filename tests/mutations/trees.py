"""Copies of the tree in which changes are tried: the tests of a change run there, against the changed package."""

from __future__ import annotations

import contextlib
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
SECONDS = 400.0
FAILED = re.compile(r"^(FAILED|ERROR) ", re.MULTILINE)  # lines of pytest's summary
VERDICTS = {0: "survived", 1: "caught"}  # by pytest's exit code; others: no test ran, or none could


def copy_tree(folder: Path) -> Path:
    """A copy of the working tree below `folder`; it shares .venv with the original."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def run_tests(tree: Path, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
    """Pytest's exit code, None where it took too long, and what it printed."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SHARDLINE_"))}
    running = subprocess.Popen(
        words,
        cwd=tree,
        env={**inherited, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = running.communicate(timeout=SECONDS)
        return running.returncode, printed
    except subprocess.TimeoutExpired:
        return None, f"no end after {SECONDS:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@contextlib.contextmanager
def changed(tree: Path, change: Change) -> Iterator[None]:
    """The change is in the tree for the time of the block."""
    path = change.path(tree)
    before = path.read_text(encoding="utf-8")
    try:
        _write(path, change.applied_to(before))
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form: a change may keep size and second of the one before."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def verdict(tree: Path, change: Change) -> tuple[str, str]:
    """caught, survived or another word, and what the tests printed."""
    with changed(tree, change):
        code, printed = run_tests(tree, change.tests.split(), "-x")
    if code == 1 and not FAILED.search(printed):
        return "ended with 1, and no test failed", printed
    return VERDICTS.get(code, f"exit code {code}") if code is not None else "hung", printed
