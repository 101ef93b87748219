"""Where the time of a step goes, by rank: parts that add up to the step, and ranks that others wait for.

    | data | compute | compute that hides tp | exposed tp | idle | optimizer |        a whole step, each second once

Hidden communication overlaps with computation, so its seconds are a part of computing. A pipeline's exposed transfers
are a part of its idle time, and so is the wait for all other ranks at the end of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardline.config.layout import Layout
from shardline.show.run_files import RunFiles
from shardline.telemetry.slow_ranks import AXES, OWN, own_work, parts_of

SLOW = 1.1  # times the median of the ranks with the same work


def part_names(axes: Iterable[str]) -> list[str]:
    """Every part, in drawing order."""
    known = [axis for axis in AXES if axis in set(axes)]
    hidden, exposed = ([f"{kind} {axis}" for axis in known] for kind in ("hidden", "exposed"))
    return ["data", "compute", *hidden, *exposed, "idle", "optimizer"]


@dataclass(frozen=True)
class PartTimes:
    """The parts of all logged steps that every rank has written: (steps, ranks, parts)."""

    steps: list[int]
    ranks: list[int]
    names: list[str]
    seconds: list[list[list[float]]]

    def mean_by_step(self) -> list[list[float]]:
        """(parts, steps): the mean of all ranks."""
        means = [[statistics.fmean(part) for part in zip(*ranks, strict=True)] for ranks in self.seconds]
        return [list(part) for part in zip(*means, strict=True)]

    def median_by_rank(self) -> list[list[float]]:
        """(ranks, parts): the median of steps; the first, with one-time costs, counts only if it is the only one."""
        steps = self.seconds[1:] or self.seconds
        return [
            [statistics.median(step[place][part] for step in steps) for part in range(len(self.names))]
            for place in range(len(self.ranks))
        ]


def step_times(run: RunFiles, most_steps: int, most_ranks: int) -> PartTimes | None:
    """The part times of a run, thinned evenly if there are too many steps or ranks; None if ranks wrote nothing."""
    ranks = present_ranks(run)
    common = sorted(set.intersection(*(set(run.ranks[rank].steps) for rank in ranks))) if ranks else []
    steps, ranks = spread(common, most_steps), spread(ranks, most_ranks)
    if not steps:
        return None
    parts = [[parts_of(run.ranks[rank].steps[step]) for rank in ranks] for step in steps]
    used = {name for of_step in parts for one in of_step for name, seconds in one.items() if seconds > 0}
    names = [name for name in part_names(AXES) if name in used | {"compute"}]
    seconds = [[[one.get(name, 0.0) for name in names] for one in of_step] for of_step in parts]
    return PartTimes(steps, ranks, names, seconds)


def present_ranks(run: RunFiles) -> list[int]:
    """The ranks of the last start: an earlier one may have had more."""
    size = run.last_start.get("world_size", 0)
    return [rank for rank in run.ranks if rank < size]


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    places = (round(place * (len(items) - 1) / (most - 1)) for place in range(most))
    return [items[place] for place in dict.fromkeys(places)]


# ---- slow ranks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPace:
    """How long a rank works in a step, compared with ranks that have the same work."""

    rank: int
    own: float  # seconds of data, computing and update
    waiting: float
    ratio: float  # to the median of the ranks with the same work
    phase: str  # the phase in which it loses most; "" if it is not slow

    @property
    def slow(self) -> bool:
        return bool(self.phase)


def rank_paces(times: PartTimes, layout: Layout) -> list[RankPace]:
    """Compare ranks of the same pipeline position, since others have other layers."""
    by_rank = dict(zip(times.ranks, times.median_by_rank(), strict=True))
    groups: dict[int, list[int]] = {}
    for rank in times.ranks:
        groups.setdefault(layout.coordinates(rank)["pp"], []).append(rank)
    found = []
    for group in groups.values():
        own = {rank: own_work(dict(zip(times.names, by_rank[rank], strict=True))) for rank in group}
        usual = {part: statistics.median(own[rank][part] for rank in group) for part in OWN}
        for rank in group:
            total, typical = sum(own[rank].values()), sum(usual.values())
            ratio = total / typical if typical > 0 else 1.0
            phase = max(OWN, key=lambda part: own[rank][part] - usual[part]) if ratio > SLOW else ""
            found.append(RankPace(rank, total, sum(by_rank[rank]) - total, ratio, phase))
    return sorted(found, key=lambda pace: pace.rank)
