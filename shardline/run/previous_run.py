"""The run that a folder already holds: which files are its own, and how --overwrite sets them aside.

run's files --set_aside--> replaced-DATE-TIME/, itself a run's folder; nothing is deleted
            <--put_back--- where the new run does not take place
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.errors import UserError

if TYPE_CHECKING:
    from shardline.config.schema import Config

# The first line of a run's config.toml tells it from a file of the same name that is the user's.
CONFIG_HEADER = "# The resolved config of this run, written by Shardline."
ROOT_FILES = ("metrics.jsonl", "metrics.before-resume.jsonl")
# (section, key of the folder's name, default name, what a run writes into it)
FOLDERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("checkpoint", "folder", "checkpoint", ("step-*", "mirror.json")),
    ("profiling", "save_traces_folder", "profile_traces", ("iteration_*",)),
    ("profiling", "save_memory_snapshot_folder", "memory_snapshot", ("iteration_*",)),
    ("metrics", "save_tb_folder", "tb", ("events.out.tfevents.*", "rank_*")),
    ("comm", "save_traces_folder", "comm_traces", ("rank_*",)),
    ("", "", "log", ("rank-*.log", "ranks.json", "restarts.jsonl", "wandb", "wandb-*.txt")),
)


def own_files(config: Config, path: Path) -> Iterator[Path]:
    """What a run wrote under `path`, also into the folders that the previous run's config named; nothing else."""
    if is_our_config(path / "config.toml"):
        yield path / "config.toml"
    patterns: set[tuple[Path, tuple[str, ...]]] = {(path, ROOT_FILES)}
    previous = _previous_folders(path)
    for section, key, default, names in FOLDERS:
        used = {default, previous.get(f"{section}.{key}", default)}
        if section:
            used.add(getattr(getattr(config, section), key))
        patterns |= {(path / name, names) for name in used if is_inside(path / name, path)}
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
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip("\n") == CONFIG_HEADER
    except OSError:
        return False


def previous_config(path: Path) -> dict[str, Any]:
    """The config of the run that is in the folder; empty where there is none."""
    if not is_our_config(path / "config.toml"):
        return {}
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _previous_folders(path: Path) -> dict[str, str]:
    """`section.key` -> the folder name that the previous run's config gave it."""
    config = previous_config(path)
    names = {f"{section}.{key}": config.get(section, {}).get(key) for section, key, _, _ in FOLDERS if section}
    return {key: name for key, name in names.items() if isinstance(name, str)}


@dataclass
class SetAside:
    """A run that has made room for another one in the same folder."""

    folder: Path
    moved: list[tuple[Path, Path]] = field(default_factory=list)  # (where a file was, where it is)

    def put_back(self) -> None:
        """Give the run its folder back; what a start that failed has written gives way to it."""
        for before, now in reversed(self.moved):
            before.parent.mkdir(parents=True, exist_ok=True)
            now.replace(before)
        for place, _, _ in os.walk(self.folder, topdown=False):
            os.rmdir(place)


def set_aside(path: Path, files: Sequence[Path]) -> SetAside:
    """Move a run's files into a new folder under `path`; what else is there stays."""
    aside = SetAside(new_folder(path, "replaced"))
    for file in files:
        place = aside.folder / os.path.relpath(file.parent.resolve(), path.resolve()) / file.name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            file.rename(place)
        except OSError as error:
            aside.put_back()
            raise UserError(f"--overwrite: {file} cannot be moved: {error.strerror}; move it yourself") from error
        aside.moved.append((file, place))
    for parent in {file.parent for file in files} - {path}:
        with contextlib.suppress(OSError):  # something of the user's is left in it
            parent.rmdir()
    return aside


def new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name-DATE-TIME`, or the same with -2, -3, ...: mkdir decides who of two starters gets a name."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 10_000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise UserError(f"{parent} holds too many folders named {stem}: give --job.dump_folder")
