"""When a run saves, and in which form."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.hf import write_hf
from shardline.models.hf_config import export_family
from shardline.precision.mixed import DTYPES
from shardline.training import checkpoint as files
from shardline.training.assets import assets_at, special_tokens, tokenizer_of_run
from shardline.training.collecting import collected
from shardline.training.starting import DataIdentity, Progress
from shardline.training.tensor_file import Entry, describe_file

log = logging.getLogger("shardline")


class Saver:
    def __init__(
        self,
        config: Config,
        folder: Path,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        identity: DataIdentity,
        writes: bool = True,
    ) -> None:
        self.config, self.section = config, config.checkpoint
        self.folder, self.model, self.optimizer, self.identity = folder, model, optimizer, identity
        self.saved_step = 0
        self.writes = writes  # one rank does; the others help gather what they hold
        self._check_folder()
        if self.section.enable and self.section.last_save_in_hf:
            export_family(model.arch)  # an architecture that no family has is refused before the first step

    def _check_folder(self) -> None:
        """A folder that cannot be written is better met now than at the first save."""
        if self.section.enable and not self.section.load_only:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"checkpoint.folder: cannot write {self.folder}: {error.strerror or error}; name another folder"
                ) from error

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
            entries = self._collected(files.model_entries(self.model, dtype))
            path = files.save_checkpoint(
                self.folder, progress.step, "model", self.model.arch, trainer, entries, self.writes
            )
        else:
            held = files.model_entries(self.model) + files.optimizer_entries(self.model, self.optimizer)
            entries = self._collected(held)
            path = files.save_checkpoint(
                self.folder, progress.step, "full", self.model.arch, trainer, entries, self.writes
            )
        # one rank prunes: another would take what is being written for what a crash left behind
        removed = files.prune(self.folder, self.section.keep_latest_k, protected={progress.step}) if self.writes else []
        self.saved_step = progress.step
        log.info("saved %s%s", path, f" (removed {len(removed)} older)" if removed else "")
        return path

    def save_at_stop(self, progress: Progress) -> None:
        """Save the step at which a signal or a time limit asks for it, unless it is saved already."""
        if self.section.enable and not self.section.load_only and self.saved_step != progress.step:
            self.save(progress)

    def _save_hf(self, step: int, trainer: dict[str, Any], dtype: torch.dtype) -> Path:
        final = self.folder / f"step-{step}"
        if not self.writes:
            for _ in self._named():
                pass
            return final
        with files.partial_folder(final) as partial:
            self.folder.mkdir(parents=True, exist_ok=True)
            assets, special = assets_at(trainer["tokenizer"]), special_tokens(trainer["tokenizer"])
            write_hf(self._named(), self.model.arch, partial, dtype, assets_from=assets, special_tokens=special)
            recorded = {path.name: describe_file(path) for path in sorted(partial.iterdir())}
            files.publish(partial, final, files.manifest(step, "model", self.model.arch, trainer, recorded))
        return final

    def _trainer_state(self, progress: Progress) -> dict[str, Any]:
        return {
            **asdict(progress),
            "data": asdict(self.identity),
            "optimizer": self.config.optimizer.name,
            "tokenizer": tokenizer_of_run(self.config),
            "config_sha256": hashlib.sha256(to_toml(self.config).encode()).hexdigest(),
            "torch": torch.__version__,
            "rng": files.rng_state(),
        }

    def _collected(self, entries: list[Entry]) -> list[Entry]:
        return collected(entries, self.model.arch, next(self.model.parameters()).dtype)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._collected(files.model_entries(self.model)):
            yield entry.name.removeprefix("model/"), entry.read()
