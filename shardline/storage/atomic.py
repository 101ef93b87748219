"""Writes files atomically, so that no reader or crash ever sees half of one, and opens only regular files.

Other users may be able to write into a run's folder. A run therefore never writes through a symbolic link, and neither
reading nor writing waits for the other end of a FIFO.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from shardline.errors import UserError

OTHERS_WRITE = 0o022  # the permission bits that no file of a run has


def forbid_others_to_write() -> int:
    """Deny group and others write access to files that this process creates from now on; returns the old umask."""
    before = os.umask(OTHERS_WRITE)
    os.umask(before | OTHERS_WRITE)
    return before


def plain_file(path: str, flags: int) -> int:
    """An `opener` for `open` that raises OSError for anything but a regular file, and for writing through a link.

    Reading follows links: the file may be on another disk.
    """
    name, writes = os.path.basename(path), bool(flags & (os.O_WRONLY | os.O_RDWR))
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o644)
    except OSError as error:
        if writes and error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{name} is a symbolic link, through which a run does not write") from error
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise _not_a_file(name) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(name)
    os.set_blocking(descriptor, True)
    return descriptor


def _not_a_file(name: str) -> OSError:
    return OSError(errno.EINVAL, f"{name} is a FIFO, a device or a folder, not a file")


def read_plain(path: Path) -> str:
    """Return the text of a run's file; raises `UserError` if it is not a regular file, other errors as they are."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=plain_file) as file:
            return file.read()
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with a file of this text, durably: it is on disk when this returns."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a crash, or planted
        with open(temporary, "x", encoding="utf-8", opener=plain_file) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable: they reach the disk only when the folder itself is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
