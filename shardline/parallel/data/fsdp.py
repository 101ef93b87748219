"""Data parallelism: ranks read different samples and sum their gradients.

    FSDP (dp_shard)            parameters, gradients and optimizer state are sharded over the ranks; a block's weights
                               are all-gathered just before it runs, its gradients reduce-scattered after its backward
    DDP (dp_replicate alone)   every rank holds everything; gradients are summed in buckets while backward runs
                               (ddp.py)
    HSDP (both)                FSDP inside a group; gradients are also summed between groups

Gradients are summed, never averaged: the loss is already divided by the targets of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from shardline.comm import collectives
from shardline.comm.exposed_time import StreamWaits, can_watch_streams, exposed, mark
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import Observed, Started, described, runs_on_host
from shardline.comm.spans import now
from shardline.config.schema import Config, Parallelism
from shardline.models.decoder import Block, Decoder
from shardline.parallel.data.replica_sums import BETWEEN_SHARDS, compress_sums
from shardline.precision.mixed import Precision

ENTRY_METHODS = ("hidden",)  # methods of the model that start a forward


def apply_fsdp(model: Decoder, mesh: Mesh, config: Config, precision: Precision) -> None:
    """Shard each block, then the rest of the model, over dp_shard x cp; replicate over dp_replicate."""
    dp = mesh.joined("dp_replicate", "fsdp")
    assert dp is not None
    # Quantized codes and their factors must be gathered unchanged; the few trained parameters are cast at each use.
    in_codes = any(".stored." in name for name, _ in model.named_parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.compute != precision.storage and not in_codes else None,
        reduce_dtype=precision.reduce,
        cast_forward_inputs=False,  # rotary tables stay float32
    )
    on_gpu = dp.device_type == "cuda"
    # Copies between page-locked memory and a GPU overlap with computation; without a GPU there is no such memory.
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if config.training.enable_cpu_offload else OffloadPolicy()
    freed = config.parallelism.fsdp_reshard_after_forward
    one_stage = config.parallelism.pipeline_parallel_degree == 1  # in a pipeline every micro-batch needs the weights
    reshard = one_stage if freed == "default" else freed == "always"
    whole = model.whole_parameters()
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    for block in model.blocks():
        if block.moe is not None and mesh.layout.ep > 1:  # the experts are sharded over different ranks than the rest
            rest = block.without_experts()
            fully_shard(rest, mesh=dp, reshard_after_forward=reshard, ignored_params=whole, **options)
            ranks, experts = mesh.of_experts("replicas", "expert_shard"), block.moe.spec.n_experts // mesh.layout.ep
            cut = functools.partial(_expert_cut, mesh.layout.expert_shard, experts)
            others = whole | set(rest.parameters())
            of_experts: dict[str, Any] = {"mesh": ranks, "shard_placement_fn": cut, "ignored_params": others}
            fully_shard(block, reshard_after_forward=reshard, **of_experts, **options)
        else:
            fully_shard(block.module, mesh=dp, reshard_after_forward=reshard, ignored_params=whole, **options)
    # The root's modules (embedding, norm, head) are used first and last: freeing them in between gains nothing.
    fully_shard(model, mesh=dp, reshard_after_forward=False, ignored_params=whole, **options)
    for name in ENTRY_METHODS:
        register_fsdp_forward_method(model, name)
    native = model.arch.foreign is None  # the hooks of `StreamWaits` know the inputs and outputs of native blocks only
    waits = StreamWaits() if on_gpu and dp.size() > 1 and can_watch_streams() and native else None
    exposed.measured = waits is not None or not on_gpu
    replicated = mesh.axis("dp_replicate") is not None and not mesh.apart
    compression = config.parallelism.gradient_compression
    compressed = replicated and compression in BETWEEN_SHARDS
    use_counted_collectives(model, waits, replicated, compressed)
    if compressed:
        compress_sums(model, config)
    _prefetch(model, config.parallelism.fsdp_prefetch)


def _expert_cut(ranks: int, experts: int, parameter: nn.Parameter) -> Shard | None:
    """Return how FSDP shards experts: None for whole experts, or along `dim` if there are fewer experts than ranks.

    In the latter case biases, which are small, go to the first ranks; those of gate and up are (experts, 2, width).
    """
    if experts >= ranks or parameter.ndim < 3 or parameter.shape[1:-1] == (2,):
        return None
    dim = 3 if parameter.ndim == 4 else 1
    return Shard(dim) if parameter.shape[dim] % ranks == 0 else None  # only whole experts can be shared out unevenly


def use_counted_collectives(
    model: Decoder, waits: StreamWaits | None, replicated: bool, compressed: bool = False
) -> None:
    """Make FSDP sum instead of average, through counted collectives. FSDP has these settings in every module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # before the factor: only NCCL can do other reductions
            module.set_gradient_divide_factor(1.0)
            axis = "expert_shard" if getattr(module, "rest", None) is not None else "fsdp"
            scatter = CountedScatter(waits, is_last=module is model, axis=axis)
            scatter.counts_sums = not compressed
            module.set_custom_all_gather(CountedGather(waits, module, axis))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
            if replicated:
                module.set_all_reduce_hook(scatter.all_reduced)
    if waits is not None:
        waits.watch(model, model.blocks(), ENTRY_METHODS)


def _prefetch(model: Decoder, depth: int) -> None:
    """Prefetch the weights of the next `depth` blocks while one computes; 0 leaves this to FSDP (only in backward).

    With several stages, each is its own chain, and the root, with which all of them start, prefetches nothing.
    """
    if depth == 0:
        return
    for stage in model.stages:
        blocks = [sharded_modules(model.block(layer)) for layer in stage.layers]
        chain = [[cast(FSDPModule, model)], *blocks] if len(model.stages) == 1 else blocks
        for index, modules in enumerate(chain):
            is_root = index == 0 and len(model.stages) == 1
            before = chain[1:] if is_root else chain[len(chain) - len(blocks) : index]  # backward starts with the root
            modules[0].set_modules_to_forward_prefetch(list(itertools.chain(*chain[index + 1 : index + 1 + depth])))
            modules[0].set_modules_to_backward_prefetch(list(itertools.chain(*before[::-1][:depth])))


def sharded_modules(block: Block) -> list[FSDPModule]:
    """Return the FSDP modules of a block: two if its experts are sharded separately, else one."""
    return [cast(FSDPModule, module) for module in (block.module, block.rest) if module is not None]


class _Allocate:
    axis: str

    def _observed(self, what: str, x: Tensor, each: int, background: bool = False) -> Observed:
        """Observe a collective of FSDP that sends `each` bytes to every other rank."""
        over, counted = job.axes[self.axis], "dp_shard" if self.axis == "fsdp" else self.axis
        on_host = runs_on_host(over.group, x.device)
        return Observed(counted, what, described(what, counted, x), each * (over.size - 1), on_host, background)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(_Allocate):
    """FSDP's all-gather; on CPU it always runs in the background until FSDP needs the weights."""

    def __init__(self, waits: StreamWaits | None = None, module: Any = None, axis: str = "fsdp") -> None:
        self.waits, self.module, self.axis = waits, module, axis

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        on_cpu = input_tensor.device.type == "cpu"
        call, start = self._observed("all_gather", input_tensor, input_tensor.nbytes, background=on_cpu), now()
        with contextlib.nullcontext() if on_cpu else call:
            work = collectives._all_gather(output_tensor, input_tensor, group=group, async_op=async_op or on_cpu)
        if self.waits is not None:
            self.waits.gathered[self.module] = mark()
        return TimedWork(Started(start, work, call)) if on_cpu else work


class CountedScatter(_Allocate):
    """FSDP's reduce-scatter, whose result FSDP uses at once: on CPU the step waits here, on a GPU another stream does.

    At the end of backward, the step waits for the last gradients, and no computation is left to hide that wait.
    """

    def __init__(self, waits: StreamWaits | None = None, is_last: bool = False, axis: str = "fsdp") -> None:
        self.waits, self.is_last, self.axis = waits, is_last, axis
        self.counts_sums = True  # of sums between replicas; compressed sums count their bytes themselves
        self.ended: Any = 0  # nanoseconds, or an event

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        started = now() if self.waits is None else mark()
        work = None
        with self._observed("reduce_scatter", input_tensor, output_tensor.nbytes):
            by_sum = op == dist.ReduceOp.SUM and not async_op
            if not (by_sum and collectives.scattered_by_host(output_tensor, input_tensor, self.axis)):
                work = collectives._reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        self._scattered(started)
        return work

    def _scattered(self, started: Any) -> None:
        if self.waits is None:
            self.ended = _waited(started)
            return
        self.ended = self.waits.scattered = mark()
        if self._ends_step():
            self.waits.scattered = None
            exposed.between(started, self.ended)

    def _ends_step(self) -> bool:
        return self.is_last and exposed.last_backward

    def all_reduced(self, reduced: Tensor) -> None:
        """FSDP calls this when HSDP has summed a scattered gradient between replicas, right after the scatter."""
        size = collectives.axis("dp_replicate").size
        if self.counts_sums:
            job.traffic.add("dp_replicate", 2 * (size - 1) / size * reduced.nbytes)
        if self.waits is None:
            _waited(self.ended)
            if self.counts_sums and job.spans.enabled and reduced.device.type == "cpu":
                job.spans.ended("dp_replicate", "all_reduce", self.ended)
        elif self._ends_step():
            exposed.between(self.ended, mark())


def _waited(started: int) -> int:
    """Record that the host has waited for a collective since `started`; return the current time."""
    ended = now()
    exposed.add((ended - started) / 1e9)
    return ended


class TimedWork(dist.Work):
    """A collective in the background; the time for which the step waits for it counts as exposed."""

    def __init__(self, started: Started) -> None:
        super().__init__()
        self.started = started

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with exposed.waiting(torch.device("cpu")):
            return self.started.wait(timeout)


def set_gradient_sync(model: nn.Module, section: Parallelism, last: bool) -> None:
    """Call before a micro-batch: sets what FSDP does with its gradients, and with its weights after backward.

    step: keep whole gradients, reduce them with the last micro-batch; micro_batch: reduce every time; scatter:
    reduce-scatter every time, all-reduce between replicas with the last one. With fsdp_reshard_after_forward "never",
    weights stay gathered until the end of the step.
    """
    if not isinstance(model, FSDPModule):
        return
    mode = accumulation_sync(section)
    exposed.last_backward = last
    model.set_requires_gradient_sync(last or mode != "step")
    model.set_requires_all_reduce(last or mode != "scatter")
    model.set_is_last_backward(last)
    if section.fsdp_reshard_after_forward == "never":
        model.set_reshard_after_backward(last)


def accumulation_sync(section: Parallelism) -> str:
    """Return when gradients are summed; `scatter` postpones the sums between replicas, so without HSDP it is `step`."""
    summed = section.data_parallel_mode == "sync" and collectives.axis_size("dp_replicate") > 1
    is_hsdp = summed and collectives.axis_size("fsdp") > 1
    return section.accumulation_sync if is_hsdp or section.accumulation_sync != "scatter" else "step"


def free_gathered(model: nn.Module) -> None:
    """Call after a forward without a backward: frees the weights that FSDP keeps for backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard(model: Decoder) -> None:
    """Reshard what a forward pass without backward has left gathered: only then do parameters have their names."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
