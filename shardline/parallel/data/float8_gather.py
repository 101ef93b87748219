"""FSDP all-gathers weights in float8: half the bytes, for the products that round them to float8 anyway.

    shard (N / r, K) -> float8 and a factor  ==all-gather==>  (N, K) in float8, r factors -> (N, K), rounded

The product rounds the gathered weight again, which changes nothing: factors are powers of two, so its numbers are
already float8 numbers. Either each shard has its own factor, which is gathered with it, or all shards of a weight share
one; then one all-reduce before each step finds the factors of all weights.

FSDP calls two functions of a shard around its all-gather, if the shard has them. They are private to FSDP and used only
in this file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardline.comm import collectives
from shardline.models.decoder import Decoder
from shardline.precision.float8 import E4M3, LARGEST, power_of_two_below


class Shard8:
    """This rank's shard of one weight."""

    def __init__(self, shard: Tensor) -> None:
        self.shard = shard
        self.scale: Tensor | None = None  # the factor of all shards of the weight, if they share one
        self.whole: Tensor | None = None  # FSDP frees and allocates its memory

    def largest(self) -> Tensor:
        return self.shard.abs().amax().float().view(1)

    def before(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors that FSDP gathers."""
        narrow = self.shard.to(policy.param_dtype or self.shard.dtype)
        scale = power_of_two_below(narrow.abs().amax().view(1)) if self.scale is None else self.scale
        data = (narrow.float() * scale).clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
        return (data.view(torch.uint8), scale.reciprocal()), None

    def after(
        self, gathered: tuple[Tensor, ...], about: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the weight, in memory that FSDP frees with the gathered tensors; with `out`, refill that memory."""
        data, factors = gathered
        shards = data.view(E4M3).view(factors.shape[0], -1, data.shape[1]).to(dtype)
        whole = (shards * factors.view(-1, 1, 1).to(dtype)).view(data.shape)
        if out is None:
            self.whole = whole
            return whole, (whole,)
        assert self.whole is not None
        with torch.autograd._unsafe_preserve_version_counter(self.whole):  # backward sees the same numbers as forward
            self.whole.copy_(whole)
        return None


class Float8Gather:
    """The shards of all weights that are gathered in float8; `names` are the names of their modules."""

    def __init__(self, model: Decoder, names: Collection[str], shared_factors: bool) -> None:
        wanted = {model.get_submodule(name) for name in names}
        self.shards = [found for parameter in _sharded(model) if (found := _attach(parameter, wanted)) is not None]
        self.shared_factors = shared_factors

    def __len__(self) -> int:
        return len(self.shards)

    def prepare(self) -> None:
        """Call before passes with changed weights: finds the factors that shards share."""
        if not self.shared_factors or not self.shards:
            return
        largest = collectives.max_in_place(torch.cat([shard.largest() for shard in self.shards]), "fsdp")
        for shard, scale in zip(self.shards, power_of_two_below(largest).split(1), strict=True):
            shard.scale = scale


def _sharded(model: nn.Module) -> list[Any]:
    """Return FSDP's records of all parameters; later versions have several groups in a module."""
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _attach(parameter: Any, wanted: set[nn.Module]) -> Shard8 | None:
    """Make FSDP gather a weight in float8, if it is wanted and its shards are equally large."""
    about, shard = parameter._module_info, parameter._sharded_local_tensor
    if about.module not in wanted or about.param_name != "weight":
        return None
    ranks = parameter.mesh_info.shard_mesh_size
    if parameter.fsdp_placement.dim != 0 or parameter._orig_size[0] % ranks:  # equal on all ranks, unlike their shards
        return None
    found = Shard8(shard)
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = found.before, found.after
    parameter._init_extensions()
    return found
