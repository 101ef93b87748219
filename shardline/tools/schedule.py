"""`shardline schedule`: draw a pipeline schedule and print what it costs, without running anything.

rank 0  FFFF..B-B-B-B-       a column is the time of one forward pass: F 1, B 2, I 1, W 1
rank 1  .FFFFB-B-B-B-..      . idle
"""

from __future__ import annotations

import json as json_lines
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardline.config.names import SCHEDULES
from shardline.errors import UserError
from shardline.parallel.pipeline.schedules import (
    CLOSED_FORMS,
    build_schedule,
    read_csv,
    stages_per_rank_of,
    theoretical_bubble,
    warnings,
)
from shardline.parallel.pipeline.timeline import ACTION_KINDS, Schedule, TimedAction, Timeline, in_flight, simulate
from shardline.words import counted

MOST_PASSES = 200_000  # more would take minutes and fill no screen
DEFAULT = "1F1B"
# Terminal colours of each kind; a rank's second, fourth, ... stage has the paler one.
COLORS = {"F": (44, 104), "B": (42, 102), "I": (46, 106), "W": (43, 103)}


def command(
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
        rows = [_numbers(one) for one in _all_schedules(*_sizes(pp, microbatches, stages_per_rank), stages_per_rank)]
        print("\n".join(json_lines.dumps(row) for row in rows) if json else comparison(rows))
        return 0
    if csv is not None:
        _refuse_together("--csv", schedule=schedule)
        found = read_csv(csv)  # numbers that were given must agree with it
        found = build_schedule("", pp or found.ranks, microbatches or found.microbatches, stages_per_rank, csv)
    else:
        found = build_schedule(
            schedule or DEFAULT, *_sizes(pp, microbatches, stages_per_rank), stages_per_rank=stages_per_rank
        )
    timeline = simulate(found)
    if svg is not None:
        from shardline.tools.schedule_svg import draw

        _write(Path(svg), draw(found, timeline, title(found), bubble_line(found, timeline)))
    if json:
        spans = [[[str(span.action), span.start, span.end] for span in row] for row in timeline.spans]
        print(json_lines.dumps({**_numbers(found), "actions": spans}))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(report(found, timeline, shutil.get_terminal_size((120, 24)).columns, color))
    for warning in warnings(found):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _refuse_together(option: str, **others: str | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise UserError(f"shardline schedule: {option} and --{name} exclude each other: give one of them")


def _sizes(pp: int | None, microbatches: int | None, stages_per_rank: int | None) -> tuple[int, int]:
    if pp is None or microbatches is None:
        raise UserError(f"shardline schedule: --{'pp' if pp is None else 'microbatches'} N is missing")
    passes = pp * microbatches * (stages_per_rank or 2)
    if passes > MOST_PASSES:
        raise UserError(
            f"{pp} ranks with {microbatches} micro-batches make {passes} passes; at most {MOST_PASSES} can be drawn"
        )
    return pp, microbatches


def _all_schedules(ranks: int, microbatches: int, stages_per_rank: int | None) -> list[Schedule]:
    """Every schedule, with the requested stages per rank if it can run with them."""
    made = []
    for name in SCHEDULES:
        counts = stages_per_rank_of(name)
        count = stages_per_rank if stages_per_rank is not None and stages_per_rank in counts else counts.low
        made.append(build_schedule(name, ranks, microbatches, count))
    return made


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path}: cannot be written: {error.strerror}") from error


def _numbers(schedule: Schedule) -> dict[str, Any]:
    timeline = simulate(schedule)
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "stages": [list(schedule.stages_of(rank)) for rank in range(schedule.ranks)],
        "total": timeline.total,
        "bubble": timeline.bubble,
        "closed_form": theoretical_bubble(schedule) if schedule.name in CLOSED_FORMS else None,
        "idle": list(timeline.idle),
        "in_flight": list(in_flight(schedule)),
    }


# ---- output ----------------------------------------------------------------------------------------------------------


def report(schedule: Schedule, timeline: Timeline, width: int, color: bool) -> str:
    """Title, drawing, legend, bubble, and a line for each rank."""
    held = in_flight(schedule)
    lines = [title(schedule), "", *drawing(schedule, timeline, width, color), ""]
    lines += [bubble_line(schedule, timeline), ""]
    lines.append(f"{'rank':>4}  {'idle':>6}  {'in flight':>9}  {'micro-batches':>13}  stages")
    for rank, idle in enumerate(timeline.idle):
        own = schedule.stages_of(rank)
        lines.append(
            f"{rank:>4}  {100 * idle:>5.1f}%  {held[rank]:>9}  {_plain(held[rank] / len(own)):>13}  "
            f"{' '.join(map(str, own))}"
        )
    lines.append(
        "in flight: the most activations of one stage and micro-batch held at once; micro-batches: the same per stage"
    )
    return "\n".join(lines)


def title(schedule: Schedule) -> str:
    counts = sorted({len(schedule.stages_of(rank)) for rank in range(schedule.ranks)})
    each = f"{' or '.join(map(str, counts))} stage{'s' * (counts != [1])} on each"
    several = "es" * (schedule.microbatches > 1)
    return f"{schedule.name}: {counted(schedule.ranks, 'rank')}, {each}, {schedule.microbatches} micro-batch{several}"


def bubble_line(schedule: Schedule, timeline: Timeline) -> str:
    closed = f" (closed form {100 * theoretical_bubble(schedule):.1f}%)" if schedule.name in CLOSED_FORMS else ""
    share = f"the share of {timeline.total:g} time units in which ranks are idle"
    return f"bubble {100 * timeline.bubble:.1f}%{closed}: {share}"


def drawing(schedule: Schedule, timeline: Timeline, width: int, color: bool) -> list[str]:
    """A line for each rank and a legend. Actions have names if these fit into one line, else wrapped letters."""
    label = max(len(f"rank {schedule.ranks - 1}  "), 6)
    units = round(timeline.total)
    longest = max(len(str(span.action)) for row in timeline.spans for span in row)
    named = label + units * (longest + 1) <= width
    cell = longest + 1 if named else 1
    rows = [_row(schedule, rank, spans, units, cell, named, color) for rank, spans in enumerate(timeline.spans)]
    per_line = max(10, (width - label) // cell)
    lines = []
    for start in range(0, units, per_line):
        if start:
            lines.append("")
        if units > per_line:
            lines.append(f"{'time':<{label}}{start}")
        for rank, row in enumerate(rows):
            lines.append(f"{f'rank {rank}':<{label}}" + "".join(row[start : start + per_line]).rstrip())
    return [*lines, "", _legend(schedule, named, color)]


def _row(
    schedule: Schedule, rank: int, spans: Sequence[TimedAction], units: int, cell: int, named: bool, color: bool
) -> list[str]:
    """The text of each unit of time of a rank, `cell` columns wide."""
    row = [".".ljust(cell)] * units
    own = schedule.stages_of(rank)
    for span in spans:
        kind, stage, _ = span.action
        start, length = round(span.start), round(span.end - span.start)
        later = own.index(stage)
        name = str(span.action) if named else kind.lower() if later else kind
        # A gap after a name separates neighbours; without colours, dashes show how long an action takes.
        text = name.ljust(length * cell - named, " " if color else "-") + " " * named
        for unit in range(length):
            piece = text[unit * cell : (unit + 1) * cell]
            row[start + unit] = f"\x1b[30;{COLORS[kind][later % 2]}m{piece}\x1b[0m" if color else piece
    return row


def _legend(schedule: Schedule, named: bool, color: bool) -> str:
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
    return "   ".join([*words, ". idle"])


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line for each schedule."""
    lines = ["| schedule | stages per rank | bubble | micro-batches in flight, most |", "|---|---|---|---|"]
    for row in rows:
        counts = [len(own) for own in row["stages"]]
        held = max(most / count for most, count in zip(row["in_flight"], counts, strict=True))
        lines.append(f"| {row['schedule']} | {counts[0]} | {100 * row['bubble']:.1f}% | {_plain(held)} |")
    return "\n".join(lines)


def _plain(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
