"""The folder of a launcher in $TMPDIR: reports and notes of its ranks. It does not outlive the launcher for long.

The kernel drops the launcher's lock on the folder, however the launcher ends. So a folder that can be locked has no
owner, and the next start removes it. Its name has the number of this boot of the machine, because locks on a shared
disk may hold only within each machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that only this user can read, until the end of the block."""
    prefix = _prefix()
    if prefix:
        _remove_orphans(Path(tempfile.gettempdir()), prefix)
    folder, lock = _make(prefix or "shardline-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _prefix() -> str:
    """The prefix of this boot's folders; "" if the boot's number is not known."""
    try:
        return f"shardline-{BOOT.read_text().strip()[:8]}-"
    except OSError:
        return ""


def _make(prefix: str) -> tuple[Path, int | None]:
    """A new folder, and the descriptor that holds its lock, where the file system has locks.

    Another start may see the folder unlocked for a moment and remove it; then a new one is made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            lock = _lock(folder)
        except (FileNotFoundError, BlockingIOError):
            continue
        except OSError:
            return folder, None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Hold the lock of a folder; returns its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_orphans(place: Path, prefix: str) -> None:
    """Remove the folders of this user's launchers that were killed."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
