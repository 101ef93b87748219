"""Decides which slices of a sequence each context-parallel rank has, and which slices attend to which: numbers only.

A sequence is cut into equal slices. With `headtail`, a rank has an early and a late slice, so that under a causal mask
every rank has the same work. A `#` is a slice that sees all of another slice, a `\\` one that sees half of itself:

    4 ranks, 8 slices             keys of slice    0 1 2 3 4 5 6 7      owner  0 1 2 3 3 2 1 0
    queries of rank 0                    slice 0   \\
                                               7   # # # # # # # \\     9 halves of a pair, as on every rank
    queries of rank 1                          1   # \\
                                               6   # # # # # # \\
    ...

A rank's slices lie one after the other in its tensors, in the order of the sequence. The attention of a rank's queries
over another rank's keys is a few `Call`s: rectangles of whole slices, as large as possible.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# What the queries of a slice see of the keys of a slice
SKIP, CAUSAL, FULL, MASKED = range(4)
Table = Sequence[Sequence[int]]  # [slice of queries][slice of keys]


class Slices(NamedTuple):
    """Every rank has `each` slices: 2 with headtail, 1 if a rank has one contiguous part of the sequence."""

    ranks: int
    each: int

    @property
    def total(self) -> int:
        return self.ranks * self.each

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the slices of a rank, in the order of the sequence."""
        return (rank, self.total - 1 - rank) if self.each == 2 else (rank,)


class Call(NamedTuple):
    """One kernel call: own slices of queries over slices of the source's keys, each counted from 0 on its rank."""

    queries: range
    keys: range
    kind: int


@functools.lru_cache
def causal_table(count: int, length: int, window: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return what `count` slices of `length` tokens see of each other; `window` includes the query, 0 is no window."""
    return tuple(tuple(_kind(i - j, length, window) for j in range(count)) for i in range(count))


def _kind(apart: int, length: int, window: int) -> int:
    if apart < 0:
        return SKIP
    nearest, farthest = (apart - 1) * length + 1, (apart + 1) * length - 1  # distances of a query and a key
    if window and nearest >= window:
        return SKIP
    if window and farthest >= window:
        return MASKED
    return FULL if apart else CAUSAL


@dataclass(frozen=True)
class AttentionPlan:
    """What one rank computes with the keys of every rank, and which slices must be sent for that."""

    slices: Slices
    rank: int
    length: int  # tokens of a slice
    calls: tuple[tuple[Call, ...], ...]  # by source
    wanted: tuple[range | None, ...]  # by source: its slices that this rank needs
    given: tuple[range | None, ...]  # by rank: this rank's slices that it needs

    def own_in_two(self) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """Split the calls with own keys into those computed first and last: in between, the rank waits for others.

        The causal call over both slices is split into the late queries over the early keys, and each slice over itself:

            head   \\            last
            tail   # \\    first, last
        """
        own = self.calls[self.rank]
        head, tail, both = range(1), range(1, 2), range(2)
        if own == (Call(both, both, CAUSAL),):
            return (Call(tail, head, FULL),), (Call(head, head, CAUSAL), Call(tail, tail, CAUSAL))
        return own[: (len(own) + 1) // 2], own[(len(own) + 1) // 2 :]

    def sent(self, backward: bool) -> int:
        """Return how many slices this rank sends, each to one rank; backward adds gradients of received slices."""
        travelling = (self.given, self.wanted) if backward else (self.given,)
        return sum(len(span or ()) for spans in travelling for to, span in enumerate(spans) if to != self.rank)


def make_plan(table: Table, slices: Slices, rank: int, length: int) -> AttentionPlan:
    mine = slices.of(rank)
    calls, wanted, given = [], [], []
    for other in range(slices.ranks):
        theirs = slices.of(other)
        seen = [[table[i][j] for j in theirs] for i in mine]
        calls.append(tuple(_calls(seen, own=other == rank)))
        wanted.append(_needed([[table[i][j] for i in mine] for j in theirs]))
        given.append(_needed([[table[i][j] for i in theirs] for j in mine]))
    return AttentionPlan(slices, rank, length, tuple(calls), tuple(wanted), tuple(given))


@functools.lru_cache
def causal_plan(slices: Slices, rank: int, length: int, window: int) -> AttentionPlan:
    """Return the plan without packed documents, which is the same for every batch."""
    return make_plan(causal_table(slices.total, length, window), slices, rank, length)


def _needed(kinds: list[list[int]]) -> range | None:
    """Return the range of key slices that some queries see; kinds are [slice of keys][slice of queries]."""
    used = [at for at, row in enumerate(kinds) if any(kind != SKIP for kind in row)]
    return range(used[0], used[-1] + 1) if used else None


def _calls(seen: list[list[int]], own: bool) -> list[Call]:
    """Return rectangles of one kind; seen is [own slice of queries][the source's slice of keys]."""
    several = range(len(seen))
    if own and all(seen[i][j] == _kind(i - j, 1, 0) for i in several for j in several):
        return [Call(several, several, CAUSAL)]  # own slices are in the order of the sequence
    rows = [i for i in several if any(kind != SKIP for kind in seen[i])]
    columns = [j for j in several if any(seen[i][j] != SKIP for i in several)]
    if rows and all(seen[i][j] == FULL for i in rows for j in columns):
        return [Call(range(rows[0], rows[-1] + 1), range(columns[0], columns[-1] + 1), FULL)]
    return [Call(range(i, i + 1), range(j, j + 1), seen[i][j]) for i in several for j in several if seen[i][j] != SKIP]
