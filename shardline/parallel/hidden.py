"""How long tensor-parallel communication took in a step, and how much of that the rank stood still for.

On a CPU both come from timestamps (`spans`): a transfer lasts from when it was issued until it was complete, which a
thread of its own sees; what is exposed is the time spent waiting for it.

On a GPU, events are recorded in the stream around every operation of the axis. A collective alone is exposed for all of
that time. An overlapped product is exposed for what it took beyond the unsplit matrix products, which were timed at the
start of the run; the start also tells how long its communication takes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from shardline.parallel.spans import Span, spans


class Times(NamedTuple):
    """Seconds of one step."""

    comm: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of communication that was hidden behind computation."""
        return max(0.0, 1 - self.exposed / self.comm) if self.comm > 0 else 0.0


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def host_times(recorded: Iterable[Span], axis: str) -> Times:
    of_axis = [span for span in recorded if span.axis == axis]
    comm = union((span.start, span.end) for span in of_axis if not span.waiting)
    exposed = union((span.start, span.end) for span in of_axis if span.waiting)
    return Times(comm / 1e9, exposed / 1e9)


class DeviceClock:
    """Events around the operations of one axis; off but for sampled steps."""

    def __init__(self) -> None:
        self.axis: str | None = None
        self._inside = False
        self._marks: list[tuple[Any, Any, float, float | None]] = []

    @contextlib.contextmanager
    def around(self, axis: str, compute: float = 0.0, comm: float | None = None) -> Iterator[None]:
        """An operation that computes for so many seconds beside its communication, which takes `comm` alone."""
        if self.axis != axis or self._inside:
            yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._inside = True
        start.record()
        try:
            yield
        finally:
            end.record()
            self._inside = False
            self._marks.append((start, end, compute, comm))

    def take(self) -> Times:
        """After the device has finished the step."""
        total = exposed = 0.0
        for start, end, compute, comm in self._marks:
            seconds = start.elapsed_time(end) / 1e3
            alone = seconds if comm is None else comm
            total += alone
            exposed += min(max(seconds - compute, 0.0), alone) if comm is not None else seconds
        self._marks.clear()
        return Times(total, exposed)


clock = DeviceClock()


class Sampler:
    """Measures a step that is going to be logged: `begin` before it, `end` after."""

    def __init__(self, device: torch.device, axis: str = "tp") -> None:
        self.device, self.axis = device, axis

    def begin(self) -> None:
        if self.device.type == "cuda":
            clock.axis = self.axis
        else:
            spans.record("step")

    def end(self) -> Times:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            clock.axis = None
            return clock.take()
        found = host_times(spans.take("step"), self.axis)
        spans.stop("step")
        return found
