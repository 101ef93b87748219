"""When a run saves, what it saves, and what it starts from."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.hf import read_hf, write_hf
from shardline.models.state import load_logical_state
from shardline.precision.mixed import DTYPES
from shardline.training import checkpoint as files
from shardline.training.checkpoint import Saved

log = logging.getLogger("shardline")
LOADABLE = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


@dataclass
class Progress:
    """How far a run is: all that a resumed run needs beside weights and optimizer state."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class DataIdentity:
    """What the samples of a run depend on; a resumed run must not change it unnoticed."""

    seed: int
    dataset: str
    seq_len: int
    global_batch_size: int
    tokenizer: str


def resumable_step(folder: Path, config: Config, model_arch: Any) -> int | None:
    """The step a run in `folder` would continue from, or None; a checkpoint of another model is an error."""
    saved = _candidates(folder / config.checkpoint.folder, config.checkpoint.load_step)
    if not saved:
        return None
    different = files.same_model(saved[0].architecture, model_arch)
    if different:
        changes = ", ".join(f"{n}: {getattr(saved[0].architecture, n)} -> {getattr(model_arch, n)}" for n in different)
        raise UserError(f"{saved[0].path} is of another model ({changes}); use another job.dump_folder, or --overwrite")
    return saved[0].step


def _candidates(folder: Path, step: int) -> list[Saved]:
    """Checkpoints a run may start from, best first."""
    return [saved for saved in reversed(files.list_checkpoints(folder)) if step in (-1, saved.step)]


class Saver:
    def __init__(self, config: Config, folder: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
        self.config, self.section = config, config.checkpoint
        self.folder = folder / config.checkpoint.folder
        self.model, self.optimizer = model, optimizer
        self.identity: DataIdentity | None = None
        self.saved_step: int | None = None
        unknown = set(self.section.exclude_from_loading) - set(LOADABLE)
        if unknown:
            raise UserError(
                f"checkpoint.exclude_from_loading: {', '.join(sorted(unknown))}: expected some of {', '.join(LOADABLE)}"
            )

    # ---- starting ----------------------------------------------------------------------------------------------------

    def resume(self, progress: Progress, total_steps: int) -> bool:
        """Continue this folder's run from its newest good full checkpoint; True when the run is already finished."""
        step = self.section.load_step
        for saved in _candidates(self.folder, step):
            if saved.kind == "model":
                if saved.step >= total_steps:
                    progress.step = saved.step
                    return True
                log.info("%s holds weights only and cannot be resumed", saved.path)
                continue
            try:
                saved.verify()
            except UserError as error:
                if step != -1:
                    raise
                log.warning("skipping a damaged checkpoint: %s", error)
                continue
            self._load(saved, progress, model_only=False)
            self.saved_step = progress.step
            log.info("resumed from %s", saved.path)
            return progress.step >= total_steps
        raise UserError(f"{self.folder} holds no checkpoint that can be resumed")

    def initial_load(self, progress: Progress) -> bool:
        """Start from weights given by the config; False when none are."""
        section = self.section
        if not section.enable or (section.initial_load_path is None and not section.initial_load_in_hf):
            return False
        if section.initial_load_in_hf:
            path = Path(section.initial_load_path or self.config.model.hf_assets_path)
            load_logical_state(self.model, read_hf(path, self.model.arch))
        else:
            path = Path(str(section.initial_load_path))
            saved = files.find_checkpoint(path, section.load_step)
            saved.verify()
            if saved.kind == "model" and not section.initial_load_model_only:
                raise UserError(f"{saved.path} holds weights only; set checkpoint.initial_load_model_only = true")
            self._load(saved, progress, model_only=section.initial_load_model_only)
        log.info("initial weights from %s", path)
        return True

    def _load(self, saved: Saved, progress: Progress, *, model_only: bool) -> None:
        excluded = set(self.section.exclude_from_loading)
        if excluded:
            log.info("not loaded, as checkpoint.exclude_from_loading says: %s", ", ".join(sorted(excluded)))
        if "model" not in excluded:
            files.load_model(saved, self.model)
        if model_only:
            return
        if "optimizer" not in excluded:
            files.load_optimizer(saved, self.model, self.optimizer)
        trainer = saved.trainer
        if "train_state" not in excluded:
            progress.step, progress.tokens = trainer["step"], trainer["tokens"]
            files.set_rng_state(trainer["rng"])
        if "dataloader" not in excluded:
            self._check_identity(trainer["data"], saved.path)
            progress.samples = trainer["samples"]

    def _check_identity(self, recorded: dict[str, Any], path: Path) -> None:
        assert self.identity is not None
        now = asdict(self.identity)
        changed = [f"{key}: {recorded.get(key)!r} -> {now[key]!r}" for key in now if recorded.get(key) != now[key]]
        if changed:
            raise UserError(
                f"resuming {path} would change its data ({', '.join(changed)}); keep them as they were, or start new"
                ' data from its beginning with checkpoint.exclude_from_loading = ["dataloader"]'
            )

    # ---- saving ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int, total_steps: int) -> bool:
        section = self.section
        if not section.enable or section.load_only:
            return False
        first = section.enable_first_step_checkpoint and step == 1
        return first or step == total_steps or step % section.interval == 0

    def save(self, progress: Progress, *, last: bool = False) -> Path:
        """Save this step: everything, or as `checkpoint.last_save_*` says at the end of the run."""
        trainer = self._trainer_state(progress)
        dtype = DTYPES[self.section.export_dtype]
        if last and self.section.last_save_in_hf:
            path = self._save_hf(progress.step, trainer, dtype)
        elif last and self.section.last_save_model_only:
            entries = files.model_entries(self.model, dtype)
            path = files.save_checkpoint(self.folder, progress.step, "model", self.model.arch, trainer, entries)
        else:
            entries = files.model_entries(self.model) + files.optimizer_entries(self.model, self.optimizer)
            path = files.save_checkpoint(self.folder, progress.step, "full", self.model.arch, trainer, entries)
        self.saved_step = progress.step
        removed = files.prune(self.folder, self.section.keep_latest_k)
        log.info("saved %s%s", path, f" (removed {len(removed)} older)" if removed else "")
        return path

    def save_at_stop(self, progress: Progress) -> None:
        """Save the step a signal ended the run at, unless it is saved already or nothing was trained."""
        wanted = self.section.enable and not self.section.load_only and progress.step > 0
        if wanted and self.saved_step != progress.step:
            self.save(progress)

    def _save_hf(self, step: int, trainer: dict[str, Any], dtype: torch.dtype) -> Path:
        final, partial = self.folder / f"step-{step}", self.folder / f"step-{step}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_hf(_named(self.model), self.model.arch, partial, dtype=dtype, assets_from=assets_folder(self.config))
            files.publish(partial, final, files.manifest(step, "model", self.model.arch, trainer, {}))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"checkpoint {final} was not saved: {error.strerror or error}") from error
        return final

    def _trainer_state(self, progress: Progress) -> dict[str, Any]:
        assert self.identity is not None
        return {
            **asdict(progress),
            "data": asdict(self.identity),
            "tokenizer": tokenizer_location(self.config),
            "config_sha256": hashlib.sha256(to_toml(self.config).encode()).hexdigest(),
            "torch": torch.__version__,
            "rng": files.rng_state(),
        }


def tokenizer_location(config: Config) -> str:
    """Where the run's tokenizer is, as a later `generate` or `export` will look for it."""
    given = config.model.tokenizer_path or config.model.hf_assets_path
    return str(Path(given).resolve()) if Path(given).exists() else "bytes"


def assets_folder(config: Config) -> Path | None:
    location = Path(tokenizer_location(config))
    if location.is_file():
        return location.parent
    return location if location.is_dir() else None


def _named(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in files.model_entries(model):
        yield entry.name.removeprefix("model/"), entry.read()
