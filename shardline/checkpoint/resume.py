"""What a run starts from: its own newest checkpoint, weights the config names, or fresh weights."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.fetch import local_path
from shardline.checkpoint.format import Saved
from shardline.checkpoint.load import load_model, load_optimizer
from shardline.checkpoint.reader import Shards
from shardline.comm import collectives, watchdog
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError, blame
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import logical_shapes
from shardline.models.hf import read_hf
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from shardline.storage.location import is_url
from shardline.storage.safetensors import Damaged

log = logging.getLogger("shardline")


@dataclass
class Progress:
    """How far a run is: all that a resumed run needs beside weights and optimizer state."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    schedule_start: int = 0  # the step at which the learning-rate schedule began; below 0 where steps count anew
    validated: int = 0  # samples of each validation
    excluded: tuple[str, ...] = ()  # what checkpoint.exclude_from_loading said when this run was started


@dataclass(frozen=True)
class DataIdentity:
    """What the samples of a run depend on; a resumed run must not change it unnoticed."""

    seed: int
    dataset: str
    seq_len: int
    global_batch_size: int
    tokenizer: str


@dataclass
class Start:
    """Fills a built model and optimizer, and tells where the run stands."""

    config: Config
    folder: Path  # of the run's checkpoints
    model: Decoder
    optimizer: torch.optim.Optimizer
    identity: DataIdentity
    total_steps: int
    mesh: Mesh
    load_extra: Callable[[Shards], None] = lambda shards: None  # state beside weights and optimizer
    damages: list[str] = field(default_factory=list)  # of checkpoints that were tried

    def run(self, resume: bool, seed: int) -> tuple[Progress, bool]:
        """Give the model its weights; (how far the run is, whether it had already finished)."""
        progress = Progress(excluded=tuple(sorted(set(self.config.checkpoint.exclude_from_loading))))
        if resume:
            return progress, self._resume(progress, seed)
        if not self._load_initial(progress, seed):
            self._draw(seed)
        return progress, False

    def _draw(self, seed: int) -> None:
        init_weights(self.model, seed)
        log.info("weights drawn from seed %d", seed)

    def _resume(self, progress: Progress, seed: int) -> bool:
        """Rank 0 chooses, since it alone may rename what is not good; every rank loads, and all agree that it did."""
        while True:
            step, finished = self.mesh.from_rank_0(self._choose)
            if finished:
                progress.step = step
                return True
            damage = self._agree(lambda step=step: self._load_step(step, progress, seed))  # type: ignore[misc]
            if not damage:
                break
            self.mesh.from_rank_0(lambda step=step, damage=damage: self._give_up(step, damage))  # type: ignore[misc]
        self.mesh.from_rank_0(lambda: self._abandon_after(step))
        log.info("resumed from %s", self.folder / f"step-{step}")
        return progress.step >= self.last_step(progress)

    def last_step(self, progress: Progress) -> int:
        """At which a run that is so far ends."""
        return _last_step(self.config, self.total_steps, asdict(progress), asdict(self.identity))

    def _load_step(self, step: int, progress: Progress, seed: int) -> None:
        saved = next(iter(_candidates(self.folder, step)), None)
        if saved is None:
            raise UserError(
                f"{socket.gethostname()} has no step-{step} in {self.folder}:"
                " checkpoints must be on a disk that all machines share"
            )
        left_out = self._left_out(saved)
        if "train_state" in left_out:
            raise UserError(
                f'checkpoint.exclude_from_loading = ["train_state"] would count steps from 0 beside {saved.path}; take'
                f" another job.dump_folder with checkpoint.initial_load_path = {str(saved.path)!r} and"
                " checkpoint.initial_load_model_only = false"
            )
        self._load(saved, progress, seed, left_out, model_only=False)

    def _left_out(self, saved: Saved) -> set[str]:
        """What of a checkpoint of this run is not loaded.

        What was left out when the run was started has been made since, and a restart must not make it again: the run
        was told once. Data and optimizers may have changed once more, though.
        """
        wanted = set(self.config.checkpoint.exclude_from_loading)
        since = wanted & set(saved.trainer.get("excluded", ()))
        if self._changed_data(saved):
            since.discard("dataloader")
        if saved.trainer.get("optimizer") != self.config.optimizer.name:
            since.discard("optimizer")
        if since:
            log.info(
                "loaded all the same, as this run began without it (checkpoint.exclude_from_loading): %s",
                ", ".join(sorted(since)),
            )
        return wanted - since

    def _agree(self, load: Callable[[], None]) -> str:
        """Load on every rank: "" where all could, else which file is damaged; other errors are raised on all ranks."""
        damage = refusal = ""
        try:
            load()
        except Damaged as error:
            damage = str(error)
        except UserError as error:
            refusal = str(error)
        except OSError as error:
            refusal = f"{socket.gethostname()} cannot read {error.filename or self.folder}: {error.strerror or error}"
        answers = self.mesh.from_everyone((damage, refusal))
        for _, refused in answers:
            if refused:
                raise UserError(refused)
        return next((damaged for damaged, _ in answers if damaged), "")

    def _give_up(self, step: int, damage: str) -> None:
        """Set a damaged checkpoint aside so that an older one is tried, unless the user asked for this one."""
        if self.config.checkpoint.load_step != -1:
            raise UserError(damage)
        self._set_aside(next(iter(_candidates(self.folder, step))), damage)

    def _set_aside(self, saved: Saved, damage: str) -> None:
        self._skip(damage)
        log.warning("it is kept as %s", files.set_aside(saved, "damaged"))

    def _skip(self, damage: str) -> None:
        if damage not in self.damages:
            log.warning("skipping a damaged checkpoint: %s", damage)
            self.damages.append(damage)

    def _choose(self) -> tuple[int, bool]:
        """(step to resume from, whether the run is finished); sets aside what can be seen to be damaged."""
        step = self.config.checkpoint.load_step
        files.list_checkpoints(self.folder, lambda error: self._skip(str(error)))
        for saved in _candidates(self.folder, step):
            if saved.kind == "model":
                if saved.step >= _end_of(saved, self.config, self.total_steps):
                    return saved.step, True
                log.info("%s holds weights only and cannot be resumed", saved.path)
                continue
            try:
                saved.check_sizes()
            except Damaged as error:
                if step != -1:
                    raise
                self._set_aside(saved, str(error))
                continue
            check_model(saved, self.model.arch)
            self._check_identity(saved)
            self._check_optimizer(saved)
            return saved.step, False
        why = f" ({'; '.join(self.damages)})" if self.damages else ""
        raise UserError(
            f"{self.folder} holds no checkpoint that can be resumed{why}; --overwrite starts anew,"
            " checkpoint.initial_load_path starts another run from weights"
        )

    def _abandon_after(self, step: int) -> None:
        """Later checkpoints belong to steps that will be trained again: no later start may take them for this run's."""
        for saved in files.list_checkpoints(self.folder):
            if saved.step > step:
                log.info("step %d is trained again: %s", saved.step, files.set_aside(saved, "abandoned"))

    def _load_initial(self, progress: Progress, seed: int) -> bool:
        section = self.config.checkpoint
        if not section.enable or (section.initial_load_path is None and not section.initial_load_in_hf):
            if section.enable and section.load_step != -1:
                raise UserError(f"checkpoint.load_step = {section.load_step}: {self.folder} holds no such checkpoint")
            return False
        if section.initial_load_in_hf:
            path = Path(section.initial_load_path or self.config.model.hf_assets_path)
            with blame("checkpoint.initial_load_path" if section.initial_load_path else "model.hf_assets_path"):
                load_logical_state(self.model, read_hf(path, self.model.arch))
        else:
            saved = self._initial_checkpoint(self._initial_path(str(section.initial_load_path)))
            path = saved.path
            if saved.is_hf:
                self.mesh.from_rank_0(saved.verify)
            if saved.kind == "model" and not section.initial_load_model_only:
                raise UserError(f"{path} holds weights only; set checkpoint.initial_load_model_only = true")
            model_only = section.initial_load_model_only
            left_out = set(section.exclude_from_loading)
            self._compare_initial(saved, has_weights="model" not in left_out)
            damage = self._agree(lambda: self._load(saved, progress, seed, left_out, model_only=model_only))
            if damage:
                raise UserError(damage)
            if progress.step >= self.last_step(progress):
                raise UserError(
                    f"{path} is at step {progress.step} and this run would end at {self.last_step(progress)}:"
                    " training.steps counts on from there; count from 0 with checkpoint.exclude_from_loading ="
                    ' ["train_state"], or load the weights alone with checkpoint.initial_load_model_only = true'
                )
        log.info("initial weights from %s", path)
        return True

    def _initial_checkpoint(self, path: Path) -> Saved:
        try:
            with blame("checkpoint.initial_load_path"):
                return files.find_checkpoint(path, self.config.checkpoint.load_step)
        except UserError as error:
            if (path / "config.json").is_file():
                raise UserError(
                    f"checkpoint.initial_load_path: {path} is a Hugging Face folder; set"
                    " checkpoint.initial_load_in_hf = true"
                ) from error
            raise

    def _compare_initial(self, saved: Saved, has_weights: bool) -> None:
        """Weights can fit a model that computes otherwise, which is said; where they do not fit, they are refused."""
        ours = self.model.arch
        changes = _changes(saved.architecture, ours)
        if has_weights and logical_shapes(saved.architecture) != logical_shapes(ours):
            raise UserError(
                f"checkpoint.initial_load_path: {saved.path} is of another model ({changes}); give this run's model the"
                " same sizes (model.flavor, model.overrides), or name another checkpoint"
            )
        if changes:
            log.warning("%s was trained with another arithmetic: %s", saved.path, changes)

    def _initial_path(self, given: str) -> Path:
        """Of a URL the copy on this machine, which one of its ranks fetches."""
        if not is_url(given):
            return Path(given)
        path, problem = Path(), ""
        with watchdog.patiently(f"fetching {given}", collectives.groups()):
            try:
                path = local_path(given, self.config.checkpoint.load_step)
            except UserError as error:
                problem = f"checkpoint.initial_load_path: {error}"
        for refused in self.mesh.from_everyone(problem):
            if refused:
                raise UserError(refused)
        return path

    def _load(self, saved: Saved, progress: Progress, seed: int, excluded: set[str], *, model_only: bool) -> None:
        if excluded:
            log.info("not loaded, as checkpoint.exclude_from_loading says: %s", ", ".join(sorted(excluded)))
        if "model" in excluded:
            self._draw(seed)
        else:
            load_model(saved, self.model)
        if model_only:
            return
        if "optimizer" not in excluded:
            self._check_optimizer(saved)
            load_optimizer(saved, self.model, self.optimizer)
            self.load_extra(saved.shards)
        trainer = saved.trainer
        if "train_state" not in excluded:
            progress.step, progress.tokens = trainer["step"], trainer["tokens"]
            progress.validated = trainer.get("validated", 0)
            files.set_rng_state(self._rng(saved))
        scheduled = 0 if "lr_scheduler" in excluded else trainer["step"] - trainer["schedule_start"]
        progress.schedule_start = progress.step - scheduled
        if "dataloader" not in excluded:
            self._check_identity(saved)
            progress.samples = trainer["samples"]

    def _rng(self, saved: Saved) -> Mapping[str, Any]:
        """This rank's random state, where the ranks are those that saved; else rank 0's, on all of them."""
        states = saved.trainer["rng"]
        if isinstance(states, Mapping):  # version 1 had rank 0's only
            return states
        same = saved.world_size == self.mesh.world_size and saved.layout == asdict(self.mesh.layout)
        state = states[self.mesh.rank if same else 0]
        return states[state] if isinstance(state, int) else state  # a number: that rank's

    def _check_identity(self, saved: Saved) -> None:
        changed = self._changed_data(saved)
        if changed and "dataloader" not in self.config.checkpoint.exclude_from_loading:
            raise UserError(
                f"resuming {saved.path} would change its data ({', '.join(changed)}); keep them as they were, or start"
                ' new data from its beginning with checkpoint.exclude_from_loading = ["dataloader"]'
            )

    def _changed_data(self, saved: Saved) -> list[str]:
        recorded, now = saved.trainer.get("data", {}), asdict(self.identity)
        named = {"dataset": f"the data of {self._data_key()}"}
        return [
            f"{named.get(key, key)}: {recorded.get(key)!r} -> {now[key]!r}"
            for key in now
            if recorded.get(key) != now[key]
        ]

    def _data_key(self) -> str:
        section = self.config.training
        key = "dataset" if section.dataset_path is None else "dataset_path"
        return f"training.{key} = {getattr(section, key)}"

    def _check_optimizer(self, saved: Saved) -> None:
        """State of another optimizer may fit and mean something else."""
        name = self.config.optimizer.name
        recorded = saved.trainer.get("optimizer", name)
        if recorded != name and "optimizer" not in self.config.checkpoint.exclude_from_loading:
            raise UserError(
                f"{saved.path} holds the state of optimizer.name = {recorded!r}, this run has {name!r}; set it back, or"
                ' begin without state: checkpoint.exclude_from_loading = ["optimizer"]'
            )


def resumable_step(folder: Path, config: Config, arch: Architecture, total_steps: int) -> int | None:
    """The step a run in `folder` would continue from, or None; a checkpoint of another model is an error.

    Weights alone count only when they are a finished run's.
    """
    place, step = folder / config.checkpoint.folder, config.checkpoint.load_step
    damages: list[str] = []
    files.list_checkpoints(place, lambda error: damages.append(str(error)))
    candidates = _candidates(place, step)
    if step != -1 and not candidates:
        if (place / f"step-{step}").is_dir():
            files.read_checkpoint(place / f"step-{step}")  # says what is wrong with it
        there = ", ".join(str(saved.step) for saved in files.list_checkpoints(place)) or "none"
        raise UserError(f"checkpoint.load_step = {step}: {place} holds no such checkpoint (steps there: {there})")
    good = [saved for saved in candidates if saved.kind == "full" or saved.step >= _end_of(saved, config, total_steps)]
    if not good:
        if damages:
            raise UserError(
                f"{folder} already holds a run and has no good checkpoint to resume from ({'; '.join(damages)}):"
                " --overwrite moves that run aside, --job.dump_folder names another folder"
            )
        return None
    check_model(good[0], arch)
    return good[0].step


def _end_of(saved: Saved, config: Config, total_steps: int) -> int:
    return _last_step(config, total_steps, saved.trainer, saved.trainer.get("data", {}))


def _last_step(config: Config, total_steps: int, trainer: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Passes over the data count from the step at which they were begun; `total_steps` where that was the first."""
    if config.training.epochs is None or "global_batch_size" not in data:
        return total_steps
    return int(total_steps + trainer["step"] - trainer["samples"] // data["global_batch_size"])


def check_model(saved: Saved, arch: Architecture) -> None:
    changes = _changes(saved.architecture, arch)
    if changes:
        raise UserError(f"{saved.path} is of another model ({changes}); use another job.dump_folder, or --overwrite")


def _candidates(folder: Path, step: int) -> list[Saved]:
    """Checkpoints a run may start from, best first."""
    return files.list_checkpoints(folder, step=step)[::-1]


def _changes(a: Architecture, b: Architecture) -> str:
    return ", ".join(f"{name}: {getattr(a, name)} -> {getattr(b, name)}" for name in files.same_model(a, b))
