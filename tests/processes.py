"""Processes that tests start: each ends with the test that started it, however that test ends.

    process = start([sys.executable, "-m", "shardline", "train", ...], stdout=subprocess.PIPE)

It leads a session of its own, which is killed when the test is over (`shared`: when its owner calls `end`). Ranks of a
launcher have sessions of their own, and die with their launcher. `leftovers` finds what is left all the same.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

OUTLIVES_TERMINAL = "SHARDLINE_TESTS_OUTLIVE_TERMINAL"
_of_test: list[subprocess.Popen[Any]] = []


def start(words: Sequence[Any], shared: bool = False, **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own."""
    process = subprocess.Popen(words, start_new_session=True, **options)
    if not shared:
        _of_test.append(process)
    return process


@contextlib.contextmanager
def running(words: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the block."""
    process = start(words, **options)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process with its whole session, where something of it still runs, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def end_all() -> None:
    """End what the test that is over has started."""
    while _of_test:
        end(_of_test.pop())


def reset_signals() -> None:
    """Let processes that tests start have SIGHUP and SIGINT as usual, also where the tests run under nohup or in the
    background of a script, which ignore them.

    A signal that is ignored stays so in a new program, one with a handler does not. Workers of the test session are new
    programs, too, and take the same handler.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or OUTLIVES_TERMINAL in os.environ:
        os.environ[OUTLIVES_TERMINAL] = "1"
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
