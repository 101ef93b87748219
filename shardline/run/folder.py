"""The folder of a run: who may write into it, and whether the run in it is resumed, replaced or refused."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.config.schema import Checkpoint
from shardline.errors import UserError
from shardline.json_text import parse_json
from shardline.models.flavors import model_label
from shardline.run.attempt import is_partial_only, this_attempt
from shardline.run.lock import Lock, take
from shardline.run.previous_run import (
    CONFIG_HEADER,
    PENDING,
    is_inside,
    is_our_config,
    is_result,
    new_folder,
    own_files,
    pending,
    previous_config,
    put_back,
    set_aside,
)
from shardline.storage.atomic import read_plain, write_atomically
from shardline.storage.progress import say

if TYPE_CHECKING:
    from shardline.config.schema import Config

log = logging.getLogger("shardline")

LOCK_PATIENCE = 60.0  # seconds; a file server may need them to see that the machine that held it is gone


@dataclass
class RunFolder:
    """The files of a run. Rank 0 opens it with `open_run_folder`; other ranks make a `RunFolder` of its path."""

    path: Path
    checkpoint_name: str = "checkpoint"
    resume_step: int | None = None  # the checkpoint this run continues from
    lock: Lock | None = None
    again: bool = field(default_factory=lambda: this_attempt().begun)  # this run has written here before
    replaced: Path | None = None  # where the previous run is, which gets its folder back unless this one begins
    settled: bool = False

    def __post_init__(self) -> None:
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.moved_metrics_path = self.path / "metrics.before-resume.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.checkpoint_folder = self.path / self.checkpoint_name

    @property
    def resume(self) -> bool:
        return self.resume_step is not None

    def log_path(self, rank: int) -> Path:
        return self.path / "log" / f"rank-{rank}.log"

    def write_config(self, text: str) -> None:
        """Write config.toml; `text` is the resolved TOML."""
        write_atomically(self.config_path, f"{CONFIG_HEADER}\n{text}")

    def write_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Write log/ranks.json: rank, host and pid of every worker."""
        write_atomically(self.path / "log" / "ranks.json", json.dumps(ranks, indent=1) + "\n")

    def host_words(self, rank: int) -> str:
        """` on node1`, by log/ranks.json; nothing where it does not say."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):
            rows = parse_json(read_plain(self.path / "log" / "ranks.json"))
            return next((f" on {row['host']}" for row in rows if row["rank"] == rank), "")
        return ""

    def begin(self) -> None:
        """Everything is ready for steps: this job, restarts included, no longer puts back what it replaces."""
        if self.replaced is not None:
            log.info("--overwrite: the previous run is now in %s", self.replaced, extra={"file_only": True})
            self.replaced = None

    def settle(self) -> None:
        """A step or a save is done: a run that this one replaces stays aside. Only rank 0's call has an effect."""
        if self.lock is not None and not self.settled:
            for aside in pending(self.path):
                (aside / PENDING).unlink(missing_ok=True)
            self.replaced, self.settled = None, True

    def close(self) -> None:
        """Release the folder; a run that was to be replaced and was not is moved back."""
        if self.replaced is not None:
            put_back(self.replaced)
            self.replaced = None
        if self.lock is not None:
            self.lock.release()


def open_run_folder(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    has_good_checkpoint: Callable[[Path], int | None],
) -> RunFolder:
    """Take the run's folder for this process alone, and decide between a new run, a resumed one and a refusal.

    `has_good_checkpoint(run folder)` returns the step to resume from, None without one, and raises a UserError for a
    checkpoint of another model.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other: use only one of them")
    folder = RunFolder(_make_folder(config, resume), config.checkpoint.folder)
    _refuse_planted_links(folder.path)
    attempt = this_attempt()
    folder.lock = _lock(folder.path, LOCK_PATIENCE if attempt.folder is not None else 0.0)
    try:
        if attempt.begun:
            _go_on(config, folder, has_good_checkpoint)
        else:
            _decide(config, folder, resume, overwrite, has_good_checkpoint)
        folder.write_ranks([{"rank": 0, "host": socket.gethostname(), "pid": os.getpid()}])
    except BaseException:
        folder.close()
        raise
    return folder


def check_folder(config: Config, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that `open_run_folder` would refuse whatever its checkpoints are, without taking it."""
    given = config.job.dump_folder
    _check_resume(config, resume)
    if overwrite or given is None or config.checkpoint.enable:
        return
    path = Path(given).expanduser()
    for found in filter(is_result, own_files(config, path)):
        raise _holds_a_run(config, path, found)


def _check_resume(config: Config, resume: bool) -> None:
    """Refuse --resume where there is nothing to resume, or nothing would be read."""
    given = config.job.dump_folder
    if resume and given is None:
        raise UserError("--resume needs the folder of the run to continue: add --job.dump_folder FOLDER")
    if resume and config.checkpoint.mirror is None and not Path(str(given)).expanduser().exists():
        raise UserError(f"--resume: there is no folder {Path(str(given)).expanduser()}")  # a mirror would fill it
    if resume and not config.checkpoint.enable:
        raise UserError("--resume needs checkpoints: add --checkpoint.enable")


def _holds_a_run(config: Config, path: Path, found: Path) -> UserError:
    has_no = "it has no good checkpoint to resume from"
    why = has_no if config.checkpoint.enable else "checkpoint.enable is false, so it cannot be resumed"
    return UserError(
        f"{path} already holds a run ({found.name}) and {why}:"
        " --overwrite moves that run aside, --job.dump_folder names another folder"
    )


def _decide(
    config: Config,
    folder: RunFolder,
    resume: bool,
    overwrite: bool,
    has_good_checkpoint: Callable[[Path], int | None],
) -> None:
    path = folder.path
    for aside in pending(path):
        put_back(aside)
        say(f"the run in {aside} is back in {path}: the one that was to replace it ended before its first step")
    if folder.config_path.exists() and not is_our_config(folder.config_path):
        raise UserError(
            f"{folder.config_path} was not written by a run and would be lost: use another --job.dump_folder"
        )
    outside = _checkpoints_outside(config, folder)
    found = [*filter(is_result, own_files(config, path)), *outside]
    if overwrite and outside:
        raise UserError(
            f"checkpoint.folder = {config.checkpoint.folder!r} lies outside the run folder and holds {outside[0].name}:"
            " --overwrite moves nothing there; move it yourself or name another folder"
        )
    if overwrite:
        folder.replaced = set_aside(path, list(own_files(config, path))) if found else None
        if folder.replaced is not None:  # at once: only the next start can move it back if this one is killed
            say(f"--overwrite: the previous run is now in {folder.replaced}")
    elif found or resume:
        folder.resume_step = has_good_checkpoint(path) if config.checkpoint.enable else None
        if folder.resume_step is None and resume:
            mirrored = f" and none in {config.checkpoint.mirror}" if config.checkpoint.mirror else ""
            raise UserError(f"--resume: there is no good checkpoint in {folder.checkpoint_folder}{mirrored}")
        if folder.resume_step is not None:
            log.info("resuming from step %d of the run in %s", folder.resume_step, path)
        elif _ended_before_a_save(config, folder):
            folder.again = True
            log.info("the run in %s ended before its first save and begins at step 0 again", path)
        else:
            raise _holds_a_run(config, path, found[0])


def _go_on(config: Config, folder: RunFolder, has_good_checkpoint: Callable[[Path], int | None]) -> None:
    """Continue an earlier attempt of this job: from its last save, or from step 0 where it never saved."""
    saved = config.checkpoint.enable and not is_partial_only(folder.checkpoint_folder)
    folder.resume_step = has_good_checkpoint(folder.path) if saved else None
    if folder.resume_step is not None:
        log.info("restarted: resuming from step %d of the run in %s", folder.resume_step, folder.path)
    elif saved:
        raise UserError(f"{folder.checkpoint_folder} holds no checkpoint that the run could be restarted from")
    else:
        log.info("restarted: nothing was saved yet, %s begins at step 0 again", folder.path)


def _ended_before_a_save(config: Config, folder: RunFolder) -> bool:
    """Whether the run that is there would have saved, was cut off before it could, and has nothing to lose.

    If it came further, its checkpoints have disappeared: that is for a person to look at.
    """
    previous = previous_config(folder.path)
    section = previous.get("checkpoint", {})
    if not (config.checkpoint.enable and section.get("enable")) or not is_partial_only(folder.checkpoint_folder):
        return False
    first = section.get("interval", 1)
    ratio, steps = section.get("interval_ratio"), previous.get("training", {}).get("steps")
    if ratio is not None and steps is not None:
        first = Checkpoint(interval_ratio=ratio).every(steps)
    partial = any(folder.checkpoint_folder.glob("step-*"))  # a save in the background was cut off
    logged = [_logged(path) for path in (folder.metrics_path, folder.moved_metrics_path)]
    step, seconds = max(one[0] for one in logged), max(one[1] for one in logged)
    if section.get("enable_first_step_checkpoint"):
        return bool(step < (2 if partial else 1))
    came_to = seconds if section.get("interval_type") == "seconds" else step
    return bool(came_to < first * (2 if partial else 1))


def _logged(metrics: Path) -> tuple[int, float]:
    """The last step of a run's rows, and how long its steps took."""
    last, seconds = 0, 0.0
    for line in read_plain(metrics).splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # the last line may be torn
            row = parse_json(line)
            step = int(row.get("step", 0))
            seconds += max(0, step - last) * float(row.get("step_seconds", 0))
            last = max(last, step)
    return last, seconds


def _checkpoints_outside(config: Config, folder: RunFolder) -> list[Path]:
    if not config.checkpoint.enable or is_inside(folder.checkpoint_folder, folder.path):
        return []
    return sorted(folder.checkpoint_folder.glob("step-*"))


def _run_name(config: Config) -> str:
    file = config.job.config_file
    name = Path(file).stem if file else model_label(config.model).replace(" ", "-")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "run"


def _make_folder(config: Config, resume: bool) -> Path:
    given = config.job.dump_folder
    _check_resume(config, resume)
    path = Path("outputs" if given is None else given).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        return new_folder(path, _run_name(config)) if given is None else path
    except OSError as error:
        raise _unusable(path, error) from error


def _refuse_planted_links(path: Path) -> None:
    """Refuse links to elsewhere that another user has put into the folder; the user's own may lead to a larger disk."""
    for child in os.scandir(path):
        if child.is_symlink() and child.stat(follow_symlinks=False).st_uid not in (os.geteuid(), 0):
            raise UserError(
                f"{child.path} is a symbolic link of another user, through which a run does not write: remove it, or"
                " use another --job.dump_folder"
            )


def _unusable(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "it, or a part of the path, is a file"
    else:
        reason = error.strerror or str(error)
    return UserError(f"job.dump_folder: cannot use {path} as the run folder: {reason}; use a folder you can write to")


def _lock(path: Path, patience: float) -> Lock:
    """Hold the folder for this run alone, or raise an error that names who does.

    `patience` is for a rank of the earlier attempt that was killed and may not be gone yet.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return take(path / "log" / "lock")
        except OSError as error:
            problem = _unusable(path, error)
        except UserError as error:
            problem = error
        if time.monotonic() > deadline:
            raise problem
        time.sleep(0.2)
