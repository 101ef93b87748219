"""What is noted of every collective: the bytes it sends, where the watchdog finds this rank, and when it ran.

    call = Observed("tp", "all_gather", tag, sent, on_host)    issued: counted, and numbered for the watchdog
    with call:                                                 while the rank waits for it, once or several times
        work.wait()

Spans are recorded of what the host carries. The communication of a call in the `background` is timed by `Started` or by
a thread, not here.
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

    `sent` is in bytes, None where another rank counts them. Messages of a `channel` between two ranks are numbered on
    their own, and a rank goes on after it has issued them.
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
        """A wait that failed is left as well: the rank is elsewhere from now on, and its own error counts.

        What was launched may still run, so the watchdog follows the device; if that fails, the first error stays.
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
    """A collective that returns when it is done: by the process group, or `directly` between the memories of GPUs."""

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
        if self.device.type == "cuda":  # the collective would wait for the values first, which is not communication
            torch.cuda.current_stream(self.device).synchronize()
        return now()


class Started:
    """A collective that was issued at `start` and runs in the background.

    Where spans are recorded, its own lasts until its work is complete. Gloo's sends and receives do not report that:
    theirs end when somebody has waited for them.
    """

    def __init__(self, start: int, work: dist.Work, call: Observed) -> None:
        self.work, self.call = work, call
        timed = job.spans.enabled and call.on_host
        self._end = functools.partial(_end_span, call, start, [True] if timed else [])
        if timed:
            with contextlib.suppress(RuntimeError):
                # Called by the backend's thread when the work is complete, or here where it is already.
                work.get_future().add_done_callback(self._end)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the result may be used; without a time-out, the group's counts."""
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
    """How messages name a collective: `all_gather over tp of (4, 8) float32`."""
    return f"{what} over {axis} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def runs_on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the CPU carries a group's collectives on this device. Gloo's are, also those on tensors of a GPU."""
    if device.type == "cpu":
        return True
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get(device.type) != "nccl"


@contextlib.contextmanager
def labelled(axis: str, what: str, copies_only: bool = False) -> Iterator[None]:
    """Around launches on a GPU that communicate without a process group: in a trace, what they run counts for the axis.

    copies_only: memory copies alone, where products are launched in between.
    """
    if not job.spans.enabled:
        yield
        return
    with torch.profiler.record_function(f"{RANGE}{axis}{COPIES if copies_only else ''}: {what}"):
        yield
