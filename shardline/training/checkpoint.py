"""Checkpoints: one safetensors file and a JSON manifest per saved step, published by a rename. No pickle.

    checkpoint/step-200/manifest.json      format, step, kind, architecture, trainer state, checksums of the file
    checkpoint/step-200/state.safetensors  model/<name>, optimizer/<kind>/<name>, all under unfused names

A folder is written as `step-200.partial` and renamed when everything in it is on disk, so a crash leaves either a whole
checkpoint or one that is recognised as broken. `kind` is "full" (can be resumed) or "model" (weights only).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.fused import fuse, logical_names, unfuse
from shardline.models.hf import HFTensors, read_hf
from shardline.models.local import local_slices, whole
from shardline.models.state import load_logical_state
from shardline.training.optimizer import load_optimizer_state, optimizer_state
from shardline.training.tensor_file import TYPES, Entry, verify_file, write_tensors

FORMAT = "shardline-checkpoint"
STATE_FILE = "state.safetensors"
Kind = Literal["full", "model"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose manifest reads well; its tensors are checked when they are loaded."""

    path: Path
    step: int
    kind: Kind
    architecture: Architecture
    trainer: dict[str, Any]
    files: dict[str, Any]

    def verify(self) -> None:
        for name, recorded in self.files.items():
            verify_file(self.path / name, recorded)

    def tensors(self, prefix: str) -> TensorView:
        return TensorView(self.path / STATE_FILE, prefix)

    def weights(self) -> TensorView | HFTensors:
        """The model under unfused names, each tensor read when asked for; a last save may be a Hugging Face folder."""
        return self.tensors("model/") if STATE_FILE in self.files else read_hf(self.path, self.architecture)


class TensorView(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file whose names start with `prefix`, read one at a time."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._file, self._prefix = safe_open(path, framework="pt"), prefix
        names = (name for name in self._file.keys() if name.startswith(prefix))  # noqa: SIM118
        self._names = dict.fromkeys(name.removeprefix(prefix) for name in names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(self._prefix + name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """The type a tensor is stored in, without reading it."""
        return TYPES[self._file.get_slice(self._prefix + name).get_dtype()]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def model_entries(model: Decoder, dtype: torch.dtype | None = None) -> list[Entry]:
    """The model under unfused names; tied weights appear once, under the embedding's name."""
    entries = []
    for name, parameter in model.named_parameters():
        entries += _unfused_entries(model.arch, "model/", name, parameter.detach(), dtype)
    return entries


def optimizer_entries(model: Decoder, optimizer: torch.optim.Optimizer) -> list[Entry]:
    """Optimizer state under `optimizer/<kind>/<unfused name>`; scalars are repeated under each name."""
    parameters = dict(model.named_parameters())
    entries = []
    for key, tensor in optimizer_state(optimizer, model).items():
        kind, name = key.split(".", 1)
        if tensor.shape == parameters[name].shape:
            entries += _unfused_entries(model.arch, f"optimizer/{kind}/", name, tensor)
        else:
            entries += [
                Entry(f"optimizer/{kind}/{part}", tuple(tensor.shape), tensor.dtype, lambda t=tensor: t)  # type: ignore[misc]
                for part in logical_names(model.arch, name)
            ]
    return entries


def _unfused_entries(
    arch: Architecture, prefix: str, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> list[Entry]:
    empty = torch.empty(tensor.shape, device="meta")
    parts: dict[str, torch.Tensor] = {}

    def read(part: str) -> torch.Tensor:
        """The parts of one parameter are read one after the other: gather it once."""
        if not parts:
            parts.update(unfuse(arch, name, whole(tensor)))
        return parts.pop(part)

    return [
        Entry(prefix + part, tuple(view.shape), dtype or tensor.dtype, functools.partial(read, part))
        for part, view in unfuse(arch, name, empty).items()
    ]


def load_model(saved: Saved, model: Decoder) -> None:
    load_logical_state(model, saved.weights())


def load_optimizer(saved: Saved, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Fuse the saved rows again and hand them to the optimizer."""
    view = saved.tensors("optimizer/")
    kinds = sorted({name.split("/", 1)[0] for name in view})
    state = {}
    for name, parameter in model.named_parameters():
        names = logical_names(model.arch, name)
        for kind in kinds:
            parts = {part: view[f"{kind}/{part}"] for part in names if f"{kind}/{part}" in view}
            if len(parts) < len(names):
                continue
            if sum(part.numel() for part in parts.values()) == parameter.numel():
                state[f"{kind}.{name}"] = _as_parameter(fuse(model.arch, name, parts), parameter)
            else:
                state[f"{kind}.{name}"] = parts[names[0]]
    load_optimizer_state(optimizer, model, state)


def _as_parameter(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Whole values cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        values[local_slices(parameter)].to(parameter.device),
        mesh,
        placements,
        run_check=False,
        shape=values.shape,
        stride=values.stride(),
    )


def save_checkpoint(
    folder: Path,
    step: int,
    kind: Kind,
    architecture: Architecture,
    trainer: dict[str, Any],
    entries: list[Entry],
    writes: bool = True,
) -> Path:
    """Write `folder/step-N` so that it appears whole or not at all; ranks that do not write help gather the tensors."""
    final = folder / f"step-{step}"
    if not writes:
        for entry in entries:
            entry.read()
        return final
    with partial_folder(final) as partial:
        partial.mkdir(parents=True)
        files = {STATE_FILE: write_tensors(partial / STATE_FILE, entries)}
        publish(partial, final, manifest(step, kind, architecture, trainer, files))
    return final


@contextlib.contextmanager
def partial_folder(final: Path) -> Iterator[Path]:
    """Where to write `final`; what ends the writing early, a second Ctrl-C included, leaves nothing there."""
    partial = final.with_name(f"{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        yield partial
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"checkpoint {final} was not saved: {error.strerror or error}; earlier ones are intact"
            ) from error
        raise


def manifest(
    step: int, kind: Kind, architecture: Architecture, trainer: dict[str, Any], files: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": 1,
        "step": step,
        "kind": kind,
        "architecture": architecture.model_dump(mode="json"),
        "trainer": trainer,
        "files": files,
    }


def publish(partial: Path, final: Path, content: dict[str, Any]) -> None:
    """Add the manifest to `partial`, make everything durable and rename it to `final`."""
    with open(partial / "manifest.json", "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    put_in_place(partial, final)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, which it replaces if that is there."""
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        partial.rename(final)
    _sync_folder(final.parent)


def read_checkpoint(path: Path) -> Saved:
    """Read a step folder's manifest; a folder that is no whole checkpoint is a `UserError`."""
    try:
        content = json.loads((path / "manifest.json").read_text())
        if content["format"] != FORMAT or content["version"] != 1:
            raise UserError(f"{path}: format {content['format']!r} version {content['version']!r} is not readable here")
        architecture = Architecture.model_validate(content["architecture"])
        return Saved(path, content["step"], content["kind"], architecture, content["trainer"], content["files"])
    except FileNotFoundError:
        raise UserError(f"{path} is not a checkpoint: it has no manifest.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}/manifest.json cannot be read: {error}") from error


def list_checkpoints(folder: Path, report: Callable[[UserError], None] | None = None) -> list[Saved]:
    """Every whole checkpoint under `folder`, oldest first; broken ones are left out, and told to `report`."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        name = re.fullmatch(r"(step-\d+)(\.replaced)?", path.name)
        if name and (path.name == name[1] or not (folder / name[1]).exists()):  # replaced: a rename was cut short
            try:
                found.append(read_checkpoint(path))
            except UserError as error:
                if report is not None:
                    report(error)
    return sorted(found, key=lambda saved: saved.step)


def find_checkpoint(path: Path, step: int = -1) -> Saved:
    """The checkpoint that `path` means: a step folder, a run folder or a checkpoint folder (its newest, or `step`)."""
    if (path / "manifest.json").is_file():
        return read_checkpoint(path)
    for folder in (path / "checkpoint", path):
        every = [saved for saved in list_checkpoints(folder) if step in (-1, saved.step)]
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
    """Remove all but the newest `keep` (0: keep all), never `protected` steps or the newest that can be resumed."""
    every = list_checkpoints(folder)
    kept = [saved for saved in every if saved.kind == "full"][-1:] + [s for s in every if s.step in protected]
    doomed = [saved.path for saved in every[:-keep] if saved not in kept] if keep > 0 else []
    cut_short = folder.glob("step-*.partial")  # saves that a crash ended
    for path in (*doomed, *cut_short):
        shutil.rmtree(path, ignore_errors=True)
    return doomed


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
