"""An adapter on disk with all that belongs to it: a checkpoint of a run with LoRA, or a folder in `peft`'s format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.adapters.lora import Adaptation
from shardline.adapters.merge import MergedTensors
from shardline.adapters.peft_files import is_adapter, open_peft, read_config
from shardline.checkpoint.assets import tokenizer_of_checkpoint
from shardline.checkpoint.format import MANIFEST, Saved, find_checkpoint
from shardline.checkpoint.lora.base import Base, find_base, hf_base, recorded_adaptation
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.added_rows import read_hf_enlarged
from shardline.models.fused_weights import embedding_name, logical_shapes
from shardline.models.huggingface.config import architecture_from_hf
from shardline.models.init import draw_tensor, initial_std
from shardline.storage.safetensors import LazyTensors


class Adapter(NamedTuple):
    """What was trained (`tensors`, by logical names), and the frozen weights it was trained beside."""

    how: Adaptation
    tensors: Mapping[str, Tensor]
    architecture: Architecture
    base: Base
    tokenizer: str
    step: int

    def frozen(self) -> LazyTensors:
        return base_tensors(self.base, self.architecture)

    def merged(self) -> tuple[MergedTensors, Architecture]:
        """The model with its adapter merged in. An adapted embedding can no longer be tied to the output layer."""
        arch = self.architecture
        if arch.tie_word_embeddings and embedding_name(arch) in self.how.targets:
            arch = _untied(arch)
        return MergedTensors(self.frozen(), self.tensors, self.how, self.architecture), arch


def _untied(arch: Architecture) -> Architecture:
    """The same model with an output layer of its own."""
    if arch.foreign is None:
        return arch.model_copy(update={"tie_word_embeddings": False})
    from shardline.models.huggingface.foreign_config import foreign_architecture

    found = foreign_architecture(arch.foreign.config, {"tie_word_embeddings": False})
    if f"{arch.foreign.output}.weight" not in logical_shapes(found):
        kind = arch.foreign.config["model_type"]
        raise UserError(f"--merge: the output layer of a {kind} model cannot have a weight of its own")
    return found


def find_adapter(path: Path, base: str | None) -> Adapter | None:
    """Return the adapter at `path`, or None for a whole model; `base` is where its frozen weights are now."""
    if is_adapter(path) and not (path / MANIFEST).is_file():
        return _of_folder(path, base)
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        found = None
    else:
        found = find_checkpoint(path)
    how = None if found is None else recorded_adaptation(found)
    if found is None or how is None:
        if base is not None:
            raise UserError(f"--base is for adapters: {path} holds a whole model")
        return None
    return _of_checkpoint(found, how, base)


def _of_checkpoint(saved: Saved, how: Adaptation, given: str | None) -> Adapter:
    saved.verify() if saved.is_hf else None
    tensors = open_peft(saved.path, saved.architecture)[1] if saved.is_hf else saved.tensors("model/")
    base = find_base(saved, given)
    return Adapter(how, tensors, saved.architecture, base, tokenizer_of_checkpoint(saved), saved.step)


def _of_folder(path: Path, given: str | None) -> Adapter:
    named = given or read_config(path).get("base_model_name_or_path")
    if not named or not (Path(named) / "config.json").is_file():
        raise UserError(f"{path} is an adapter of {named!r}, which is not a folder here: pass --base=FOLDER")
    arch = architecture_from_hf(Path(named))
    how, tensors = open_peft(path, arch)
    tokenizer = path if (path / "tokenizer.json").is_file() else named
    return Adapter(how, tensors, arch, hf_base(Path(named)), str(tokenizer), 0)


def base_tensors(base: Base, arch: Architecture) -> LazyTensors:
    """Frozen weights, each read or drawn when it is asked for."""
    if base.kind == "seed":
        return DrawnTensors(arch, base.seed)
    return read_hf_enlarged(Path(base.path), arch) if base.kind == "hf" else find_checkpoint(Path(base.path)).weights()


class DrawnTensors(LazyTensors):
    """The random weights with which a run starts that loads none."""

    def __init__(self, arch: Architecture, seed: int) -> None:
        self.arch, self.seed, self.constants = arch, seed, dict[str, Tensor]()
        self._rows = logical_shapes(arch)
        if arch.foreign is not None:
            from shardline.models.huggingface.foreign import ForeignDecoder

            self.constants = ForeignDecoder(arch).constants

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def __getitem__(self, name: str) -> Tensor:
        if name in self.constants:
            return self.constants[name]
        shape, std = self._rows[name], initial_std(self.arch, name)
        if std is None:
            return torch.full(shape, 1.0 if name.endswith("norm.weight") else 0.0)
        return draw_tensor(self.seed, name, shape, std)
