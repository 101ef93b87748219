"""Whole tensors of a model whose parameters may be shards, under their own or their logical names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardline.comm.collectives import gather_rows
from shardline.comm.job import job
from shardline.config.architecture import Architecture
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, shard_slices
from shardline.models.fused_weights import unfuse
from shardline.models.huggingface.config import export_family
from shardline.models.huggingface.files import stored_entries
from shardline.storage.safetensors import Entry


def logical_state(model: Decoder) -> dict[str, Tensor]:
    """Every parameter, detached and unfused. Parts of fused weights are copies, the rest share the model's memory."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for part, tensor in unfuse(model.arch, name, whole(parameter.detach())).items():
            state[part] = tensor if part == name else _own(tensor)
    return state


def hf_state(arch: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logical tensors as a Hugging Face folder stores them."""
    entries = [Entry(name, tuple(each.shape), each.dtype, lambda each=each: each) for name, each in state.items()]
    found = {}
    for entry in stored_entries(entries, arch, export_family(arch)):
        read = entry.read()
        tensor = read if isinstance(read, Tensor) else torch.cat(list(read))
        found[entry.name] = tensor.reshape(entry.shape)
    return found


def _own(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: with a single KV head a part is a view of the fused weight."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def whole(tensor: Any) -> Tensor:
    """All of a tensor, shared memory or a copy; every rank of its mesh must call this.

    DTensor's own `full_tensor` crashes the process where gloo carries tensors of a GPU (torch 2.11), and its
    collectives are neither counted nor watched.
    """
    if not hasattr(tensor, "placements"):
        plain: Tensor = tensor
        return plain
    shard, mesh = tensor.to_local(), tensor.device_mesh
    cut = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(i) > 1]
    if not cut:
        return local(tensor)
    largest = math.prod(_sizes(shard_slices(tensor, [0] * mesh.ndim)))  # rank 0 never holds less than another
    shards = shard.new_empty(largest)
    shards[: shard.numel()] = shard.flatten()
    for i in cut:
        group = mesh.get_group(i)
        shards = gather_rows(shards, next(over.name for over in job.axes.values() if over.group is group))
    full = shard.new_empty(tensor.shape)
    # Gathered over the last dimension last: its coordinate counts slowest
    for at, values in zip(np.ndindex(*(mesh.size(i) for i in reversed(cut))), shards.view(-1, largest), strict=True):
        coordinates = [0] * mesh.ndim
        for i, coordinate in zip(reversed(cut), at, strict=True):
            coordinates[i] = coordinate
        place = shard_slices(tensor, coordinates)
        full[place] = values[: math.prod(_sizes(place))].view(_sizes(place))
    return full


def _sizes(place: tuple[slice, ...]) -> list[int]:
    return [part.stop - part.start for part in place]
