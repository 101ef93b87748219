"""The collectives of a benchmark: buffers, timed calls, and results checked element by element."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.observe import Observed

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
WARM_UP = 3
TIMED_SECONDS = 0.5  # of calls, if --iterations is not set
LEAST, MOST = 5, 200
TILE = 2**16  # repetitions of the pattern that are written or compared at once


class WrongResult(RuntimeError):
    """A collective returned wrong values."""


@dataclass(frozen=True)
class CollectiveTime:
    op: str
    size: int  # bytes
    count: int  # elements of one rank, as nccl-tests count them
    iterations: int
    seconds: float
    algbw: float  # 1e9 bytes per second
    busbw: float


@dataclass
class Case:
    """One collective on buffers of one size.

    `x` and `result` are split into equal parts: each part of `x` is filled with one of the patterns `given`, and
    afterwards each part of `result` must hold the corresponding pattern of `expected`.
    """

    op: str
    run: Callable[[], object]
    x: Tensor
    given: list[Tensor]
    result: Tensor
    expected: list[Tensor]
    count: int

    @property
    def size(self) -> int:
        """Bytes of the larger buffer, as nccl-tests count them."""
        return max(x.numel() * x.element_size() for x in (self.x, self.result))


class Bench:
    """Measures over one axis. GPU tensors that gloo cannot send go through host memory, and the copies are timed."""

    def __init__(
        self, axis: collectives.Axis, device: torch.device, dtype: torch.dtype, iterations: int | None
    ) -> None:
        self.axis, self.device, self.dtype, self.iterations = axis, device, dtype, iterations
        backends = dict(part.split(":") for part in dist.get_backend_config(axis.group).split(","))
        self.backend = backends[device.type]
        self.through_host = self.backend == "gloo" and device.type == "cuda"
        # Values are small enough for exact sums in every dtype with up to 128 ranks.
        self.period = max(2, min(13, 256 // axis.size))

    def measure(self, op: str, size: int) -> CollectiveTime:
        case = self.case(op, size)
        self._fill(case)
        self._calls(case, 1)
        self._check(case)
        self._fill(case)
        self._calls(case, WARM_UP)
        iterations = self.iterations
        if iterations is None:
            iterations = max(LEAST, min(MOST, int(TIMED_SECONDS / max(self._timed(case, 1), 1e-9))))
        seconds = self._timed(case, iterations)
        n, algbw = self.axis.size, case.size / seconds / 1e9
        factor = {"all_reduce": 2 * (n - 1) / n, "p2p": 1.0}.get(op, (n - 1) / n)
        return CollectiveTime(op, case.size, case.count, iterations, seconds, algbw, algbw * factor)

    def case(self, op: str, size: int) -> Case:
        """Return buffers of `size` bytes or a little less: a whole number of elements for every rank, at least one."""
        made: Case = getattr(self, f"_{op}")(max(1, size // self.dtype.itemsize // self.axis.size))
        return made

    def _timed(self, case: Case, iterations: int) -> float:
        """Return the seconds of one call on the slowest rank; all ranks start together."""
        collectives.max_in_place(torch.zeros(1, device=self.device), "world")
        self._synchronize()
        started = time.perf_counter()
        self._calls(case, iterations)
        seconds = torch.tensor([(time.perf_counter() - started) / iterations], device=self.device)
        return collectives.max_in_place(seconds, "world").item()

    def _calls(self, case: Case, times: int) -> None:
        with Observed(self.axis.name, case.op, f"{case.op} of {case.size} bytes", None, on_host=True):
            for _ in range(times):
                case.run()
            self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- the collectives; `count` elements per rank ------------------------------------------------------------------

    def _all_reduce(self, count: int) -> Case:
        x = self._empty(count * self.axis.size)
        call = partial(dist.all_reduce, x, group=self.axis.group)
        return Case("all_reduce", call, x, [self._pattern(self.axis.rank)], x, [self._sum()], len(x))

    def _all_gather(self, count: int) -> Case:
        x, out = self._empty(count), self._empty(count * self.axis.size)
        call = partial(collectives._all_gather, out, x, group=self.axis.group)
        expected = [self._pattern(rank) for rank in range(self.axis.size)]
        return Case("all_gather", call, x, [self._pattern(self.axis.rank)], out, expected, count)

    def _reduce_scatter(self, count: int) -> Case:
        x, out = self._empty(count * self.axis.size), self._empty(count)
        call = partial(collectives._reduce_scatter, out, x, group=self.axis.group)
        return Case("reduce_scatter", call, x, self._patterns_to_all(), out, [self._sum(self.axis.rank)], count)

    def _all_to_all(self, count: int) -> Case:
        x, out = (self._empty(count * self.axis.size) for _ in range(2))
        send, receive = self._host_buffers(x, out)

        def call() -> None:
            _stage(send, x)
            dist.all_to_all_single(receive, send, group=self.axis.group)
            _stage(out, receive)

        expected = [self._pattern(rank, self.axis.rank) for rank in range(self.axis.size)]
        return Case("all_to_all", call, x, self._patterns_to_all(), out, expected, count)

    def _p2p(self, count: int) -> Case:
        n, group, own = self.axis.size, self.axis.group, self.axis.rank
        x, out = (self._empty(count * n) for _ in range(2))
        send, receive = self._host_buffers(x, out)
        after, before = (own + 1) % n, (own - 1) % n

        def call() -> None:
            _stage(send, x)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, receive, group=group, group_peer=before),
                    dist.P2POp(dist.isend, send, group=group, group_peer=after),
                ]
            )
            for work in works:
                work.wait()
            _stage(out, receive)

        return Case("p2p", call, x, [self._pattern(own)], out, [self._pattern(before)], len(x))

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _empty(self, count: int) -> Tensor:
        return torch.full((count,), -1.0, dtype=self.dtype, device=self.device)

    def _host_buffers(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors to send and receive: copies in host memory if the backend needs them."""
        if not self.through_host:
            return list(tensors)
        return [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]

    def _pattern(self, rank: int, to: int = 0) -> Tensor:
        """Return integers that repeat along a tensor, different for each rank and receiver."""
        return (torch.arange(self.period) + 3 * rank + 5 * to) % self.period

    def _sum(self, to: int = 0) -> Tensor:
        return torch.stack([self._pattern(rank, to) for rank in range(self.axis.size)]).sum(0)

    def _patterns_to_all(self) -> list[Tensor]:
        return [self._pattern(self.axis.rank, to) for to in range(self.axis.size)]

    def _fill(self, case: Case) -> None:
        for part, pattern in zip(case.x.split(len(case.x) // len(case.given)), case.given, strict=True):
            tile = self._tile(pattern)
            for piece in part.split(len(tile)):
                piece.copy_(tile[: len(piece)])

    def _tile(self, pattern: Tensor) -> Tensor:
        return pattern.to(self.device, self.dtype).repeat(TILE)

    def _check(self, case: Case) -> None:
        for part, pattern in zip(case.result.split(len(case.result) // len(case.expected)), case.expected, strict=True):
            tile, exact = self._tile(pattern), pattern.max() <= 256
            for piece in part.split(len(tile)):
                expected = tile[: len(piece)]
                if torch.equal(piece, expected) or (not exact and torch.allclose(piece, expected, rtol=0.02)):
                    continue
                at = int((piece != expected).nonzero()[0])
                raise WrongResult(
                    f"{case.op} over {self.axis.name} by {self.backend} returned {piece[at].item():g}"
                    f" instead of {expected[at].item():g}"
                )


def _stage(target: Tensor, source: Tensor) -> None:
    """Copy, unless both are the same tensor."""
    if target is not source:
        target.copy_(source)
