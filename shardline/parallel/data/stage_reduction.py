"""Decides when the gradients of pipeline stages are summed over data-parallel ranks.

    rank 0, stages 0 and 2   ... 2B3 | sum of stage 2 ... 0B3 | sum of stage 0, and of modules outside of blocks

Backward passes of the schedule sum nothing themselves: a stage is summed once it has its last gradient of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardline.comm.exposed_time import exposed
from shardline.config.schema import Parallelism
from shardline.models.decoder import Decoder, Stage
from shardline.parallel.data.ddp import Replicas
from shardline.parallel.data.fsdp import accumulation_sync, sharded_modules


class Unit(NamedTuple):
    """Gradients that are summed together once all of these stages have theirs."""

    stages: set[int]
    start: Callable[[], None]


class StageSums:
    """Sums the gradients of pipeline stages over data ranks.

    Parameters that several stages use are summed with the last of these stages. They are a tied embedding and the
    modules outside of blocks, which FSDP treats as one.
    """

    def __init__(self, model: Decoder, section: Parallelism, stages: Mapping[int, Stage], replicas: Replicas | None):
        self.model, self.section, self.replicas = model, section, replicas
        self.last = False
        self.left: set[int] = set()
        self.all = set(stages)
        users = stage_users(model, stages)
        self.units: list[Unit] = []
        if replicas is not None:
            for bucket in replicas.buckets:
                of_bucket = {stage for parameter in bucket.parameters for stage in users[parameter]}
                of_bucket = of_bucket if replicas.overlap else self.all
                self.units.append(Unit(of_bucket, functools.partial(replicas.start, bucket)))
        elif isinstance(model, FSDPModule):
            for index, stage in stages.items():
                for layer in reversed(stage.layers):
                    for module in sharded_modules(model.block(layer)):
                        self.units.append(Unit({index}, functools.partial(self._reduce, module)))
            outside = {index for index, stage in stages.items() if stage.first or stage.last}
            self.units.append(Unit(outside or self.all, functools.partial(self._reduce, model)))
        self.waiting: list[Unit] = []

    def begin(self, last: bool) -> None:
        """Call before a run of the schedule; `last` says whether it is the last one of the step."""
        self.last, self.left = last, set(self.all)
        self.waiting = list(self.units) if last or accumulation_sync(self.section) != "step" else []
        if isinstance(self.model, FSDPModule):
            exposed.last_backward = False
            self.model.set_requires_gradient_sync(False)
            self.model.set_is_last_backward(False)
            self.model.set_reshard_after_backward(self.section.fsdp_reshard_after_forward == "always")

    def done(self, stage: int) -> None:
        """Call when a stage has all its gradients of this run: starts the sums that need no other stage."""
        self.left.discard(stage)
        ready = [unit for unit in self.waiting if not unit.stages & self.left]
        self.waiting = [unit for unit in self.waiting if unit.stages & self.left]
        for unit in ready:
            unit.start()
        if not self.left and self.last and isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(True)
            # FSDP does this after the last backward: it waits for the sums and forgets the order of this step.
            self.model._get_fsdp_state()._root_post_backward_final_callback()

    def _reduce(self, module: FSDPModule) -> None:
        exposed.last_backward = self.last
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_requires_all_reduce(self.last or accumulation_sync(self.section) != "scatter", recurse=False)
        module.set_reshard_after_backward(self.last, recurse=False)
        reduce_now(module)


def stage_users(model: Decoder, stages: Mapping[int, Stage]) -> dict[nn.Parameter, frozenset[int]]:
    """Return for each parameter the stages of this rank in which it gets gradients."""
    layer_of = {layer: index for index, stage in stages.items() for layer in stage.layers}
    first = [index for index, stage in stages.items() if stage.first]
    last = [index for index, stage in stages.items() if stage.last]
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            users = [layer_of[int(name.split(".")[1])]]
        elif name.startswith("tok_embeddings."):
            users = first + (last if model.arch.tie_word_embeddings else [])
        else:
            users = last
        found[parameter] = frozenset(users)
    return found


def reduce_now(module: FSDPModule) -> None:
    """Do what FSDP does after a module's backward; a schedule may compute weight gradients later than FSDP expects."""
    group = module._get_fsdp_state()._fsdp_param_group  # private to torch, as above, and used only in this file
    if group is not None:
        group.post_backward()
