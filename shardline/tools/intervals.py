"""Sets of moments: sorted lists of nonempty (start, end) intervals that neither overlap nor touch."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments covered by any of the intervals, which may overlap and come in any order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the moments of `a` that are not in `b`."""
    rest: list[Interval] = []
    first = 0
    for start, end in a:
        while first < len(b) and b[first][1] <= start:
            first += 1
        at = first
        while at < len(b) and b[at][0] < end:
            if start < b[at][0]:
                rest.append((start, b[at][0]))
            start = max(start, b[at][1])
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def within(a: list[Interval], start: float, end: float) -> list[Interval]:
    """Return the moments of `a` from `start` to `end`."""
    cut = ((max(begin, start), min(stop, end)) for begin, stop in a)
    return [(begin, stop) for begin, stop in cut if begin < stop]


def length(a: list[Interval]) -> float:
    return sum(end - start for start, end in a)
