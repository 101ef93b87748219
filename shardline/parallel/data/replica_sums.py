"""Compresses HSDP's sums between replicas: the shards of one FSDP module are treated like a bucket of DDP.

    backward of block 3   gather | compute | reduce-scatter inside a replica | sum of the shards between replicas
                                             fast link, in full                slow link, compressed

FSDP sums between replicas with `dist.all_reduce` over its own process group. `CompressedSums` replaces that group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardline.comm.job import job
from shardline.config.schema import Config
from shardline.models.dtensor import local
from shardline.parallel.data.compression import unflatten
from shardline.parallel.data.ddp import LeftOut, exchange_of
from shardline.parallel.data.error_feedback import FeedbackExchange
from shardline.precision.mixed import DTYPES

BETWEEN_SHARDS = ("bfloat16", "int8", "topk")  # values of parallelism.gradient_compression that HSDP supports


class CompressedSums(dist.ProcessGroup):
    """Replaces the process group of an FSDP module's replicas; its only collective is the sum of gradients."""

    def __init__(self, group: Any, config: Config, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.group, self.config = group, config

    @functools.cached_property
    def trained(self) -> list[Any]:
        """FSDP's records of the parameters with gradients, in the order of their shards in a sum."""
        return [one for one in self.group.fsdp_params if one.sharded_param.requires_grad]

    @functools.cached_property
    def exchange(self) -> Any:
        shapes = [torch.Size((one.padded_sharded_param_size.numel(),)) for one in self.trained]
        section = self.config.parallelism
        made = exchange_of([], shapes, section, DTYPES[self.config.training.mixed_precision_reduce])
        made.timed = False  # FSDP's hook measures how long the step waits
        return made

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> None:  # type: ignore[override]
        (flat,) = tensors
        sizes = self.exchange.shapes
        if flat.numel() != sum(size.numel() for size in sizes):
            raise RuntimeError(
                f"a sum between replicas has {flat.numel()} elements, expected {sum(size.numel() for size in sizes)}:"
                " a trained parameter has no gradient, and parallelism.gradient_compression needs all of them"
            )
        self.exchange.start(unflatten(flat, sizes), flat.device)
        flat.copy_(torch.cat(self.exchange.finish()))

    def left_out(self, names: dict[int, str]) -> Iterator[LeftOut]:
        """The errors of this module's shards; padding has none."""
        if isinstance(self.exchange, FeedbackExchange):
            for one, error in zip(self.trained, self.exchange.memories(self.group.device), strict=True):
                parameter, shape = one.sharded_param, local(one.sharded_param).shape
                yield LeftOut(names[id(parameter)], parameter, error[: shape.numel()].view(shape), None)


def compress_sums(model: nn.Module, config: Config) -> None:
    """Make replicas exchange the gradients of FSDP's modules as `parallelism.gradient_compression` says."""
    wanted = dist.get_process_group_ranks(job.axes["dp_replicate"].group)
    for group in _parameter_groups(model):
        inner = group.mesh_info.replicate_process_group
        if dist.get_process_group_ranks(inner) != wanted:
            raise RuntimeError("FSDP sums over different replicas than those of the mesh")
        group.mesh_info.replicate_process_group = CompressedSums(group, config, inner)


def compressed_sums(model: nn.Module) -> Iterator[CompressedSums]:
    for group in _parameter_groups(model):
        inner = getattr(group.mesh_info, "replicate_process_group", None)
        if isinstance(inner, CompressedSums):
            yield inner


def left_out_of_shards(model: nn.Module) -> Iterator[LeftOut]:
    """Yield what HSDP has left out of the sums so far; weights must be sharded, not gathered."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for sums in compressed_sums(model):
        yield from sums.left_out(names)


def _parameter_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group  # private to torch: FSDP offers no hook instead of a sum
            if group is not None:
                yield group
