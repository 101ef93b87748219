"""The run that a folder already holds: which files are its own, and how --overwrite sets them aside.

run's files --set_aside--> replaced-DATE-TIME/, itself a run's folder; nothing is deleted
            <--put_back--- if the new run does not begin

Until the new run has made a step, `.pending` in that folder names what was moved. A start that fails puts it back;
after one that was killed, the next start does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.config.schema import leaves
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.storage.atomic import plain_file, read_plain, write_atomically

if TYPE_CHECKING:
    from shardline.config.schema import Config

# The first line of a run's config.toml tells it from a file of the same name that is the user's.
CONFIG_HEADER = "# The resolved config of this run, written by Shardline."
PENDING = ".pending"
PLACES = ("job.config_file", "job.dump_folder", "checkpoint.load_step")  # where a run is, and where it continues
ROOT_FILES = ("metrics.jsonl", "metrics.before-resume.jsonl", "samples*.jsonl", "report.html")
# (section, key of the folder's name, default name, what a run writes into it)
FOLDERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("checkpoint", "folder", "checkpoint", ("step-*", "mirror.json")),
    ("profiling", "save_traces_folder", "profile_traces", ("iteration_*",)),
    ("profiling", "save_memory_snapshot_folder", "memory_snapshot", ("iteration_*",)),
    ("metrics", "save_tb_folder", "tb", ("events.out.tfevents.*", "rank_*")),
    ("comm", "save_traces_folder", "comm_traces", ("rank_*",)),
    ("", "", "log", ("rank-*.log", "ranks.json", "restarts.jsonl", "telemetry-*.jsonl", "heartbeat.json")),
    ("", "", "log", ("wandb", "wandb-*.txt")),
)


def own_files(config: Config, path: Path) -> Iterator[Path]:
    """What runs wrote under `path`, also in folders that the previous run's config named; nothing else."""
    if is_our_config(path / "config.toml"):
        yield path / "config.toml"
    patterns: set[tuple[Path, tuple[str, ...]]] = {(path, ROOT_FILES)}
    previous = previous_config(path)
    for section, key, default, names in FOLDERS:
        used = {default}
        if section:
            table = previous.get(section)
            named = table.get(key, default) if isinstance(table, dict) else default
            used |= {getattr(getattr(config, section), key), str(named)}
        patterns |= {(path / name, names) for name in used if "\0" not in name and is_inside(path / name, path)}
    for folder, names in sorted(patterns):
        for name in names:
            yield from sorted(folder.glob(name))


def is_result(file: Path) -> bool:
    """Whether a file shows that a run got somewhere; a start that failed leaves only its config and its log."""
    if file.name == "metrics.jsonl":
        return file.stat().st_size > 0
    return file.name != "config.toml" and file.parent.name != "log"


def is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def is_our_config(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=plain_file) as file:
            return file.readline().rstrip("\n") == CONFIG_HEADER
    except OSError:
        return False


def previous_config(path: Path) -> dict[str, Any]:
    """The config of the run that is in the folder; empty where there is none."""
    if not is_our_config(path / "config.toml"):
        return {}
    try:
        return tomllib.loads(read_plain(path / "config.toml"))
    except (OSError, ValueError, RecursionError):  # not TOML, or nested deeply
        return {}


def changed_keys(path: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, value then, value now) where the config of the run in the folder differs, without keys of places.

    A key that its file leaves out has its default.
    """
    previous = previous_config(path)
    found = []
    for key, field in leaves().items() if previous else ():
        before: Any = previous
        for part in key.split("."):
            before = before.get(part) if isinstance(before, dict) else None
        before, now = field.default if before is None else before, config.value(key)
        if before != now and key not in PLACES:
            found.append((key, before, now))
    return found


def set_aside(path: Path, files: Sequence[Path]) -> Path:
    """Move a run's files into a new folder under `path`, and return that; all else stays."""
    aside, root = new_folder(path, "replaced"), path.resolve()
    names = [os.path.relpath(file.parent.resolve() / file.name, root) for file in files]
    write_atomically(aside / PENDING, json.dumps(names))
    for file, name in zip(files, names, strict=True):
        try:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            file.rename(aside / name)
        except OSError as error:
            put_back(aside)
            raise UserError(f"--overwrite: {file} cannot be moved: {error.strerror}; move it yourself") from error
    for parent in {file.parent for file in files} - {path}:
        with contextlib.suppress(OSError):  # something of the user's is left in it
            parent.rmdir()
    return aside


def pending(path: Path) -> list[Path]:
    """Where runs were set aside for one that has made no step yet."""
    return [mark.parent for mark in sorted(path.glob(f"replaced-*/{PENDING}"))]


def _names(file: Path) -> list[str]:
    """The list of names that a file holds, none of which leads out of its folder."""
    names = parse_json(read_plain(file))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file.name} is no list of names")
    if outside := [name for name in names if {"", ".."} & set(name.split("/"))]:
        raise ValueError(f"{file.name} names {outside[0]!r}")
    return names


def put_back(aside: Path) -> None:
    """Give a run its folder back, in place of what a start that made no step has written."""
    try:
        for name in _names(aside / PENDING):
            now, before = aside / name, aside.parent / name
            if os.path.lexists(now):  # not yet moved back, or never moved, by a start that was killed
                before.parent.mkdir(parents=True, exist_ok=True)
                if before.is_dir() and not before.is_symlink():
                    shutil.rmtree(before)
                now.replace(before)
        (aside / PENDING).unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the run in {aside} cannot be moved back: {reason}; move it yourself") from error
    for place, _, _ in os.walk(aside, topdown=False):
        with contextlib.suppress(OSError):  # something of the user's is in it
            os.rmdir(place)


def new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name-DATE-TIME`, or the same with -2, -3, ...: mkdir decides which of two starters gets a name."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 10_000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise UserError(f"{parent} holds too many folders named {stem}: add --job.dump_folder")
