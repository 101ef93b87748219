"""Ends a job that hangs, on every rank, and names the ranks that did not arrive.

Collectives report to the watchdog where this rank is (`comm.observe`). A thread publishes that once a second:

    sequence number and tag of the last collective on each axis, what the rank waits in and since when, step, place

A rank that waits longer than the limit reads what the others published. A member of the same collective is missing if
it has not reached its sequence number, has reached it with another tag, or has stopped publishing. Only the progress of
ranks is compared, so work that takes long on all of them (compilation, start-up) is not a hang.

NCCL's collectives run on the device while the rank continues. An event after each shows when it has ended; the rank is
considered to be in the first one that has not.
"""

from __future__ import annotations

import collections
import concurrent.futures._base
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardline.comm.flight_recorder import Flight, FlightRecorder
from shardline.comm.hang import Status, View, Wait, decode_status
from shardline.comm.job import job
from shardline.comm.store import SignedStore, backend_timeout, rank_key, set_group_timeouts
from shardline.report import HANG_CODE, this_report, write_report

log = logging.getLogger("shardline")

PERIOD = 1.0
SILENT_PERIODS = 4  # a rank that publishes nothing for this long while others wait is stopped or cut off
MANY_RANKS = 64  # above this, only one rank at a time examines all others
TURN_SECONDS = 30.0
A_DAY = 86400.0
WRITE_SECONDS = 5.0  # limit for writing the flight recorder's file before a rank ends

# Files of wrappers: a rank's place is the line that called them. All files of torch count as wrappers, too.
_passed_over = {__file__, threading.__file__, concurrent.futures._base.__file__}


def pass_over(file: str) -> None:
    """Register a module that wraps collectives, by its `__file__`: reports name the place that called it."""
    _passed_over.add(file)


class Entered(NamedTuple):
    """A collective of this rank, and when it was issued or entered."""

    axis: str
    sequence: int
    tag: object
    since: float
    flight: Flight | None = None


class Watchdog:
    """The watchdog of one rank. `store` is a connection that nothing else uses."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_seconds: float, period: float = PERIOD
    ) -> None:
        self.store = SignedStore(store, "watchdog", rank_key())
        self.rank, self.world_size, self.timeout_seconds, self.period = rank, world_size, timeout_seconds, period
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.step_number, self.busy_with = 0, ""
        self._counts: dict[str, tuple[int, object]] = {}
        self._waits: list[Entered] = []
        self._issued: Entered | None = None  # the last reported event, if it was `issue`
        self._launched: collections.deque[tuple[Entered, torch.cuda.Event]] = collections.deque()  # on the device
        self._changed = self._reached = self._first_since = time.monotonic()
        self._asking_since: float | None = None  # when the device was queried, while it has not answered
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> beat, and when it was first seen
        self._looking_since: float | None = None
        self._turn = ""
        self._main = threading.main_thread().ident
        self.recorder: FlightRecorder | None = None
        self._dumped = 0.0  # time of the last request for the recorder's file
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start publishing, and become the job's watchdog."""
        self._publish()
        for work in (self._watch, self._guard, self._follow):
            self._threads.append(threading.Thread(target=work, name="shardline-watchdog", daemon=True))
            self._threads[-1].start()
        job.watchdog = self

    def close(self) -> None:
        """Stop publishing. A thread that returns from the store while Python shuts down would abort the process."""
        self._closed.set()
        if job.watchdog is self:
            job.watchdog = None
        if self.recorder is not None:
            self.recorder.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.period)

    # ---- what the rank reports ---------------------------------------------------------------------------------------

    def issue(self, tag: object, axis: str = "world") -> int:
        """Note a collective that is waited for later, or never; return its sequence number on this axis.

        If nothing is reported after it, the rank is presumed to wait in it.
        """
        sequence = self.post(tag, axis)
        self._issued = Entered(axis, sequence, tag, self._changed)
        return sequence

    def post(self, tag: object, axis: str) -> int:
        """Note a collective that runs in the background: the rank is not presumed to wait in it."""
        sequence = self._counts[axis][0] + 1 if axis in self._counts else 1
        self._counts[axis] = (sequence, tag)
        self._moved()
        return sequence

    def record(self, axis: str, sequence: int, tag: str, size: float | None) -> Flight | None:
        """Note a collective in the flight recorder, if there is one."""
        recorder = self.recorder
        return None if recorder is None else recorder.issue(axis, sequence, tag, size, self.step_number)

    def wait(self, sequence: int, tag: object, axis: str = "world", flight: Flight | None = None) -> None:
        """Note that the rank waits, from now until `leave`, for a collective that it has issued."""
        self._moved()
        if flight is not None:
            flight.waited = flight.waited or time.time()
        self._waits.append(Entered(axis, sequence, tag, self._changed, flight))

    def enter(self, tag: object, axis: str = "world") -> int:
        """Call `issue` and `wait`, for a collective that returns when it is done."""
        sequence = self.issue(tag, axis)
        self.wait(sequence, tag, axis)
        return sequence

    def leave(self, on_device: bool = False) -> None:
        """Note that the rank continues. `on_device`: the collective may still be running in the current stream."""
        self._moved()
        if not self._waits:
            return
        call = self._waits.pop()
        if on_device and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self._launched.append((call._replace(since=self._changed), event))
        elif call.flight is not None:
            call.flight.done = time.time()

    def step(self, number: int) -> None:
        """Note that step `number` begins."""
        self.step_number = number
        self._moved()

    def _moved(self) -> None:
        self._changed = time.monotonic()
        self._issued = None

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Use around work that others may have to wait for: the rank is not missing, however long it takes."""
        self.busy_with = what
        try:
            yield
        finally:
            self.busy_with = ""
            self._moved()

    # ---- publishing and looking --------------------------------------------------------------------------------------

    def status(self) -> Status:
        now = time.monotonic()
        counts = {axis: (sequence, str(tag)) for axis, (sequence, tag) in list(self._counts.items())}
        running = self._running()
        for one in reversed(running):  # the device is behind the host: it is in the first running call of each axis
            counts[one.axis] = (one.sequence, str(one.tag))
        wait, call = None, self._waits_in(running)
        known = call or self._issued
        if known is not None:
            axis, sequence, tag, since, _ = known
            long = now - since > self.timeout_seconds / 2  # a large axis has many members: publish them only if needed
            members = job.members.get(axis) if long else ()
            wait = Wait(axis, sequence, str(tag), now - since, members, presumed=call is None)
        where, idle = _place(self._main), now - self._changed
        return Status(
            self.rank, self.host, self.pid, self._beat, self.step_number, idle, where, self.busy_with, counts, wait
        )

    def _waits_in(self, running: list[Entered]) -> Entered | None:
        """Return the outermost collective that the rank waits in, else the first that its device has not finished."""
        waits = list(self._waits)
        if waits or not running:
            return waits[0] if waits else None
        return running[0]._replace(since=max(running[0].since, self._first_since))

    def _follow(self) -> None:
        """Note what the device has finished, in a separate thread: the driver may block it as long as the device."""
        while not self._closed.wait(self.period / 4):
            self._asking_since = time.monotonic()
            while self._launched and self._launched[0][1].query():
                call, _ = self._launched.popleft()
                if call.flight is not None:
                    call.flight.done = time.time()
                self._first_since = time.monotonic()
            self._asking_since = None

    def _running(self) -> list[Entered]:
        """Return what the device has not finished, oldest first; empty if the driver does not answer."""
        asking_since = self._asking_since
        unanswered = asking_since is not None and time.monotonic() - asking_since > self.period
        return [] if unanswered else [call for call, _ in list(self._launched)]

    def _publish(self) -> None:
        self._beat += 1
        self.store.write(f"status/{self.rank}", asdict(self.status()))

    def _watch(self) -> None:
        while not self._closed.wait(self.period):
            try:
                self._publish()
                hang = self.store.read("hang", str)
                if hang is not None:
                    self._end(hang)
                asked = None if self.recorder is None else self.store.read("dumps", float)
                if asked is not None and asked != self._dumped:
                    self._dumped = asked
                    self._write_flights("on request")
                self._look()
                self._reached = time.monotonic()
            except (RuntimeError, ValueError):  # the store is gone or slow: `_guard` limits how long this may last
                continue

    def _look(self) -> None:
        """Look for a hang. This begins before the limit is reached, so that silent ranks are known by then."""
        stuck, silence = self._stuck_seconds(), SILENT_PERIODS * self.period
        if stuck <= max(self.timeout_seconds / 2, self.timeout_seconds - silence) or not self._has_turn(stuck):
            self._seen.clear()
            self._looking_since = None
            return
        self._looking_since = self._looking_since or time.monotonic()
        statuses = self._statuses()
        if stuck <= self.timeout_seconds or time.monotonic() - self._looking_since < silence:
            return
        now = time.monotonic()
        silent = {rank: now - since for rank, (_, since) in self._seen.items()}
        found = View(statuses, silent, self.world_size, self.timeout_seconds, silence).hang()
        if found is not None:
            first = self.store.offer("hang", found, str)
            self._end(first or found, shown=first is None)

    def _guard(self) -> None:
        """End this rank if it waits while the store is unreachable: it could not read what the others published."""
        ticked = time.monotonic()
        while not self._closed.wait(self.period):
            now = time.monotonic()
            if now - ticked > SILENT_PERIODS * self.period:  # this process itself was stopped for a while
                self._reached = now
            ticked, silent = now, now - self._reached
            allowed = max(self.timeout_seconds, 2 * SILENT_PERIODS * self.period)
            if silent > allowed and self._stuck_seconds() > self.timeout_seconds:
                address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
                status, lost = self.status(), f"has not reached the store of the job at {address} for {silent:.0f} s"
                why = "that host is down, or the network is cut"
                self._end(f"{status.who} is {status.doing()}, and {lost}: {why}", shown=True)

    def _stuck_seconds(self) -> float:
        """Return how long this rank has waited for others or, if it does not wait, how long ago it last reported."""
        call = self._waits_in(self._running())
        return 0.0 if self.busy_with else time.monotonic() - (self._changed if call is None else call.since)

    def _has_turn(self, stuck: float) -> bool:
        """Whether this rank may look. In a large job one rank looks; if it finds nothing, later another one does."""
        if self.world_size <= MANY_RANKS:
            return True
        waits = list(self._waits)
        where = f"{waits[0].axis}/{waits[0].sequence}" if waits else "outside"
        turn = f"turn/{where}/{int((stuck - self.timeout_seconds) // TURN_SECONDS)}"
        if turn != self._turn and self.store.offer(turn, self.rank, int) is None:
            self._turn = turn
        return turn == self._turn

    def _statuses(self) -> dict[int, Status]:
        now = time.monotonic()
        read = {rank: self.store.read(f"status/{rank}", decode_status) for rank in range(self.world_size)}
        found = {rank: status for rank, status in read.items() if status is not None and status.rank == rank}
        for rank, status in found.items():
            beat, since = self._seen.get(rank, (-1, now))
            self._seen[rank] = (status.beat, since if beat == status.beat else now)
        return found

    def _end(self, message: str, shown: bool = False) -> None:
        """End this process, whatever its main thread is blocked in; the launcher shows the message."""
        if self._closed.is_set():
            return
        reported = write_report(this_report("hang", message))
        self._write_flights(message)
        if log.handlers:  # in a thread: the main thread may be blocked while it holds a handler's lock
            options = {"extra": {"file_only": True}}
            writer = threading.Thread(target=log.critical, args=("%s", message), kwargs=options, daemon=True)
            writer.start()
            writer.join(1.0)
        if shown and not reported:
            os.write(2, f"error: {message}\n".encode())
        os._exit(HANG_CODE)

    def _write_flights(self, reason: str) -> None:
        """Write the recorder's file, with a time limit in case the file system hangs."""
        if self.recorder is None:
            return
        writer = threading.Thread(target=self.recorder.write, args=(reason, dict(job.members)), daemon=True)
        writer.start()
        writer.join(WRITE_SECONDS)


def keep_flights(size: int, folder: Path, prefix: str) -> None:
    """Keep the last `size` collectives; a hang of the job, or SIGUSR2 to one rank, makes every rank write them."""
    dog = job.watchdog
    if dog is not None:
        dog.recorder = FlightRecorder(dog.rank, size, folder, prefix)
        dog.recorder.listen(lambda: dog.store.write("dumps", time.time()))


def set_timeouts(seconds: float) -> None:
    """Set the longest wait for a collective from now on; the backends' limit is a little above the watchdog's."""
    if job.watchdog is not None:
        job.watchdog.timeout_seconds = seconds
    set_group_timeouts((over.group for over in job.axes.values()), backend_timeout(seconds))


@contextlib.contextmanager
def patiently(what: str) -> Iterator[None]:
    """Use around work of some ranks that others wait for, such as saving: no time-out applies until all are done."""
    dog = job.watchdog
    if dog is None:
        yield
        return
    seconds = dog.timeout_seconds
    set_timeouts(A_DAY)
    try:
        with dog.busy(what):
            yield
        dog.enter(f"end of {what}")
        dist.barrier()
        dog.leave()
    finally:
        set_timeouts(seconds)


def _place(thread: int | None) -> str:
    """Return the place of a thread: the innermost line outside torch and the wrappers around its collectives."""
    frame = innermost = sys._current_frames().get(thread or 0)
    while frame is not None and _is_wrapper(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_wrapper(file: str) -> bool:
    return file in _passed_over or f"{os.sep}torch{os.sep}" in file
