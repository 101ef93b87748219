"""The folder of a run: who may write into it, what of it is ours, and whether it is resumed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.errors import UserError
from shardline.run import overwrite as replacing
from shardline.run.attempt import this_attempt
from shardline.run.lock import Lock, take

if TYPE_CHECKING:
    from shardline.config.schema import Config

# The first line of a run's config.toml tells it from a file of the same name that is the user's.
CONFIG_HEADER = "# The resolved config of this run, written by Shardline."

LOCK_PATIENCE = 60.0  # seconds; a file server may need them to see that the machine that held it is gone
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


@dataclass
class RunFolder:
    """Where a run writes. Rank 0 opens it with `open_run_folder`; other ranks make a `RunFolder` of its path."""

    path: Path
    checkpoint_name: str = "checkpoint"
    resume_step: int | None = None  # the checkpoint this run continues from
    notes: list[str] = field(default_factory=list)  # for the log, which opens after the folder
    lock: Lock | None = None
    again: bool = field(default_factory=lambda: this_attempt().begun)  # this run has written here before
    replaces: bool = False  # a run that is set aside until this one is sure to take place

    @property
    def resume(self) -> bool:
        return self.resume_step is not None

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def moved_metrics_path(self) -> Path:
        return self.path / "metrics.before-resume.jsonl"

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / self.checkpoint_name

    def log_path(self, rank: int) -> Path:
        return self.path / "log" / f"rank-{rank}.log"

    def write_config(self, text: str) -> None:
        """Write config.toml; `text` is the resolved TOML."""
        write_atomically(self.config_path, f"{CONFIG_HEADER}\n{text}")

    def write_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Write log/ranks.json: rank, host and pid of every worker."""
        write_atomically(self.path / "log" / "ranks.json", json.dumps(ranks, indent=1) + "\n")

    def settle(self) -> list[str]:
        """This run takes place: one that it replaces goes. Lines for the log."""
        if not self.replaces:
            return []
        self.replaces = False
        replacing.remove(self.path)
        return [f"--overwrite: removed the previous run in {self.path}"]

    def close(self) -> None:
        """Let another run have the folder; a run that was to be replaced and was not is there again."""
        if self.replaces:
            self.replaces = False
            replacing.put_back(self.path)
        if self.lock is not None:
            self.lock.release()


def this_rank(rank: int) -> dict[str, Any]:
    return {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}


def open_run_folder(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    has_good_checkpoint: Callable[[Path], int | None],
) -> RunFolder:
    """Take the run's folder for this process alone, and decide between a new run, a resumed one and a refusal.

    `has_good_checkpoint(run folder)` gives the step to resume from, None without one, and raises a UserError for a
    checkpoint of another model.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other: give one of them")
    if config.job.dump_folder is None:
        if resume:
            raise UserError("--resume needs the folder of the run to continue: give --job.dump_folder FOLDER")
        path = _new_folder(Path("outputs"), _run_name(config))
    else:
        # a folder that is not there yet may be filled from the mirror
        path = _given_folder(Path(config.job.dump_folder).expanduser(), resume and config.checkpoint.mirror is None)
    folder = RunFolder(path, config.checkpoint.folder)
    attempt = this_attempt()
    folder.lock = _patiently(functools.partial(_lock, folder), LOCK_PATIENCE if attempt.folder is not None else 0.0)
    try:
        replacing.tidy_up(path, begun=attempt.begun)
        if attempt.begun:
            _go_on(config, folder, has_good_checkpoint)
        else:
            _decide(config, folder, resume, overwrite, has_good_checkpoint)
        folder.write_ranks([this_rank(int(os.environ.get("RANK", "0")))])
    except BaseException:
        folder.close()
        raise
    return folder


def _decide(
    config: Config,
    folder: RunFolder,
    resume: bool,
    overwrite: bool,
    has_good_checkpoint: Callable[[Path], int | None],
) -> None:
    path = folder.path
    if folder.config_path.exists() and not _is_our_config(folder.config_path):
        raise UserError(
            f"{folder.config_path} was not written by a run and would be lost: give another --job.dump_folder"
        )
    found = [*filter(_is_result, _own_files(config, path)), *_checkpoints_outside(config, folder)]
    if resume and not config.checkpoint.enable:
        raise UserError("--resume needs checkpoints: add --checkpoint.enable")
    if overwrite:
        _overwrite(config, folder)
    elif found or resume:
        folder.resume_step = has_good_checkpoint(path) if config.checkpoint.enable else None
        if folder.resume_step is None and resume:
            mirrored = f" and none in {config.checkpoint.mirror}" if config.checkpoint.mirror else ""
            raise UserError(f"--resume: there is no good checkpoint in {folder.checkpoint_folder}{mirrored}")
        if folder.resume_step is not None:
            folder.notes.append(f"resuming from step {folder.resume_step} of the run in {path}")
        elif _ended_before_a_save(config, folder):
            folder.again = True
            folder.notes.append(f"the run in {path} ended before its first save and begins at step 0 again")
        else:
            raise UserError(_refusal(config, path, found[0]))


def _patiently(attempt: Callable[[], Lock], seconds: float) -> Lock:
    """A restarted job may have to wait for a rank of its earlier attempt, which was killed and is not gone yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _go_on(config: Config, folder: RunFolder, has_good_checkpoint: Callable[[Path], int | None]) -> None:
    """A later attempt of the job that this folder belongs to: from its last save, or anew where it never saved."""
    saved = config.checkpoint.enable and any(folder.checkpoint_folder.glob("step-*"))
    folder.resume_step = has_good_checkpoint(folder.path) if saved else None
    if folder.resume_step is not None:
        folder.notes.append(f"restarted: resuming from step {folder.resume_step} of the run in {folder.path}")
    elif saved and not _is_partial_only(folder.checkpoint_folder):
        raise UserError(f"{folder.checkpoint_folder} holds no checkpoint that the run could be restarted from")
    else:
        folder.notes.append(f"restarted: nothing was saved yet, {folder.path} begins at step 0 again")


def _ended_before_a_save(config: Config, folder: RunFolder) -> bool:
    """Whether the run that is there would have saved, was cut off before it could, and has nothing to lose.

    Where it came further, its checkpoints were there and are gone: that is for somebody to look at.
    """
    section = _previous_config(folder.path).get("checkpoint", {})
    if not (config.checkpoint.enable and section.get("enable")) or not _is_partial_only(folder.checkpoint_folder):
        return False
    first = 1 if section.get("enable_first_step_checkpoint") else section.get("interval", 1)
    partial = any(folder.checkpoint_folder.glob("step-*"))  # a save that goes on behind was cut off
    came_to = max(map(_last_logged_step, (folder.metrics_path, folder.moved_metrics_path)))
    return bool(came_to < first * (2 if partial else 1))


def _last_logged_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    steps = [0]
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # the last line may be torn
            steps.append(int(json.loads(line).get("step", 0)))
    return max(steps)


def _is_partial_only(checkpoints: Path) -> bool:
    """Whether a crash in the first save is all that was left."""
    return all(path.name.endswith(".partial") for path in checkpoints.glob("step-*"))


def _is_result(file: Path) -> bool:
    """Whether a file shows that a run got somewhere; a start that failed leaves only its config and its log."""
    if file.name == "metrics.jsonl":
        return file.stat().st_size > 0
    return file.name != "config.toml" and file.parent.name != "log"


def _refusal(config: Config, path: Path, example: Path) -> str:
    if config.checkpoint.enable:
        why = "it has no good checkpoint to resume from"
    else:
        why = "checkpoint.enable is false, so it cannot be resumed"
    return (
        f"{path} already holds a run ({example.name}) and {why}:"
        " --overwrite removes that run, --job.dump_folder names another folder"
    )


def _overwrite(config: Config, folder: RunFolder) -> None:
    outside = _checkpoints_outside(config, folder)
    if outside:
        raise UserError(
            f"checkpoint.folder = {config.checkpoint.folder!r} lies outside the run folder and holds {outside[0].name}:"
            " --overwrite removes nothing there; remove it yourself or name another folder"
        )
    files = list(_own_files(config, folder.path))
    replacing.set_aside(folder.path, files)
    folder.replaces = bool(files)


def _own_files(config: Config, path: Path) -> Iterator[Path]:
    """What a run wrote under `path`, also into the folders that the previous run's config named; nothing else."""
    if _is_our_config(path / "config.toml"):
        yield path / "config.toml"
    patterns: set[tuple[Path, tuple[str, ...]]] = {(path, ROOT_FILES)}
    previous = _previous_folders(path)
    for section, key, default, names in FOLDERS:
        used = {default, previous.get(f"{section}.{key}", default)}
        if section:
            used.add(getattr(getattr(config, section), key))
        patterns |= {(path / name, names) for name in used if _inside(path / name, path)}
    for folder, names in sorted(patterns):
        for name in names:
            yield from sorted(folder.glob(name))


def _checkpoints_outside(config: Config, folder: RunFolder) -> list[Path]:
    if not config.checkpoint.enable or _inside(folder.checkpoint_folder, folder.path):
        return []
    return sorted(folder.checkpoint_folder.glob("step-*"))


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _is_our_config(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip("\n") == CONFIG_HEADER
    except OSError:
        return False


def _previous_config(path: Path) -> dict[str, Any]:
    """Of the run that is there; empty where there is none."""
    if not _is_our_config(path / "config.toml"):
        return {}
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _previous_folders(path: Path) -> dict[str, str]:
    """`section.key` -> the folder name that the previous run's config gave it."""
    config = _previous_config(path)
    names = {f"{section}.{key}": config.get(section, {}).get(key) for section, key, _, _ in FOLDERS if section}
    return {key: name for key, name in names.items() if isinstance(name, str)}


def _run_name(config: Config) -> str:
    file = config.job.config_file
    name = Path(file).stem if file else f"{config.model.name}-{config.model.flavor}"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "run"


def _new_folder(parent: Path, name: str) -> Path:
    """`parent/name-DATE-TIME`, or the same with -2, -3, ...: mkdir decides who of two starters gets a name."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = parent / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise _unusable(parent, error) from error
    raise UserError(f"{parent} holds too many folders named {stem}: give --job.dump_folder")


def _given_folder(path: Path, resume: bool) -> Path:
    if resume and not path.exists():
        raise UserError(f"--resume: there is no folder {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def _unusable(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "it, or a part of the path, is a file"
    else:
        reason = error.strerror or str(error)
    return UserError(f"job.dump_folder: cannot use {path} as the run folder: {reason}; give a folder you can write to")


def _lock(folder: RunFolder) -> Lock:
    """Hold the folder for this run alone, or raise naming who does."""
    try:
        lock, notes = take(folder.path / "log" / "lock")
    except OSError as error:
        raise _unusable(folder.path, error) from error
    folder.notes += notes
    return lock


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` so that a reader or a crash sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
