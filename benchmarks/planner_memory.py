"""The memory of other trainers: what a rank keeps for each parameter, token and logit, given the trainer's traits."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.plan.hardware import GIB
from shardline.plan.pipeline import held_microbatches
from shardline.plan.stages import StageLayers, cut, stage_parameters
from shardline.plan.traits import Traits
from shardline.plan.work import Workload, expert_shards


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    reserved: float  # what the allocator wastes: fragments and rounded-up sizes

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.reserved


def peak_memory(workload: Workload, traits: Traits) -> TrainerMemory:
    """Return the memory of the fullest rank of the pipeline."""
    stages = cut(workload, traits)
    ranks = workload.layout.pp
    if traits.reports_first:
        return _rank_memory(workload, traits, stages[::ranks], 0)
    return max((_rank_memory(workload, traits, stages[rank::ranks], rank) for rank in range(ranks)), key=_total)


def _total(memory: TrainerMemory) -> float:
    return memory.total


def _rank_memory(workload: Workload, traits: Traits, stages: list[StageLayers], rank: int) -> TrainerMemory:
    layout = workload.layout
    sizes = [stage_parameters(workload, stage) for stage in stages]
    dense, experts = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    shared, expert_shared = layout.dp_shard * layout.cp, expert_shards(layout)

    def share(stage_of_zero: int) -> float:
        """Return the number of parameters for which this rank keeps state that is sharded from this ZeRO stage on."""
        split = workload.zero >= stage_of_zero
        return dense / (shared if split else 1) + experts / (expert_shared if split else 1)

    weights = share(3) * traits.weight_bytes
    gradients = share(2) * traits.gradient_bytes
    optimizer = share(1) * (workload.state_bytes + traits.master_bytes)
    copies = layout.dp_replicate if workload.zero == 0 else shared
    buffers = (dense + experts) * traits.bucket_bytes[min(workload.zero, 1)] * (copies > 1)
    passes = held_microbatches(
        workload.schedule, layout.pp, workload.micro_batches, workload.stages_per_rank, rank
    ) / len(stages)
    layers = sum(stage.dense + stage.experts for stage in stages)
    activations = passes * layers * layer_bytes(workload, traits)
    if workload.recompute in ("full", "op"):  # the layer being recomputed
        activations += whole_layer_bytes(workload, traits)
    if any(stage.last for stage in stages):
        activations += workload.tokens * workload.arch.vocab_size / layout.tp * traits.logit_kept
    activations += workload.tokens * workload.arch.dim / layout.tp * traits.working
    inner = weights + gradients + optimizer + activations + buffers
    return TrainerMemory(
        weights, gradients, optimizer, activations, buffers, inner * (traits.reserved - 1) + traits.base_gib * GIB
    )


def layer_bytes(workload: Workload, traits: Traits) -> float:
    """Return the bytes that one layer keeps of one micro-batch."""
    if workload.recompute == "full":
        return workload.tokens * workload.number * workload.arch.dim / workload.stream_share
    return whole_layer_bytes(workload, traits) * (traits.kept_op if workload.recompute == "op" else 1.0)


def whole_layer_bytes(workload: Workload, traits: Traits) -> float:
    """Return the same without recomputation."""
    arch, tp = workload.arch, workload.layout.tp
    stream, gathered, heads, width = traits.kept
    stream += traits.kept_piped if workload.layout.pp > 1 else 0.0
    numbers = stream * arch.dim / workload.stream_share + traits.kept_rotated * arch.head_dim
    numbers += gathered * traits.keeps_gathered * arch.dim if tp > 1 else 0.0
    attention = arch.n_heads * arch.head_dim + arch.n_kv_heads * arch.head_dim
    numbers += heads * attention / tp + width * arch.ffn_dim / tp
    return workload.tokens * workload.number * numbers
