"""The chapters of `shardline explain`: mesh, shards, the life of a token, schedule, traffic, memory and config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.comm.fake import PHASES, Collectives
from shardline.config.architecture import Architecture
from shardline.config.check import expert_notes, notes
from shardline.config.layout import AXES, EXPERT_AXES, Layout, with_degrees
from shardline.config.schema import Config
from shardline.config.write import shown
from shardline.parallel.pipeline.schedules import warnings
from shardline.parallel.pipeline.stages import count_microbatches, plan_pipeline
from shardline.parallel.pipeline.timeline import in_flight, simulate
from shardline.precision.mixed import Precision
from shardline.show.pictures import group_of, groups_of, mesh_data, timeline_rows
from shardline.show.token_life import TokenPath, token_life
from shardline.tools.dry_run.dry_run import micro_batches_of
from shardline.tools.dry_run.shapes import Built, ParameterKind, coordinates_of, stage_ranks
from shardline.tools.schedule import bubble_line, drawing, title
from shardline.tools.stage_costs import StagedModel
from shardline.training.memory_need import MemoryNeed
from shardline.words import listed, ranges, sized

MOST_PIECES = 64  # drawn of one matrix
MOST_PASSES = 4000  # in a drawn schedule; `shardline schedule` draws longer ones
MOST_DRAWN_RANKS = 16  # in the terminal's map of a mesh
AXIS_WORDS = {
    "pp": "each rank has some layers; micro-batches pass from stage to stage",
    "dp_replicate": "replicas of the model read different samples; gradients are summed",
    "dp_shard": "ranks read different samples, and each stores a part of every weight (FSDP)",
    "cp": "ranks share each sequence",
    "tp": "ranks share the heads and the hidden columns of each layer",
    "ep": "ranks hold different experts; tokens are sent to them",
    "etp": "ranks share the matrices of each expert",
    "expert_shard": "each rank stores a part of its experts' weights (FSDP)",
}
# (axis, kind of collective) -> what it is for
SENT_FOR = {
    ("tp", "all-gather"): "tokens, or their gradients, are gathered before a product",
    ("tp", "reduce-scatter"): "partial sums of a product are added, and tokens are scattered again",
    ("tp", "all-reduce"): "sums over the ranks that share a product: activations, the loss, gradients of norms",
    ("cp", "all-gather"): "keys and values of the other slices",
    ("cp", "all-to-all"): "gradients of keys and values go to their owners; ulysses exchanges heads for tokens",
    ("cp", "ring"): "keys, values and their gradients are passed around the ring",
    ("ep", "all-to-all"): "tokens are sent to their experts and back",
    ("ep", "all-gather"): "how many rows each expert gets from each rank",
    ("dp_shard", "all-gather"): "weights of a block are gathered before it runs",
    ("dp_shard", "reduce-scatter"): "gradients are summed; each rank keeps its shard",
    ("expert_shard", "all-gather"): "weights of experts are gathered before they run",
    ("expert_shard", "reduce-scatter"): "gradients of experts are summed; each rank keeps its shard",
    ("dp_replicate", "all-reduce"): "gradients are summed between replicas",
    ("pp", "send"): "activations to the next stage, gradients back",
    ("world", "all-reduce"): "the loss and the gradient norm of all ranks",
    ("loss", "all-reduce"): "the number of targets in the batch",
}
MEMORY_FOR = {
    "weights": "the part of the model that a rank stores",
    "optimizer state": "what the optimizer keeps for each weight",
    "gradients": "what backward computes for each trained weight",
    "activations": "what forward saves for backward, including weights in the compute type; an estimate",
}


@dataclass(frozen=True)
class Chapter:
    """One chapter. Columns are (name, kind of value: text, whole, bytes or share); `drawing` is for terminals."""

    key: str
    title: str
    words: Sequence[str] = ()
    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[Sequence[Any]] = ()
    picture: Mapping[str, Any] | None = None
    drawing: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Subject:
    """A config and everything derived from it. `stages`: the first rank of each pipeline position, as it is built."""

    config: Config
    arch: Architecture
    layout: Layout
    precision: Precision
    stages: Sequence[Built]
    sent: Collectives

    @property
    def sent_by_axis(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (axis, *_), numbers in self.sent.items():
            found[axis] += numbers["bytes"]
        return dict(found)


def chapters(subject: Subject, width: int) -> list[Chapter]:
    """All chapters; `width` is the number of columns for terminal drawings."""
    found = [mesh_chapter(subject), shards_chapter(subject), life_chapter(subject), schedule_chapter(subject, width)]
    return [*found, sent_chapter(subject), memory_chapter(subject), config_chapter(subject)]


# ---- mesh ------------------------------------------------------------------------------------------------------------


def mesh_chapter(subject: Subject) -> Chapter:
    layout = subject.layout
    if layout.world_size == 1:
        return Chapter("mesh", "The mesh", ["There is one rank: it holds everything and sends nothing."])
    axes = [axis for axis in (*AXES, *(EXPERT_AXES if layout.ep > 1 else ())) if getattr(layout, axis) > 1]
    sent = subject.sent_by_axis
    rows = [
        [axis, getattr(layout, axis), listed([str(rank) for rank in groups_of(layout, axis)[0]], 4), AXIS_WORDS[axis]]
        for axis in axes
    ]
    holds = {
        rank: f"{built.layers}; {built.elements:,} parameters"
        for place, built in enumerate(subject.stages)
        for rank in stage_ranks(layout, place)
    }
    words = f"{layout.world_size} ranks form a grid: {layout}. Ranks that differ only on one axis are a group."
    return Chapter(
        "mesh",
        "The mesh",
        [words, "Ranks on the last axis are neighbours. Bytes are what rank 0 sends over an axis in a step."],
        [("axis", "text"), ("ranks", "whole"), ("first group", "text"), ("sent", "bytes"), ("what it is for", "text")],
        [[*row[:3], sent.get(row[0], 0), row[3]] for row in rows],
        {"kind": "mesh", **mesh_data(layout, holds, dict.fromkeys(stage_ranks(layout, 0), sent))},
        list(_rank_map(layout, axes)),
    )


def _rank_map(layout: Layout, axes: Sequence[str]) -> Iterator[str]:
    """A line for each axis, a column for each rank."""
    if layout.world_size > MOST_DRAWN_RANKS:
        return
    yield "rank".ljust(14) + "".join(f"{rank:>4}" for rank in range(layout.world_size))
    for axis in axes:
        yield axis.ljust(14) + "".join(f"{coordinates_of(layout, rank)[axis]:>4}" for rank in range(layout.world_size))


# ---- shards ----------------------------------------------------------------------------------------------------------


def shards_chapter(subject: Subject) -> Chapter:
    """Each kind of parameter once, where it first occurs."""
    seen: dict[str, tuple[Built, ParameterKind]] = {}
    totals: Counter[str] = Counter()
    for built in subject.stages:
        for kind, count in built.counts.items():
            seen.setdefault(kind.name, (built, kind))
            totals[kind.name] += count
    rows = [
        [
            name.removesuffix(".weight"),
            totals[name],
            _times(kind.whole),
            _times(built.shards[kind]),
            kind.copies(subject.layout),
            kind.placement,
        ]
        for name, (built, kind) in seen.items()
    ]
    words = ["Parameters that differ only in their layer share a line. A shard is what one rank stores."]
    if subject.layout.pp > 1:
        held = [f"rank {built.rank}: {built.layers}, {built.elements:,} parameters" for built in subject.stages]
        words.append(f"Each pipeline position has its own layers: {listed(held, 8, '; ')}.")
    columns = [("parameter", "text"), ("how many", "whole"), ("whole", "text"), ("shard", "text"), ("copies", "whole")]
    picture = {"kind": "shards", "matrices": [_matrix(subject.layout, *found) for found in seen.values()]}
    return Chapter("shards", "What each rank holds", words, [*columns, ("cut", "text")], rows, picture)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _matrix(layout: Layout, built: Built, kind: ParameterKind) -> dict[str, Any]:
    """The pieces of one parameter, each with the ranks that hold it, as many as a picture can show."""
    pieces: dict[tuple[range, ...], list[int]] = {}
    for rank in stage_ranks(layout, layout.coordinates(built.rank)["pp"]):
        pieces.setdefault(kind.region(layout, coordinates_of(layout, rank)), []).append(rank)
    drawn = list(pieces.items())[:MOST_PIECES]
    return {
        "name": kind.name.removesuffix(".weight"),
        "whole": kind.whole,
        "dimensions": kind.dimensions[: len(kind.whole)],
        "cut": kind.placement,
        "axes": sorted({number for _, number in kind.cuts}),
        "pieces": [
            {"region": [[held.start, held.stop] for held in region], "ranks": ranges(ranks)} for region, ranks in drawn
        ],
        "more": len(pieces) - len(drawn),
        "elements": math.prod(kind.whole),
    }


# ---- a token, and the schedule ---------------------------------------------------------------------------------------


def life_chapter(subject: Subject) -> Chapter:
    config, arch, layout = subject.config, subject.arch, subject.layout
    path = TokenPath(config, arch, layout, subject.precision, plan_pipeline(config, arch, layout))
    columns = [("where", "text"), ("what happens", "text")]
    rows = [list(moment) for moment in token_life(path)]
    return Chapter("life", "The life of one token", [], columns, rows, {"kind": "life"})


def schedule_chapter(subject: Subject, width: int) -> Chapter:
    config, layout = subject.config, subject.layout
    count = micro_batches_of(config, layout)
    if layout.pp == 1:
        several = f"{count} micro-batches, one after another" if count > 1 else "one micro-batch"
        one = f"Each rank runs forward and backward of {several}, and then the update."
        return Chapter("schedule", "The schedule", [one])
    model = StagedModel(config, subject.arch, layout, count_microbatches(config))
    schedule = model.schedule(None)
    costs = model.costs(schedule.stages)
    timeline = simulate(schedule, weights=costs.cost)
    words = [f"{title(schedule)}.", f"{bubble_line(schedule, timeline, costs)}.", *warnings(schedule)]
    if count > 1:
        words.append(f"A step repeats this {count} times before the update.")
    small = sum(map(len, schedule.orders)) <= MOST_PASSES
    ranks = group_of(layout, "pp", 0)
    held = in_flight(schedule)
    return Chapter(
        "schedule",
        "The schedule",
        words if small else [*words, "It is too long for a picture here; `shardline schedule` draws it."],
        [("rank", "whole"), ("stages", "text"), ("layers", "text"), ("idle", "share"), ("in flight", "whole")],
        [
            [
                *(rank, _numbers(schedule.stages_of(at))),
                ranges(layer for stage in schedule.stages_of(at) for layer in costs.layers[stage]) or "none",
                *(timeline.idle[at], held[at]),
            ]
            for at, rank in enumerate(ranks)
        ],
        {"kind": "schedule", "ranks": ranks, "spans": timeline_rows(timeline), "total": timeline.total}
        if small
        else None,
        drawing(schedule, timeline, width, color=False) if small else (),
    )


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


# ---- traffic and memory ----------------------------------------------------------------------------------------------


def sent_chapter(subject: Subject) -> Chapter:
    name = "What is sent when"
    if subject.layout.world_size == 1:
        return Chapter("sent", name, ["Nothing is sent."])
    if not any(axis == "world" for axis, *_ in subject.sent):  # every step ends with a collective over "world"
        return Chapter("sent", name, ["Unknown: the model's code reads tensor values, which a plan does not have."])
    found = sorted(subject.sent.items(), key=lambda item: (PHASES.index(item[0][2]), -item[1]["bytes"]))
    rows = [
        [phase, axis, kind, numbers["calls"], numbers["bytes"], SENT_FOR.get((axis, kind), "")]
        for (axis, kind, phase), numbers in found
    ]
    total = sum(subject.sent_by_axis.values())
    words = f"Rank 0 sends {sized(total)} in a step, assuming ring collectives; this is computed, not measured."
    columns = [("when", "text"), ("axis", "text"), ("what", "text"), ("times", "whole"), ("bytes", "bytes")]
    return Chapter("sent", name, [words], [*columns, ("for", "text")], rows, {"kind": "sent"})


def memory_chapter(subject: Subject) -> Chapter:
    """A row for each pipeline position; all its ranks need the same."""
    rows = [[built.rank, built.layers, *_purposes(built.need).values(), built.need.peak] for built in subject.stages]
    fullest = "; gradients and activations are those of the fullest rank" if subject.layout.pp > 1 else ""
    words = [f"{name}: {what}." for name, what in MEMORY_FOR.items()]
    words.append(f"at once: all of them on a GPU, at the peak of a step{fullest}.")
    columns = [("rank", "whole"), ("layers", "text"), *((name, "bytes") for name in (*MEMORY_FOR, "at once"))]
    picture = {"kind": "memory", "purposes": list(MEMORY_FOR), "ranks": [row[0] for row in rows]}
    return Chapter("memory", "What memory is for", words, columns, rows, picture)


def _purposes(need: MemoryNeed) -> dict[str, int | None]:
    return dict(zip(MEMORY_FOR, (need.weights, need.state, need.gradients, need.activations), strict=True))


# ---- config ----------------------------------------------------------------------------------------------------------


def config_chapter(subject: Subject) -> Chapter:
    defaults = dict(shown(Config()))
    rows = [[key, defaults.get(key), value] for key, value in shown(subject.config) if value != defaults.get(key)]
    words = [*expert_notes(subject.config, subject.arch), *subject.config.alias_notes]
    words += notes(with_degrees(subject.config, subject.layout))
    columns = [("key", "text"), ("default", "text"), ("value", "text")]
    return Chapter("config", "What differs from the defaults", words, columns, rows)
