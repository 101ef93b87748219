"""Describes a pipeline schedule and simulates when each of its actions runs. It is pure data, without tensors.

rank 0   0F0 0F1 .   .   0B0 0B0 0F2 ...      an action: stage, kind, micro-batch
rank 1   .   1F0 1B0 1B0 1F1 ...              a dot: idle time, which schedules try to avoid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from shardline.errors import ConfigError

ACTION_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # the time of an action, in forward passes


class Action(NamedTuple):
    """One computation of a stage for a micro-batch; prints as `2F5`."""

    kind: str  # F forward, B full backward, I input gradient, W weight gradient
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order."""

    name: str
    placement: tuple[int, ...]  # stage -> rank
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]  # for each rank, in the order they run

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def splits(self) -> bool:
        """Whether any backward computes input and weight gradients separately."""
        return any(action.kind in "IW" for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)


class TimedAction(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank runs each of its actions."""

    spans: tuple[tuple[TimedAction, ...], ...]  # for each rank
    total: float

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the total time in which each rank computes nothing."""
        return tuple(1 - sum(span.end - span.start for span in row) / self.total for row in self.spans)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together."""
        return sum(self.idle) / len(self.spans)


def needs(action: Action, stages: int, split: bool) -> tuple[Action, ...]:
    """Return the actions that must have run before this one; `split`: the next stage's backward is an I."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    own = Action("F", stage, microbatch)
    return (own,) if stage == stages - 1 else (own, Action("I" if split else "B", stage + 1, microbatch))


def simulate(
    schedule: Schedule,
    costs: Mapping[str, float] = COSTS,
    transfer: float = 0.0,
    weights: Sequence[float] | None = None,
) -> Timeline:
    """Start every action as early as its rank and its inputs allow; raise ConfigError for an order that deadlocks.

    `transfer` is the time that a message takes between two ranks, which go on computing meanwhile. `weights` multiply
    the time of each stage's actions; None: all stages take equally long.
    """
    weights = weights or [1.0] * schedule.stages
    split = {(action.stage, action.microbatch) for order in schedule.orders for action in order if action.kind == "I"}
    ends: dict[Action, float] = {}
    spans: list[list[TimedAction]] = [[] for _ in schedule.orders]
    waiting: dict[Action, list[int]] = {}  # ranks that go on when this action has run
    clocks = [0.0] * schedule.ranks
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            inputs = needs(action, schedule.stages, (action.stage + 1, action.microbatch) in split)
            missing = next((one for one in inputs if one not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = (ends[one] + transfer * (schedule.placement[one.stage] != rank) for one in inputs)
            start = max([clocks[rank], *arrivals])
            ends[action] = clocks[rank] = start + costs[action.kind] * weights[action.stage]
            spans[rank].append(TimedAction(action, start, ends[action]))
            ready += waiting.pop(action, [])
    stuck = [(needed, rank) for needed, found in waiting.items() for rank in found]
    if stuck:
        needed, rank = min(stuck, key=lambda pair: pair[1])
        action = schedule.orders[rank][len(spans[rank])]
        why = _comes_too_late(schedule, needed, rank)
        raise ConfigError(f"{schedule.name}: cannot run: on rank {rank}, {action} waits for {needed}, which {why}")
    return Timeline(tuple(map(tuple, spans)), max(clocks))


def _comes_too_late(schedule: Schedule, action: Action, waiting: int) -> str:
    home = schedule.placement[action.stage]
    if action not in schedule.orders[home]:
        return "no rank computes"
    return "comes later on the same rank" if home == waiting else f"rank {home} never reaches"


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations that each rank holds at once, in units of one stage and one micro-batch.

    A forward pass adds one; a backward pass, or the weight gradient where backward is split, frees it.
    """
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return tuple(max(accumulate(change[action.kind] for action in order), default=0) for order in schedule.orders)
