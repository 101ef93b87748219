"""`shardline trace overlap`: how much communication the traces of a run show, and how much of it computation hides.

Times are computed from unions of intervals, for each rank, step and mesh dimension, so that nothing counts twice:

    communication   [ tp ----------------- ]        [ tp ---- ]
    computation     [ ------------- ]  [ ------- ]
    exposed                          ..             ...........      communication without computation
    hidden           ................  .....                         the rest of communication
    idle                                         ...                 neither
"""

from __future__ import annotations

import json as json_lines
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardline.errors import UserError
from shardline.tools.intervals import Interval, length, union, within, without
from shardline.tools.trace_events import RankTrace, read
from shardline.words import to_stderr

ALL = "all"  # the row of all dimensions together, if there are several


@dataclass(frozen=True)
class OverlapRow:
    """Milliseconds of one step on one rank; `dim` is None if there is no communication."""

    rank: int | None
    step: int | None
    dim: str | None
    communication: float
    exposed: float
    compute: float
    idle: float

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed

    @property
    def hidden_fraction(self) -> float | None:
        return self.hidden / self.communication if self.communication else None


def command(traces: Sequence[str], json: bool = False) -> int:
    paths = [path for trace in traces for path in traces_in(Path(trace))]
    rows = [(path, row) for path in paths for row in rows_of(read(path))]
    silent = [path for path in paths if all(row.dim is None for at, row in rows if at == path)]
    if json:
        for path, row in rows:
            print(json_lines.dumps(_json(path, row)))
    else:
        print(table([row for _, row in rows]))
    for path in silent:
        to_stderr(f"note: {path} shows no communication")
    return 0


def traces_in(path: Path) -> list[Path]:
    """Return the file itself, or for a folder, such as a run's, the traces of the last profile."""
    if not path.is_dir():
        return [path]
    newest = max((found.parent for found in path.rglob("rank*_trace.json")), key=_number, default=None)
    if newest is None:
        raise UserError(f"{path} holds no traces; profiling.enable_profiling writes some into a run's folder")
    return sorted(newest.glob("rank*_trace.json"), key=_number)


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0)


def rows_of(rank: RankTrace) -> list[OverlapRow]:
    """Return a row for each step and dimension; a trace without marked steps counts as one step."""
    computing = union((activity.start, activity.end) for activity in rank.computation)
    if not rank.on_gpu:
        computing = without(computing, union((wait.start, wait.end) for wait in rank.waits))
    rows: list[OverlapRow] = []
    for step, (host_start, host_end), window in windows(rank):
        dims = {
            dim: union((a.start, a.end) for a in activities if host_start <= a.launched < host_end)
            for dim, activities in rank.communication.items()
        }
        dims = {dim: talking for dim, talking in sorted(dims.items()) if talking}
        together = union(interval for talking in dims.values() for interval in talking)
        compute = length(within(computing, *window))
        idle = length(without(without([window], computing), together))
        named: list[tuple[str | None, list[Interval]]] = [*dims.items()] or [(None, [])]
        for dim, talking in [*named, (ALL, together)] if len(dims) > 1 else named:
            all_of_it, exposed = length(talking), length(without(talking, computing))
            rows.append(OverlapRow(rank.rank, step, dim, all_of_it / 1e3, exposed / 1e3, compute / 1e3, idle / 1e3))
    return rows


class StepWindow(NamedTuple):
    """A step: its number, its interval on the host, and the interval that counts as the step.

    A GPU runs behind the host: its step lasts from the end of the last step to the end of what was launched in it.
    """

    step: int | None
    host: Interval
    time: Interval


def windows(rank: RankTrace) -> list[StepWindow]:
    everything = [*rank.computation, *(activity for found in rank.communication.values() for activity in found)]
    if not rank.steps:
        if not everything:
            return []
        window = min(a.start for a in everything), max(a.end for a in everything)
        return [StepWindow(None, (-float("inf"), float("inf")), window)]
    found = []
    before = -float("inf")
    for step, start, end in rank.steps:
        window = start, end
        if rank.on_gpu:
            window = max(start, before), max((a.end for a in everything if start <= a.launched < end), default=end)
            before = window[1]
        found.append(StepWindow(step, (start, end), window))
    return found


# ---- output ----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[OverlapRow]) -> str:
    """Return all rows, in milliseconds, and the mean of each dimension."""
    names = ("communication", "exposed", "hidden", "hidden %", "compute", "idle")
    lines = ["  ".join([f"{'rank':>4}  {'step':>6}  {'dim':<12}", *(f"{name:>13}" for name in names)])]
    for row in rows:
        lines.append("  ".join([f"{_or_dash(row.rank):>4}  {_or_dash(row.step):>6}", *_cells(row)]))
    dims = [dim for dim in dict.fromkeys(row.dim for row in rows) if dim is not None]
    if dims and len(rows) > len(dims):
        lines.append(f"mean of {len({(row.rank, row.step) for row in rows})} steps on the ranks above")
        for dim in dims:
            lines.append("  ".join([f"{'':>4}  {'':>6}", *_cells(_mean([row for row in rows if row.dim == dim]))]))
    return "\n".join(lines)


def _cells(row: OverlapRow) -> list[str]:
    fraction = "-" if row.hidden_fraction is None else f"{100 * row.hidden_fraction:.1f}"
    times = [f"{number:.3f}" for number in (row.communication, row.exposed, row.hidden, row.compute, row.idle)]
    return [f"{row.dim or '-':<12}", *(f"{cell:>13}" for cell in (*times[:3], fraction, *times[3:]))]


def _mean(rows: Sequence[OverlapRow]) -> OverlapRow:
    names = ("communication", "exposed", "compute", "idle")
    return OverlapRow(None, None, rows[0].dim, *(sum(getattr(row, name) for row in rows) / len(rows) for name in names))


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _json(path: Path, row: OverlapRow) -> dict[str, Any]:
    of = {"trace": str(path), "rank": row.rank, "step": row.step, "dim": row.dim}
    times = {f"{name}_ms": getattr(row, name) for name in ("communication", "exposed", "hidden", "compute", "idle")}
    return {**of, **times, "hidden_fraction": row.hidden_fraction}
