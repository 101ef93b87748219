"""Reads the folder of a run, finished or under way: metrics, the log of each rank, restarts, checkpoints."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.config.layout import Layout
from shardline.config.write import toml_value
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.storage.atomic import read_plain

Row = dict[str, Any]


@dataclass(frozen=True)
class RankRows:
    """What one rank wrote. For a step that was trained again, only the last time is kept."""

    starts: list[Row]
    steps: dict[int, Row]
    details: dict[int, Row]
    events: list[Row]  # everything else, ordered by time


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder; what is missing is empty."""

    path: Path
    config: dict[str, str] = field(default_factory=dict)  # key -> value, as TOML writes it
    rows: list[Row] = field(default_factory=list)  # one per logged step
    validation: list[Row] = field(default_factory=list)
    before_resume: list[Row] = field(default_factory=list)  # steps that were trained again later
    ranks: dict[int, RankRows] = field(default_factory=dict)
    restarts: list[Row] = field(default_factory=list)
    checkpoints: list[Row] = field(default_factory=list)  # those that exist now: step, kind, bytes, time
    engaged: Row = field(default_factory=dict)  # what the first step did
    read_at: float = 0.0

    @property
    def first_start(self) -> Row:
        """The first start of rank 0; empty if the run has no such file."""
        return self._starts[0] if self._starts else {}

    @property
    def last_start(self) -> Row:
        return self._starts[-1] if self._starts else {}

    @property
    def layout(self) -> Layout | None:
        """The layout of the last start; None if it is unknown."""
        known = self.last_start.get("layout")
        return None if known is None else Layout(**known)

    @property
    def _starts(self) -> list[Row]:
        return self.ranks[0].starts if 0 in self.ranks else []


def read_run(path: Path, now: float) -> RunFiles:
    """Read everything about a run; raises UserError if the folder holds none."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name the folder of a run, such as outputs/run")
    if not (path / "metrics.jsonl").exists() and not (path / "config.toml").exists():
        raise UserError(f"{path} holds no run: it has neither metrics.jsonl nor config.toml")
    rows = list(json_lines(path / "metrics.jsonl"))
    config = read_config(path / "config.toml")
    folder = json.loads(config.get("checkpoint.folder", '"checkpoint"'))
    return RunFiles(
        path,
        config,
        in_order([row for row in rows if "loss" in row]),
        in_order([row for row in rows if "validation_loss" in row]),
        [row for row in json_lines(path / "metrics.before-resume.jsonl") if "loss" in row],
        dict(read_ranks(path / "log")),
        list(json_lines(path / "log" / "restarts.jsonl")),
        sorted(read_checkpoints(path / folder), key=lambda row: row["step"]),
        read_object(path / "engaged.json"),
        now,
    )


def json_lines(path: Path) -> Iterator[Row]:
    """The JSON objects in a file; other lines, such as a crash may leave at the end, are skipped."""
    if path.exists():
        yield from filter(None, map(parsed, read_plain(path).splitlines()))


def read_object(path: Path) -> Row:
    return parsed(read_plain(path)) if path.exists() else {}


def parsed(text: str) -> Row:
    """The JSON object in a text, or an empty one. NaN and infinities become None: JSON on a page has neither."""
    try:
        row = parse_json(text)
    except ValueError:
        return {}
    return _finite(row) if isinstance(row, dict) else {}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows ordered by step, each step once: the last row of a step counts."""
    found = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [found[step] for step in sorted(found)]


# ---- what ranks wrote ------------------------------------------------------------------------------------------------


def read_ranks(folder: Path) -> Iterator[tuple[int, RankRows]]:
    paths = {path.stem.removeprefix("telemetry-"): path for path in folder.glob("telemetry-*.jsonl")}
    for rank in sorted(int(name) for name in paths if name.isdecimal()):
        yield rank, sorted_rows(json_lines(paths[str(rank)]))


def sorted_rows(rows: Iterable[Row]) -> RankRows:
    """Rows by kind. A start after some step drops what was written for later steps: they are trained again."""
    found = RankRows([], {}, {}, [])
    for row in rows:
        event, step = row.get("event"), row.get("step", 0)
        if event == "start":
            found.starts.append(row)
            for kept in (found.steps, found.details):
                for later in [number for number in kept if number > step]:
                    del kept[later]
        elif event in ("step", "detail"):
            (found.steps if event == "step" else found.details)[step] = row
        else:
            found.events.append(row)
    return found


# ---- checkpoints and config ------------------------------------------------------------------------------------------


def read_checkpoints(folder: Path) -> Iterator[Row]:
    """The existing checkpoints, from their manifests; their bytes are not verified here."""
    for path in folder.glob("step-*/manifest.json"):
        try:
            manifest = parse_json(read_plain(path))
            size = sum(int(file["size"]) for file in manifest["files"].values())
            yield {"step": manifest["step"], "kind": manifest["kind"], "size": size, "time": path.stat().st_mtime}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # `shardline checkpoint verify` says what is wrong with it


def read_config(path: Path) -> dict[str, str]:
    """Every key of a run's config.toml as written: the version that wrote it may have had other keys."""
    try:
        return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8")), ""))
    except (OSError, ValueError):
        return {}


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", toml_value(value)
