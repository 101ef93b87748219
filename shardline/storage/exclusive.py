"""Lets one process at a time do some work on files: by flock, or where a file system has no locks, by a heartbeat.

    .lock           locked by flock, which the system frees however the process ends
    .lock.3         without flock: the third holder since the first one; its modification time is renewed while it works

A file system gives each number to one process only, and nobody asks for a number while that before it is beating. A
holder that was killed falls silent. One that ends removes its number and those before it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from shardline.storage.atomic import plain_file
from shardline.storage.progress import say

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
BEAT_SECONDS = 3.0
SILENCE_SECONDS = 15.0
POLL_SECONDS = 0.25
Stamp = tuple[int, int]  # inode and modification time


@contextlib.contextmanager
def exclusive(file: Path, waits: Callable[[], object]) -> Iterator[None]:
    """Hold `file` alone in the block; `waits` is called once if another process holds it."""
    with contextlib.ExitStack() as held:
        try:
            _lock(held.enter_context(open(file, "w", opener=plain_file)), waits)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(f"{file} cannot be locked ({error.strerror}): a heartbeat beside it keeps other processes out")
            held.enter_context(_beating(file, waits))
        yield


def _lock(stream: IO[str], waits: Callable[[], object]) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(stream, fcntl.LOCK_EX)


@contextlib.contextmanager
def _beating(file: Path, waits: Callable[[], object]) -> Iterator[None]:
    number, mine = _take(file, waits)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(mine, ended), name="shardline-exclusive", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for earlier, path in sorted(_numbers(file)):
            if earlier <= number:
                path.unlink(missing_ok=True)


def _beat(mine: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(mine)


def _take(file: Path, waits: Callable[[], object]) -> tuple[int, Path]:
    """Wait until the last number is gone or silent, and take the next one."""
    has_waited = False
    while True:
        number, last = max(_numbers(file), default=(0, file))
        silent = None
        if number > 0:
            if not has_waited:
                waits()
            has_waited, silent = True, _silence(last)
            if silent is None:
                continue
        mine = file.with_name(f"{file.name}.{number + 1}")
        try:
            open(mine, "x", opener=plain_file).close()
        except FileExistsError:
            continue
        if number == 0 or _stamp(last) == silent:
            return number + 1, mine
        mine.unlink(missing_ok=True)  # another process took this number, ended, and the count began anew


def _numbers(file: Path) -> Iterator[tuple[int, Path]]:
    for path in file.parent.iterdir():
        if found := re.fullmatch(rf"{re.escape(file.name)}\.(\d+)", path.name):
            yield int(found[1]), path


def _silence(path: Path) -> Stamp | None:
    """Watch a holder's file until it is gone (None) or was not renewed for too long (its last stamp)."""
    stamp, since = _stamp(path), time.monotonic()
    while stamp is not None and time.monotonic() - since < SILENCE_SECONDS:
        time.sleep(POLL_SECONDS)
        before, stamp = stamp, _stamp(path)
        since = since if stamp == before else time.monotonic()
    return stamp


def _stamp(path: Path) -> Stamp | None:
    try:
        with path.open() as file:  # opening makes a network file system look
            found = os.fstat(file.fileno())
            return found.st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return None
