"""The commands with which a user continues after a run: to train further, to generate, to export."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from shardline.config.names import LAUNCHER_VARIABLE, PROGRAM_VARIABLE
from shardline.config.schema import Checkpoint, Config
from shardline.run.options import TrainOptions
from shardline.run.stop import why_not_saved
from shardline.words import ShellCommand

# Options of a start that apply to the next one too.
KEPT = ("nproc", "nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "max_restarts")


def resume_command(folder: Path, config: Config, options: TrainOptions, *more: str) -> ShellCommand:
    """The command that continues the run in `folder`, whose config.toml has all that the first start was given."""
    given = [
        f"--{name.replace('_', '-')}={shlex.quote(str(getattr(options, name)))}"
        for name in KEPT
        if getattr(options, name) != getattr(TrainOptions, name)
        and not (options.surroundings and name not in ("nproc", "max_restarts"))  # a scheduler says how machines meet
    ]
    if config.checkpoint.load_step != -1:  # was for this start
        given.append("--checkpoint.load_step=-1")
    file, known = folder / "config.toml", os.environ
    if "TORCHELASTIC_RUN_ID" in known and LAUNCHER_VARIABLE not in known:
        nodes = f" --nnodes {known['GROUP_WORLD_SIZE']}" if known.get("GROUP_WORLD_SIZE", "1") != "1" else ""
        start = f"torchrun{nodes} --nproc-per-node {known['LOCAL_WORLD_SIZE']} -m shardline.train"
        return ShellCommand(" ".join([start, "--job.config_file", shlex.quote(str(file)), "--resume", *given, *more]))
    return _command("train", file, "--resume", *given, *more)


def after_end(folder: Path, config: Config, options: TrainOptions, total_steps: int) -> list[tuple[str, str]]:
    """Label and command of what a user may do with a finished run."""
    section = config.checkpoint
    if why_not_saved(config) is not None:
        return []
    saved = folder if section.folder == Checkpoint().folder else folder / section.folder
    rows: list[tuple[str, str]] = [
        ("generate", _command("generate", saved, '--prompt "Once upon a time"')),
        ("export", _command("export", saved, "FOLDER")),
    ]
    if not (section.last_save_model_only or section.last_save_in_hf or config.validation.patience):
        epochs = config.training.epochs
        longer = f"--training.steps={2 * total_steps}" if epochs is None else f"--training.epochs={2 * epochs:g}"
        rows.append(("train on", resume_command(folder, config, options, longer)))
    return rows


def _command(name: str, path: Path, *more: str) -> ShellCommand:
    return ShellCommand(" ".join([os.environ.get(PROGRAM_VARIABLE, "shardline"), name, shlex.quote(str(path)), *more]))
