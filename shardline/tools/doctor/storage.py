"""Reads the file system of a run's folder: free space, speed, and whether its locks keep a second process out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardline.tools.doctor.readings import StorageState

BLOCK = 2**22
BLOCKS = 32
SMALL_FILES = 5
MOUNTS = Path("/proc/self/mountinfo")


def read_storage(folder: Path) -> StorageState:
    """Read the file system on which `folder` is or would be created; all files written there are removed again."""
    there = existing(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".shardline-doctor-", dir=there) as name:
            place = Path(name)
            sync = sync_seconds(place)
            write, read = speeds(place / "data")
            return StorageState(
                str(there),
                kind=file_system(there),
                free=shutil.disk_usage(there).free,
                write=write,
                read=read,
                sync_seconds=sync,
                lock_problem=lock_problem(place / "lock"),
            )
    except OSError as error:
        return StorageState(str(there), problem=error.strerror or str(error), kind=file_system(there))


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    found = folder.expanduser().absolute()
    while not found.exists():
        found = found.parent
    return found


def speeds(file: Path) -> tuple[float, float]:
    """Return bytes per second of writing, fsync included, and of reading again, past the cache if possible."""
    block, size = os.urandom(BLOCK), BLOCK * BLOCKS
    with open(file, "wb", buffering=0) as writing:
        began = time.perf_counter()
        for _ in range(BLOCKS):
            writing.write(block)
        os.fsync(writing.fileno())
        written = time.perf_counter() - began
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(file, "rb", buffering=0) as reading:
        began = time.perf_counter()
        while reading.read(BLOCK):
            pass
        taken = time.perf_counter() - began
    file.unlink()
    return size / written, size / taken


def sync_seconds(folder: Path) -> float:
    """Return the median time until a small file is safe: written, renamed, and its folder synchronized."""
    taken = []
    for number in range(SMALL_FILES):
        began = time.perf_counter()
        part = folder / f"small-{number}.part"
        with open(part, "w") as file:
            file.write("{}")
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / f"small-{number}")
        with _opened(folder, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def lock_problem(file: Path) -> str:
    """Return why a lock on this file does not keep others out; "" if it does."""
    with _opened(file, os.O_RDWR | os.O_CREAT) as first, _opened(file, os.O_RDWR) as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return ""
    return "two processes get the same lock"


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on, such as ext4 or nfs4; "" if unknown."""
    found = ("", "")
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    path = str(folder.resolve())
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = path == point or path.startswith(f"{point.rstrip('/')}/")
        if inside and len(point) >= len(found[0]):
            found = (point, after.split()[0])
    return found[1]
