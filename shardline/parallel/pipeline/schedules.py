"""Builds pipeline schedules by name or from a file, with the stages that each allows, and checks that they can run.

`build_schedule` is the entry point. orders.py makes the orders, timeline.py the times; nothing here needs torch.
"""

from __future__ import annotations

import csv as comma_separated
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardline.config.names import SCHEDULES_FROM_FILE, find_schedule, unknown_schedule
from shardline.errors import ConfigError
from shardline.parallel.pipeline import orders
from shardline.parallel.pipeline.timeline import Action, Schedule, simulate


@dataclass(frozen=True)
class StageCounts:
    """The number of stages that a rank can have; `high` is None if there is no limit."""

    low: int
    high: int | None

    def __contains__(self, count: int) -> bool:
        return self.low <= count and (self.high is None or count <= self.high)

    def __str__(self) -> str:
        return f"{self.low} or more" if self.high is None else f"exactly {self.low}"


ONE, TWO, SEVERAL, ANY = StageCounts(1, 1), StageCounts(2, 2), StageCounts(2, None), StageCounts(1, None)


@dataclass(frozen=True)
class ScheduleKind:
    """One row of the table of schedules."""

    stage_counts: StageCounts
    placement: Callable[[int, int], tuple[int, ...]]  # ranks, stages per rank -> stage -> rank
    orders: Callable[[int, int, int], orders.Orders]  # ranks, micro-batches, stages per rank


KINDS: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(ONE, orders.loops, orders.looped_bfs),
    "1F1B": ScheduleKind(ONE, orders.loops, orders.one_forward_one_backward),
    "LoopedBFS": ScheduleKind(SEVERAL, orders.loops, orders.looped_bfs),
    "Interleaved1F1B": ScheduleKind(SEVERAL, orders.loops, orders.interleaved),
    "InterleavedZeroBubble": ScheduleKind(SEVERAL, orders.loops, orders.interleaved_zero_bubble),
    "ZBVZeroBubble": ScheduleKind(TWO, orders.v_shape, orders.zero_bubble_v),
    "DualPipeV": ScheduleKind(TWO, orders.v_shape, orders.dual_pipe_v),
}


def stages_per_rank_of(name: str) -> StageCounts:
    """Return the numbers of stages per rank that a schedule allows; a schedule from a file may have any number."""
    known = _known(name)
    return ANY if known in SCHEDULES_FROM_FILE else KINDS[known].stage_counts


def build_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    csv: str | Path | None = None,
) -> Schedule:
    """Build the schedule of that name, or the one in the file `csv`, which overrides the name.

    `stages_per_rank = None` takes the fewest that the schedule allows. Raise ConfigError if the schedule cannot run.
    """
    if ranks < 1 or microbatches < 1:
        raise ConfigError(f"a pipeline needs at least 1 rank and 1 micro-batch, got {ranks} and {microbatches}")
    if csv:
        return _from_file(csv, ranks, microbatches, stages_per_rank)
    known = _known(name)
    if known in SCHEDULES_FROM_FILE:
        raise ConfigError(f"{known} comes from a file: name the file, or choose one of {', '.join(KINDS)}")
    kind = KINDS[known]
    count = kind.stage_counts.low if stages_per_rank is None else stages_per_rank
    if count not in kind.stage_counts:
        raise ConfigError(_wrong_stages(known, ranks, count))
    made = kind.orders(ranks, microbatches, count)
    schedule = Schedule(known, kind.placement(ranks, count), microbatches, tuple(tuple(order) for order in made))
    validate(schedule)
    return schedule


def _known(name: str) -> str:
    """Return the name as the table spells it; case does not matter."""
    known = find_schedule(name)
    if known is None:
        raise ConfigError(unknown_schedule(name))
    return known


def _wrong_stages(name: str, ranks: int, count: int) -> str:
    allowed = KINDS[name].stage_counts
    others = [other for other, kind in KINDS.items() if count in kind.stage_counts]
    remedy = f"; schedules with {count} per rank: {', '.join(others)}" if others else ""
    return f"{name} runs with {allowed} stage{'s' * (allowed != ONE)} per rank, got {count} on {ranks} ranks{remedy}"


# ---- from a file -----------------------------------------------------------------------------------------------------


def read_csv(path: str | Path) -> Schedule:
    """Read a file as torch.distributed.pipelining writes it: a row for each rank, an action in each cell.

    Cells are like `0F0`, `1B0`, `1I0`, `1W0`, or empty. The two actions of a pair `(0F4;7B0)OVERLAP_F_B` run one after
    the other. A stage belongs to the rank in whose row it appears.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in comma_separated.reader(file)]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, comma_separated.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    while rows and not any(rows[-1]):
        rows.pop()
    placement: dict[int, int] = {}
    found: list[dict[Action, None]] = [{} for _ in rows]  # an ordered set for each rank
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            place = f"{path}: row {rank + 1}, cell {column + 1}: {cell!r}"
            for action in _actions_in(cell, place):
                if placement.setdefault(action.stage, rank) != rank:
                    raise ConfigError(f"{place}: stage {action.stage} is already in row {placement[action.stage] + 1}")
                if action in found[rank]:
                    raise ConfigError(f"{place}: {action} is already in this row")
                found[rank][action] = None
        if not found[rank]:
            raise ConfigError(f"{path}: row {rank + 1} has no action: each rank needs a stage")
    if not placement:
        raise ConfigError(f"{path}: has no action: write a row for each rank, with cells such as 0F0, 0B0")
    absent = next((stage for stage in range(max(placement)) if stage not in placement), None)
    if absent is not None:
        raise ConfigError(f"{path}: stage {absent} is missing; the file goes up to stage {max(placement)}")
    schedule = Schedule(
        f"file {Path(path).name}",
        tuple(placement[stage] for stage in range(len(placement))),
        1 + max(action.microbatch for order in found for action in order),
        tuple(tuple(order) for order in found),
    )
    validate(schedule)
    return schedule


def _actions_in(cell: str, place: str) -> list[Action]:
    pair = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
    actions = []
    for word in pair[1].split(";") if pair else [cell] if cell else []:
        match = re.fullmatch(r"(\d{1,9})([FBIW])(\d{1,9})", word.strip())
        if match is None:
            raise ConfigError(f"{place} is not an action: expected stage, one of F B I W, and micro-batch, such as 0F0")
        actions.append(Action(match[2], int(match[1]), int(match[3])))
    return actions


def _from_file(path: str | Path, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    schedule = read_csv(path)
    if schedule.ranks != ranks:
        raise ConfigError(f"{path}: has rows for {schedule.ranks} ranks, the pipeline has {ranks}")
    if schedule.microbatches != microbatches:
        raise ConfigError(f"{path}: has {schedule.microbatches} micro-batches, a step has {microbatches}")
    counts = {len(schedule.stages_of(rank)) for rank in range(ranks)}
    if stages_per_rank is not None and counts != {stages_per_rank}:
        has = " or ".join(map(str, sorted(counts)))
        raise ConfigError(f"{path}: has {has} stages per rank, expected {stages_per_rank}")
    return schedule


# ---- checks and estimates --------------------------------------------------------------------------------------------


def validate(schedule: Schedule) -> None:
    """Check that each micro-batch goes forward and backward through each stage once, in an order that can run."""
    for rank, order in enumerate(schedule.orders):
        actions = set(order)
        for stage in schedule.stages_of(rank):
            for microbatch in range(schedule.microbatches):
                _check_backward(schedule.name, rank, stage, microbatch, actions)
    simulate(schedule)


def _check_backward(name: str, rank: int, stage: int, microbatch: int, seen: set[Action]) -> None:
    kinds = "".join(kind for kind in "FBIW" if Action(kind, stage, microbatch) in seen)
    if kinds in ("FB", "FIW"):
        return
    here = f"{stage}{{}}{microbatch}".format
    if "F" not in kinds:
        problem = f"{here('F')} is missing"
    elif "B" in kinds:
        problem = f"{here('B')} is the whole backward pass, but {here('I' if 'I' in kinds else 'W')} is there too"
    elif kinds == "F":
        problem = f"{here('B')}, or {here('I')} and {here('W')}, is missing"
    else:
        problem = f"{here('W' if 'I' in kinds else 'I')} is missing"
    raise ConfigError(f"{name}: {problem} on rank {rank}")


CLOSED_FORMS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def theoretical_bubble(schedule: Schedule) -> float:
    """Return the idle share if all stages cost the same and backward costs twice as much as forward.

    It uses a closed form if there is one: with p ranks, v stages on each and m micro-batches, (p - 1) / (v m + p - 1).
    With m < p, a rank waits v times for its micro-batches to come round: the pass takes v p + m - 1 instead of
    v m + p - 1.
    """
    if schedule.name not in CLOSED_FORMS:
        return simulate(schedule).bubble
    ranks, microbatches, count = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    return 1 - count * microbatches / (count * max(microbatches, ranks) + min(microbatches, ranks) - 1)


def plain_bubble(schedule: Schedule) -> float | None:
    """Return the theoretical idle share of 1F1B on the same ranks with the same micro-batches; None for 1F1B itself."""
    if schedule.name == "1F1B":
        return None
    return theoretical_bubble(build_schedule("1F1B", schedule.ranks, schedule.microbatches))


def warnings(schedule: Schedule) -> list[str]:
    """Return a log line if there are fewer micro-batches than stages, with the resulting idle share."""
    given, stages, ranks = schedule.microbatches, schedule.stages, schedule.ranks
    if given >= stages or ranks == 1:
        return []
    some = f"{given} micro-batch{'es' * (given > 1)} for {stages} stages"
    remedy = f"cut the batch into {stages} or more"
    if schedule.name in KINDS:
        better = theoretical_bubble(build_schedule(schedule.name, ranks, stages, stages // ranks))
        remedy += f" ({better:.0%} with {stages})"
    return [f"{schedule.name}: with {some}, ranks idle for {theoretical_bubble(schedule):.0%} of a step; {remedy}"]
