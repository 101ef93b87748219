"""Observes every collective: counts the bytes that it sends, tells the watchdog where this rank is, and records times.

    call = Observed("tp", "all_gather", tag, sent, on_host)    issued: counted, and numbered for the watchdog
    with call:                                                 while the rank waits for it, once or several times
        work.wait()

Spans are recorded only for collectives on the host. `Started` or a thread times the communication of a call in the
`background`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm.job import Axis, job
from shardline.comm.spans import COPIES, RANGE, now
from shardline.comm.watchdog import pass_over

pass_over(__file__)


class Observed:
    """One collective, or several transfers that count as one.

    `sent` is in bytes, None if another rank counts them. Messages of a `channel` between two ranks have their own
    sequence numbers, and a rank continues after it has issued them.
    """

    def __init__(
        self,
        axis: str,
        what: str,
        tag: str,
        sent: float | None,
        on_host: bool,
        background: bool = False,
        channel: str = "",
    ) -> None:
        self.axis, self.what, self.tag, self.on_host, self.background = axis, what, tag, on_host, background
        self.counted_as, self.start = channel or axis, 0
        if sent is not None:
            job.traffic.add(axis, sent)
        dog = job.watchdog
        self.sequence = 0 if dog is None else (dog.post if channel else dog.issue)(tag, self.counted_as)
        self.flight = None if dog is None else dog.record(self.counted_as, self.sequence, tag, sent)

    def __enter__(self) -> None:
        if job.watchdog is not None:
            job.watchdog.wait(self.sequence, self.tag, self.counted_as, self.flight)
        if job.spans.enabled and self.on_host:
            self.start = self.began()

    def __exit__(self, *error: Any) -> None:
        """Leave the wait, also if it failed: the rank is elsewhere from now on, and its own error counts.

        What was launched may still run, so the watchdog follows the device; if that fails, the first error is kept.
        """
        if self.start:
            job.spans.ended(self.axis, self.what, self.start, only_waiting=self.background)
            self.start = 0
        if job.watchdog is not None:
            with contextlib.nullcontext() if error[0] is None else contextlib.suppress(RuntimeError):
                job.watchdog.leave(on_device=not self.on_host)

    def began(self) -> int:
        return now()


class Blocking(Observed):
    """A collective that returns when it is done, run by the process group or `directly` between GPU memories."""

    def __init__(self, over: Axis, what: str, x: Tensor, sent: float, directly: bool = False) -> None:
        self.device, self.directly = x.device, directly
        on_host = not directly and runs_on_host(over.group, x.device)
        super().__init__(over.name, what, described(what, over.name, x), sent, on_host)

    def __enter__(self) -> None:
        super().__enter__()
        self.timed = contextlib.ExitStack()
        if self.directly:
            self.timed.enter_context(labelled(self.axis, self.what))
        if job.clock.axis == self.axis:
            self.timed.enter_context(job.clock.around(self.axis))

    def __exit__(self, *error: Any) -> None:
        self.timed.__exit__(*error)
        super().__exit__(*error)

    def began(self) -> int:
        if self.device.type == "cuda":  # the collective first waits for its input, which is not communication
            torch.cuda.current_stream(self.device).synchronize()
        return now()


class Started:
    """A collective that was issued at `start` and runs in the background.

    If spans are recorded, its span lasts until its work is complete. Gloo's sends and receives do not report their
    completion: their spans end when a wait for them returns.
    """

    def __init__(self, start: int, work: dist.Work, call: Observed) -> None:
        self.work, self.call = work, call
        timed = job.spans.enabled and call.on_host
        self._end = functools.partial(_end_span, call, start, [True] if timed else [])
        if timed:
            with contextlib.suppress(RuntimeError):
                # Called by the backend's thread when the work is complete, or here if it already is.
                work.get_future().add_done_callback(self._end)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the result may be used; without a time-out, the group's applies."""
        with self.call:
            done = self.work.wait(timeout)
        self._end()
        return done


def _end_span(call: Observed, start: int, running: list[bool], future: object = None) -> None:
    ended = now()
    with contextlib.suppress(IndexError):  # the backend's thread and the one that waits may both call: the first counts
        running.pop()
        job.spans.add(call.axis, call.what, start, ended, waiting=False)


def described(what: str, axis: str, x: Tensor) -> str:
    """Describe a collective for messages: `all_gather over tp of (4, 8) float32`."""
    return f"{what} over {axis} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def runs_on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the CPU runs a group's collectives on this device. It runs gloo's, even on tensors of a GPU."""
    if device.type == "cpu":
        return True
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get(device.type) != "nccl"


@contextlib.contextmanager
def labelled(axis: str, what: str, copies_only: bool = False) -> Iterator[None]:
    """Use around GPU launches that communicate without a process group: in a trace, they count for the axis.

    copies_only: only memory copies count, for code that also launches products.
    """
    if not job.spans.enabled:
        yield
        return
    with torch.profiler.record_function(f"{RANGE}{axis}{COPIES if copies_only else ''}: {what}"):
        yield
