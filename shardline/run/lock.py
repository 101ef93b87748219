"""One run at a time in a folder: a lock that the kernel drops with the process, and a heartbeat for other machines.

    log/lock        "pid 4711 on node3", locked by flock, its modification time renewed every few seconds

On one machine flock alone decides: a run that was killed holds nothing. File systems that machines share may keep locks
local to each machine, or have none; there the heartbeat decides. Ages are taken from the file system's own clock.

The second line tells machines of one name apart, and a machine before and after it was started again: by the number of
its boot. It also tells the holder from another process that has its pid now, or has it in another container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardline.errors import UserError
from shardline.storage.atomic import plain_file

log = logging.getLogger("shardline")

BEAT_SECONDS = 3.0
SILENCE_SECONDS = 15.0  # without a beat, after which a run on another machine is taken for dead
LEASE_SECONDS = 120.0  # for a file server to give up the lock of a machine that is gone
POLL_SECONDS = 0.25
BOOT = Path("/proc/sys/kernel/random/boot_id")
_held: set[int] = set()


class Holder(NamedTuple):
    """The process that a lock names; what is not known is empty."""

    words: str  # `pid 4711 on node3`
    boot: str = ""
    pids: str = ""  # the namespace in which its pid counts
    started: str = ""  # in clock ticks since the boot

    @classmethod
    def this_process(cls) -> Holder:
        pid, pids = os.getpid(), ""
        with contextlib.suppress(OSError):
            pids = os.readlink("/proc/self/ns/pid")
        return cls(f"pid {pid} on {socket.gethostname()}", _boot(), pids, _started(pid))

    @classmethod
    def of(cls, text: str) -> Holder:
        words, _, rest = text.partition("\n")
        found = re.fullmatch(r"boot=(\S*) pids=(\S*) started=(\d*)", rest)
        return cls(words, *found.groups()) if found else cls(words)

    def text(self) -> str:
        return f"{self.words}\nboot={self.boot} pids={self.pids} started={self.started}\n"

    @property
    def host(self) -> str | None:
        found = re.fullmatch(r"pid \d+ on (\S+)", self.words)
        return found[1] if found else None

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine since its last boot."""
        return self.host == socket.gethostname() and self.boot in ("", _boot())

    def may_run(self) -> bool:
        """Whether a process of this machine may still be there, by its pid."""
        pid, ours = int(self.words.split()[1]), Holder.this_process().pids
        if self.pids not in ("", ours):
            return True  # the pid counts in another container
        return Path(f"/proc/{pid}").exists() and self.started in ("", _started(pid))


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started; field 22 of its `stat`, whose second field may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@dataclass
class Lock:
    """An exclusive hold on a file, until `release` or the end of the process, however it ends."""

    descriptor: int
    released: threading.Event

    def release(self) -> None:
        if self.descriptor in _held:
            self.released.set()
            _held.remove(self.descriptor)
            os.ftruncate(self.descriptor, 0)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


def _forget_locks() -> None:
    """Close the locks in a forked child: a data worker that outlives its trainer must not keep the trainer's folder."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def take(file: Path) -> Lock:
    """Hold `file`, or raise a UserError that names who does. OSError: it cannot be written."""
    file.parent.mkdir(exist_ok=True)
    descriptor = plain_file(str(file), os.O_RDWR | os.O_CREAT)
    try:
        _claim(file, descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, Holder.this_process().text().encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    lock = Lock(descriptor, threading.Event())
    threading.Thread(target=_beat, args=(lock,), name="folder lock", daemon=True).start()
    return lock


def _beat(lock: Lock) -> None:
    while not lock.released.wait(BEAT_SECONDS):
        if lock.descriptor not in _held:
            return
        with contextlib.suppress(OSError):
            os.utime(lock.descriptor)


def _claim(file: Path, descriptor: int) -> None:
    """Make sure that nobody else holds the file."""
    problem = _try_flock(descriptor)
    if problem is not None and problem.errno in (errno.EWOULDBLOCK, errno.EACCES):
        _wait_for_lease(file, descriptor)
    elif problem is not None:
        log.info("%s cannot be locked (%s): a heartbeat in it keeps other runs out", file, problem.strerror)
    holder = _holder(descriptor)
    if not holder.words:
        return
    known_dead = holder.is_here() and (problem is None or not holder.may_run())
    if not known_dead and _beats(file):
        raise _in_use(file, holder)
    if _holder(descriptor).words:
        log.info("the run that had this folder (%s) ended without releasing it: its lock was taken over", holder.words)


def _try_flock(descriptor: int) -> OSError | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _wait_for_lease(file: Path, descriptor: int) -> None:
    """Wait for the lock of a machine that is silent: on a file server it outlives that machine for a while."""
    deadline = time.monotonic() + LEASE_SECONDS
    holder = _holder(descriptor, seconds=0.4)  # it may have taken the lock this instant and not have written its name
    if holder.host is None or holder.is_here() or _beats(file):
        raise _in_use(file, holder)
    while _try_flock(descriptor) is not None:
        if time.monotonic() > deadline or _holder(descriptor) != holder:
            now = _holder(descriptor)
            raise _in_use(file, now if now.words else holder)
        time.sleep(POLL_SECONDS)


def _in_use(file: Path, holder: Holder) -> UserError:
    return UserError(
        f"{file.parent.parent} is in use by another run ({holder.words or 'unknown process'}):"
        " wait for it, stop it, or use another --job.dump_folder"
    )


def _beats(file: Path) -> bool:
    """Whether the holder's heart beats: watches until there is a beat, or none came for too long."""
    seen = file.stat().st_mtime_ns
    silent = max(0.0, (_now(file) - seen) / 1e9)  # below 0 after the clock was set back
    silent_until = time.monotonic() + SILENCE_SECONDS - silent
    while time.monotonic() < silent_until:
        time.sleep(POLL_SECONDS)
        with file.open() as again:  # opening makes a network file system look
            if os.fstat(again.fileno()).st_mtime_ns != seen:
                return bool(again.read().strip())  # emptied: its run has ended
    return False


def _now(file: Path) -> int:
    """The file system's own time in ns, because machines' clocks differ."""
    probe = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    probe.unlink(missing_ok=True)
    with open(probe, "x", opener=plain_file) as made:
        probe.unlink()
        return os.fstat(made.fileno()).st_mtime_ns


def _holder(descriptor: int, seconds: float = 0.0) -> Holder:
    deadline = time.monotonic() + seconds
    while True:
        text = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        if text or time.monotonic() >= deadline:
            return Holder.of(text)
        time.sleep(0.02)
