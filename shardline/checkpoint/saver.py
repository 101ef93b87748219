"""When a run saves, in which form, and how its ranks write a checkpoint together.

    every rank   copy or refer to its parts -> write its shard, checksums, fsync -> tell rank 0 what is in it
    rank 0       make the folder ... hear all ranks -> merge, manifest, fsync -> rename -> prune -> tell the verdict
    every rank   hear the verdict: saved, or the same error on all

All of it but the copies runs in a background thread. A synchronous save is waited for at once, an asynchronous one by
the next save, at the end of the run, and where the run stops.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.assets import tokenizer_of_run
from shardline.checkpoint.background import Background, Cancelled, Position
from shardline.checkpoint.merging import Finish, merge
from shardline.checkpoint.mirror import Mirror
from shardline.checkpoint.owners import Owners
from shardline.checkpoint.resume import DataIdentity, Progress
from shardline.checkpoint.shards import Part, Piece, Scratch, model_parts, optimizer_parts, take
from shardline.checkpoint.staging import Staging
from shardline.checkpoint.telling import Telling
from shardline.comm import collectives, watchdog
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.hf_config import export_family
from shardline.precision.mixed import DTYPES
from shardline.storage.crash_points import reach
from shardline.storage.safetensors import TYPE_NAMES, Entry, write_tensors

log = logging.getLogger("shardline")
VERDICT_SECONDS = 30.0  # rank 0 notices first that a rank is late
LAST_WAIT_SECONDS = 30.0  # for a save that goes on behind, where the run has failed


@dataclass(frozen=True)
class Save:
    """One save, as the background thread gets it."""

    number: int
    step: int
    kind: files.Kind
    parts: list[Part]
    trainer: dict[str, Any]
    rng: dict[str, Any]
    in_hf: torch.dtype | None  # the type of a Hugging Face folder, where it is to be one
    staged: bool


class Saver:
    def __init__(
        self,
        config: Config,
        folder: Path,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        identity: DataIdentity,
        mesh: Mesh,
        mirror: Mirror | None = None,
        extra: Callable[[], list[Part]] = list,
    ) -> None:
        self.config, self.section, self.mesh = config, config.checkpoint, mesh
        self.folder, self.model, self.optimizer, self.identity = folder, model, optimizer, identity
        self.saved_step = 0
        self.mirror = mirror  # of rank 0 alone
        self._extra = extra  # parts beside weights and optimizer state
        self._check_folder()
        if self.section.enable and self.section.last_save_in_hf:
            export_family(model.arch)  # an architecture that no family has is refused before the first step
        self._owners = Owners(mesh.rank, mesh.world_size)
        self._background = Background(self.section.save_timeout_seconds, mesh.rank)
        self._telling: Telling | None = None
        self._staging = self._make_staging()
        self._scratch = Scratch()
        self._number = 0
        self._shard = files.shard_name(mesh.rank, mesh.world_size)

    def _check_folder(self) -> None:
        """A folder that cannot be written is better met now than at the first save."""
        if self.section.enable and not self.section.load_only:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):  # a read-only folder takes none, whoever asks
                    pass
            except OSError as error:
                raise UserError(
                    f"checkpoint.folder: cannot write {self.folder}: {error.strerror or error}; name another folder"
                ) from error

    def _make_staging(self) -> Staging | None:
        section = self.section
        if not section.enable or section.load_only or section.async_mode == "disabled":
            return None
        pinned = section.async_mode == "async_with_pinned_mem"
        if pinned and not torch.cuda.is_available():
            log.info('note: checkpoint.async_mode = "async_with_pinned_mem": without a GPU this is "async"')
        return Staging(self.optimizer, pinned)

    def is_due(self, step: int, total_steps: int) -> bool:
        section = self.section
        if not section.enable or section.load_only:
            return False
        first = section.enable_first_step_checkpoint and step == 1
        return first or step == total_steps or step % section.interval == 0

    def prepare(self) -> None:
        """Before the first step, on every rank: make the buffers of asynchronous saves, behind."""
        staging = self._staging
        if staging is not None:
            parts = self._owners.of("full", self._parts())
            self._background.submit("the buffers on the host", lambda position: staging.prepare(parts))

    def save(self, progress: Progress, *, last: bool = False, wait: bool = False) -> Path:
        """Save this step: everything, or as `checkpoint.last_save_*` says at the end of the run.

        With `checkpoint.async_mode` the writing goes on behind, unless `last` or `wait` asks to wait for it.
        """
        final = self.folder / f"step-{progress.step}"
        self._background.wait()
        save = self._begin(progress, last, later=self._staging is not None and not (last or wait))
        self._background.submit(str(final), functools.partial(self._write, save, final))
        self.saved_step = progress.step
        if not save.staged:
            self.finish()
        return final

    def save_at_stop(self, progress: Progress) -> None:
        """Save the step at which a signal or a time limit asks for it, unless it is saved already; wait for it."""
        if self.section.enable and not self.section.load_only:
            if self.saved_step != progress.step:
                self.save(progress, wait=True)
            self.finish()

    @property
    def busy(self) -> bool:
        """Whether a save goes on behind."""
        return self._background.busy

    @property
    def seconds(self) -> float:
        """How long the last save that ended took, from its beginning to its place on disk."""
        return self._background.seconds

    def check(self) -> None:
        """At a step boundary: raise the error of a save that went on behind."""
        self._background.check()

    def finish(self) -> None:
        """Wait for the save under way."""
        try:
            self._background.wait()
        except KeyboardInterrupt:
            self._remove_partial()
            raise

    def complete(self) -> None:
        """At the end of the run: wait for the save under way, and for its copy in the mirror."""
        self.finish()
        if self.section.enable and self.section.mirror is not None:
            with watchdog.patiently("copying checkpoints to the mirror", collectives.groups()):
                if self.mirror is not None:
                    self.mirror.finish()

    def let_finish(self) -> None:
        """The run ends with an error that is not the save's: what goes on behind may still come to its end."""
        with contextlib.suppress(UserError):
            self._background.wait(LAST_WAIT_SECONDS)

    def close(self) -> None:
        """Give up what is still being written; a run that ended well has waited for it."""
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

    # ---- in the run's thread -----------------------------------------------------------------------------------------

    def _begin(self, progress: Progress, last: bool, later: bool) -> Save:
        reach("staging", self.folder / f"step-{progress.step}")
        only_weights = last and self.section.last_save_model_only
        in_hf = DTYPES[self.section.export_dtype] if last and self.section.last_save_in_hf else None
        if only_weights or in_hf is not None:
            kind: files.Kind = "model"
            parts = model_parts(self.model, DTYPES[self.section.export_dtype])
        else:
            kind = "full"
            parts = self._parts()
        owned = self._owners.of(kind, parts)
        self._connect()
        if later:
            assert self._staging is not None
            owned = self._staging.stage(owned)
        elif any(part.tensor.is_cuda for part in owned):
            torch.cuda.synchronize(next(part.tensor.device for part in owned if part.tensor.is_cuda))
        reach("staged", self.folder / f"step-{progress.step}")
        self._number += 1
        return Save(
            self._number, progress.step, kind, owned, self._trainer_state(progress), files.rng_state(), in_hf, later
        )

    def _parts(self) -> list[Part]:
        return model_parts(self.model) + optimizer_parts(self.model, self.optimizer) + self._extra()

    def _connect(self) -> None:
        """Keys of this saver's own: an earlier run in these processes may have used the same store."""
        if self._telling is None:
            token = self.mesh.from_rank_0(lambda: os.urandom(8).hex())
            self._telling = Telling(self.mesh.world_size, f"checkpoint/{token}")

    def _trainer_state(self, progress: Progress) -> dict[str, Any]:
        return {
            **asdict(progress),
            "data": asdict(self.identity),
            "optimizer": self.config.optimizer.name,
            "tokenizer": tokenizer_of_run(self.config),
            "config_sha256": hashlib.sha256(to_toml(self.config).encode()).hexdigest(),
            "torch": torch.__version__,
        }

    # ---- in the background thread ------------------------------------------------------------------------------------

    def _write(self, save: Save, final: Path, position: Position) -> None:
        telling, began = self._telling, time.monotonic()
        assert telling is not None
        device = next((part.tensor.device for part in save.parts if part.tensor.is_cuda), None)
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first one
        deadline = began + self.section.save_timeout_seconds
        prefix, partial = f"{save.number}/", final.with_name(f"{final.name}.partial")
        if self.mesh.rank == 0:
            telling.tell(prefix + "folder", _words_of(lambda: _make(partial)))
        failed: BaseException | None = None
        try:
            position.at = f"waiting for rank 0 to make {partial}"
            problem = telling.hear(prefix + "folder", deadline, position.check, f"rank 0 did not make {partial}")
            part = {"error": problem} if problem else self._write_shard(save, partial, position)
        except Cancelled:
            part, failed = {"error": "the save was interrupted"}, Cancelled()
        except BaseException as error:
            part, failed = {"error": f"{_words(error)} ({self._shard})"}, error
        telling.tell(f"{prefix}part-{self.mesh.rank}", part)
        reach("part-told", partial / self._shard)
        if isinstance(failed, Cancelled):
            raise failed
        if self.mesh.rank == 0:
            verdict = self._finish(save, final, partial, deadline, position)
            reach("before-verdict", final)
            telling.tell(prefix + "verdict", verdict)
            if save.number > 1:  # every rank has told its part of this save: it knows how the one before ended
                telling.forget(f"{save.number - 1}/verdict")
        else:
            position.at = f"waiting for rank 0 to finish {final}"
            late = f"checkpoint {final} was not saved: rank 0 did not finish it; earlier ones are intact"
            verdict = telling.hear(prefix + "verdict", deadline + VERDICT_SECONDS, position.check, late)
        if verdict["error"]:
            if failed is not None and not isinstance(failed, OSError | UserError):
                raise failed  # a fault of ours, with its traceback
            raise UserError(f"checkpoint {final} was not saved: {verdict['error']}; earlier ones are intact")
        removed = f" (removed {verdict['removed']} older)" if verdict["removed"] else ""
        log.info("saved %s%s", final, removed)

    def _write_shard(self, save: Save, partial: Path, position: Position) -> dict[str, Any]:
        """Write what this rank owns; what rank 0 has to know of it."""
        if save.staged and self._staging is not None:
            position.at = "copying the state to the host"
            self._staging.ready()
        part: dict[str, Any] = {"file": None, "tensors": {}, "rng": save.rng}
        if save.parts:
            path = partial / self._shard
            entries = [self._entry(part, piece, position, path) for part in save.parts for piece in part.pieces]
            position.at = f"opening {path}"
            part |= {"file": self._shard, "record": write_tensors(path, entries), "tensors": _table(save.parts)}
        return part

    def _entry(self, part: Part, piece: Piece, position: Position, path: Path) -> Entry:
        def read() -> Iterator[torch.Tensor]:
            position.at = f"writing {path}, {piece.name}"
            for rows in take(part, piece, self._scratch):
                position.check()
                yield rows

        return Entry(piece.key, piece.place.size, part.dtype, read)

    def _finish(self, save: Save, final: Path, partial: Path, deadline: float, position: Position) -> dict[str, Any]:
        """Rank 0's end of a save: {"error": words, or "" where it is saved}."""
        telling = self._telling
        assert telling is not None
        try:
            parts = []
            for rank in range(self.mesh.world_size):
                shard = files.shard_name(rank, self.mesh.world_size)
                position.at = f"waiting for rank {rank} to write {partial / shard}"
                late = f"rank {rank} did not write {shard} in {self.section.save_timeout_seconds} s"
                parts.append(telling.hear(f"{save.number}/part-{rank}", deadline, position.check, late))
            reach("parts-complete", partial)
            for rank in range(self.mesh.world_size):
                telling.forget(f"{save.number}/part-{rank}")
            telling.forget(f"{save.number}/folder")
            errors = list(dict.fromkeys(part["error"] for part in parts if "error" in part))
            if errors:
                raise UserError("; ".join(errors))
            position.check()
            position.at = f"writing {partial / 'manifest.json'}"
            finish = Finish(save.step, save.kind, self.model.arch, save.trainer, self.mesh.layout)
            finish.publish(partial, final, merge(parts), save.in_hf)
            removed = self._prune(save.step, position)
            if self.mirror is not None:
                self.mirror.nudge()
            return {"error": "", "removed": removed}
        except Cancelled:
            raise
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            named = " (manifest.json)" if isinstance(error, OSError) else ""
            return {"error": _words(error) + named, "removed": 0}

    def _prune(self, step: int, position: Position) -> int:
        """How many older ones were removed; that one could not be is no reason to doubt this one."""
        position.at = f"removing older checkpoints of {self.folder}"
        copying = set() if self.mirror is None else self.mirror.protected()
        try:
            return len(files.prune(self.folder, self.section.keep_latest_k, protected={step, *copying}))
        except OSError as error:
            log.warning("older checkpoints of %s were not removed: %s", self.folder, _words(error))
            return 0


def _table(parts: list[Part]) -> dict[str, Any]:
    """Rows of the manifest's `tensors` for one file: start and size of each piece."""
    table: dict[str, Any] = {}
    for part in parts:
        for piece in part.pieces:
            row = {"dtype": TYPE_NAMES[part.dtype], "shape": list(piece.shape), "places": list[list[int]]()}
            table.setdefault(piece.name, row)["places"].append([*piece.place.start, *piece.place.size])
    return table


def _make(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _words_of(work: Any) -> str:
    """What is wrong, in words, or "" where it worked."""
    try:
        work()
    except OSError as error:
        return _words(error)
    return ""


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
