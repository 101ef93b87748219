"""Reads TorchTitan's checkpoints, which are folders of torch.distributed.checkpoint, tensor by tensor.

    step-1000/.metadata        a Python pickle: which tensors there are, and which file holds which part of them
    step-1000/__0_0.distcp     parts of tensors, one or more files for each rank that wrote

A pickle can run any code while it is read, so it is read only if the user trusts the folder. The parts themselves are
read by torch with `weights_only`. The format has no checksums, so a flipped bit goes unnoticed. It does not record the
architecture either, and shapes reveal neither rope_theta nor the number of heads, so the config must name the model.

The rotary embeddings of TorchTitan's Llama rotate neighbouring rows of wq and wk (2i with 2i + 1); ours and its Qwen3's
rotate rows half a head apart (i with i + D/2). Rows are put in our order while they are read:

    theirs  a0 b0 a1 b1 a2 b2 ...      ours  a0 a1 a2 ... b0 b1 b2 ...

Weights of experts (`moe.experts.w1`) have no `.weight` there, and the bias that balances them is `moe.expert_bias`.
"""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.flavors import resolve
from shardline.models.fused_weights import logical_shapes
from shardline.models.huggingface.files import shape_problems
from shardline.models.huggingface.stored import is_logical
from shardline.storage.safetensors import LazyTensors, name_of_type
from shardline.words import listed

METADATA = ".metadata"
# What a full checkpoint holds besides the model, and the rotary tables that models used to save.
_NOT_WEIGHTS = re.compile(r"(optimizer|optim|lr_scheduler|dataloader|train_state|ft_dataloader)\b.*|.*freqs_cis")


class _CachingReader(dcp.FileSystemReader):
    """Reads the metadata only once: every load asks for it again, and it is large."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


class DCPTensors(LazyTensors):
    """The weights in a folder by our names, each read when asked for; `arch` decides the order of rows."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self.folder, self.arch = folder, arch
        self._reader = _CachingReader(folder)
        self._rows = _rows(folder, self._reader)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(row.size) for name, (_, row) in self._rows.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._rows[name][1].properties.dtype

    def drop(self, name: str) -> None:
        del self._rows[name]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.stored(name)
        if self.arch.family == "llama" and re.search(r"\.attention\.w[qk]\.", name):
            return halves_from_pairs(tensor, self.arch.head_dim)
        return tensor

    def stored(self, name: str) -> Tensor:
        """Read a tensor as it is in the files."""
        key, row = self._rows[name]
        tensor = torch.empty(row.size, dtype=row.properties.dtype)
        try:
            dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException, not an Exception
            causes = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
            raise UserError(f"{self.folder}: {key} cannot be read ({'; '.join(causes)})") from error
        return tensor


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows (heads * D, ...) so that rotated pairs are i and i + D/2 instead of neighbours."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def open_dcp(folder: Path, config: Config | None) -> DCPTensors:
    """Open a trusted folder; its tensors must be those of the model that `config` names."""
    if config is None or not any(config.is_set(f"model.{key}") for key in ("name", "flavor")):
        raise UserError(
            f"{folder} does not record which model it is: name it with --model.name and --model.flavor (and"
            " --model.overrides.FIELD for what differs), or with --config FILE"
        )
    arch = resolve(config.model)
    tensors = DCPTensors(folder, arch)
    if arch.tie_word_embeddings and "output.weight" in tensors:
        if not torch.equal(tensors.stored("output.weight"), tensors.stored("tok_embeddings.weight")):
            raise UserError(
                f"{folder}: output.weight differs from tok_embeddings.weight, but the model ties them;"
                " pass --model.overrides.tie_word_embeddings=false to keep both"
            )
        tensors.drop("output.weight")
    problems = shape_problems(tensors.shapes(), logical_shapes(arch))
    if problems:
        raise UserError(f"{folder}: the tensors do not fit the model\n  " + listed(problems, 8, "\n  "))
    return tensors


def _rows(folder: Path, reader: _CachingReader) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """The weights in the metadata: our name -> the name there, and the tensor's metadata."""
    try:
        every = dict(reader.read_metadata().state_dict_metadata)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / METADATA} cannot be read ({type(error).__name__}: {error})") from error
    rows: dict[str, tuple[str, TensorStorageMetadata]] = {}
    strange = []
    for key, row in every.items():
        if _NOT_WEIGHTS.fullmatch(key):
            continue
        name = _our_name(key)
        if not isinstance(row, TensorStorageMetadata) or not is_logical(name) or name in rows:
            strange.append(key)
            continue
        _check_row(folder, key, row)
        rows[name] = (key, row)
    if strange:
        raise UserError(f"{folder} holds tensors that no supported model has: {listed(strange, 3)}")
    if not rows:
        raise UserError(
            f"{folder} holds no weights of a model (tok_embeddings.weight, layers.0.attention.wq.weight, ...)"
        )
    return rows


def _our_name(key: str) -> str:
    name = re.sub(r"(\.moe\.experts\.w[123])$", r"\1.weight", key.removeprefix("model."))
    return name.replace(".moe.expert_bias", ".moe.router.balance")


def _check_row(folder: Path, key: str, row: TensorStorageMetadata) -> None:
    """Refuse a tensor with missing parts: their elements would be left uninitialised."""
    held = sum(math.prod(chunk.sizes) for chunk in row.chunks)
    if held != math.prod(row.size):
        raise UserError(f"{folder}: {key} has {math.prod(row.size)} elements, its parts {held}: it was not saved whole")
    if name_of_type(row.properties.dtype) is None:
        raise UserError(f"{folder}: {key} has type {row.properties.dtype}, which is not supported")
