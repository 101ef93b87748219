"""Cuts a model into pipeline stages (by our own rule, evenly, or by another trainer's) and counts their parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shardline.config.architecture import Architecture
from shardline.plan.traits import Traits
from shardline.plan.work import Workload, attention_shapes, expert_layers, feed_forward_shapes, layer_parameters


class StageLayers(NamedTuple):
    """The layers of one pipeline stage."""

    dense: int
    experts: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.dense + self.experts


def cut(workload: Workload, traits: Traits) -> list[StageLayers]:
    """Return the layers of each stage, those with experts spread evenly."""
    arch = workload.arch
    counts = workload.layers_of_stages or CUTS[traits.cut](workload)
    experts, done, found = expert_layers(arch), 0, []
    for index, count in enumerate(counts):
        before = round(experts * done / arch.n_layers)
        done += count
        with_experts = round(experts * done / arch.n_layers) - before
        found.append(StageLayers(count - with_experts, with_experts, index == 0, index == len(counts) - 1))
    return found


def even(workload: Workload) -> tuple[int, ...]:
    count, layers = workload.layout.pp * workload.stages_per_rank, workload.arch.n_layers
    return tuple(layers // count + (index < layers % count) for index in range(count))


def balanced(workload: Workload) -> tuple[int, ...]:
    """Return our own cut by weight, cached by the architecture's id: its hash would cost more than the cut."""
    arch, count = workload.arch, workload.layout.pp * workload.stages_per_rank
    _, found = _cuts.setdefault(id(arch), (arch, {}))
    key = (workload.seq_len, count)
    if key not in found:
        from shardline.parallel.pipeline.stages import balanced_layers  # imports torch

        found[key] = tuple(len(own) for own in balanced_layers(arch, workload.seq_len, count))
    return found[key]


# By the architecture's id, which stays unique because the architecture is held here.
_cuts: dict[int, tuple[Architecture, dict[tuple[int, int], tuple[int, ...]]]] = {}


def by_costs(workload: Workload, above: bool = False) -> tuple[int, ...]:
    """Return the layers of each stage; it ends with the block that brings costs to its share, or `above` it."""
    layers = range(1, 1 + workload.arch.n_layers)
    return tuple(sum(block in layers for block in held) for held in blocks_by_costs(workload, above))


def blocks_by_costs(workload: Workload, above: bool = False) -> list[list[int]]:
    """Return the blocks of each stage: embedding, layers, norm, output layer, cast and loss; some cost nothing."""
    arch, ranks = workload.arch, workload.layout.pp
    layer = sum(columns * inner for columns, inner in (*attention_shapes(arch), *feed_forward_shapes(arch, False)))
    costs = [0, *[layer] * arch.n_layers, 0, arch.vocab_size * arch.dim, 0, 0]
    held: list[list[int]] = [[] for _ in range(ranks)]
    stage, so_far = 0, 0
    for block, cost in enumerate(costs):
        held[stage].append(block)
        so_far += cost
        share = sum(costs) * (stage + 1) / ranks
        if so_far > share or (so_far == share and not above):
            stage = min(stage + 1, ranks - 1)
    return held


CUTS: dict[str, Callable[[Workload], tuple[int, ...]]] = {
    "even": even,
    "balanced": balanced,
    "costs": by_costs,
    "costs_above": partial(by_costs, above=True),
}


def stage_parameters(workload: Workload, stage: StageLayers) -> tuple[float, float]:
    """Return (dense, expert) parameters of a stage on a rank, before data parallelism shards them."""
    arch, layout = workload.arch, workload.layout
    dense, mixed = (layer_parameters(arch, with_experts, layout) for with_experts in (False, True))
    tables = stage.first + stage.last
    if tables == 2 and arch.tie_word_embeddings:
        tables = 1
    ends = tables * arch.vocab_size * arch.dim / layout.tp
    return stage.dense * dense.dense + stage.experts * mixed.dense + ends, stage.experts * mixed.experts
