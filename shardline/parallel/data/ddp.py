"""DDP: every rank holds the whole model, and gradients are summed in buckets while backward goes on."""

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
from shardline.parallel.data.compression import Exchange, LowRankExchange, WholeExchange
from shardline.parallel.tensor.tensor import replace_parameter
from shardline.precision.mixed import DTYPES


@dataclass
class Bucket:
    """Gradients that are summed together."""

    parameters: list[nn.Parameter]
    exchange: Exchange
    missing: set[nn.Parameter] = field(default_factory=set)
    going: bool = False  # an exchange was started and its result not yet taken
    totals: list[Tensor] | None = None  # of the step so far


class Remembered(NamedTuple):
    """What an exchange keeps of one parameter from step to step: this rank's error, and the replicas' common Q."""

    name: str
    parameter: nn.Parameter
    error: Tensor
    q: Tensor


class Replicas:
    """Sums gradients over dp_replicate in buckets, starting each as soon as its last gradient is there.

        backward:  ... grads of layer 3 -> bucket 0 | grads of layer 2 -> bucket 1 | ...        finish
        link:                     sum of bucket 0 ------ | sum of bucket 1 ------ |              wait for the rest

    A bucket takes its gradients along: `p.grad` is empty until `finish` puts the sums there. Summing after every
    micro-batch therefore sums what that one added, and goes on during the next one's forward. Buckets start in one
    order on all ranks. A parameter that gets no gradient on a rank counts as zero there.
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
        self.next = 0  # bucket to start
        exposed.measured = True
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def expect(self, last: bool, every_micro_batch: bool) -> None:
        """Before a micro-batch: whether its gradients are to be summed, with those kept since the last sum."""
        self._start_rest()
        self.enabled = last or every_micro_batch
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = {parameter for parameter in bucket.parameters if parameter.requires_grad}

    def finish(self) -> None:
        """After the last backward: wait for the sums and put them where the optimizer looks for them."""
        self._start_rest()
        for bucket in self.buckets:
            self._settle(bucket)
            totals, bucket.totals = bucket.totals, None
            for parameter, total in zip(bucket.parameters, totals or [], strict=True):
                parameter.grad = _like(parameter, total) if parameter.requires_grad else None

    def remembered(self) -> Iterator[Remembered]:
        """Between steps: what is to be saved. The tensors may be filled."""
        for bucket in self.buckets:
            if isinstance(bucket.exchange, LowRankExchange):
                for index in bucket.exchange.matrices:
                    parameter = bucket.parameters[index]
                    yield Remembered(self.names[parameter], parameter, *bucket.exchange.memory(index, self.device))

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
        """Begin to sum a bucket, whose gradients are complete."""
        self._settle(bucket)
        gradients = [None if p.grad is None else local(p.grad) for p in bucket.parameters]
        bucket.exchange.start(gradients, self.device)
        bucket.going = True
        for parameter in bucket.parameters:
            parameter.grad = None

    def _start_next(self) -> None:
        self.start(self.buckets[self.next])
        if self.next > 0:  # has been on its way since the bucket before was full
            self.buckets[self.next - 1].exchange.advance()
        self.next += 1

    def _start_rest(self) -> None:
        """After backward: what did not start during it, because gradients are missing or nothing was to overlap."""
        if not self.enabled:
            return
        self.enabled = False
        while self.next < len(self.buckets):
            self._start_next()
        if not self.overlap:
            for bucket in self.buckets:
                self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        """Wait for a bucket's sum and add it to the step's."""
        if not bucket.going:
            return
        sums = bucket.exchange.finish()
        bucket.going = False
        if bucket.totals is None:
            bucket.totals = sums
        else:
            torch._foreach_add_(bucket.totals, sums)


def replicate_parameters(model: Decoder, mesh: Mesh) -> None:
    """Declare every parameter whole on each dp_replicate rank (beside its cut over tp), before it has memory."""
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            joined = mesh.joined("dp_replicate", "tp")
            placements = [Replicate(), *parameter.placements]
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        else:
            joined, placements, whole = mesh.axis("dp_replicate"), [Replicate()], parameter.detach()
        replace_parameter(model, name, distribute_tensor(whole, joined, placements, src_data_rank=None))


def _buckets(model: nn.Module, config: Config, users: Mapping[nn.Parameter, frozenset[int]]) -> list[Bucket]:
    """Parameters in the order backward reaches them, cut where a bucket would exceed its limit or `users` change."""
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
    return [Bucket([p for _, p in group], _exchange(group, section, dtype)) for group in groups]


def _exchange(group: list[tuple[str, nn.Parameter]], section: Parallelism, dtype: torch.dtype) -> Exchange:
    """`gradient_compression` as the sum of one bucket; of what tp cuts, each rank sums its own part."""
    shapes = [local(parameter).shape for _, parameter in group]
    if section.gradient_compression == "powersgd":
        names = [name for name, _ in group]
        return LowRankExchange(names, shapes, section.powersgd_rank, dtype, "dp_replicate")
    rounded = section.gradient_compression == "bfloat16"
    return WholeExchange(shapes, dtype, "dp_replicate", sent=torch.bfloat16 if rounded else dtype)


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A gradient from its local part, which becomes part of it, in the parameter's type and layout."""
    part = part.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
