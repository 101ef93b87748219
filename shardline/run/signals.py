"""Signals of a run: those that stop it or ask for a save become requests (stop.py), at any moment of its life.

SIGHUP is treated as SIGTERM, under its own name; where it was ignored, as under nohup, it stays so.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from shardline.config.names import LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from shardline.run.stop import Requests

log = logging.getLogger("shardline")

ECHO_SECONDS = 2.0  # within which a rank of a SLURM job hears of one signal twice
STARTED_VARIABLE = "SHARDLINE_STARTED"  # when the launcher started, in seconds since 1970
ends_with_run = False  # this process belongs to the program, not to code that calls a run


def claim_process() -> None:
    """Declare that the program owns this process: signals after the work is done do not change how it ends."""
    global ends_with_run
    ends_with_run = True
    atexit.register(_ignore_signals)  # called last; the interpreter would restore handlers that end the process


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop."""
    hangs_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangs_up]


def counts_as(number: int) -> signal.Signals:
    """The signal whose exit code stands for a signal."""
    return signal.Signals(signal.SIGTERM if number == signal.SIGHUP else number)


def leave_terminal() -> None:
    """Write to the null device what would go to a terminal that was closed, where every print would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def listening(requests: Requests) -> Iterator[Requests]:
    """Turn signals into requests; a second one of those that stop a run interrupts it at once.

    Once there is a final exit code, a signal ends the process at once and does not change how it ends.
    """
    if not _in_main_thread():
        yield requests
        return

    # SLURM signals every process of a job at once; a rank's launcher then passes on what it was sent itself.
    echoes = "SLURM_STEP_ID" in os.environ and LAUNCHER_VARIABLE in os.environ

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if number == signal.SIGUSR1:
            requests.saves += 1
            text = "%s: saving after this step"
        else:
            if requests.final_code is not None and ends_with_run:
                _end_at_once(requests.final_code)
            if requests.is_stopping:
                if echoes and requests.clock() - requests.asked_at < ECHO_SECONDS:
                    return
                raise KeyboardInterrupt(number)
            requests.stop, requests.asked_at = signal.Signals(number).name, requests.clock()
            text = "%s: stopping after this step (again: at once)"
        # From a thread: the signal may have come in the middle of a print, and one inside another repeats its text.
        _thread.start_new_thread(log.info, (text, signal.Signals(number).name))

    previous = {number: signal.signal(number, ask) for number in (*ending_signals(), signal.SIGUSR1)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield requests
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ends = requests.final_code is not None and ends_with_run
        for number, handler in previous.items():
            if number == signal.SIGUSR1 or not ends:
                signal.signal(number, handler)


def _end_at_once(code: int) -> NoReturn:
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a print
        sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let signals that stop a run interrupt what comes before its steps, as Ctrl-C does, instead of killing it.

    The ranks of a launcher keep the default: before there are steps, it ends them at once.
    """
    alone = "RANK" not in os.environ and _in_main_thread()
    previous = {number: signal.signal(number, _interrupt) for number in (ending_signals() if alone else [])}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == _interrupt:  # the end of a run leaves another one
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        leave_terminal()
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def starting_job(started_by_launcher: bool) -> Iterator[None]:
    """Surround a whole run, from before torch is imported: note the time, and hold SIGUSR1 until there are steps.

    Its default would end the process. A blocked signal stays pending, in ranks too, which inherit the mask. It is also
    ignored, for threads that are made while there are steps, and so do not have the mask. SIGUSR2 stays blocked: the
    flight recorder waits for it.
    """
    before = os.environ.get(STARTED_VARIABLE)
    if not started_by_launcher:
        os.environ[STARTED_VARIABLE] = repr(time.time())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    ignores = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and _in_main_thread()
    if ignores:  # not once more in a rank: what is pending would be dropped
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.sigtimedwait({number}, 0)  # one that came too late
        if ignores:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if before is None:
            os.environ.pop(STARTED_VARIABLE, None)
        else:
            os.environ[STARTED_VARIABLE] = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
