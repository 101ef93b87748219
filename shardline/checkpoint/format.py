"""Checkpoints: safetensors shards written by the ranks that hold them, and a JSON manifest. No pickle.

    checkpoint/step-200/manifest.json                        format, step, kind, architecture, trainer state, tables
    checkpoint/step-200/shard-00000-of-00004.safetensors     pieces of model/<name> and optimizer/<kind>/<name>

A folder is written as `step-200.partial` and renamed when everything in it is on disk, so a crash leaves either a whole
checkpoint or one that is recognised as broken. `kind` is "full" (can be resumed) or "model" (weights only). Names are
unfused; a piece that is not all of its tensor has its place in its key. The manifest has the checksums of the shards
and, at its end, its own. docs/checkpoints.md describes every field.

Version 1 had all tensors whole in one `state.safetensors`; it is still read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shardline.checkpoint.folders import (
    FORMAT,
    LEFTOVERS,
    MANIFEST,
    VERSION,
    Unreadable,
    manifest_checksum,
    parse_manifest,
)
from shardline.checkpoint.reader import Shards, TensorView
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.hf import HFTensors, read_hf
from shardline.storage.crash_points import reach
from shardline.storage.safetensors import TYPE_NAMES, Damaged, Entry, check_size, verify_file, write_tensors

OLD_STATE_FILE = "state.safetensors"  # of version 1
Kind = Literal["full", "model"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose manifest reads well; its tensors are checked when they are read."""

    path: Path
    step: int
    kind: Kind
    architecture: Architecture
    trainer: dict[str, Any]
    files: dict[str, Any] = field(repr=False)
    table: dict[str, Any] | None = field(default=None, repr=False)  # the manifest's `tensors`
    world_size: int = 1
    layout: dict[str, int] | None = None

    def verify(self) -> None:
        """Read every file and compare every checksum."""
        for name, recorded in self.files.items():
            verify_file(self.path / name, recorded)

    def check_sizes(self) -> None:
        """That every file is there with its size; nothing is read."""
        for name, recorded in self.files.items():
            check_size(self.path / name, recorded)

    @property
    def is_hf(self) -> bool:
        """A last save may be a Hugging Face folder."""
        return OLD_STATE_FILE not in self.files and not self.table

    @functools.cached_property
    def shards(self) -> Shards:
        if OLD_STATE_FILE in self.files:
            return Shards(self.path, {OLD_STATE_FILE: self.files[OLD_STATE_FILE]}, None)
        return Shards(self.path, self.files, self.table or {})

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """`model/<name>` or `optimizer/<kind>/<name>`, or a block of it; only the bytes it needs are read."""
        return self.shards.read(name, slices)

    def tensors(self, prefix: str) -> TensorView:
        return TensorView(self.shards, prefix)

    def weights(self) -> TensorView | HFTensors:
        """The model under unfused names, each tensor read when asked for."""
        return read_hf(self.path, self.architecture) if self.is_hf else self.tensors("model/")


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def write_whole(partial: Path, entries: Sequence[Entry]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One shard with whole tensors, for whoever has all of them; the manifest's `files` and `tensors`."""
    name = shard_name(0, 1)
    record = write_tensors(partial / name, entries)
    rows = {entry.name: [[0, *(0 for _ in entry.shape), *entry.shape]] for entry in entries}
    tensors = {
        entry.name: {"dtype": TYPE_NAMES[entry.dtype], "shape": list(entry.shape), "pieces": rows[entry.name]}
        for entry in entries
    }
    return {name: record}, tensors


def manifest(
    step: int,
    kind: Kind,
    architecture: Architecture,
    trainer: dict[str, Any],
    files: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    world_size: int = 1,
    layout: dict[str, int] | None = None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "kind": kind,
        "architecture": architecture.model_dump(mode="json"),
        "trainer": trainer,
        "world_size": world_size,
        "layout": layout,
        "files": files,
        "tensors": tensors or {},
    }


def publish(partial: Path, final: Path, content: dict[str, Any]) -> None:
    """Add the manifest to `partial`, make everything durable and rename it to `final`."""
    with open(partial / MANIFEST, "w") as file:
        file.write(_readable({**content, "crc32": manifest_checksum(content)}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    reach("manifest-written", partial)
    put_in_place(partial, final)


def _readable(content: dict[str, Any]) -> str:
    """JSON with a line for each key, each file and each tensor, readable and still short."""

    def lines(value: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"

    rows = [
        f" {json.dumps(key)}: {lines(value) if key in ('files', 'tensors') and value else json.dumps(value)}"
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, which it replaces if that is there."""
    reach("before-rename", partial)
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        with contextlib.suppress(OSError):  # the next pruning removes it
            remove(replaced)
    else:
        partial.rename(final)
    sync_folder(final.parent)
    reach("renamed", final)


def read_checkpoint(path: Path) -> Saved:
    """Read a step folder's manifest; a folder that is no whole checkpoint is a `UserError`."""
    try:
        content = parse_manifest((path / MANIFEST).read_text())
        return Saved(
            path,
            content["step"],
            content["kind"],
            Architecture.model_validate(content["architecture"]),
            content["trainer"],
            content["files"],
            content.get("tensors"),
            content.get("world_size", 1),
            content.get("layout"),
        )
    except FileNotFoundError:
        raise UserError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except Unreadable as error:
        raise UserError(f"{path}/{MANIFEST} {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/{MANIFEST} cannot be read: {error}") from error


def list_checkpoints(folder: Path, report: Callable[[UserError], None] | None = None, step: int = -1) -> list[Saved]:
    """Every whole checkpoint under `folder` (or that of one step), oldest first.

    Broken ones are left out, and told to `report`.
    """
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        name = re.fullmatch(r"(step-(\d+))(\.replaced)?", path.name)
        if name is None or step not in (-1, int(name[2])):
            continue
        if path.name == name[1] or not (folder / name[1]).exists():  # replaced: a rename was cut short
            try:
                saved = read_checkpoint(path)
                if name[1] != f"step-{saved.step}":
                    raise UserError(f"{path}/{MANIFEST} is of step {saved.step}")
                found.append(saved)
            except UserError as error:
                if report is not None:
                    report(error)
    return sorted(found, key=lambda saved: saved.step)


def find_checkpoint(path: Path, step: int = -1) -> Saved:
    """The checkpoint that `path` means: a step folder, a run folder or a checkpoint folder (its newest, or `step`)."""
    if (path / MANIFEST).is_file():
        return read_checkpoint(path)
    for folder in (path / "checkpoint", path):
        every = list_checkpoints(folder, step=step)
        if every:
            return every[-1]
    wanted = "no checkpoint" if step == -1 else f"no checkpoint of step {step}"
    raise UserError(f"{path} holds {wanted}" if path.exists() else f"{path} does not exist")


def set_aside(saved: Saved, why: str) -> Path:
    """Rename a checkpoint that a run must not come back to: `step-8.abandoned`, `step-8.damaged`."""
    aside = saved.path.with_name(f"step-{saved.step}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    return saved.path.rename(aside)


def prune(folder: Path, keep: int, protected: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest `keep` (0: keep all), never `protected` steps or the newest that can be resumed.

    Of what earlier attempts left, partial saves go, and of damaged and abandoned ones all but the newest.
    """
    reach("before-prune", folder)
    every = list_checkpoints(folder)
    resumable = [saved for saved in every if saved.kind == "full" and _sizes_are_right(saved)][-1:]
    kept = {saved.path for saved in resumable} | {saved.path for saved in every if saved.step in protected}
    doomed = [saved.path for saved in every[:-keep] if saved.path not in kept] if keep > 0 else []
    for path in (*doomed, *_leftovers(folder)):
        remove(path)
        reach("pruned", path)
    return doomed


def remove(path: Path) -> None:
    """Under another name first: one that a crash leaves half removed must not look like a checkpoint."""
    doomed = path.with_name(f"{path.name.partition('.')[0]}.removed")
    if path != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    reach("removing", doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sizes_are_right(saved: Saved) -> bool:
    try:
        saved.check_sizes()
    except Damaged:
        return False
    return True


def _leftovers(folder: Path) -> list[Path]:
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*.*"):
        name = re.fullmatch(rf"step-(\d+)\.({'|'.join(LEFTOVERS)})", path.name)
        if name:
            found.setdefault(name[2], []).append((int(name[1]), path))
    aside = [path for kind in ("damaged", "abandoned") for _, path in sorted(found.get(kind, []))[:-1]]
    cut_short = [path for kind in ("partial", "removed") for _, path in found.get(kind, [])]
    replaced = [path for step, path in found.get("replaced", []) if (folder / f"step-{step}").exists()]
    return cut_short + replaced + aside


def same_model(a: Architecture, b: Architecture) -> list[str]:
    """Names of the fields in which two architectures compute something different."""
    free = {"attn_backend", "init_std", "max_seq_len"}
    return [name for name in type(a).model_fields if name not in free and getattr(a, name) != getattr(b, name)]


def rng_state() -> dict[str, Any]:
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


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
