"""Gradient norm and clipping, over all parameters on all ranks.

Each rank adds up the squares of its shards, divided by the number of ranks that hold the same shard; the sum over all
ranks is then the squared norm, for any layout. `squared_norm` returns that local sum; the step all-reduces it together
with its other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardline.comm import collectives
from shardline.models.dtensor import local
from shardline.optim.norms import squared_sums


def squared_norm(
    parameters: Iterable[nn.Parameter], ranks: int = 1, twice: Collection[nn.Parameter] = frozenset()
) -> Tensor:
    """This rank's share of the squared norm of all gradients, a 0-d float32 tensor; does not wait for the device.

    `ranks` is the number of ranks that hold a parameter or a shard of it: all ranks, or those of a pipeline stage.
    Parameters in `twice` are on two stages.
    """
    held = [(local(p.grad), (1 + (p in twice)) * ranks / shards(p)) for p in parameters if p.grad is not None]
    if not held:
        return torch.zeros(())
    squares = squared_sums([gradient for gradient, _ in held])
    if ranks == 1 and not twice:
        return squares.sum()
    copies = torch.tensor([copies for _, copies in held], dtype=squares.dtype)
    return (squares / copies.to(squares.device, non_blocking=True)).sum()


def shards(parameter: Tensor) -> int:
    """The number of different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    cut = [isinstance(placement, Shard | _StridedShard) for placement in parameter.placements]
    return math.prod(size for size, is_cut in zip(parameter.device_mesh.shape, cut, strict=True) if is_cut)


def clipping_factor(norm: float, max_norm: float) -> float:
    """The factor that scales gradients of this norm down to max_norm; a max_norm of 0 or less, or inf, is no limit."""
    return max_norm / (norm + 1e-6) if 0 < max_norm < min(norm + 1e-6, math.inf) else 1.0


def clip_(parameters: Iterable[nn.Parameter], norm: float, max_norm: float, scale: float = 1.0) -> None:
    """Scale the gradients so that their norm is at most `max_norm`; 0 or less, or inf, is no limit.

    They are also divided by `scale`, by which the loss was multiplied; `norm` does not include it.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    factor = clipping_factor(norm, max_norm) / scale
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def nonfinite_parameters(model: nn.Module, of_gradients: bool = True) -> list[str]:
    """Names of the parameters whose gradient (or value) holds an inf or nan on any rank; waits for the device.

    Every rank must call it; it follows a norm that is not finite, which all of them see.
    """
    tensors = {name: p.grad if of_gradients else p for name, p in model.named_parameters()}
    held = {name: local(tensor) for name, tensor in tensors.items() if tensor is not None}
    names = [name for name, tensor in held.items() if not torch.isfinite(tensor).all()]
    if collectives.axis_size("world") == 1:
        return names
    everyone: list[list[str]] = [[] for _ in range(collectives.axis_size("world"))]
    dist.all_gather_object(everyone, names)  # pipeline ranks hold different parameters
    return list(dict.fromkeys(name for names in everyone for name in names))
