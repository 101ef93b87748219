"""LAMB and LARS: Adam and SGD with the step of each layer scaled in proportion to the norm of its weights.

    LAMB  u = m / (sqrt(v) + eps) + decay w        w -= lr |w| / |u| u                 (You et al. 2020, algorithm 2)
    LARS  b = momentum b + lr r (g + decay w)      w -= b                              (You et al. 2017, algorithm 1)
          r = c |w| / (|g| + decay |w|)

m and v are Adam's bias-corrected moments; c is `optimizer.trust_coefficient`, momentum is `optimizer.beta1`. If a
norm is 0, the ratio is 1. Norm weights and biases (1-D) take the plain step, without decay, as published.

A layer is a logical weight: wq, wk and wv each have a ratio although they are rows of one fused parameter, and the
experts of a layer share one for each of their three matrices. Norms are over the full weight, however it is sharded:
all of them together cost one small all-reduce per step, and one more for each axis that shards experts.

The gradients are overwritten with the update, so that no additional memory of the model's size is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardline.comm.collectives import sum_over_group
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import is_halved, logical_rows
from shardline.optim.clip import shards
from shardline.optim.narrow_adam import adam_state
from shardline.optim.norms import squared_row_sums, squared_sums


def fused_parts(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Every fused matrix of a `Decoder`: (parts, local rows) float32, 1 if a row of this rank belongs to the part."""
    found: dict[nn.Parameter, Tensor] = {}
    arch: Any = getattr(model, "arch", None)
    for name, parameter in model.named_parameters() if arch is not None else ():
        if is_halved(name):  # (experts, 2, ...): gate and up alternate
            found[parameter] = torch.eye(2, device=parameter.device).repeat(1, len(local(parameter)))
            continue
        rows = local_slices(parameter)[0]
        pieces = logical_rows(arch, name, parameter.shape[0], rows)
        if parameter.ndim > 1 and len(pieces) > 1:
            member = torch.zeros(len(pieces), rows.stop - rows.start, device="cpu")
            for row, piece in zip(member, pieces, strict=True):
                row[piece.places] = 1
            found[parameter] = member.to(parameter.device)
    return found


def whole_norms(tensors: Sequence[Tensor], parts: Sequence[Tensor | None] | None = None) -> Tensor:
    """L2 norms of full tensors, sharded or not, float32: one per tensor, or one per part if `parts` has an entry.

    Every rank of a DTensor's mesh calls this with the same list.
    """
    sums = whole_sums(
        _local_squared_sums([local(tensor) for tensor in tensors], parts or [None] * len(tensors)), tensors
    )
    return torch.cat(sums).sqrt() if sums else torch.zeros(0)


def whole_sums(sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Turn sums over this rank's shards into sums over full tensors; every sum is a vector.

    All tensors whose mesh includes every rank share one all-reduce; others take one per mesh dimension that shards any
    of them.
    """
    sums = list(sums)
    sharded = [index for index, tensor in enumerate(tensors) if _copies(tensor) < _mesh_size(tensor)]
    ranks = dist.get_world_size() if sharded else 1
    everywhere = [index for index in sharded if _mesh_size(tensors[index]) == ranks]
    if everywhere:
        scales = [1 / _copies(tensors[index]) for index in everywhere]
        _sum_over(None, _mesh(tensors[everywhere[0]]), sums, everywhere, scales)
    for mesh in dict.fromkeys(_mesh(tensors[index]) for index in sharded if index not in set(everywhere)):
        of_mesh = [index for index in sharded if _mesh(tensors[index]) == mesh]
        for dimension in range(mesh.ndim):
            placements = [tensors[index].placements[dimension] for index in of_mesh]  # type: ignore[attr-defined]
            copied = [placement.is_replicate() for placement in placements]
            if not all(copied):
                scales = [1 / mesh.size(dimension) if is_copied else 1.0 for is_copied in copied]
                _sum_over(mesh.get_group(dimension), mesh, sums, of_mesh, scales)
    return sums


def sums_along(sums: Sequence[Tensor], tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Turn sums along one dimension of this rank's shards into sums along that dimension of the full tensors.

    Every mesh dimension that shards some tensor along its dimension takes one all-reduce.
    """
    sums = list(sums)
    for mesh in dict.fromkeys(_mesh(tensor) for tensor in tensors if isinstance(tensor, DTensor)):
        for dimension in range(mesh.ndim):
            chosen = [
                index
                for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True))
                if isinstance(tensor, DTensor) and _mesh(tensor) == mesh and cuts(tensor, dimension, dim)
            ]
            if chosen and mesh.size(dimension) > 1:
                _sum_over(mesh.get_group(dimension), mesh, sums, chosen, [1.0] * len(chosen))
    return sums


def cuts(tensor: DTensor, mesh_dimension: int, dim: int) -> bool:
    """Whether a mesh dimension shards the tensor along `dim`."""
    placement: Any = tensor.placements[mesh_dimension]
    return isinstance(placement, Shard | _StridedShard) and placement.dim % tensor.ndim == dim % tensor.ndim


def _local_squared_sums(tensors: list[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor]:
    """One vector per tensor: (1,), or (parts,) for a fused weight."""
    sums = iter(squared_sums([tensor for tensor, part in zip(tensors, parts, strict=True) if part is None]))
    return [
        next(sums).reshape(1) if part is None else (part * squared_row_sums(_rows(tensor, part).flatten(1))).sum(1)
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def _rows(tensor: Tensor, part: Tensor) -> Tensor:
    """The tensor with its rows first; a row of fused experts is the gate or up projection of one expert."""
    return tensor if part.shape[1] == tensor.shape[0] else tensor.flatten(0, 1)


def _sum_over(
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh,
    sums: list[Tensor],
    chosen: list[int],
    scales: list[float],
) -> None:
    """Replace the chosen sums by their sums over the group, in one collective; `scales` make copies count once."""
    scaled = torch._foreach_mul([sums[index] for index in chosen], scales)
    flat = torch.cat([part.flatten() for part in scaled])
    flat = sum_over_group(flat.to(mesh.device_type), group).to(flat.device)  # a group works on its own device
    for index, values in zip(chosen, flat.split([part.numel() for part in scaled]), strict=True):
        sums[index] = values.view_as(sums[index])


def _copies(tensor: Tensor) -> int:
    """How many ranks of the tensor's mesh hold the same shard of it."""
    return _mesh_size(tensor) // shards(tensor)


def _mesh(tensor: Tensor) -> DeviceMesh:
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh


def _mesh_size(tensor: Tensor) -> int:
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


class _Layerwise(torch.optim.Optimizer):
    """What LAMB and LARS share: lists of local tensors per group, and one round of norms for all of them."""

    def __init__(
        self, groups: list[dict[str, Any]], options: dict[str, Any], parts: Mapping[nn.Parameter, Tensor]
    ) -> None:
        super().__init__(groups, options)
        self.parts = parts

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        raise NotImplementedError

    def _local_lists(self, group: dict[str, Any]) -> tuple[list[nn.Parameter], list[Tensor], list[Tensor]]:
        """Parameters with a gradient, and the local parts of both; creates their state if there is none."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.initial_state(parameter)
        return parameters, [local(p.detach()) for p in parameters], [local(p.grad) for p in parameters]

    def _states(self, parameters: list[nn.Parameter], kind: str) -> list[Tensor]:
        return [local(self.state[parameter][kind]) for parameter in parameters]

    def _norms(self, parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """Norms of the weights, and of what their gradients currently contain, one per logical weight."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [self.parts.get(parameter) for parameter in parameters]
        weights, updates = whole_norms([*parameters, *gradients], parts * 2).chunk(2)
        return weights, updates

    def _multiply(self, parameters: list[nn.Parameter], ratios: Tensor) -> None:
        """Multiply each gradient by its ratio, and each part of a fused gradient by its own."""
        parts = [self.parts.get(parameter) for parameter in parameters]
        pieces = ratios.split([1 if part is None else len(part) for part in parts])
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        rows = [
            gradient if part is None else _rows(gradient, part)  # a view
            for gradient, part in zip(gradients, parts, strict=True)
        ]
        factors = [
            # a product with 0 and 1 does not round
            piece if part is None else (part * piece[:, None]).sum(0).view(-1, *[1] * (row.ndim - 1))
            for piece, part, row in zip(pieces, parts, rows, strict=True)
        ]
        torch._foreach_mul_(rows, factors)


class Lamb(_Layerwise):
    """Groups with `adapt` use trust ratios; the others step like Adam."""

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return adam_state(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        adapted: list[nn.Parameter] = []
        for group in self.param_groups:
            parameters = self._write_updates(group)
            adapted += parameters if group["adapt"] else []
        if adapted:
            weights, updates = self._norms(adapted)
            one = torch.ones_like(weights)
            self._multiply(adapted, torch.where((weights > 0) & (updates > 0), weights / updates, one))
        for group in self.param_groups:
            _, weights_, updates_ = self._local_lists(group)
            if weights_:
                torch._foreach_add_(weights_, updates_, alpha=-group["lr"])

    def _write_updates(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """Advance the moments, and overwrite the gradients with m / (sqrt(v) + eps) + decay w."""
        parameters, weights, gradients = self._local_lists(group)
        if not parameters:
            return parameters
        first, second = self._states(parameters, "exp_avg"), self._states(parameters, "exp_avg_sq")
        (beta1, beta2), steps = group["betas"], self._states(parameters, "step")
        torch._foreach_add_(steps, 1)
        counts = [int(step.item()) for step in steps]  # they are on the CPU: no wait
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_copy_(gradients, second)
        torch._foreach_sqrt_(gradients)
        torch._foreach_div_(gradients, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(gradients, group["eps"])
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, first)
        torch._foreach_div_(gradients, [1 - beta1**count for count in counts])
        if group["weight_decay"]:
            torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])
        return parameters


class Lars(_Layerwise):
    """Groups with `adapt` use trust ratios; the others step like SGD with momentum."""

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, weights, updates = self._local_lists(group)
            if not parameters:
                continue
            if group["adapt"]:
                self._adapt(group, parameters, weights, updates)
            momentum = self._states(parameters, "momentum_buffer")
            torch._foreach_mul_(momentum, group["momentum"])
            torch._foreach_add_(momentum, updates, alpha=group["lr"])
            torch._foreach_sub_(weights, momentum)

    def _adapt(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Overwrite the gradients with r (g + decay w)."""
        decay = group["weight_decay"]
        of_weights, of_gradients = self._norms(parameters)
        ratios = group["trust_coefficient"] * of_weights / (of_gradients + decay * of_weights)
        if decay:
            torch._foreach_add_(gradients, weights, alpha=decay)
        one = torch.ones_like(ratios)
        self._multiply(parameters, torch.where((of_weights > 0) & (of_gradients > 0), ratios, one))
