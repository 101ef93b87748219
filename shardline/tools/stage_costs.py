"""What the pipeline stages of a config cost: the work of their layers, and the rows sent to experts.

Work is counted as for MFU: a layer counts only the experts that a token uses, and the last stage includes the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardline.config.architecture import Architecture
from shardline.config.check import checked_layout
from shardline.config.layout import Layout, check_experts, fewest_ranks
from shardline.config.schema import Config
from shardline.data.order import one_pass
from shardline.errors import ConfigError
from shardline.models.flavors import resolve
from shardline.parallel.expert.expert import sent_in_a_pass
from shardline.parallel.pipeline.stages import count_microbatches, cut_stages, plan_pipeline
from shardline.parallel.pipeline.timeline import Schedule
from shardline.precision.mixed import choose_precision
from shardline.run.device import flops_by_part


class StageCosts(NamedTuple):
    """What each stage holds, first to last, and what its forward pass of a micro-batch costs."""

    layers: tuple[tuple[int, ...], ...]
    with_experts: tuple[int, ...]  # how many of these layers have experts
    cost: tuple[float, ...]  # the time of the pass; the mean is 1
    transfers: tuple[int, ...]  # how often rows are sent between ranks, to experts and back
    sent: tuple[int, ...]  # bytes that a rank sends in them


class StagedModel(NamedTuple):
    """A config with a pipeline, and what follows from it."""

    config: Config
    arch: Architecture
    layout: Layout
    microbatches: int

    def schedule(self, stages_per_rank: int | None) -> Schedule:
        """The schedule of a run with this config."""
        plan = plan_pipeline(self.config, self.arch, self.layout, stages_per_rank)
        assert plan is not None, "read_model refuses a config without a pipeline"
        return plan.schedule

    def costs(self, count: int) -> StageCosts:
        """Return the costs of `count` stages, split as in a run, with the dtypes of a run on GPUs."""
        training, arch, ep = self.config.training, self.arch, self.layout.ep
        stages = cut_stages(self.config, arch, count)
        flops, output = flops_by_part(arch, training.seq_len)
        work = [sum(flops[layer] for layer in stage.layers) + stage.last * output for stage in stages]
        experts = [0 if arch.moe is None else sum(map(arch.moe.holds, stage.layers)) for stage in stages]
        precision = choose_precision(self.config, torch.device("cuda"), has_bfloat16=True)
        tokens = self.config.parallelism.pipeline_parallel_microbatch_size * training.seq_len
        each = sent_in_a_pass(arch, self.layout, tokens, precision.compute.itemsize)
        return StageCosts(
            layers=tuple(stage.layers for stage in stages),
            with_experts=tuple(experts),
            cost=tuple(one * count / sum(work) for one in work),
            transfers=tuple(2 * number * (ep > 1) for number in experts),
            sent=tuple(number * each for number in experts),
        )


def read_model(config: Config, microbatches: int | None) -> StagedModel:
    """Return the model of a config on the fewest ranks that it needs; `microbatches` overrides the config's number."""
    section = config.parallelism
    if section.pipeline_parallel_degree == 1:
        raise ConfigError("parallelism.pipeline_parallel_degree = 1: there is no pipeline to draw; use --pp 2 or more")
    if microbatches is not None:
        batch = microbatches * section.pipeline_parallel_microbatch_size
        config = one_pass(config, batch)
    layout, arch = checked_layout(config, fewest_ranks(section)), resolve(config.model)
    check_experts(arch, layout)
    return StagedModel(config, arch, layout, count_microbatches(config))
