"""DDP: every rank holds the whole model, and gradients are summed in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardline.comm.exposed_time import exposed
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config, Parallelism
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.models.gradient_hooks import when_gradient_arrives
from shardline.parallel.data.compression import GradientExchange, LowRankExchange, WholeExchange
from shardline.parallel.data.error_feedback import FeedbackExchange, Int8Exchange, TopKExchange
from shardline.parallel.tensor.tensor import replace_parameter
from shardline.precision.mixed import DTYPES


@dataclass
class Bucket:
    """Gradients that are summed together."""

    parameters: list[nn.Parameter]
    exchange: GradientExchange
    missing: set[nn.Parameter] = field(default_factory=set)
    running: bool = False  # an exchange was started and its result not yet taken
    totals: list[Tensor] | None = None  # the sums of the step so far


class LeftOut(NamedTuple):
    """What compression keeps of one parameter between steps: this rank's error; PowerSGD's Q, which replicas share."""

    name: str
    parameter: nn.Parameter
    error: Tensor
    q: Tensor | None


class Replicas:
    """Sums gradients over dp_replicate in buckets, and starts each bucket as soon as its last gradient is there.

        backward:  ... grads of layer 3 -> bucket 0 | grads of layer 2 -> bucket 1 | ...        finish
        link:                     sum of bucket 0 ------ | sum of bucket 1 ------ |              wait for the rest

    A bucket takes its gradients out of the parameters: `p.grad` is empty until `finish` puts the sums there. So a sum
    after every micro-batch covers what that micro-batch added, and runs on during the next forward. All ranks start
    buckets in the same order. If a parameter has no gradient on some rank, that rank adds zeros.
    """

    def __init__(
        self, model: nn.Module, config: Config, users: Mapping[nn.Parameter, frozenset[int]] | None = None
    ) -> None:
        self.overlap = config.parallelism.overlap_gradient_reduction
        self.buckets = _buckets(model, config, users or {})
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.device = local(next(iter(self.bucket_of))).device
        self.enabled = False
        self.next = 0  # the next bucket to start
        exposed.measured = True
        for parameter in self.bucket_of:
            when_gradient_arrives(parameter, self._arrived)

    def expect(self, last: bool, every_micro_batch: bool) -> None:
        """Call before a micro-batch: decides whether to sum its gradients and those kept since the last sum."""
        self._start_rest()
        self.enabled = last or every_micro_batch
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter in bucket.parameters if parameter.requires_grad}

    def finish(self) -> None:
        """Call after the last backward: wait for the sums and store them in `p.grad`."""
        self._start_rest()
        for bucket in self.buckets:
            self._settle(bucket)
            totals, bucket.totals = bucket.totals, None
            for parameter, total in zip(bucket.parameters, totals or [], strict=True):
                parameter.grad = _like(parameter, total) if parameter.requires_grad else None

    def left_out(self) -> Iterator[LeftOut]:
        """Yield the tensors that a checkpoint saves between steps; loading one fills them."""
        for bucket in self.buckets:
            exchange = bucket.exchange
            if isinstance(exchange, LowRankExchange):
                for index in exchange.matrices:
                    parameter = bucket.parameters[index]
                    yield LeftOut(self.names[parameter], parameter, *exchange.memory(index, self.device))
            elif isinstance(exchange, FeedbackExchange):
                for parameter, error in zip(bucket.parameters, exchange.memories(self.device), strict=True):
                    yield LeftOut(self.names[parameter], parameter, error, None)

    def _arrived(self, parameter: Any) -> None:
        if not self.enabled:
            return
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(f"the gradient of {self.names[parameter]} came twice in one backward")
        bucket.missing.discard(parameter)
        while self.overlap and self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self._start_next()

    def start(self, bucket: Bucket) -> None:
        """Start to sum a bucket that has all its gradients."""
        self._settle(bucket)
        gradients = [None if p.grad is None else local(p.grad) for p in bucket.parameters]
        bucket.exchange.start(gradients, self.device)
        bucket.running = True
        for parameter in bucket.parameters:
            parameter.grad = None

    def _start_next(self) -> None:
        self.start(self.buckets[self.next])
        if self.next > 0:  # meanwhile the previous bucket's first collective has run
            self.buckets[self.next - 1].exchange.advance()
        self.next += 1

    def _start_rest(self) -> None:
        """Start the buckets that did not start during backward: gradients are missing, or overlap is off."""
        if not self.enabled:
            return
        self.enabled = False
        while self.next < len(self.buckets):
            self._start_next()
        if not self.overlap:
            for bucket in self.buckets:
                self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        """Wait for the sum of a bucket and add it to the step's total."""
        if not bucket.running:
            return
        sums = bucket.exchange.finish()
        bucket.running = False
        if bucket.totals is None:
            bucket.totals = sums
        else:
            torch._foreach_add_(bucket.totals, sums)


def replicate_parameters(model: Decoder, mesh: Mesh) -> None:
    """Declare every parameter replicated over dp_replicate (and still sharded over tp), before it has memory."""
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            of_experts = "ep" in (parameter.device_mesh.mesh_dim_names or ())
            joined = mesh.of_experts("replicas", "ep", "etp") if of_experts else mesh.joined("dp_replicate", "tp")
            placements = [Replicate(), *parameter.placements]
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        else:
            joined, placements, whole = mesh.axis("dp_replicate"), [Replicate()], parameter.detach()
        replace_parameter(model, name, distribute_tensor(whole, joined, placements, src_data_rank=None))
    model.retie()


def _buckets(model: nn.Module, config: Config, users: Mapping[nn.Parameter, frozenset[int]]) -> list[Bucket]:
    """Cut the parameters, in backward order, where a bucket would exceed its limit or `users` change."""
    section = config.parallelism
    limit, dtype = section.gradient_bucket_mib * 2**20, DTYPES[config.training.mixed_precision_reduce]
    groups: list[list[tuple[str, nn.Parameter]]] = []
    size = 0.0
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad:
            continue
        added = local(parameter).numel() * dtype.itemsize
        other = bool(groups) and users.get(groups[-1][-1][1]) != users.get(parameter)
        if not groups or size + added > limit or other:
            groups.append([])
            size = 0
        groups[-1].append((name, parameter))
        size += added
    names = [[name for name, _ in group] for group in groups]
    shapes = [[local(parameter).shape for _, parameter in group] for group in groups]
    exchanges = [exchange_of(*both, section, dtype) for both in zip(names, shapes, strict=True)]
    return [Bucket([p for _, p in group], made) for group, made in zip(groups, exchanges, strict=True)]


def exchange_of(
    names: list[str], shapes: list[torch.Size], section: Parallelism, dtype: torch.dtype
) -> GradientExchange:
    """Make a bucket's exchange as `gradient_compression` says; each tensor-parallel rank sums its own shards."""
    if section.gradient_compression == "powersgd":
        return LowRankExchange(names, shapes, section.powersgd_rank, dtype, "dp_replicate")
    if section.gradient_compression == "int8":
        return Int8Exchange(shapes, dtype, "dp_replicate")
    if section.gradient_compression == "topk":
        return TopKExchange(shapes, dtype, "dp_replicate", section.topk_fraction)
    rounded = section.gradient_compression == "bfloat16"
    return WholeExchange(shapes, dtype, "dp_replicate", sent=torch.bfloat16 if rounded else dtype)


def _like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Make a gradient in the parameter's type and layout from a local shard, without a copy if the type allows."""
    shard = shard.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return shard
    mesh, cuts, stride = parameter.device_mesh, parameter.placements, parameter.stride()
    return DTensor.from_local(shard, mesh, cuts, run_check=False, shape=parameter.shape, stride=stride)
