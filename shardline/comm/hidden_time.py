"""Measures how long tensor-parallel communication took in a step, and how long the rank waited for it (exposed time).

On a CPU, both come from timestamps (`spans`): a transfer lasts from its issue until it is complete, which a separate
thread notes; the time spent waiting for it is exposed.

On a GPU, events are recorded in the stream around every operation of the axis. A separate collective is exposed for all
of that time. If it belongs to a product that was timed at the start of the run, it is exposed for at most the time that
it took alone: the rest is waiting for a slower rank. An overlapped product is exposed for the time that it took beyond
the unsplit matrix products at the start, again for at most the time of its communication alone. A GPU multiplies at a
different speed in a step than at the start. Weight gradients show that speed, if the backend computes them separately
and nothing runs beside them. Kernels that communicate inside the product record how long they waited: that is exposed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm.kernel_clock import TimedKernel
from shardline.comm.spans import Span, Spans


class Times(NamedTuple):
    """Seconds of one step."""

    comm: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of communication hidden by computation."""
        return max(0.0, 1 - self.exposed / self.comm) if self.comm > 0 else 0.0


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length that the intervals cover together."""
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


class Alone(NamedTuple):
    """Seconds that each part of a product took alone at the start of the run."""

    inputs: float  # matrix products with communication beside them
    weights: float  # gradients of weights
    comm: float


@dataclass
class Mark:
    """An operation of a step: when it began and ended, and the weight gradients inside.

    A product has the times of its parts `alone`; a collective counts for at most `most` seconds.
    """

    span: tuple[Any, Any]
    alone: Alone | None
    with_weights: bool
    most: float
    weights: tuple[Any, Any] | None = None
    kernels: list[TimedKernel] = field(default_factory=list)  # kernels inside that communicate

    def seconds(self) -> tuple[float, float]:
        """Return (everything else, the weight gradients that were timed separately)."""
        apart = 0.0 if self.weights is None else _elapsed(self.weights)
        return _elapsed(self.span) - apart, apart


def _elapsed(span: tuple[Any, Any]) -> float:
    seconds: float = span[0].elapsed_time(span[1]) / 1e3
    return seconds


@dataclass
class DeviceClock:
    """Events around the operations of one axis; off except in sampled steps."""

    axis: str | None = None
    traced: list[TimedKernel] | None = None  # kernels that communicate, in steps that a trace records
    _most: float = math.inf
    _inside: Mark | None = None
    _marks: list[Mark] = field(default_factory=list)

    @contextlib.contextmanager
    def around(self, axis: str, alone: Alone | None = None, with_weights: bool = False) -> Iterator[None]:
        """Use around a collective, or around a product that communicates and whose parts were timed `alone`."""
        sampled = self.axis == axis
        if self._inside is not None or not (sampled or (self.traced is not None and alone is not None)):
            yield
            return
        mark = self._inside = Mark(_events(), alone, with_weights, self._most)
        mark.span[0].record()
        try:
            yield
            mark.span[1].record()
            if sampled:
                self._marks.append(mark)
        finally:
            self._inside = None

    @property
    def reads(self) -> bool:
        """Whether anything reads times now."""
        return self.axis is not None or self.traced is not None

    def words(self, kernel: str, device: torch.device, abreast: int) -> Tensor | None:
        """Return memory for the times that a kernel records; None if nothing will read it."""
        alone = None if self._inside is None else self._inside.alone
        readers = [] if self._inside is None or alone is None else [self._inside.kernels]
        readers += [] if self.traced is None else [self.traced]
        if not readers:
            return None
        noted = TimedKernel(kernel, device, abreast, math.inf if alone is None else alone.comm)
        for kernels in readers:
            kernels.append(noted)
        return noted.words

    @contextlib.contextmanager
    def expecting(self, comm: float) -> Iterator[None]:
        """Use around a product with a separate collective that takes `comm` seconds alone."""
        self._most = comm
        try:
            yield
        finally:
            self._most = math.inf

    @contextlib.contextmanager
    def weight_gradients(self) -> Iterator[None]:
        """Use around the weight gradients of a product, after the part that communicates."""
        if self._inside is None:
            yield
            return
        mark, (began, ended) = self._inside, _events()
        began.record()
        yield
        ended.record()
        mark.weights = began, ended

    def take(self) -> Times:
        """Return the times of the step that the device has just finished."""
        timed = [(mark, *mark.seconds()) for mark in self._marks]
        self._marks = []
        paces = [apart / mark.alone.weights for mark, _, apart in timed if mark.alone and apart and mark.alone.weights]
        pace = statistics.median(paces) if paces else 1.0  # the median, as one product may have waited for memory
        total = exposed = 0.0
        for mark, seconds, apart in timed:
            if mark.alone is None:
                counted = min(seconds, mark.most)
                total, exposed = total + counted, exposed + counted
                continue
            total += mark.alone.comm
            if mark.kernels:
                exposed += min(sum(kernel.times().waited for kernel in mark.kernels), mark.alone.comm)
                continue
            compute = mark.alone.inputs + (mark.alone.weights if mark.with_weights and not apart else 0.0)
            exposed += min(max(seconds - pace * compute, 0.0), mark.alone.comm)
        return Times(total, exposed)


@dataclass
class RowClock:
    """Events around rows that a GPU sends to experts, and around waits for rows; off except in sampled steps."""

    on: bool = False
    _watch: Any = None  # a stream that only waits for collectives
    _sent: list[tuple[Any, Any]] = field(default_factory=list)
    _waited: list[tuple[Any, Any]] = field(default_factory=list)

    def sending(self) -> contextlib.AbstractContextManager[None]:
        return self._around(self._sent)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return self._around(self._waited)

    def begin(self) -> tuple[Any, Any] | None:
        """Call before an NCCL collective starts, and `until_done` after it; other work may run meanwhile."""
        if not self.on:
            return None
        span = _events()
        span[0].record()
        return span

    def until_done(self, span: tuple[Any, Any] | None, work: Any) -> None:
        if span is None:
            return
        self._watch = self._watch or torch.cuda.Stream()
        with torch.cuda.stream(self._watch):
            work.wait()
            span[1].record()
        self._sent.append(span)

    @contextlib.contextmanager
    def _around(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """Use around work that is queued in the current stream."""
        if not self.on:
            yield
            return
        span = _events()
        span[0].record()
        yield
        span[1].record()
        spans.append(span)

    def take(self) -> Times | None:
        """Return the times of the step that the device has just finished; None if the GPU sent nothing."""
        sent, waited = self._sent, self._waited
        self._sent, self._waited = [], []
        return Times(sum(map(_elapsed, sent)), sum(map(_elapsed, waited))) if sent else None


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class Sampler:
    """Measures the communication over some axes in a step that will be logged: `begin` before it, `end` after it.

    On a GPU, events time the tensor-parallel operations and the rows sent to experts; NCCL's collectives over other
    axes are not measured.
    """

    def __init__(
        self,
        device: torch.device,
        clock: DeviceClock,
        rows: RowClock,
        spans: Spans,
        axes: Sequence[str] = ("tp",),
        sends_rows: bool = False,
    ) -> None:
        """`sends_rows`: some rank's GPU sends rows to experts, so all ranks have times of that."""
        self.clock, self.rows, self.spans, self.device = clock, rows, spans, device
        self.by_events = [axis for axis in axes if axis == "tp" and device.type == "cuda"]
        self.by_host = [axis for axis in axes if axis not in self.by_events]
        self.sends_rows = sends_rows and device.type == "cuda" and "ep" not in self.by_host

    def begin(self) -> None:
        if self.by_events:
            self.clock.axis = "tp"
        self.rows.on = self.device.type == "cuda"
        if self.by_host:
            self.spans.stop("step")  # an earlier run may have failed in the middle of a step
            self.spans.record("step")

    def end(self) -> dict[str, Times]:
        found = {}
        if self.by_events:
            torch.cuda.synchronize(self.device)
            self.clock.axis = None
            found["tp"] = self.clock.take()
        if self.by_host:
            recorded = self.spans.take("step")
            self.spans.stop("step")
            found |= {axis: host_times(recorded, axis) for axis in self.by_host}
        if self.rows.on:
            torch.cuda.synchronize(self.device)
            self.rows.on = False
            by_gpu = self.rows.take()
            if by_gpu is not None or self.sends_rows:  # a pipeline rank may hold no experts
                found["ep"] = by_gpu or Times(0.0, 0.0)
        return found
