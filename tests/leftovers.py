"""Tests end what they start: the processes of a session that outlive it are named, ended, and make it fail.

Every process that a test starts inherits two variables: one that names the session, and pytest's PYTEST_CURRENT_TEST. A
process is found by the first whatever has become of its parents, and the second names its test. A process that was
forked shows the variables of the one it was forked from: whoever starts it that way writes its test down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "SHARDLINE_TEST_SESSION"  # a folder for what the processes of a session share
PATIENCE_SECONDS = 5.0  # for processes that are ending
# Helpers of Python's and torch's own that end with the process that started them.
HELPERS = ("multiprocessing.resource_tracker", "torch._inductor.compile_worker", "forkserver")


@dataclass(frozen=True)
class Leftover:
    pid: int
    test: str
    command: str


def note_started(pid: int, words: Sequence[str | os.PathLike[str]]) -> None:
    """Write down which test a forked process belongs to, and what it runs."""
    folder, test = os.environ.get(VARIABLE), os.environ.get("PYTEST_CURRENT_TEST", "no test")
    if folder and os.path.isdir(folder):
        (Path(folder) / str(pid)).write_text(f"{test}\n{' '.join(map(os.fsdecode, words))}")


def find(session: str) -> list[Leftover]:
    """The living processes that carry this session's name, apart from this process and those above it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in _lineage():
            continue
        try:
            variables = dict(
                entry.partition("=")[::2] for entry in (folder / "environ").read_text(errors="replace").split("\0")
            )
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has ended, or is somebody else's
            continue
        if variables.get(VARIABLE) == session and command and not any(name in command for name in HELPERS):
            test, note = variables.get("PYTEST_CURRENT_TEST", "no test"), Path(session) / folder.name
            if note.exists():
                test, _, command = note.read_text().partition("\n")
            found.append(Leftover(int(folder.name), test, command))
    return found


def _lineage() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0:
        pids.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return pids


class Guard:
    """Looks for leftovers once all fixtures are closed, in the one process that started the session."""

    def __init__(self) -> None:
        self.session = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="shardline-tests-")
        self.found: list[Leftover] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := find(self.session)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.found = found
        for one in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        shutil.rmtree(self.session, ignore_errors=True)
        if found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for one in self.found:
            line = f"left running by {one.test}: process {one.pid}, {one.command[:200]}"
            terminalreporter.write_line(line, red=True)
