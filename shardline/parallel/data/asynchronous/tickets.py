"""Decides which worker makes which contribution in asynchronous training, by tickets in the job's store.

A step of the run consists of as many contributions as there are workers, with the samples that each worker would read
in synchronous training. A worker takes the next ticket whenever it is free, so a fast worker makes more contributions:

    step        |   0   |   1   |   2   |   3   |
    ticket      | 0   1 | 2   3 | 4   5 | 6   7 |      ticket = step * workers + slot; the slot says which samples
    worker      | A   B | A   A | B   A | A   B |      weights of version v are those after v steps

A contribution to step s is computed with weights of version s - staleness or later: no worker takes its ticket before
these exist. Tickets are taken in order, and a worker that takes one has seen all earlier ones. So when a worker
requests something with its ticket (to stop, to save), every worker that takes a ticket of a later step knows it, and
all of them end with that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardline.comm.store import SignedStore

POLL_SECONDS = 0.02  # between two reads of the store while a worker waits for others


class TakenTicket(NamedTuple):
    """A ticket that a worker has taken."""

    worker: int
    asks: tuple[float, ...]  # counts of each kind of request; all zero: none


def decode(message: Any) -> TakenTicket:
    return TakenTicket(int(message["worker"]), tuple(map(float, message["asks"])))


def may_take(step: int, version: int, made: int, staleness: int, ends: Callable[[int], bool]) -> bool:
    """Whether a ticket of this step may be taken, after `made` steps and with weights of this version.

    `ends(n)`: all workers synchronise after n steps, so no later step may begin before that.
    """
    return version >= step - staleness and not any(ends(number) for number in range(made + 1, step + 1))


class Tickets:
    """One worker's view of the tickets; only its first rank has one."""

    def __init__(self, store: SignedStore, worker: int, workers: int, step: int) -> None:
        self.store, self.worker, self.workers = store, worker, workers
        self.next = step * workers  # the first ticket that is not known to be taken
        self.asked: dict[int, list[float]] = {}  # step -> counts of the requests made with its tickets

    @property
    def step(self) -> int:
        """The step of the next ticket."""
        return self.next // self.workers

    def take(self, asks: Sequence[float]) -> int | None:
        """Take the next ticket and return its number; None if another worker has it."""
        own = TakenTicket(self.worker, tuple(asks))
        taken = self.store.offer(f"ticket/{self.next}", own._asdict(), decode)
        number = self.next
        self._count(own if taken is None else taken)
        return number if taken is None else None

    def look(self) -> None:
        """Skip the tickets that others have taken."""
        while (taken := self.store.read(f"ticket/{self.next}", decode)) is not None:
            self._count(taken)

    def _count(self, taken: TakenTicket) -> None:
        if any(taken.asks):
            sums = self.asked.get(self.step, [0.0] * len(taken.asks))
            self.asked[self.step] = [a + b for a, b in zip(sums, taken.asks, strict=True)]
        self.next += 1

    # ---- late workers ------------------------------------------------------------------------------------------------

    def take_again(self, number: int) -> bool:
        """Take over a ticket whose worker is late; False if another has done so, or if it is this worker's own."""
        first = self.store.read(f"ticket/{number}", decode)
        if first is None or first.worker == self.worker:
            return False
        return self.store.offer(f"again/{number}", TakenTicket(self.worker, ())._asdict(), decode) is None

    def is_first(self, number: int) -> bool:
        """Whether this worker is the first to finish a ticket: only the first contribution counts."""
        return self.store.offer(f"through/{number}", TakenTicket(self.worker, ())._asdict(), decode) is None

    def is_through(self, number: int) -> bool:
        return self.store.read(f"through/{number}", decode) is not None
