"""A run outlives its terminal: writing to one that was closed must not end it, as the log file has every line."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable
from typing import Any


def let_go() -> None:
    """What would be written to a terminal goes nowhere from now on; files and pipes stay."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)


class Output:
    """Standard output that lets go of its terminal when that is closed."""

    def __init__(self) -> None:
        self.stream = sys.stdout  # what a bar puts in its place later prints through this one

    def write(self, text: str) -> int:
        return int(_tried(lambda: self.stream.write(text)) or 0)

    def flush(self) -> None:
        _tried(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        let_go()
        return action()
