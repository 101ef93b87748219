"""When a run saves, and in which form; `commit.py` defines how its ranks write a checkpoint together.

Everything in a save except copying the state runs in a background thread. The run waits for a synchronous save at once,
and for an asynchronous one before the next save, at the end of the run and when it stops.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.assets import tokenizer_of_run
from shardline.checkpoint.background import Background
from shardline.checkpoint.commit import CheckpointWriter, LastSave, Owners, Save, reason
from shardline.checkpoint.lora.base import Base, recorded
from shardline.checkpoint.mirror import Mirror
from shardline.checkpoint.resume import DataIdentity, RunPosition, rng_state
from shardline.checkpoint.shards import HeldTensor, held_state, held_weights
from shardline.checkpoint.staging import Staging
from shardline.comm import watchdog
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.huggingface.config import export_family
from shardline.precision.mixed import DTYPES
from shardline.run.stop import Request, why_not_saved
from shardline.storage.crash_points import reach
from shardline.words import counted, sized

log = logging.getLogger("shardline")
LAST_WAIT_SECONDS = 30.0  # how long a run that has failed waits for its background save


class Saver:
    """Saves the state of a run; every rank has one, and all ranks make the same calls."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        identity: DataIdentity,
        mesh: Mesh,
        mirror: Mirror | None = None,
        base: Base | None = None,
        extra: Callable[[], list[HeldTensor]] = list,
        weights: Callable[[torch.dtype | None], list[HeldTensor]] | None = None,
        state: Callable[[], list[HeldTensor]] | None = None,
    ) -> None:
        """Only rank 0 has a `mirror`; `base` are the frozen weights of LoRA or of a reference.

        `extra` returns what to save besides weights and optimizer state; `weights` and `state` return these two if they
        are not simply those of the model and the optimizer.
        """
        self.config, self.section, self.mesh, self.mirror = config, config.checkpoint, mesh, mirror
        self.folder, self.model, self.optimizer, self.identity = folder, model, optimizer, identity
        self.base = base
        self.saved_step = 0
        self._extra = extra
        self._weights = weights or functools.partial(held_weights, model)
        self._state = state or functools.partial(held_state, model, optimizer)
        self._saves = why_not_saved(config) is None
        if self._saves:
            self._check_folder()
        if self.section.enable and self.section.last_save_in_hf and model.arch.foreign is None:
            export_family(model.arch)  # refuses an architecture of no known family before the first step
        self._owners = Owners(mesh)
        self._background = Background(self.section.save_timeout_seconds, mesh.rank)
        self._staging = self._make_staging()
        self._writer = CheckpointWriter(self.section, model, mesh, mirror, self._staging)
        self._number = 0

    def _check_folder(self) -> None:
        """Refuse a folder that cannot be written, now rather than at the first save."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):  # fails in a read-only folder, even for root
                pass
        except OSError as error:
            raise UserError(
                f"checkpoint.folder: cannot write {self.folder}: {error.strerror or error}; use another folder"
            ) from error

    def _make_staging(self) -> Staging | None:
        mode = self.section.async_mode
        if not self._saves or mode == "disabled":
            return None
        pinned = mode == "async_with_pinned_mem"
        if pinned and not torch.cuda.is_available():
            log.info('note: checkpoint.async_mode = "async_with_pinned_mem" is the same as "async" without a GPU')
        return Staging(self.optimizer, pinned)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether a step is to be saved because of its number."""
        section = self.section
        first = section.enable_first_step_checkpoint and step == 1
        regular = section.interval_type == "steps" and step % section.every(total_steps) == 0
        return self._saves and (first or regular or step == total_steps)

    def save_if_due(
        self,
        progress: RunPosition,
        last_step: int,
        request: Request,
        saving: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Save if it is time to, or if a signal or the end of the job's time requests it, within `saving()`.

        The run waits for a save that was requested.
        """
        due = self.is_due(progress.step, last_step) or (self._saves and request.due)
        if request.waits and not self._saves:
            log.info("nothing is saved at %s: %s", request.stop or "SIGUSR1", why_not_saved(self.config))
        elif due or request.waits:
            with saving():
                if due:
                    self.save(progress, last=progress.step == last_step)
                if request.waits:
                    if self.saved_step != progress.step:
                        self.save(progress, wait=True)
                    self.finish()

    def prepare(self) -> None:
        """Allocate the buffers of asynchronous saves in the background; every rank calls this before the first step."""
        staging = self._staging
        if staging is not None:
            owned = self._owners.owned("full", self._held())
            self._background.submit("the buffers on the host", lambda activity: staging.prepare(owned))

    def save(self, position: RunPosition, *, last: bool = False, wait: bool = False) -> Path:
        """Save this step: everything, or what `checkpoint.last_save_*` asks for at the end of the run.

        With `checkpoint.async_mode` it is written in the background, unless `last` or `wait` asks to wait for it.
        """
        final = self.folder / f"step-{position.step}"
        self._background.wait()
        save = self._begin(position, last, later=self._staging is not None and not (last or wait))
        self._background.submit(str(final), functools.partial(self._writer.write, save, final))
        self.saved_step = position.step
        if not save.staged:
            self.finish()
        return final

    def resumed(self, step: int) -> None:
        """Record that the run continues from the save of this step; 0: from none."""
        self.saved_step = step
        self._writer.last = LastSave(step, "full") if step else None

    @property
    def last_save(self) -> LastSave | None:
        return self._writer.last

    def last_words(self, step: int) -> str:
        """Describe for the closing table what a run that has reached `step` has saved."""
        why_none, last = why_not_saved(self.config), self._writer.last
        if why_none is not None or last is None:
            return f"none: {why_none or 'nothing of the run is saved'}"
        size = f", {sized(last.size)}" if last.size else ""
        since = step - last.step
        held = "all of the run is in it" if since == 0 else f"{counted(since, 'step')} since then are not in it"
        held = "the weights alone" if last.kind == "model" else held
        writing = f"; step {self.saved_step} was being written" if self.busy else ""
        return f"step {last.step}{size}: {held}{writing}"

    @property
    def busy(self) -> bool:
        """Whether a save is under way in the background."""
        return self._background.busy

    @property
    def seconds(self) -> float:
        """Duration of the last save that ended, from its start to the rename of its folder."""
        return self._background.seconds

    def check(self) -> None:
        """Raise the error of a save that failed in the background; called between steps."""
        self._background.check()

    def finish(self) -> None:
        """Wait for the save under way."""
        try:
            self._background.wait()
        except KeyboardInterrupt:
            self._remove_partial()
            raise

    def complete(self, late: Callable[[], str]) -> None:
        """Wait for the save under way and its copy in the mirror; called at the end of the run.

        `late` returns why the run cannot wait any longer for the copy, or "" as long as it can.
        """
        self.finish()
        if self.section.enable and self.section.mirror is not None:
            with watchdog.patiently("copying checkpoints to the mirror"):
                if self.mirror is not None:
                    self.mirror.finish(late)

    def let_finish(self) -> None:
        """Wait a while for the save under way, after the run has failed for another reason, which stays its error."""
        try:
            self._background.wait(LAST_WAIT_SECONDS)
        except Exception as error:  # the store's, for example, if its process has ended by now
            log.warning("the save of step %d failed, too: %s", self.saved_step, reason(error))

    def close(self) -> None:
        """Cancel a save that is still being written; a run that ended well has already waited for it."""
        if self.mirror is not None:
            self.mirror.close()
        if self._background.busy:
            self._background.cancel()
            self._remove_partial()
        if self._staging is not None:
            self._staging.close()

    def _remove_partial(self) -> None:
        if self.mesh.rank == 0:
            for partial in self.folder.glob("step-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)

    def _begin(self, position: RunPosition, last: bool, later: bool) -> Save:
        """Prepare what the background thread is to write: copies if it writes `later`, else the state itself."""
        reach("staging", self.folder / f"step-{position.step}")
        dtype = DTYPES[self.section.export_dtype]
        hf_dtype = dtype if last and self.section.last_save_in_hf else None
        only_weights = hf_dtype is not None or (last and self.section.last_save_model_only)
        kind: files.Kind = "model" if only_weights else "full"
        held = self._weights(dtype) if only_weights else self._held()
        owned = self._owners.owned(kind, held)
        self._writer.connect()
        if later:
            assert self._staging is not None
            owned = self._staging.stage(owned)
        else:
            for device in {one.tensor.device for one in owned if one.tensor.is_cuda}:
                torch.cuda.synchronize(device)
        reach("staged", self.folder / f"step-{position.step}")
        self._number += 1
        trainer = self._trainer_state(position)
        return Save(self._number, position.step, kind, owned, trainer, rng_state(), hf_dtype, later)

    def _held(self) -> list[HeldTensor]:
        return self._weights(None) + self._state() + self._extra()

    def _trainer_state(self, position: RunPosition) -> dict[str, Any]:
        return {
            **asdict(position),
            "data": asdict(self.identity),
            "optimizer": self.config.optimizer.name,
            "tokenizer": tokenizer_of_run(self.config),
            "config_sha256": hashlib.sha256(to_toml(self.config).encode()).hexdigest(),
            "torch": torch.__version__,
            **self._adapter(),
        }

    def _adapter(self) -> dict[str, Any]:
        """What a manifest records about frozen weights: those under an adapter (LoRA), or those of a reference."""
        how = self.model.adaptation
        if self.base is None:
            return {}
        return {"reference": self.base._asdict()} if how is None else {"lora": recorded(how, self.base)}
