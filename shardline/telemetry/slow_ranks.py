"""Where the time of a rank's step goes, and which ranks all others wait for, in which phase, while the run trains.

    | data | compute | compute that hides tp | exposed tp | idle | optimizer |        a whole step, each second once

A step takes equally long on every rank, so a slow rank shows only in its own work. These times are sent with the
reduction that a logged step makes anyway, in a slot for each rank and phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.config.layout import Layout

# Axis -> its name in charts; "dp" stands for all data-parallel axes on a GPU, where they are timed as one.
AXES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "dp_shard": "FSDP",
    "dp_replicate": "replicas",
    "workers": "workers",
    "dp": "data parallel",
    "pp": "pipeline",
    "other": "sums over all ranks",
}
OWN = ("data", "compute", "optimizer")  # a rank's own work; the rest is waiting, or overlaps with computing
PHASES = dict(zip(OWN, ("loading data", "forward and backward", "the optimizer's update"), strict=True))
SHARE, SECONDS = 0.1, 1e-3  # of the step, and at least so many: slow if others wait longer
ROWS = 5  # logged steps in a row in which a rank must be slow


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Split one rank's step into the seconds of its parts, which add up to the step; none is negative."""
    left = max(float(row["seconds"]), 0.0)
    found: dict[str, float] = {}

    def take(part: str, seconds: float) -> None:
        nonlocal left
        seconds = min(max(seconds, 0.0), left)
        left -= seconds
        found[part] = found.get(part, 0.0) + seconds

    comm, exposed = _by_known_axis(row.get("comm", {})), _by_known_axis(row.get("exposed", {}))
    take("data", row["data"])
    take("optimizer", row.get("optimizer", 0.0))
    piped = "idle" in row
    if piped:
        take("idle", row["idle"] + exposed.get("other", 0.0))
    for axis, seconds in exposed.items():
        if not (piped and axis in ("pp", "other")):
            take(f"exposed {axis}", seconds)
    for axis, seconds in comm.items():
        take(f"hidden {axis}", seconds - exposed.get(axis, 0.0))
    found["compute"] = left
    return found


def _by_known_axis(seconds: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for axis, value in seconds.items():
        name = axis if axis in AXES else "other"
        found[name] = found.get(name, 0.0) + value
    return found


def own_work(parts: Mapping[str, float]) -> dict[str, float]:
    """A rank's own seconds: data, computing (with what it hides) and update."""
    own = dict.fromkeys(OWN, 0.0)
    for name, seconds in parts.items():
        part = "compute" if name.startswith("hidden ") else name
        if part in own:
            own[part] += seconds
    return own


class SlowRanks:
    """Compares the ranks that have the same layers, and reports those that are slow in several logged steps."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.rank, self.ranks = rank, layout.world_size
        self.stages = [layout.coordinates(other)["pp"] for other in range(self.ranks)]
        self.slow_rows = [0] * self.ranks
        self.named: dict[int, str] = {}  # rank -> its phase
        self.seen = 0
        self.latest: list[list[float]] = []  # for each rank: seconds by phase, in the order of OWN

    def slots(self, row: Mapping[str, Any]) -> list[float]:
        """This rank's numbers in its slots, and zeros in those of other ranks, for an all-reduce with max."""
        own = own_work(parts_of(row))
        slots = [0.0] * (len(OWN) * self.ranks)
        slots[len(OWN) * self.rank : len(OWN) * (self.rank + 1)] = [own[phase] for phase in OWN]
        return slots

    def add(self, seconds: float, slots: Sequence[float]) -> list[tuple[int, str]]:
        """Return (rank, line) for ranks that have become slow, or no longer are, from the numbers of all ranks."""
        self.latest = [list(slots[len(OWN) * rank : len(OWN) * (rank + 1)]) for rank in range(self.ranks)]
        self.seen += 1
        if self.seen == 1:  # the first step includes one-time costs
            return []
        found = []
        for rank in range(self.ranks):
            behind, phase, usual = self._behind(rank)
            is_slow = behind > max(SHARE * seconds, SECONDS)
            self.slow_rows[rank] = self.slow_rows[rank] + 1 if is_slow else 0
            if self.slow_rows[rank] >= ROWS and rank not in self.named:
                self.named[rank] = phase
                lasts = self.latest[rank][OWN.index(phase)]
                compared = f"{PHASES[phase]}: {lasts:.3g} s against {usual:.3g} s of others"
                waits = f"a step of {seconds:.3g} s waits {behind:.3g} s for it"
                found.append((rank, f"is slow in {compared}, in {ROWS} logged steps in a row; {waits}"))
            elif not is_slow and self.named.pop(rank, None) is not None:
                found.append((rank, "is as fast as the others again"))
        return found

    def _behind(self, rank: int) -> tuple[float, str, float]:
        """Seconds that ranks with the same layers wait for this one, the phase that costs most, and its usual time."""
        others = [other for other in range(self.ranks) if other != rank and self.stages[other] == self.stages[rank]]
        if not others:
            return 0.0, "", 0.0
        usual = [statistics.median(self.latest[other][place] for other in others) for place in range(len(OWN))]
        whole = statistics.median(sum(self.latest[other]) for other in others)
        more = [mine - theirs for mine, theirs in zip(self.latest[rank], usual, strict=True)]
        place = more.index(max(more))
        return sum(self.latest[rank]) - whole, OWN[place], usual[place]
