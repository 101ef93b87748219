"""The processes of one round on this machine, one per rank, each in a session of its own.

So a Ctrl-C reaches them through the launcher alone, and what a rank leaves behind, such as data workers, is found and
ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.report import REPORT_VARIABLE, Report, read_report
from shardline.run.output import OUTPUT_VARIABLE

KILL_SECONDS = 5.0
SHOWN_LINES = 30


@dataclass
class RankProcess:
    number: int
    process: subprocess.Popen[bytes]
    report_path: Path
    output: Path | None  # None: the console
    code: int | None = None
    ended_at: float = 0.0

    def poll(self) -> None:
        """See whether the process has ended, and end what it left behind."""
        if self.code is None and self.process.poll() is not None:
            self.code, self.ended_at = self.process.returncode, time.time()
            self._kill_session()

    def send(self, number: int) -> None:
        """Signal the rank itself, if it runs."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, number)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def written_report(self) -> Report | None:
        """What the rank itself reported."""
        return read_report(self.report_path)

    def report(self) -> Report:
        """How the rank ended: by its own report, or else by its exit code, with its last output."""
        found = self.written_report()
        if found is not None and (self.output is None or self.output.is_symlink()):
            return found
        details = _tail(self.output)
        if found is not None:  # what it printed is nowhere else
            text = f"{found.details.rstrip()}\nits last output:\n{details}" if details else found.details
            return replace(found, details=text)
        host, pid, code = socket.gethostname(), self.process.pid, self.code or 0
        if code < 0:
            return Report("signal", self.number, host, pid, _signal_name(-code), details, self.ended_at)
        return Report("exit", self.number, host, pid, str(code), details, self.ended_at)


def start_rank(
    folder: Path, entry: str, words: Sequence[str], number: int, variables: Mapping[str, str]
) -> RankProcess:
    """Start a rank. Rank 0 prints to the console, each other one to a file in `folder`."""
    report, output = folder / f"rank-{number}.json", None if number == 0 else folder / f"rank-{number}.out"
    environment = {**variables, REPORT_VARIABLE: str(report)}
    if output is not None:
        environment[OUTPUT_VARIABLE] = str(output)
    command = [sys.executable, "-P", "-m", "shardline.launch.rank_main", entry, *words]
    console = contextlib.nullcontext()
    with console if output is None else output.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    return RankProcess(number, process, report, output)


def kill_ranks(ranks: Iterable[RankProcess]) -> None:
    """End every rank and whatever it has started, at once."""
    running = [rank for rank in ranks if rank.code is None]
    for rank in running:
        rank._kill_session()
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold one that waits for a device
            rank.process.wait(KILL_SECONDS)
        rank.code = rank.process.returncode or -signal.SIGKILL
        rank._kill_session()


def remove_empty_outputs(ranks: Iterable[RankProcess]) -> None:
    """Remove the output files, in the run's log folder too, of ranks that printed nothing."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            if rank.output is not None and rank.output.stat().st_size == 0:
                rank.output.resolve().unlink()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(output: Path | None) -> str:
    if output is None:
        return ""
    try:
        return "\n".join(output.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
    except OSError:
        return ""
