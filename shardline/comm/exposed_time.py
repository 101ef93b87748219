"""Measures how long a rank waits for data-parallel communication that nothing hides.

On a CPU the rank itself waits, which a clock measures. On a GPU one stream waits for another:

    compute stream   | backward of block 3 |x . . . . | backward of block 2 |       x: `ready`, it reaches the wait
    other stream              | gather weights of 2  x|                             x: `done`, the weights are there

`done` - `ready` is the exposed time. `StreamWaits` marks both moments where FSDP makes its stream wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Exposed:
    """Adds up waits. A GPU's wait is measured between two events, so `take` waits for the device."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the previous run."""
        self.measured = True  # False: the waits of this run cannot be measured
        self.last_backward = True  # of a step, at whose end FSDP waits for all gradients
        self.reset()

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Use around a wait, on the stream that waits."""
        if device.type == "cuda":
            ready = mark()
            yield
            self.between(ready, mark())
        else:
            started = time.perf_counter()
            yield
            self.add(time.perf_counter() - started)

    def between(self, ready: torch.cuda.Event, done: torch.cuda.Event) -> None:
        """Add the wait of a stream from `ready` until `done`; if `done` came first, the stream did not wait."""
        self._gaps.append((ready, done))

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float | None:
        """Return the seconds since the last call; None if they cannot be measured."""
        seconds, self._seconds = self._seconds, 0.0
        gaps, self._gaps = self._gaps, []
        for event in (event for gap in gaps for event in gap):
            event.synchronize()
        for ready, done in gaps:
            first = gaps[0][0]  # the earliest event: elapsed times of events in the wrong order are undefined
            seconds += max(0.0, first.elapsed_time(done) - first.elapsed_time(ready)) / 1000
        return seconds if self.measured else None

    def reset(self) -> None:
        """Forget what was measured, without waiting for the device."""
        self._seconds = 0.0
        self._gaps = []


exposed = Exposed()


def mark() -> torch.cuda.Event:
    """Record an event at the current point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Moments:
    """Marks moments of this rank by its clock or, on a GPU, by events in its stream, which need no wait."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"

    def mark(self) -> Any:
        return mark() if self.on_device else time.perf_counter()

    def unix(self, marks: Sequence[Any]) -> list[float]:
        """Return the marks' times in seconds since 1970; waits until the device has reached the present."""
        if not marks:
            return []
        last = self.mark()
        if self.on_device:
            last.synchronize()
        now = time.time()
        return [now - (moment.elapsed_time(last) / 1000 if self.on_device else last - moment) for moment in marks]


class StreamWaits:
    """The waits of the compute stream inside FSDP: for the weights of a module, and for scattered gradients.

    FSDP waits for weights in its hooks before forward and backward of a block, for the gradients of the previous block
    once those of a block are complete, and for the last gradients after backward. Our hooks run before each of these
    waits and mark the stream; the collectives mark their ends. The wait for weights is settled after FSDP's hook, since
    that hook issues the all-gather if nothing prefetched the weights.
    """

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.ready: dict[nn.Module | None, torch.cuda.Event] = {}
        self.gathered: dict[nn.Module | None, torch.cuda.Event] = {}  # weights that nothing has waited for yet
        self.scattered: torch.cuda.Event | None = None  # latest gradients, if nothing has waited for them yet

    def watch(self, model: Any, blocks: Sequence[nn.Module], ways_in: Sequence[str]) -> None:
        """Register the hooks, after FSDP's own. `ways_in` are the root's methods that begin a forward."""
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward, prepend=True)
            block.register_forward_pre_hook(self._after_gather)
            block.register_forward_hook(self._before_backward, prepend=True)
            block.register_forward_hook(self._after_forward)
        self.root = model
        for name in ways_in:
            setattr(model, name, self._watched_root(model, getattr(model, name)))

    def _before_forward(self, block: nn.Module, arguments: Any) -> None:
        self._settle(self.root)  # by now the root has its weights; the step first waited for them
        self.ready[block] = mark()

    def _after_gather(self, block: nn.Module, arguments: Any) -> None:
        self._settle(block)
        if arguments[0].requires_grad:  # FSDP's node comes later in backward: this gradient arrives here first
            arguments[0].register_hook(self._before_scatter)

    def _before_backward(self, block: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._before_forward(block, None))

    def _after_forward(self, block: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._settle(block))

    def _settle(self, module: nn.Module | None) -> None:
        ready, done = self.ready.pop(module, None), self.gathered.pop(module, None)
        if ready is not None and done is not None:
            exposed.between(ready, done)

    def _before_scatter(self, gradient: Tensor | None = None) -> None:
        done, self.scattered = self.scattered, None
        if done is not None:
            exposed.between(mark(), done)

    def _watched_root(self, model: nn.Module, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*arguments: Any, **options: Any) -> Tensor:
            self.gathered.clear()
            self.ready[model] = mark()
            out = inner(*arguments, **options)
            if out.requires_grad:
                out = out.view_as(out)  # FSDP does not know this tensor, so this hook runs before FSDP's own
                out.register_hook(lambda gradient: at_end_of_backward(self._before_scatter))
            return out

        return watched


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward has ended. FSDP uses the same queue, which is first in, first out."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def can_watch_streams() -> bool:
    """Whether this release of torch has the private API that `at_end_of_backward` needs."""
    return hasattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback")
