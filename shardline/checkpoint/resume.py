"""Where a run starts: from its own newest checkpoint, from weights that the config names, or from fresh weights."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardline import hub
from shardline.adapters.base_weights import RoundedTensors, fill_quantized
from shardline.adapters.lora import own_parameters, trained_parameters
from shardline.adapters.peft_files import open_peft
from shardline.adapters.start import draw_matrices, set_magnitudes
from shardline.checkpoint import format as files
from shardline.checkpoint.fetch import local_path, step_at
from shardline.checkpoint.format import Found, Saved
from shardline.checkpoint.load import load_model, load_optimizer
from shardline.checkpoint.lora.adapter import base_tensors
from shardline.checkpoint.lora.base import Base, check_same, fill_base, recorded_base, recorded_reference
from shardline.checkpoint.reader import ShardFiles
from shardline.comm import watchdog
from shardline.comm.mesh import Mesh
from shardline.config.architecture import TABLES, Architecture
from shardline.config.schema import Config
from shardline.errors import UserError, blame
from shardline.models.added_rows import read_hf_enlarged
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import logical_shapes
from shardline.models.huggingface.files import read_hf
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from shardline.optim.lr_schedule import check_resumed
from shardline.optim.optimizer import scaled_lr
from shardline.run.stop import why_not_saved
from shardline.storage.blocks import Damaged
from shardline.storage.location import is_url, locate
from shardline.storage.safetensors import LazyTensors

log = logging.getLogger("shardline")


@dataclass
class RunPosition:
    """How far a run has come: everything a resumed run needs besides weights and optimizer state."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    schedule_start: int = 0  # the step at which the learning-rate schedule began; negative if steps were reset
    validated: int = 0  # samples read by each validation
    best_validation: float | None = None  # the lowest validation loss so far, with validation.patience
    worse_validations: int = 0  # validations since the best one
    loss_scale: tuple[float, int] = (0.0, 0)  # for float16: the scale, and the good steps since it changed
    excluded: tuple[str, ...] = ()  # checkpoint.exclude_from_loading when this run was started
    lr: float = 0.0  # learning rate of the last step
    last_step: int = 0  # the step at which the run was to end
    history: str = ""  # the replica groups that took part in its steps: equal histories mean equal weights


@dataclass(frozen=True)
class DataIdentity:
    """What the samples of a run depend on; a resumed run must not change it unnoticed."""

    seed: int
    dataset: str
    seq_len: int
    global_batch_size: int
    tokenizer: str


_NEEDED = ("step", "samples", "tokens", "schedule_start", "rng")  # keys of "trainer" in a manifest


class _Choice(NamedTuple):
    """The checkpoint that rank 0 has chosen: its folder's name, its step, and whether the run ended with it."""

    name: str
    step: int
    finished: bool


@dataclass
class Start:
    """Fills a built model and optimizer, and finds out how far the run has come."""

    config: Config
    folder: Path  # the run's checkpoint folder
    model: Decoder
    optimizer: torch.optim.Optimizer
    identity: DataIdentity
    total_steps: int
    mesh: Mesh
    load_extra: Callable[[ShardFiles], None] = lambda shards: None  # loads state besides weights and optimizer
    base: Base | None = None  # the frozen weights, with LoRA or a reference model
    found: list[Found] | None = None  # rank 0's listing of the folder; None: not listed yet
    copy: Decoder | None = None  # the reference model for preference pairs: a copy of the initial weights
    meanwhile: Callable[[], None] = lambda: None  # what this thread does while others draw the weights
    _damages: list[str] = field(default_factory=list)  # why checkpoints that were tried are damaged

    def run(self, resume: bool, seed: int) -> tuple[RunPosition, bool]:
        """Give the model its weights; returns how far the run has come and whether it had already finished."""
        position = RunPosition(excluded=tuple(sorted(set(self.config.checkpoint.exclude_from_loading))))
        if self.copy is not None and self.base is not None:
            self._fill_base(self.base, self.copy)
        if resume:
            return position, self._resume(position, seed)
        if self._adapts and self.base is not None:
            self._fill_base(self.base, self.model)
            self._start_adapter(seed)
        elif not self._load_initial(position, seed):
            self._draw(seed)
        return position, False

    def _draw(self, seed: int) -> None:
        init_weights(self.model, seed, self.meanwhile)
        log.info("weights drawn from seed %d", seed)

    # ---- LoRA --------------------------------------------------------------------------------------------------------

    @property
    def _adapts(self) -> bool:
        return self.model.adaptation is not None

    def _fill_base(self, base: Base, model: Decoder) -> None:
        """Give a model its frozen weights."""
        with blame("checkpoint.initial_load_path" if base.path else "debug.seed"):
            fill_base(own_parameters(model), base)
            if any(".stored." in name or name.endswith(".magnitude") for name, _ in model.named_parameters()):
                tensors = RoundedTensors(model, base_tensors(base, model.arch))
                fill_quantized(model, tensors.tensors)
                set_magnitudes(model, tensors)
        log.info("frozen weights from %s", base.words if base.path else f"seed {base.seed}: they are random")

    def _start_adapter(self, seed: int) -> None:
        """Draw the trained matrices, or read them from an adapter's folder."""
        given = self.config.lora.adapter_path
        if given is None:
            draw_matrices(self.model, seed)
            return
        with blame("lora.adapter_path"):
            _, tensors = open_peft(Path(given), self.model.arch)
            load_logical_state(trained_parameters(self.model), tensors, strict=False)
        log.info("adapter from %s", given)

    def last_step(self, position: RunPosition) -> int:
        """The step at which a run that has come this far ends."""
        return _last_step(self.config, self.total_steps, asdict(position), asdict(self.identity))

    # ---- the run's own checkpoints -----------------------------------------------------------------------------------

    def _resume(self, position: RunPosition, seed: int) -> bool:
        """Load the newest good checkpoint on every rank; returns whether the run had finished.

        Rank 0 chooses, since it alone may rename bad checkpoints. Ranks agree on whether all of them could load it.
        """
        while True:
            choice = self.mesh.from_rank_0(self._choose)
            if choice.finished:
                position.step = choice.step
                return True
            damage = self._agree(functools.partial(self._load_step, choice.name, position, seed))
            if not damage:
                break
            self.mesh.from_rank_0(functools.partial(self._give_up, choice.step, damage))
        if why_not_saved(self.config) is None:
            self.mesh.from_rank_0(functools.partial(self._abandon_after, choice.step))
        log.info("resumed from %s", self.folder / choice.name)
        return position.step >= self.last_step(position)

    def _listing(self) -> list[Found]:
        if self.found is None:
            self.found = files.list_folder(self.folder)
        return self.found

    def _choose(self) -> _Choice:
        """Choose the newest checkpoint that can be resumed; set aside those found to be damaged."""
        wanted = self.config.checkpoint.load_step
        for found in self._listing():
            if found.saved is None:
                self._skip(str(found.error))
        for saved in _candidates(self._listing(), wanted):
            if saved.kind == "model":
                if saved.step >= _end_of(saved, self.config, self.total_steps):
                    return _Choice(saved.path.name, saved.step, True)
                log.info("%s holds weights only and cannot be resumed", saved.path)
                continue
            for problem in [*map(str, saved.check_sizes()), *_missing(saved)][:1]:
                self._give_up(saved.step, problem)
                return self._choose()
            check_model(saved, self.model.arch)
            self._check_identity(saved)
            self._check_optimizer(saved)
            end = _end_of(saved, self.config, self.total_steps)
            peak = scaled_lr(self.config, self.identity.global_batch_size)
            check_resumed(saved.trainer, self.config, peak, end, saved.path)
            return _Choice(saved.path.name, saved.step, False)
        why = f" ({'; '.join(self._damages)})" if self._damages else ""
        raise UserError(
            f"{self.folder} holds no checkpoint that can be resumed{why}; start over with --overwrite, or start another"
            " run from weights with checkpoint.initial_load_path"
        )

    def _give_up(self, step: int, damage: str) -> None:
        """Set a damaged checkpoint aside and go on to an older one, unless the user asked for this one."""
        if self.config.checkpoint.load_step != -1:
            raise UserError(damage)
        self._skip(damage)
        if why_not_saved(self.config) is None:
            log.warning("it is kept as %s", self._set_aside(step, "damaged"))
        else:  # a run that never saves does not rename either
            self.found = [one for one in self._listing() if one.saved is None or one.saved.step != step]

    def _skip(self, damage: str) -> None:
        if damage not in self._damages:
            log.warning("skipping a damaged checkpoint: %s", damage)
            self._damages.append(damage)

    def _set_aside(self, step: int, why: str) -> Path:
        (saved,) = _candidates(self._listing(), step)
        self.found = None  # the older save of this step that it replaced may count from now on
        return files.set_aside(saved, why)

    def _abandon_after(self, step: int) -> None:
        """Set later checkpoints aside: their steps are trained again, so no later start may use them."""
        while later := [saved.step for saved in _candidates(self._listing()) if saved.step > step]:
            log.info("step %d will be trained again: %s", later[0], self._set_aside(later[0], "abandoned"))

    def _load_step(self, name: str, position: RunPosition, seed: int) -> None:
        saved = files.look_at(locate(self.folder / name)).saved
        if saved is None:
            raise UserError(
                f"{socket.gethostname()} has no {name} in {self.folder}:"
                " checkpoints must be on a disk that all machines share"
            )
        if self.base is not None and (known := recorded_reference(saved)) is not None:
            check_same(known, self.base, saved.path)
        left_out = self._left_out(saved)
        if "train_state" in left_out:
            raise UserError(
                f'checkpoint.exclude_from_loading = ["train_state"] would count steps from 0 beside {saved.path}; use'
                f" another job.dump_folder with checkpoint.initial_load_path = {str(saved.path)!r} and"
                " checkpoint.initial_load_model_only = false"
            )
        try:
            self._load(saved, position, seed, left_out, model_only=False)
        except Damaged:
            raise
        except UserError as error:  # it may be the manifest that is wrong
            for problem in saved.compare_headers():
                raise Damaged(str(problem)) from error
            raise UserError(f"{saved.path}: {error}") from error

    def _left_out(self, saved: Saved) -> set[str]:
        """Return the parts of this run's checkpoint that are not loaded.

        `checkpoint.exclude_from_loading` applies to the first start. The run's later checkpoints hold the state that
        replaced the excluded parts, so a restart loads it, unless data or optimizer have changed again.
        """
        wanted = set(self.config.checkpoint.exclude_from_loading)
        since = wanted & set(saved.trainer.get("excluded", ()))
        if self._changed_data(saved):
            since.discard("dataloader")
        if saved.trainer.get("optimizer") != self.config.optimizer.name:
            since.discard("optimizer")
        if since:
            log.info(
                "loaded although checkpoint.exclude_from_loading names it, since this run began without it: %s",
                ", ".join(sorted(since)),
            )
        return wanted - since

    def _agree(self, load: Callable[[], None]) -> str:
        """Load on every rank; returns the damage found, or "". Other errors are raised on all ranks."""
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

    # ---- weights that the config names -------------------------------------------------------------------------------

    def _load_initial(self, position: RunPosition, seed: int) -> bool:
        section = self.config.checkpoint
        if not section.enable or (section.initial_load_path is None and not section.initial_load_in_hf):
            if section.enable and section.load_step != -1:
                raise UserError(f"checkpoint.load_step = {section.load_step}: {self.folder} holds no such checkpoint")
            return False
        if section.initial_load_in_hf:
            path = Path(hub.local_path(section.initial_load_path or self.config.model.hf_assets_path))
            with blame("checkpoint.initial_load_path" if section.initial_load_path else "model.hf_assets_path"):
                load_logical_state(self.model, self._weights_in(path))
        else:
            saved = self._initial_checkpoint(str(section.initial_load_path))
            path = saved.path
            if saved.is_hf:
                self.mesh.from_rank_0(saved.verify)
            if saved.kind == "model" and not section.initial_load_model_only:
                raise UserError(f"{path} holds weights only; set checkpoint.initial_load_model_only = true")
            model_only = section.initial_load_model_only
            left_out = set(section.exclude_from_loading)
            self._compare_initial(saved, has_weights="model" not in left_out)
            damage = self._agree(lambda: self._load(saved, position, seed, left_out, model_only=model_only))
            if damage:
                raise UserError(damage)
            if position.step >= self.last_step(position):
                raise UserError(
                    f"{path} is at step {position.step} and this run would end at {self.last_step(position)}, since"
                    " training.steps continues its count; count from 0 with checkpoint.exclude_from_loading ="
                    ' ["train_state"], or load only the weights with checkpoint.initial_load_model_only = true'
                )
        log.info("initial weights from %s", path)
        return True

    def _weights_in(self, folder: Path) -> LazyTensors:
        """The weights of a Hugging Face folder, with rows for the tokens that `[data]` adds to its vocabulary."""
        added = self.config.data.added_tokens or self.config.data.special_tokens
        return (read_hf_enlarged if added else read_hf)(folder, self.model.arch)

    def _initial_checkpoint(self, given: str) -> Saved:
        """Find the checkpoint of the initial weights.

        Rank 0 chooses the step: a run that still saves there may show the others a newer one.
        """
        asked_for = self.config.checkpoint.load_step
        with blame("checkpoint.initial_load_path"):
            folder = locate(given).local if is_url(given) else Path(given)
            if folder is None:
                step = self.mesh.from_rank_0(lambda: step_at(given, asked_for))
        if folder is not None:
            step = self.mesh.from_rank_0(lambda: self._find_initial(folder, asked_for).step)
        return self._find_initial(self._initial_path(given, step), step)

    def _find_initial(self, path: Path, step: int) -> Saved:
        try:
            with blame("checkpoint.initial_load_path"):
                return files.find_checkpoint(path, step)
        except UserError as error:
            if (path / "config.json").is_file():
                raise UserError(
                    f"checkpoint.initial_load_path: {path} is a Hugging Face folder; set"
                    " checkpoint.initial_load_in_hf = true"
                ) from error
            raise

    def _compare_initial(self, saved: Saved, has_weights: bool) -> None:
        """Refuse weights that do not fit; warn if they fit but come from a model that computes differently."""
        ours = self.model.arch
        changes = _changes(saved.architecture, ours)
        if has_weights and logical_shapes(saved.architecture) != logical_shapes(ours):
            raise UserError(
                f"checkpoint.initial_load_path: {saved.path} is of another model ({changes}); set the same sizes for"
                " this run's model (model.flavor, model.overrides), or use another checkpoint"
            )
        if changes:
            log.warning("%s was trained by a model that computes differently: %s", saved.path, changes)

    def _initial_path(self, given: str, step: int) -> Path:
        """Fetch a checkpoint given as a URL: one rank of each machine makes the copy that its other ranks use."""
        if not is_url(given):
            return Path(given)
        fetched: list[Path] = []
        with watchdog.patiently(f"fetching {given}"), blame("checkpoint.initial_load_path"):
            damage = self._agree(lambda: fetched.append(local_path(given, step)))
            if damage:
                raise UserError(damage)
        return fetched[0]

    def _load(self, saved: Saved, position: RunPosition, seed: int, excluded: set[str], *, model_only: bool) -> None:
        if excluded:
            log.info("not loaded because of checkpoint.exclude_from_loading: %s", ", ".join(sorted(excluded)))
        if self.base is not None and self._adapts and "model" not in excluded:
            check_same(recorded_base(saved), self.base, saved.path)
            self._fill_base(self.base, self.model)
            load_model(saved, self.model)
        elif self.base is not None and self._adapts:
            self._fill_base(self.base, self.model)
            self._start_adapter(seed)
        elif "model" in excluded:
            self._draw(seed)
        else:
            load_model(saved, self.model)
        if model_only:
            return
        for problem in _missing(saved):
            raise Damaged(problem)
        if "optimizer" not in excluded:
            self._check_optimizer(saved)
            load_optimizer(saved, self.model, self.optimizer)
            self.load_extra(saved.shards)
        trainer = saved.trainer
        if "train_state" not in excluded:
            position.step, position.tokens = trainer["step"], trainer["tokens"]
            position.validated = trainer.get("validated", 0)
            position.best_validation = trainer.get("best_validation")
            position.worse_validations = trainer.get("worse_validations", 0)
            position.loss_scale = tuple(trainer.get("loss_scale", position.loss_scale))
            position.lr, position.last_step = trainer.get("lr", 0.0), trainer.get("last_step", 0)
            position.history = trainer.get("history", "")
            with _damaged_state(saved):
                set_rng_state(self._rng(saved))
        scheduled = 0 if "lr_scheduler" in excluded else trainer["step"] - trainer["schedule_start"]
        position.schedule_start = position.step - scheduled
        if "dataloader" not in excluded:
            self._check_identity(saved)
            position.samples = trainer["samples"]

    def _rng(self, saved: Saved) -> Mapping[str, Any]:
        """This rank's random state if the layout is the one that saved it; otherwise rank 0's on all ranks."""
        states, layout = saved.trainer["rng"], saved.manifest["layout"]
        state = states[self.mesh.rank if layout == asdict(self.mesh.layout) else 0]
        return states[state] if isinstance(state, int) else state  # a number stands for that rank's state

    def _check_identity(self, saved: Saved) -> None:
        changed = self._changed_data(saved)
        if changed and "dataloader" not in self.config.checkpoint.exclude_from_loading:
            raise UserError(
                f"resuming {saved.path} would change its data ({', '.join(changed)}); restore these settings, or start"
                ' the new data from its beginning with checkpoint.exclude_from_loading = ["dataloader"]'
            )

    def _changed_data(self, saved: Saved) -> list[str]:
        recorded, now = saved.trainer.get("data", {}), asdict(self.identity)
        key = "dataset" if self.config.training.dataset_path is None else "dataset_path"
        named = {"dataset": f"the data of training.{key} = {getattr(self.config.training, key)}"}
        return [
            f"{named.get(key, key)}: {recorded.get(key)!r} -> {now[key]!r}"
            for key in now
            if recorded.get(key) != now[key]
        ]

    def _check_optimizer(self, saved: Saved) -> None:
        """Refuse the state of another optimizer, which may fit but mean something else."""
        name = self.config.optimizer.name
        recorded = saved.trainer.get("optimizer", name)
        if recorded != name and "optimizer" not in self.config.checkpoint.exclude_from_loading:
            raise UserError(
                f"{saved.path} holds the state of optimizer.name = {recorded!r}, but this run has {name!r}; set it"
                ' back, or start without optimizer state: checkpoint.exclude_from_loading = ["optimizer"]'
            )


def resumable_step(
    folder: Path, config: Config, arch: Architecture, total_steps: int, listing: Sequence[Found] | None = None
) -> int | None:
    """The step a run in `folder` would continue from, or None; a checkpoint of another model is an error.

    A checkpoint with only weights counts if its run had finished. `listing` is what the checkpoint folder holds.
    """
    place, step = folder / config.checkpoint.folder, config.checkpoint.load_step
    found = files.list_folder(place) if listing is None else listing
    candidates = _candidates(found, step)
    if step != -1 and not candidates:
        with blame(f"checkpoint.load_step = {step}"):
            files.choose(place, found, step)  # raises an error that says what is wrong
    good = [saved for saved in candidates if saved.kind == "full" or saved.step >= _end_of(saved, config, total_steps)]
    if not good:
        if candidates:  # all of them hold weights only
            raise UserError(_weights_only(candidates[0], folder))
        broken = [str(one.error) for one in found if one.saved is None]
        if broken:
            raise UserError(
                f"{folder} already holds a run and has no good checkpoint to resume from ({'; '.join(broken)}):"
                " --overwrite moves that run aside, --job.dump_folder names another folder"
            )
        return None
    check_model(good[0], arch)
    return good[0].step


def _weights_only(saved: Saved, folder: Path) -> str:
    """Why a run that saved no optimizer state cannot be continued, and what can be done with its weights."""
    first, flag = "", f"--checkpoint.initial_load_path={saved.path}"
    if "lora" in saved.trainer:
        first = "" if saved.is_hf else f"shardline export {saved.path} ADAPTER, and "
        flag = f"--lora.adapter_path={saved.path if saved.is_hf else 'ADAPTER'}"
    why = "checkpoint.last_save_in_hf" if saved.is_hf else "checkpoint.last_save_model_only, or an import"
    return (
        f"{saved.path} holds weights only ({why}), so the run in {folder} cannot be continued; start another"
        f" run from them: {first}--job.dump_folder=NEW {flag}; --overwrite moves the old run aside"
    )


def _end_of(saved: Saved, config: Config, total_steps: int) -> int:
    return _last_step(config, total_steps, saved.trainer, saved.trainer.get("data", {}))


def _last_step(config: Config, total_steps: int, trainer: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """The last step of a run; `training.epochs` counts passes over the data from the step at which they began.

    If `validation.patience` has ended the run, it is the step the run is at.
    """
    patience = config.validation.patience
    if config.validation.enable and patience is not None and trainer.get("worse_validations", 0) >= patience:
        return int(trainer.get("step", 0))
    if config.training.epochs is None or "global_batch_size" not in data:
        return total_steps
    return int(total_steps + trainer.get("step", 0) - trainer.get("samples", 0) // data["global_batch_size"])


def check_model(saved: Saved, arch: Architecture) -> None:
    changes = _changes(saved.architecture, arch)
    if changes:
        raise UserError(f"{saved.path} is of another model ({changes}); use another job.dump_folder, or --overwrite")


def _candidates(listing: Sequence[Found], step: int = -1) -> list[Saved]:
    """Checkpoints a run may start from (or that of one step), newest first."""
    return [found.saved for found in reversed(listing) if found.saved is not None and step in (-1, found.step)]


def _changes(a: Architecture, b: Architecture) -> str:
    """The fields that make two architectures compute something different."""
    before, after = _computed(a), _computed(b)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in names)


_NOT_COMPUTED = ("dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache")


def _computed(arch: Architecture) -> dict[str, Any]:
    """The fields on which the output depends; those of tables are named `table.field`."""
    free = {"attn_backend", "init_std", "max_seq_len", "moe.aux_loss_coeff", "moe.z_loss_coeff"}
    found: dict[str, Any] = {}
    for name in type(arch).model_fields:
        value = getattr(arch, name)
        fields = type(value).model_fields if name in TABLES and value is not None else ()
        found |= {f"{name}.{field}": getattr(value, field) for field in fields} or {name: value}
    if arch.foreign is not None:  # compare each key of config.json; `shapes` follow from them
        found["foreign"] = None
        found |= {f"config.{key}": value for key, value in arch.foreign.config.items() if key not in _NOT_COMPUTED}
    if "moe.balance_coeff" in found:
        found["moe.balance_coeff"] = found["moe.balance_coeff"] > 0  # whether there are biases, not how fast they move
    return {name: value for name, value in found.items() if name not in free}


# ---- random states ---------------------------------------------------------------------------------------------------


def _missing(saved: Saved) -> list[str]:
    """The trainer state that a resume needs but the manifest lacks."""
    names = (name for name in _NEEDED if name not in saved.trainer)
    return [f"{saved.path / files.MANIFEST}: trainer.{name} is missing" for name in names]


@contextlib.contextmanager
def _damaged_state(saved: Saved) -> Iterator[None]:
    """Blame the manifest for a random state that a generator rejects."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise Damaged(f"{saved.path / files.MANIFEST}: trainer.rng cannot be restored ({reason})") from error


def rng_state() -> dict[str, Any]:
    """The states of all random generators of this process, in a form that JSON can hold."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().numpy()).hex() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
