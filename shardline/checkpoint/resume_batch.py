"""Keeps the global batch of a resumed run unchanged for any number of ranks, by adapting gradient accumulation.

4 ranks, local batch 2      | r0 | r1 | r2 | r3 |          global batch 8: one micro-batch per rank
2 ranks, local batch 2      | r0 | r1 | r0 | r1 |          the same 8 samples: two micro-batches per rank
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardline.checkpoint import format as files
from shardline.checkpoint.resume import check_model
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.fused_weights import logical_shapes
from shardline.run.previous_run import pending
from shardline.storage.location import locate
from shardline.words import counted

log = logging.getLogger("shardline")


class SavedBatch(NamedTuple):
    """The global batch of a checkpoint, the unit in which its data position counts."""

    size: int
    path: str  # or URL


def batch_to_keep(config: Config, arch: Architecture, resume: bool = False) -> SavedBatch | None:
    """Return the batch of the checkpoint that this run continues from, if the config leaves it open.

    A checkpoint of another model is refused as such, before its batch matters. The run's folder is not opened yet: it
    may still get back a run that was to be replaced, or with `--resume` one from the mirror.
    """
    section = config.checkpoint
    if config.training.global_batch_size > 0 or not section.enable:
        return None
    anew = "dataloader" in section.exclude_from_loading
    for saved, own in _continued(config, resume):
        if anew and not (own and "dataloader" in saved.trainer.get("excluded", ())):
            return None
        if own:
            check_model(saved, arch)
        elif logical_shapes(saved.architecture) != logical_shapes(arch):
            return None  # reported when it is loaded
        size = saved.trainer.get("data", {}).get("global_batch_size")
        if isinstance(size, int) and size > 0:
            return SavedBatch(size, str(saved.place))
    return None


def _continued(config: Config, resume: bool) -> Iterator[tuple[files.Saved, bool]]:
    """Yield checkpoints whose data position the run may take over, best first, and whether they are the run's own."""
    section = config.checkpoint
    if config.job.dump_folder is not None:
        run = Path(config.job.dump_folder).expanduser()
        every = [saved for path in (run, *pending(run)) for saved in files.list_checkpoints(path / section.folder)]
        if resume and section.mirror is not None and not every:
            with contextlib.suppress(Exception):  # reported when it is fetched; a file system may raise anything
                every = files.list_checkpoints(locate(section.mirror))
        yield from ((saved, True) for saved in reversed(every) if section.load_step in (-1, saved.step))
    if section.initial_load_path is not None and not (section.initial_load_in_hf or section.initial_load_model_only):
        with contextlib.suppress(Exception):  # reported when it is loaded
            yield files.find_checkpoint(locate(section.initial_load_path), section.load_step), False


def keep_batch(config: Config, saved: SavedBatch, ranks: int, plan: Callable[[Config], Any]) -> Config:
    """Return the config with the checkpoint's batch, and log it; raise if `ranks` x local batch does not divide it.

    `plan` raises a UserError for a local batch that the pipeline cannot split.
    """
    local, size = config.training.local_batch_size, saved.size
    if size % (local * ranks) == 0:
        log.info("%s", batch_line(config, saved, ranks))
        return config.replace({"training.global_batch_size": size, "training.gradient_accumulation_steps": None})
    remedies = []
    each = size // ranks if size % ranks == 0 else 0  # samples per rank and step
    sizes = [number for number in _divisors(each) if _can_run(config, number, plan)]
    if sizes:
        remedies.append(f"set training.local_batch_size to {_either(sizes)}")
    counts = _divisors(size // local) if size % local == 0 else []
    if counts:
        remedies.append(f"use {_either(counts)} data-parallel ranks")
    remedies.append(
        'restart the data with another training.global_batch_size: checkpoint.exclude_from_loading = ["dataloader"]'
    )
    raise UserError(
        f"{saved.path} was trained with a global batch of {size}, which training.local_batch_size x data-parallel ranks"
        f" = {local} x {ranks} = {local * ranks} does not divide: {', or '.join(remedies)}"
    )


def batch_line(config: Config, saved: SavedBatch, ranks: int) -> str:
    """A log line that says how the batch is made up now."""
    local = config.training.local_batch_size
    count = saved.size // (local * ranks)
    made = f"{count} micro-batch{'es' if count > 1 else ''} of {local} on {'each of ' if ranks > 1 else ''}"
    return f"global batch {saved.size} as in {saved.path}: {made}{counted(ranks, 'data-parallel rank')}"


def _can_run(config: Config, local: int, plan: Callable[[Config], Any]) -> bool:
    try:
        plan(config.replace({"training.local_batch_size": local}))
    except UserError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
