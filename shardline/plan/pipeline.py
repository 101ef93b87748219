"""Simulates a pipeline: the executor's own orders (`parallel/pipeline/orders.py`), with a time for each stage's pass.

With many micro-batches, a schedule repeats itself, so a few rounds are simulated and the rest is extrapolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardline.parallel.pipeline.schedules import KINDS
from shardline.parallel.pipeline.timeline import Action, needs

ROUNDS = 3  # simulated micro-batches per rank; the last round shows how long each further one takes


class Passes(NamedTuple):
    """Seconds of one stage's passes for one micro-batch."""

    forward: float
    backward: float
    weights: float  # the part of backward that computes weight gradients, which some schedules run separately


class PlannedActions(NamedTuple):
    """A schedule's actions in an order in which each comes after everything that it needs."""

    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, bool], ...], ...]  # positions of what it needs, and whether on another rank
    sends: tuple[bool, ...]  # whether another rank reads the result
    in_flight: tuple[int, ...]  # the most activations, in units of one stage's, that each rank holds


def pipeline_seconds(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    passes: Sequence[Passes],
    transfer: float = 0.0,
    blocks: bool = False,
) -> float:
    """Return the time from the first pass to the last. With `blocks`, both ranks wait during a transfer."""
    if ranks == 1:
        return microbatches * sum(one.forward + one.backward for one in passes)
    few = ROUNDS * ranks
    if microbatches <= few + ranks:
        return _run(planned(schedule, ranks, microbatches, stages_per_rank), passes, transfer, blocks)
    few += microbatches % ranks
    long = _run(planned(schedule, ranks, few, stages_per_rank), passes, transfer, blocks)
    short = _run(planned(schedule, ranks, few - ranks, stages_per_rank), passes, transfer, blocks)
    waits = 4 * transfer * blocks if ranks > 2 else 2 * transfer * blocks
    busy = (sum(_seconds(passes[stage]) for stage in own) for own in stages_of_ranks(schedule, ranks, stages_per_rank))
    return long + (microbatches - few) * max((long - short) / ranks, max(busy) + waits)


def _seconds(one: Passes) -> float:
    return one.forward + one.backward


@lru_cache(maxsize=512)
def stages_of_ranks(schedule: str, ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, placed in loops or in a V."""
    if ranks == 1:
        return (tuple(range(stages_per_rank)),)
    placement = KINDS[schedule].placement(ranks, stages_per_rank)
    return tuple(tuple(s for s, place in enumerate(placement) if place == rank) for rank in range(ranks))


def held_microbatches(schedule: str, ranks: int, microbatches: int, stages_per_rank: int, rank: int) -> float:
    """Return the most activations that a rank holds at once, in units of one stage's for one micro-batch."""
    if ranks == 1:
        return 1.0
    few = min(microbatches, ROUNDS * ranks)
    if schedule == "GPipe":
        return float(microbatches)
    if schedule == "LoopedBFS":
        return float(microbatches * stages_per_rank)
    return float(planned(schedule, ranks, few, stages_per_rank).in_flight[rank])


@lru_cache(maxsize=512)
def planned(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> PlannedActions:
    kind = KINDS[schedule]
    placement = kind.placement(ranks, stages_per_rank)
    orders = kind.orders(ranks, microbatches, stages_per_rank)
    split = {(action.stage, action.microbatch) for order in orders for action in order if action.kind == "I"}
    found: dict[Action, int] = {}
    listed: list[Action] = []
    inputs: list[tuple[tuple[int, bool], ...]] = []
    sends: list[bool] = []
    next_of, ready = [0] * ranks, list(range(ranks))
    waiting: dict[Action, list[int]] = {}
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while next_of[rank] < len(order):
            action = order[next_of[rank]]
            wanted = needs(action, len(placement), (action.stage + 1, action.microbatch) in split)
            missing = next((one for one in wanted if one not in found), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            known = [(found[one], placement[one.stage] != rank) for one in wanted]
            for position, other in known:
                sends[position] = sends[position] or other
            found[action] = len(listed)
            listed.append(action)
            inputs.append(tuple(known))
            sends.append(False)
            next_of[rank] += 1
            ready += waiting.pop(action, [])
    return PlannedActions(
        tuple(action.kind for action in listed),
        tuple(action.stage for action in listed),
        tuple(placement[action.stage] for action in listed),
        tuple(inputs),
        tuple(sends),
        tuple(_most_held(order) for order in orders),
    )


def _most_held(order: Sequence[Action]) -> int:
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def _run(plan: PlannedActions, passes: Sequence[Passes], transfer: float, blocks: bool) -> float:
    cost = {
        "F": [one.forward for one in passes],
        "B": [one.backward for one in passes],
        "I": [one.backward - one.weights for one in passes],
        "W": [one.weights for one in passes],
    }
    clocks = [0.0] * (max(plan.ranks) + 1)
    ends = [0.0] * len(plan.kinds)
    waited = transfer if blocks else 0.0
    rows = zip(plan.kinds, plan.stages, plan.ranks, plan.inputs, plan.sends, strict=True)
    for position, (kind, stage, rank, inputs, sends) in enumerate(rows):
        start = clocks[rank]
        received = 0.0
        for other, travels in inputs:
            end = ends[other] + (0.0 if blocks or not travels else transfer)
            if end > start:
                start = end
            received += waited if travels else 0.0
        end = start + received + cost[kind][stage]
        ends[position] = end
        clocks[rank] = end + (waited if sends else 0.0)
    return max(clocks)
