"""What happened to a run and when: starts, ends, saves, validations, faults and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardline.show.run_files import Row, RunFiles
from shardline.words import counted, sized


def events(run: RunFiles) -> list[dict[str, Any]]:
    """Starts, ends, saves, validations, faults and warnings, ordered by time."""
    found = [event for rank, rows in run.ranks.items() for event in _rank_events(rank, rows.starts, rows.events)]
    for row in run.restarts:
        took = f"; training again after {row['seconds']:.1f} s" if row.get("seconds") is not None else ""
        found.append(_event(row["time"], "fault", f"{row['cause']}{took}, from step {row.get('from_step') or 0}"))
    seen = {event["step"] for event in found if event["kind"] == "save"}
    for row in run.checkpoints:
        if row["step"] not in seen:
            found.append(_event(row["time"], "save", f"step {row['step']}, {sized(row['size'])}", row["step"]))
    return sorted(found, key=lambda event: event["time"])


def _event(when: float, kind: str, text: str, step: int | None = None) -> dict[str, Any]:
    return {"time": when, "kind": kind, "text": text, "step": step}


def _save_words(row: Row) -> str:
    how = "in the background" if row.get("staged") else "the run waited"
    return f"step {row['step']}, {sized(row['size'])} in {row['seconds']:.2f} s, {how}"


EVENT_WORDS: dict[str, Callable[[Row], str]] = {
    "save": _save_words,
    "validation": lambda row: f"step {row['step']}, validation loss {row['loss']:.4f}",
    "warning": lambda row: str(row["text"]),
}


def _rank_events(rank: int, starts: Sequence[Row], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The notable lines of a rank's log; for ranks other than 0, only warnings and errors."""
    for number, row in enumerate(starts if rank == 0 else ()):
        what = "the run starts" if number == 0 else f"continues after step {row['step']}"
        yield _event(row["time"], "start", f"{what}, {counted(row['world_size'], 'rank')}", row["step"])
    for row in rows:
        kind = row["event"]
        if kind == "end" and (row.get("error") or rank == 0):
            stopped = f"stopped by {row['stopped_by']}" if row.get("stopped_by") else "the loop ended"
            yield _event(row["time"], "error" if row.get("error") else "end", _of(rank, row.get("error") or stopped))
        elif kind == "warning" or (kind in EVENT_WORDS and rank == 0):
            yield _event(row["time"], kind, _of(rank, EVENT_WORDS[kind](row)), row.get("step"))


def _of(rank: int, text: str) -> str:
    return text if rank == 0 else f"rank {rank}: {text}"
