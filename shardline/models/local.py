"""A parameter may be a DTensor, of which this rank holds a part: reading that part, and filling it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: itself, or the local part of a DTensor."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def local_or_none(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local(parameter)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank of its mesh must ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Fill a parameter, or the part of it that this rank holds, from the whole tensor's values."""
    with torch.no_grad():
        local(parameter).copy_(values[local_slices(parameter)] if hasattr(parameter, "placements") else values)


def local_slices(parameter: Any) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's part lies."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
