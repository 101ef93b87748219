"""What kind of process a run is in: a program's own, which ends with the run, or that of somebody who calls it."""

from __future__ import annotations

import atexit
import signal

ends_with_run = False


def claim() -> None:
    """For a program: signals that come when all is done do not change how it ends."""
    global ends_with_run
    ends_with_run = True
    atexit.register(_hear_no_more)  # called last; the interpreter would put back what ends a process


def _hear_no_more() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
