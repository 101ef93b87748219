"""Helpers for parameters that may be DTensors: this rank's shard, and its place in the whole tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other parameter itself."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard


def local_waiting(parameter: Tensor) -> Tensor:
    """`local` for weights whose gradients may be computed later: a backward pass that skips them adds nothing.

    DTensor's own `to_local` would add zeros of the weight's size instead.
    """
    if not hasattr(parameter, "to_local"):
        return parameter
    shard: Tensor = _Local.apply(parameter)
    return shard


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        shard: Tensor = parameter.to_local()
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = ctx.layout
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_slices(parameter: Any) -> tuple[slice, ...]:
    """The place of this rank's shard in the whole tensor; all of a tensor that is no DTensor."""
    if not hasattr(parameter, "placements"):
        return tuple(slice(0, size) for size in parameter.shape)
    return shard_slices(parameter, parameter.device_mesh.get_coordinate())


def shard_slices(tensor: Any, coordinates: list[int]) -> tuple[slice, ...]:
    """The place of the shard that the rank at these coordinates of the tensor's mesh holds."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, offsets = _compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh.shape, coordinates, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
