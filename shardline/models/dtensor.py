"""A parameter may be a DTensor, of which this rank holds a part: reading that part, and filling it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def gather_over_group(x: Tensor, group: Any) -> Tensor:
    """The values x of all ranks of a group, one rank's after the other's; whoever owns the groups puts itself here."""
    raise RuntimeError(
        "a tensor is shared between ranks, but nobody gathers: shardline.comm.collectives is not imported"
    )


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: itself, or the local part of a DTensor."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def local_waiting(parameter: Tensor) -> Tensor:
    """The same for weights whose gradients may wait: backward without a gradient leaves none behind.

    DTensor's own would add zeros of the weight's size instead.
    """
    if not hasattr(parameter, "to_local"):
        return parameter
    part: Tensor = _Part.apply(parameter)
    return part


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        part: Tensor = parameter.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = ctx.layout
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Any) -> Tensor:
    """All of a tensor, shared memory or a copy; every rank of its mesh must ask for it.

    DTensor's own `full_tensor` crashes the process where gloo carries tensors of a GPU (torch 2.11), and its
    collectives are neither counted nor watched.
    """
    if not hasattr(tensor, "placements"):
        plain: Tensor = tensor
        return plain
    part, mesh = tensor.to_local(), tensor.device_mesh
    cut = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(i) > 1]
    if not cut:
        return local(tensor)
    largest = math.prod(_place(tensor, [0] * mesh.ndim)[0])  # rank 0 never holds less than another
    parts = part.new_empty(largest)
    parts[: part.numel()] = part.flatten()
    for i in cut:
        parts = gather_over_group(parts, mesh.get_group(i))
    full = part.new_empty(tensor.shape)
    # Gathered over the last dimension last: its coordinate counts slowest
    for at, piece in zip(np.ndindex(*(mesh.size(i) for i in reversed(cut))), parts.view(-1, largest), strict=True):
        coordinates = [0] * mesh.ndim
        for i, coordinate in zip(reversed(cut), at, strict=True):
            coordinates[i] = coordinate
        sizes, offsets = _place(tensor, coordinates)
        target = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        full[target] = piece[: math.prod(sizes)].view(sizes)
    return full


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Fill a parameter, or the shard of it that this rank holds, from the whole tensor's values."""
    with torch.no_grad():
        local(parameter).copy_(values[local_slices(parameter)])


def local_slices(parameter: Any) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's shard lies: all of it where it is no DTensor."""
    if not hasattr(parameter, "placements"):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = _place(parameter, parameter.device_mesh.get_coordinate())
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _place(tensor: Any, coordinates: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of the part that the rank at these coordinates of the tensor's mesh holds."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, offsets = _compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh.shape, coordinates, tensor.placements
    )
    return tuple(sizes), tuple(offsets)
