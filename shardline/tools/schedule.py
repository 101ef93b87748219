"""`shardline schedule`: draw a pipeline schedule and print what it costs, without running anything.

rank 0  FFFF..B-B-B-B-       a column is the time of one forward pass: F 1, B 2, I 1, W 1
rank 1  .FFFFB-B-B-B-..      . idle

With a config, the time of a stage's passes is proportional to the work of its layers; 1 is the mean forward pass.
"""

from __future__ import annotations

import json as json_lines
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.config.names import SCHEDULES
from shardline.errors import ConfigError, UserError
from shardline.parallel.pipeline.schedules import (
    CLOSED_FORMS,
    build_schedule,
    read_csv,
    stages_per_rank_of,
    theoretical_bubble,
    warnings,
)
from shardline.parallel.pipeline.timeline import ACTION_KINDS, Schedule, Timeline, in_flight, simulate
from shardline.words import ESCAPES, counted, ranges, sized, to_stderr, wrapped

if TYPE_CHECKING:  # these import torch, which a schedule without a config does not need
    from shardline.config.schema import Config
    from shardline.tools.stage_costs import StageCosts, StagedModel

MOST_PASSES = 200_000  # more would take minutes and fit no screen
MOST_COLUMNS = 4  # per unit of time, so that a short pass gets at least one; an even shorter one may get none
DEFAULT = "1F1B"
# Terminal colors of each kind; a rank's second, fourth, ... stage has the paler one.
COLORS = {"F": (44, 104), "B": (42, 102), "I": (46, 106), "W": (43, 103)}


def command(
    config: Config | None,
    pp: int | None,
    microbatches: int | None,
    schedule: str | None,
    stages_per_rank: int | None,
    csv: str | None,
    svg: str | None,
    compare: bool,
    json: bool,
) -> int:
    if compare:
        _refuse_together("--compare", schedule=schedule, csv=csv, svg=svg)
    elif csv is not None:
        _refuse_together("--csv", schedule=schedule)
    model = None
    if config is not None:
        from shardline.tools.stage_costs import read_model

        model = read_model(config, microbatches)
        pp, microbatches = _sizes(model.layout.pp, model.microbatches, stages_per_rank)
    if compare:
        made = _all_schedules(*_sizes(pp, microbatches, stages_per_rank), stages_per_rank, model)
        rows = [_numbers(*pair) for pair in made]
        if not rows:
            raise UserError("shardline schedule: the model cannot be split into stages for any schedule")
        print("\n".join(json_lines.dumps(row) for row in rows) if json else comparison(rows))
        return 0
    if model is not None:
        found = model.schedule(stages_per_rank)
    elif csv is not None:
        found = read_csv(csv)  # --pp and --microbatches must agree with it, if they are set
        found = build_schedule("", pp or found.ranks, microbatches or found.microbatches, stages_per_rank, csv)
    else:
        found = build_schedule(
            schedule or DEFAULT, *_sizes(pp, microbatches, stages_per_rank), stages_per_rank=stages_per_rank
        )
    costs = model and model.costs(found.stages)
    timeline = simulate(found, weights=costs and costs.cost)
    if svg is not None:
        from shardline.tools.schedule_svg import draw

        _write(Path(svg), draw(found, timeline, title(found), bubble_line(found, timeline, costs)))
    if json:
        spans = [[[str(span.action), span.start, span.end] for span in row] for row in timeline.spans]
        print(json_lines.dumps({**_numbers(found, costs), "actions": spans}))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(report(found, timeline, shutil.get_terminal_size((120, 24)).columns, color, costs))
    for warning in warnings(found):
        to_stderr(f"warning: {warning}")
    return 0


def _refuse_together(option: str, **others: str | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise UserError(f"shardline schedule: {option} and --{name} exclude each other: use only one of them")


def _sizes(pp: int | None, microbatches: int | None, stages_per_rank: int | None) -> tuple[int, int]:
    if pp is None or microbatches is None:
        raise UserError(f"shardline schedule: --{'pp' if pp is None else 'microbatches'} N is missing")
    passes = pp * microbatches * (stages_per_rank or 2)
    if passes > MOST_PASSES:
        raise UserError(
            f"{pp} ranks with {microbatches} micro-batches make {passes} passes; at most {MOST_PASSES} can be drawn"
        )
    return pp, microbatches


def _all_schedules(
    ranks: int, microbatches: int, stages_per_rank: int | None, model: StagedModel | None
) -> Iterator[tuple[Schedule, StageCosts | None]]:
    """Yield every schedule and the costs of its stages, with the requested stages per rank if it supports them.

    A note names each schedule that is left out because the model cannot be split for it.
    """
    for name in SCHEDULES:
        counts = stages_per_rank_of(name)
        count = stages_per_rank if stages_per_rank is not None and stages_per_rank in counts else counts.low
        try:
            yield build_schedule(name, ranks, microbatches, count), model and model.costs(ranks * count)
        except ConfigError as error:
            to_stderr(f"note: {name} is left out: {error}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path}: cannot be written: {error.strerror}") from error


def _numbers(schedule: Schedule, costs: StageCosts | None) -> dict[str, Any]:
    """Return the numbers of a schedule; lists are by rank, and those of `costs` by stage within a rank."""
    timeline = simulate(schedule, weights=costs and costs.cost)
    held = [list(schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    of_stages = {} if costs is None else costs._asdict()
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "stages": held,
        "total": timeline.total,
        "bubble": timeline.bubble,
        "closed_form": theoretical_bubble(schedule) if schedule.name in CLOSED_FORMS else None,
        "idle": list(timeline.idle),
        "in_flight": list(in_flight(schedule)),
        **{name: [[values[stage] for stage in own] for own in held] for name, values in of_stages.items()},
    }


# ---- output ----------------------------------------------------------------------------------------------------------


def report(schedule: Schedule, timeline: Timeline, width: int, color: bool, costs: StageCosts | None = None) -> str:
    """Return title, drawing, legend, bubble, and a line for each rank."""
    held = in_flight(schedule)
    lines = [wrapped(title(schedule), width), "", *drawing(schedule, timeline, width, color), ""]
    lines += [wrapped(bubble_line(schedule, timeline, costs), width), ""]
    ranks = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    columns = {"stages": [" ".join(map(str, own)) for own in ranks]}
    head, *rest = _aligned(columns | dict(_cost_columns(ranks, costs) if costs else ()))
    lines.append(f"{'rank':>4}  {'idle':>6}  {'in flight':>9}  {'micro-batches':>13}  {head}")
    for rank, (idle, own) in enumerate(zip(timeline.idle, ranks, strict=True)):
        numbers = f"{rank:>4}  {100 * idle:>5.1f}%  {held[rank]:>9}  {_plain(held[rank] / len(own)):>13}"
        lines.append(f"{numbers}  {rest[rank]}")
    notes = [
        "in flight: the most activations of one stage and micro-batch held at once; micro-batches: the same per stage"
    ]
    if costs is not None:
        notes.append("cost: the time of a forward pass of each stage, by the FLOPs of its layers; 1 is the mean")
    if costs is not None and any(costs.transfers):
        notes.append(
            "to experts: how often rows travel, there and back, in the forward passes of a micro-batch, and about how"
            " much a rank sends; backward passes send as much again"
        )
    return "\n".join([*lines, *(wrapped(note, width) for note in notes)])


def _cost_columns(ranks: Sequence[Sequence[int]], costs: StageCosts) -> Iterator[tuple[str, list[str]]]:
    """The columns that a config adds to the table of ranks."""

    def total(values: Sequence[int]) -> list[int]:
        return [sum(values[stage] for stage in own) for own in ranks]

    yield "cost", [" ".join(f"{costs.cost[stage]:.2f}" for stage in own) for own in ranks]
    if any(costs.transfers):
        both = zip(total(costs.transfers), total(costs.sent), strict=True)
        yield "to experts", [f"{times} x, {sized(size)}" for times, size in both]
    layers = [ranges(layer for stage in own for layer in costs.layers[stage]) or "none" for own in ranks]
    if any(costs.with_experts):
        layers = [f"{own} ({n} with experts)" for own, n in zip(layers, total(costs.with_experts), strict=True)]
    yield "layers", layers


def _aligned(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a table, header first."""
    padded = []
    for head, cells in columns.items():
        width = max(map(len, (head, *cells)))
        padded.append([cell.ljust(width) for cell in (head, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def title(schedule: Schedule) -> str:
    counts = sorted({len(schedule.stages_of(rank)) for rank in range(schedule.ranks)})
    each = f"{' or '.join(map(str, counts))} stage{'s' * (counts != [1])} on each"
    several = "es" * (schedule.microbatches > 1)
    return f"{schedule.name}: {counted(schedule.ranks, 'rank')}, {each}, {schedule.microbatches} micro-batch{several}"


def bubble_line(schedule: Schedule, timeline: Timeline, costs: StageCosts | None = None) -> str:
    theory = f"{100 * theoretical_bubble(schedule):.1f}%"
    closed = f" (closed form {theory})" if schedule.name in CLOSED_FORMS else ""
    if costs is not None:
        closed = f" ({theory} with equal stages)"
    share = f"the share of {_plain(timeline.total)} time units in which ranks are idle"
    return f"bubble {100 * timeline.bubble:.1f}%{closed}: {share}"


def drawing(schedule: Schedule, timeline: Timeline, width: int, color: bool) -> list[str]:
    """Return a line for each rank and a legend: full action names if they fit into one line, else wrapped letters."""
    label = max(len(f"rank {schedule.ranks - 1}  "), 6)
    longest = max(len(str(span.action)) for row in timeline.spans for span in row)
    shortest = min(span.end - span.start for row in timeline.spans for span in row)
    columns = _columns_for(longest + 1, shortest)  # of a unit of time
    named = shortest * MOST_COLUMNS >= 1 and label + _column(timeline.total, columns) <= width
    if not named:
        columns = _columns_for(1, shortest)
    rows = [_row(schedule, rank, timeline, columns, named, color) for rank in range(schedule.ranks)]
    per_line = max(10, width - label) // columns * columns
    lines = []
    for start in range(0, len(rows[0]), per_line):
        if start:
            lines.append("")
        if len(rows[0]) > per_line:
            lines.append(f"{'time':<{label}}{start // columns}")
        for rank, row in enumerate(rows):
            lines.append(f"{f'rank {rank}':<{label}}" + "".join(row[start : start + per_line]).rstrip())
    return [*lines, "", _legend(schedule, named, color, columns, width)]


def _columns_for(characters: int, time: float) -> int:
    """Return the width of a unit of time at which an action of this duration has room for this many characters."""
    return math.ceil(characters / max(time, 1 / MOST_COLUMNS) - 1e-6)


def _column(time: float, columns: int) -> int:
    """Return the column nearest to a time. Halves are frequent and sums inexact, so all halves are rounded up."""
    return math.floor(time * columns + 0.5 + 1e-6)


def _row(schedule: Schedule, rank: int, timeline: Timeline, columns: int, named: bool, color: bool) -> list[str]:
    """Return the text of each column of a rank."""
    row = ["." if not named or column % columns == 0 else " " for column in range(_column(timeline.total, columns))]
    own = schedule.stages_of(rank)
    for span in timeline.spans[rank]:
        kind, stage, _ = span.action
        start, end = _column(span.start, columns), _column(span.end, columns)
        later = own.index(stage)
        name = str(span.action) if named else kind.lower() if later else kind
        # A gap after a name separates neighbors; without colors, dashes show how long an action takes.
        text = (name.ljust(end - start - named, " " if color else "-") + " " * named)[: end - start]
        row[start:end] = [f"\x1b[30;{COLORS[kind][later % 2]}m{piece}\x1b[0m" if color else piece for piece in text]
    return row


def _legend(schedule: Schedule, named: bool, color: bool, columns: int, width: int) -> str:
    kinds = [kind for kind in ACTION_KINDS if any(a.kind == kind for order in schedule.orders for a in order)]
    words = [
        f"\x1b[30;{COLORS[kind][0]}m{kind}\x1b[0m {ACTION_KINDS[kind]}" if color else f"{kind} {ACTION_KINDS[kind]}"
        for kind in kinds
    ]
    several = schedule.stages > schedule.ranks
    if named:
        words.append("2F5: forward of stage 2, micro-batch 5")
    elif several:
        words.append("small letters: a rank's later stages")
    unit = [f"{columns} columns: 1 time unit"] if columns > 1 and not named else []
    lines = [""]
    for word in [*words, ". idle", *unit]:
        longer = f"{lines[-1]}   {word}" if lines[-1] else word
        if len(ESCAPES.sub("", longer)) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each schedule."""
    lines = ["| schedule | stages per rank | bubble | micro-batches in flight, at most |", "|---|---|---|---|"]
    for row in rows:
        counts = [len(own) for own in row["stages"]]
        held = max(most / count for most, count in zip(row["in_flight"], counts, strict=True))
        lines.append(f"| {row['schedule']} | {counts[0]} | {100 * row['bubble']:.1f}% | {_plain(held)} |")
    return "\n".join(lines)


def _plain(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
