"""Ends a process that does not stop in time after a signal, whatever its main thread is doing.

    signal ---> handler in C ---> pipe ---> enforcer: counts the time for a stop ---> prints a line, ends the process

Python calls its signal handlers in the main thread, between two of its own instructions: not inside a native call,
which may be long. But its handler in C writes the number of each signal into a pipe (`signal.set_wakeup_fd`) at once.

A run of one process has no launcher that would kill it. It forks a small process, before torch is loaded, that reads
the pipe. When the time is over, that process lets a thread of the run exit with the code of a stop. Where not even that
thread gets to run, because a native call holds Python's lock, it kills the run. A rank has a launcher: there a thread
reads the pipe, for a signal that was sent to the rank alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardline.report import HANG_CODE, this_report, write_report
from shardline.run import attempt, signals

log = logging.getLogger("shardline")

SAVING, STEPPING, DONE = 0, 254, 255  # what the run itself writes into the pipe: no numbers of signals
SECOND_SIGNAL_SECONDS = 5.0
LAST_SECONDS = 3.0  # for the thread that exits
LAUNCHER_SECONDS = 10.0  # by which a launcher, which counts too, comes first
LOOK_SECONDS = 1.0  # between looks whether the run is still there
_pipe: int | None = None  # the end that the run writes to
_saves = 0  # under way; a launcher is told whether there are any
_counting = threading.Lock()


@dataclass
class StopClock:
    """The time that is left for a stop, by what the pipe brings."""

    stop_seconds: float
    save_seconds: float
    signal: int | None = None
    deadline: float | None = None
    given: float = 0.0  # seconds, from the last event on
    saves: int = 0  # under way

    def hear(self, byte: int) -> None:
        """Note a signal, or that a save begins or has ended: a save has a time limit of its own."""
        if byte in (SAVING, STEPPING):
            self.saves += 1 if byte == SAVING else -1
            if self.signal is not None:
                self._give(self._first())
        elif byte in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._give(self._first() if self.signal is None else SECOND_SIGNAL_SECONDS)
            self.signal = byte

    def _first(self) -> float:
        return self.stop_seconds + (self.save_seconds if self.saves else 0.0)

    def _give(self, seconds: float) -> None:
        self.given, self.deadline = seconds, time.monotonic() + seconds

    def is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def wait_seconds(self) -> float:
        left = LOOK_SECONDS if self.deadline is None else self.deadline - time.monotonic()
        return min(LOOK_SECONDS, max(0.0, left))

    def line(self) -> str:
        name = signal.Signals(self.signal or signal.SIGTERM).name
        what = "finish its save" if self.saves else "finish its step"
        key = "checkpoint.save_timeout_seconds" if self.saves else "comm.stop_timeout_seconds"
        return f"{name}: the run did not {what} within {self.given:g} s and was ended ({key} gives more time)"

    @property
    def code(self) -> int:
        return 128 + signals.counts_as(self.signal or signal.SIGTERM)


@contextlib.contextmanager
def enforced_stop(stop_seconds: float, save_seconds: float, is_rank: bool) -> Iterator[None]:
    """Enforce a stop in the block, if the program owns this process; for a rank, a launcher does it as well."""
    global _pipe
    if not signals.ends_with_run or threading.current_thread() is not threading.main_thread() or _pipe is not None:
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    if is_rank:
        clock = StopClock(stop_seconds + LAUNCHER_SECONDS, save_seconds)
        threading.Thread(target=_enforce_here, args=(reads, clock), name="shardline-enforcer", daemon=True).start()
    else:
        _fork_enforcer(reads, writes, StopClock(stop_seconds, save_seconds))
    _pipe = writes
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _tell(DONE)
        _pipe = None
        os.close(writes)


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Around a save, which a stop waits for."""
    _tell(SAVING)
    try:
        yield
    finally:
        _tell(STEPPING)


def reached_boundary() -> None:
    """The run has come to the step boundary at which it stops: what is left is to save, and to end."""
    _tell(SAVING)


def _tell(byte: int) -> None:
    global _saves
    if byte in (SAVING, STEPPING):
        with _counting:
            before, _saves = _saves, _saves + (1 if byte == SAVING else -1)
            if (before > 0) != (_saves > 0):
                attempt.say(attempt.SAVING, _saves > 0)
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, bytes([byte]))


def _forget_pipe() -> None:
    """A forked data worker gets the same Ctrl-C from a terminal: its signals are not those of the run."""
    global _pipe
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        os.close(_pipe)
        _pipe = None


os.register_at_fork(after_in_child=_forget_pipe)


def _time_is_over(pipe: int, clock: StopClock, run: int | None = None) -> bool:
    """Read the pipe until the time for a stop is over (True) or the run has ended (False). `run` is its pid."""
    while not clock.is_over():
        if run is not None and os.getppid() != run:
            return False
        if select.select([pipe], [], [], clock.wait_seconds())[0]:
            heard = os.read(pipe, 100)
            if not heard or DONE in heard:
                return False
            for byte in heard:
                clock.hear(byte)
    return True


# ---- in a rank -------------------------------------------------------------------------------------------------------


def _enforce_here(pipe: int, clock: StopClock) -> None:
    over = _time_is_over(pipe, clock)
    os.close(pipe)
    if over:
        reported = write_report(this_report("hang", clock.line()))
        _exit(clock.line(), HANG_CODE if reported else clock.code, shown=not reported)


def _exit(line: str, code: int, shown: bool) -> None:
    """End this process; the line goes to its log, from a thread, because the main thread may hold the lock of that."""
    if shown:
        _print(line)
    writer = threading.Thread(
        target=log.critical, args=("%s", line), kwargs={"extra": {"file_only": True}}, daemon=True
    )
    if log.handlers:
        writer.start()
        writer.join(1.0)
    os._exit(code)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        bar = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # its line, and the hidden cursor
        os.write(2, f"{bar}error: {line}\n".encode())


# ---- in a process beside the run -------------------------------------------------------------------------------------


def _fork_enforcer(reads: int, writes: int, clock: StopClock) -> None:
    """Start the process, and the thread of this one that exits when told to."""
    obeys, orders = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    run = os.getpid()
    if os.fork() == 0:
        try:
            os.close(writes)
            os.close(obeys)
            _enforce_beside(reads, orders, clock, run)
        finally:
            os._exit(0)
    os.close(reads)
    os.close(orders)
    threading.Thread(target=_obey, args=(obeys,), name="shardline-enforcer", daemon=True).start()


def _enforce_beside(pipe: int, orders: int, clock: StopClock, run: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal sends them to all of its processes
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    if not _time_is_over(pipe, clock, run):
        return
    _print(clock.line())
    os.write(orders, bytes([clock.code]) + clock.line().encode())
    deadline = time.monotonic() + LAST_SECONDS
    while os.getppid() == run:
        if time.monotonic() > deadline:
            os.kill(run, signal.SIGKILL)
            return
        time.sleep(0.05)


def _obey(orders: int) -> None:
    heard = os.read(orders, 1000)
    os.close(orders)
    if heard:
        _exit(heard[1:].decode(), heard[0], shown=False)
