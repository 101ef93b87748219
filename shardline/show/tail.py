"""`shardline tail RUN`: follows a run through its files, on any shared disk: rows, events, and how it ends.

    metrics.jsonl            rows and validations; replaced when a run resumes
    log/telemetry-0.jsonl    starts, saves, warnings, the end
    log/restarts.jsonl       faults
    log/heartbeat.json       what the run is doing now, including whether it has ended

Files are reopened by name again and again, as network file systems need; nothing is locked or written.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardline.errors import UserError
from shardline.show.events import EVENT_WORDS
from shardline.show.run_files import parsed, read_object
from shardline.storage.atomic import plain_file
from shardline.telemetry.console import IN_ROWS, columns, format_time
from shardline.telemetry.heartbeat import FILE as HEARTBEAT
from shardline.words import Part, counted, fitted, printable

POLL_SECONDS = 0.5
SILENCE_SECONDS = 60.0  # without a heartbeat or a row, before that is reported, once
RESTART_SECONDS = 20.0  # after a failure, during which a launcher may start the run again
Row = dict[str, Any]


class Follower:
    """The new lines of a growing file. If it is replaced or truncated, it is read again, without lines already seen."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.inode = path, 0, 0
        self.torn = b""
        self.seen: set[bytes] = set()

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that were not there at the last call."""
        try:
            with open(self.path, "rb", opener=plain_file) as file:
                found = os.fstat(file.fileno())
                size, inode = found.st_size, found.st_ino
                if inode != self.inode or size < self.offset:
                    self.offset, self.torn, self.inode = 0, b"", inode
                file.seek(self.offset)
                text = self.torn + file.read()
                self.offset = file.tell()
        except OSError:  # not there yet
            return
        *whole, self.torn = text.split(b"\n")
        for line in whole:
            if line not in self.seen:
                self.seen.add(line)
                yield line

    def rows(self) -> Iterator[Row]:
        yield from filter(None, (parsed(line.decode(errors="replace")) for line in self.lines()))


class Tail:
    """How much of a run has been shown. `lines` returns what is new; `code` is set once the run has ended."""

    def __init__(self, run: Path, now: Callable[[], float] = time.time, patience: float = RESTART_SECONDS) -> None:
        self.run, self.now, self.patience = run, now, patience
        self.metrics = Follower(run / "metrics.jsonl")
        self.events = Follower(run / "log" / "telemetry-0.jsonl")
        self.restarts = Follower(run / "log" / "restarts.jsonl")
        self.last_step = 0
        self.moved = now()  # when something new was last seen, by this machine's clock
        self.beat: Row = {}
        self.silent = False
        self.failed_at: float | None = None
        self.code: int | None = None

    def lines(self) -> list[list[Part]]:
        """Return the new lines in the order of steps; the end comes only after everything before it was read."""
        beat = read_object(self.run / HEARTBEAT) or self.beat
        found = list(_in_order(list(self._events()), list(self._rows())))
        if found or beat != self.beat:
            self.moved, self.silent = self.now(), False
        self.beat = beat
        found += self._end()
        return found

    def _rows(self) -> Iterator[tuple[int, list[Part]]]:
        for row in self.metrics.rows():
            step = row.get("step")
            if not isinstance(step, int):
                continue
            of = f"{step:>{len(str(self.last_step))}}/{self.last_step}" if self.last_step else str(step)
            first = Part(f"step {of}")
            if "validation_loss" in row:
                loss = row["validation_loss"]
                yield step, [first, Part("validation loss " + ("not finite" if loss is None else f"{loss:.4f}"))]
            elif "tokens_per_second" in row:
                broken = [Part("loss not finite")] if row.get("loss") is None else []
                yield step, [first, *broken, *columns(row, IN_ROWS)]

    def _events(self) -> Iterator[tuple[int | None, list[Part]]]:
        for row in self.events.rows():
            kind, step = row.get("event"), row.get("step")
            after = step if isinstance(step, int) else None
            if kind == "start":
                self.last_step = row.get("last_step") or 0
                ranks = counted(row.get("world_size", 1), "rank")
                yield after, [Part(f"started on {row.get('host')}: {ranks}, after step {row.get('step', 0)}")]
            elif kind in ("save", "warning"):
                yield after, [Part(f"{'saved' if kind == 'save' else 'warning:'} {EVENT_WORDS[kind](row)}")]
        for row in self.restarts.rows():
            yield None, [Part(f"restart: {row.get('cause')}")]

    def _end(self) -> Iterator[list[Part]]:
        doing, step = self.beat.get("doing"), self.beat.get("step")
        if doing == "ended":
            self.code = 0
            why = f" ({self.beat['stopped_by']})" if self.beat.get("stopped_by") else ""
            yield [Part(f"ended at step {step}{why}")]
        elif doing == "failed":
            self.failed_at = self.now() if self.failed_at is None else self.failed_at
            since = min(self.failed_at, self.beat.get("time") or self.failed_at)
            if self.now() - since >= self.patience:
                self.code = 1
                yield [Part(f"failed after step {step}: {self.beat.get('error')}")]
        else:
            self.failed_at = None
            quiet = self.now() - self.moved
            if quiet > SILENCE_SECONDS and not self.silent:
                self.silent = True
                was = doing or "starting"
                yield [Part(f"no sign of the run for {format_time(quiet)}: it was {was}, and now hangs or was killed")]


def _in_order(events: list[tuple[int | None, list[Part]]], rows: list[tuple[int, list[Part]]]) -> Iterator[list[Part]]:
    """Lines of two files: an event that names a step comes after the rows up to that step."""
    rest = deque(rows)
    for step, event in events:
        while rest and step is not None and rest[0][0] <= step:
            yield rest.popleft()[1]
        yield event
    yield from (row for _, row in rest)


def tail(run: Path, rows: int, follow: bool, write: Callable[[str], object], width: int | None) -> int:
    """Show the last lines of a run and, with `follow`, new ones until it ends; returns the exit code."""
    state = Tail(run, patience=RESTART_SECONDS if follow else 0.0)
    found = state.lines()
    for line in found[max(0, len(found) - rows) :]:
        write(_text(line, width))
    while follow and state.code is None:
        time.sleep(POLL_SECONDS)
        for line in state.lines():
            write(_text(line, width))
    return state.code or 0


def _text(parts: list[Part], width: int | None) -> str:
    text = "  ".join(part.text for part in parts) if width is None or len(parts) == 1 else fitted(parts, width)
    return printable(text).replace("\n", " ")


def command(run: str, *, lines: int, follow: bool) -> int:
    """Follow the run in a folder; a pipe gets whole lines, a terminal lines that fit its width."""
    path = Path(run).expanduser()
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name the folder of a run, such as outputs/run")
    if not any((path / name).exists() for name in ("config.toml", "metrics.jsonl", "log")):
        raise UserError(f"{path} holds no run: it has no config.toml, metrics.jsonl or log")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return tail(path, lines, follow, lambda text: print(text, flush=True), width)
