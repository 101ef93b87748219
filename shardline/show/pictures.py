"""Data for the drawings: the pipeline as it ran and the ideal one, the mesh with its traffic, the load of experts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.config.layout import AXES, EXPERT_AXES, Layout
from shardline.parallel.pipeline.timeline import Action, Schedule, TimedAction, Timeline, needs, simulate
from shardline.show.run_files import Row, RunFiles
from shardline.show.step_parts import present_ranks, spread
from shardline.words import ranges, sized

Walks = list[list[TimedAction]]  # for each pipeline rank


# ---- pipeline --------------------------------------------------------------------------------------------------------


def pipeline_picture(run: RunFiles) -> dict[str, Any] | None:
    """The newest step whose actions every rank of the first pipeline has written, next to the ideal schedule."""
    layout = run.layout
    if layout is None or layout.pp == 1:
        return None
    ranks = group_of(layout, "pp", 0)
    details = [run.ranks[rank].details if rank in run.ranks else {} for rank in ranks]
    steps = [step for step in details[0] if all("actions" in of_rank.get(step, {}) for of_rank in details)]
    if not steps:
        return None
    walks = aligned([read_actions(of_rank[max(steps)]) for of_rank in details])
    measured, ideal = Timeline(tuple(map(tuple, walks)), total_of(walks)), ideal_timeline(walks)
    return {
        "step": max(steps),
        "ranks": ranks,
        "measured": {"spans": timeline_rows(measured), "total": measured.total, "bubble": measured.bubble},
        "ideal": {"spans": timeline_rows(ideal), "total": ideal.total, "bubble": ideal.bubble},
    }


def read_actions(row: Row) -> list[TimedAction]:
    """The actions of one rank, in seconds since 1970."""
    return [
        TimedAction(parse_action(name), row["began"] + start / 1e6, row["began"] + end / 1e6)
        for name, start, end in row["actions"]
    ]


def parse_action(text: str) -> Action:
    """`2F5`: stage 2, forward, micro-batch 5."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups()  # type: ignore[union-attr]
    return Action(kind, int(stage), int(microbatch))


def aligned(walks: Walks) -> Walks:
    """The same actions starting at 0, with ranks shifted so that no action begins before its input exists.

    Clocks of different hosts differ; messages between them show by how much at least.
    """
    made = {timed.action: (place, timed.end) for place, walk in enumerate(walks) for timed in walk}
    stages = 1 + max(action.stage for action in made)
    shifts = [0.0] * len(walks)
    for _ in walks:
        for place, walk in enumerate(walks):
            for action, start, _ in walk:
                for needed in needs(action, stages, Action("I", action.stage + 1, action.microbatch) in made):
                    source, end = made.get(needed, (place, start))
                    if source != place:
                        shifts[place] = max(shifts[place], end + shifts[source] - start)
    first = min(walk[0].start + shift for walk, shift in zip(walks, shifts, strict=True))
    return [
        [TimedAction(action, start + shift - first, end + shift - first) for action, start, end in walk]
        for walk, shift in zip(walks, shifts, strict=True)
    ]


def total_of(walks: Walks) -> float:
    return max(timed.end for walk in walks for timed in walk)


def ideal_timeline(walks: Walks) -> Timeline:
    """The same orders if every action took the mean time of its kind, and messages took no time."""
    seconds: dict[str, list[float]] = {}
    for timed in (timed for walk in walks for timed in walk):
        seconds.setdefault(timed.action.kind, []).append(timed.end - timed.start)
    costs = {kind: statistics.fmean(values) for kind, values in seconds.items()}
    orders = tuple(tuple(timed.action for timed in walk) for walk in walks)
    home = {action.stage: place for place, order in enumerate(orders) for action in order}
    placement = tuple(home[stage] for stage in sorted(home))
    count = 1 + max(action.microbatch for order in orders for action in order)
    return simulate(Schedule("measured", placement, count, orders), costs)


def timeline_rows(timeline: Timeline) -> list[list[list[Any]]]:
    """For each rank, its actions as [kind, stage, micro-batch, start, end]."""
    return [[[*action, round(start, 6), round(end, 6)] for action, start, end in row] for row in timeline.spans]


# ---- mesh ------------------------------------------------------------------------------------------------------------


def groups_of(layout: Layout, axis: str) -> list[list[int]]:
    """The ranks that communicate over an axis, group by group."""
    found: dict[tuple[int, ...], list[int]] = {}
    inside = layout.world_size // (layout.pp * layout.dp_replicate)
    for rank in range(layout.world_size):
        if axis in EXPERT_AXES:
            places = {"replica": rank // inside, **layout.expert_coordinates(rank)}
        else:
            places = layout.coordinates(rank)
        found.setdefault(tuple(place for name, place in places.items() if name != axis), []).append(rank)
    return list(found.values())


def group_of(layout: Layout, axis: str, rank: int) -> list[int]:
    return next(group for group in groups_of(layout, axis) if rank in group)


def mesh_picture(run: RunFiles) -> dict[str, Any] | None:
    """Ranks with their coordinates, what they hold, and what each sends over each axis in the last logged step."""
    layout = run.layout
    if layout is None or layout.world_size == 1:
        return None
    holds, sent = {}, {}
    for rank in present_ranks(run):
        rows = run.ranks[rank]
        holds[rank] = rows.starts[-1]
        last = rows.steps[max(rows.steps)] if rows.steps else {}
        sent[rank] = {axis: size for axis, size in last.get("sent", {}).items() if size > 0}
    return mesh_data(layout, {rank: held_words(row) for rank, row in holds.items()}, sent)


def mesh_data(layout: Layout, holds: Mapping[int, str], sent: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """The data for drawing a mesh; `sent` has the bytes that each rank sends in a step, by axis."""
    ranks = [
        {"rank": rank, "at": layout.coordinates(rank), "holds": holds.get(rank, ""), "sent": dict(sent.get(rank, {}))}
        for rank in range(layout.world_size)
    ]
    axes = {axis: groups_of(layout, axis) for axis in (*AXES, *EXPERT_AXES) if getattr(layout, axis) > 1}
    if layout.ep == 1:
        axes.pop("expert_shard", None)
    return {"degrees": dict(zip(AXES, layout.degrees, strict=True)), "ranks": ranks, "groups": axes}


def held_words(row: Row) -> str:
    layers = row["layers"]
    what = f"layers {ranges(layers)}" if len(layers) != 1 else f"layer {layers[0]}"
    return f"{what if layers else 'no layers'}; {row['parameters']:,} parameters, {sized(row['weight_bytes'])}"


# ---- experts ---------------------------------------------------------------------------------------------------------


def expert_picture(run: RunFiles, most_steps: int) -> dict[str, Any] | None:
    """Load by layer over the steps (most used expert relative to the mean), and each expert's tokens at some steps."""
    rows = {row["step"]: row["expert_load_layers"] for row in run.rows if row.get("expert_load_layers")}
    if not rows:
        return None
    steps = spread(sorted(rows), most_steps)
    layers = list(rows[steps[-1]])
    details = run.ranks[0].details if 0 in run.ranks else {}
    tokens = {step: row for step, row in sorted(details.items()) if "experts" in row}
    return {
        "steps": steps,
        "layers": layers,
        "loads": [[rows[step].get(layer) for step in steps] for layer in layers],
        "tokens": [_expert_tokens(step, tokens[step]) for step in spread(list(tokens), 8)],
    }


def _expert_tokens(step: int, row: Row) -> dict[str, Any]:
    experts: Sequence[Sequence[int]] = row["experts"]
    return {"step": step, "layers": row["layers"], "experts": experts}
