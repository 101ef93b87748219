"""Peak memory of the fullest rank: weights, gradients, optimizer state, activations, buffers.

Memory can peak at four moments of a step, and the largest counts:

    loss        all layers' activations, the logits of one chunk, the head's weight and its gradient
    backward    all layers' activations, the working memory of the last layer's backward, the head's gradient
    the end     the gradients of all layers, and the working memory of the first layer's backward
    the update  every gradient

A trace of the real block (`trace.py`) gives the activations that layers keep. A pipeline rank keeps them for as many
micro-batches as its schedule has in flight. FSDP holds the gathered weights of three layers, and gradient sums of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardline.plan.hardware import BYTES
from shardline.plan.pipeline import held_microbatches, stages_of_ranks
from shardline.plan.stages import StageLayers, cut
from shardline.plan.trace import Kept
from shardline.plan.traits import SHARDLINE
from shardline.plan.work import Workload, adapter_parameters, expert_shards, layer_parameters

GATHERED_LAYERS = 3  # the current layer, the next one, and the buffer from which the next one is copied
SUMMED_LAYERS = 2  # one layer's gradients are reduced while the next one's are computed
CHUNK_BYTES = {"cuda": 2**31, "cpu": 32 * 2**20}  # of one chunk of logits: training/loss.py
# Numbers per token in a layer's backward, in multiples of the feed-forward width and of the stream's width.
WORKING = {"cuda": (4.0, 3.0), "cpu": (1.5, 3.0)}
ENDS = {"cuda": 1.0, "cpu": 4.0}  # copies of the stream that the last norm and the loss keep
SLICES = {"cuda": 0, "cpu": 3 * 4 * 2**20}  # bytes of the softmax in float32, which a GPU kernel computes in place
FRAGMENTS = {"cuda": 0.02, "cpu": 0.0}  # what the allocator reserves beyond the memory in use, as a share of it

Table = dict[bool, dict[str, Kept]]  # whether it has experts -> way to run a block, or policy -> what it keeps
KeptOf = Callable[[int], Table]  # by the tensor-parallel degree


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    fragments: float
    moment: str = ""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.fragments


def peak_memory(workload: Workload, kept: KeptOf, device: str = "cuda", capacity: float | None = None) -> Memory:
    """Return the memory of the fullest rank of the pipeline."""
    stages, ranks = cut(workload, SHARDLINE), workload.layout.pp
    places = range(ranks) if ranks <= 4 else (0, 1, ranks // 2, ranks - 1)
    placed = stages_of_ranks(workload.schedule, ranks, workload.stages_per_rank)
    held = (
        _Rank(workload, kept, device, capacity, [stages[index] for index in placed[place]], place).peak()
        for place in places
    )
    return max(held, key=lambda memory: memory.total)


class _Rank:
    """One rank of the pipeline, with `stages` of the model."""

    def __init__(
        self,
        workload: Workload,
        kept: KeptOf,
        device: str,
        capacity: float | None,
        stages: list[StageLayers],
        place: int,
    ) -> None:
        self.workload, self.device, self.stages, self.place = workload, device, stages, place
        self.capacity = capacity
        self.table = kept(workload.layout.tp)
        layout, arch = workload.layout, workload.arch
        self.compute, self.storage = BYTES[workload.activations], BYTES[workload.storage]
        self.shards, self.expert_shards = layout.dp_shard * layout.cp, expert_shards(layout)
        self.sharded = self.shards > 1
        self.dense = layer_parameters(arch, False, layout).dense
        self.mixed = layer_parameters(arch, True, layout)
        self.table_size = arch.vocab_size * arch.dim / layout.tp
        self.first, self.last = any(stage.first for stage in stages), any(stage.last for stage in stages)

    def peak(self) -> Memory:
        weights, optimizer = self._weights(), self._optimizer()
        copies, gathered, summed = self._copies(), self._gathered(), self._summed()
        activations, working = self._activations(), self._working()
        before, after = self._gradients()
        moments = {
            "backward": (before + self._head_gradient(), activations + working, gathered + summed),
            "the end": (max(after - self._last_gradients(), before), working, gathered + summed),
            "the update": (after, 0.0, 0.0),
        }
        if self.last:
            moments["the loss"] = (before + self._head_gradient(), activations, gathered + self._loss_buffers())
        fixed = weights + optimizer + copies
        moment = max(moments, key=lambda name: sum(moments[name]))
        gradients, kept, buffers = moments[moment]
        fragments = FRAGMENTS[self.device] * (fixed + gradients + kept + buffers)
        return Memory(weights, gradients, optimizer, kept, copies + buffers, fragments, moment)

    # ---- what stays --------------------------------------------------------------------------------------------------

    def _blocks(self) -> tuple[float, float]:
        """Return (dense, expert) parameters of the layers here, before data parallelism shards them."""
        dense = sum(stage.dense for stage in self.stages) * self.dense
        dense += sum(stage.experts for stage in self.stages) * self.mixed.dense
        return dense, sum(stage.experts for stage in self.stages) * self.mixed.experts

    def _ends(self) -> float:
        ends = self.first + self.last
        return self.table_size * (1 if ends == 2 and self.workload.arch.tie_word_embeddings else ends)

    def _own(self) -> float:
        """Return the number of parameters that this rank keeps."""
        dense, experts = self._blocks()
        return (dense + self._ends()) / self.shards + experts / self.expert_shards

    def _trained(self) -> float:
        workload = self.workload
        if not workload.lora_rank:
            return self._own()
        layers = sum(stage.dense + stage.experts for stage in self.stages)
        return layers * adapter_parameters(workload.arch, workload.lora_rank) / workload.layout.tp / self.shards

    def _weights(self) -> float:
        workload = self.workload
        if workload.cpu_offload:
            return 0.0
        if not workload.lora_rank:
            return self._own() * self.storage
        dense, experts = self._blocks()
        frozen = dense * workload.base_bytes / self.shards + experts * workload.base_bytes / self.expert_shards
        return frozen + self._ends() * self.compute / self.shards + self._trained() * self.storage

    def _optimizer(self) -> float:
        return 0.0 if self.workload.cpu_offload else self._trained() * self.workload.state_bytes

    def _copies(self) -> float:
        """Return the bytes of a second copy of the blocks' matrices, in the compute type, which a single rank keeps."""
        return sum(self._blocks()) * self.compute if self.workload.keeps_narrow else 0.0

    def _gradients(self) -> tuple[float, float]:
        """Return the bytes of gradients before a backward pass (from earlier micro-batches) and after it."""
        workload = self.workload
        dense, experts = self._blocks()
        if workload.keeps_narrow:
            return 0.0, (dense + experts) * self.compute + self._ends() * self.storage
        whole = self._trained() * self.storage
        if workload.early_step:
            return 0.0, 0.1 * whole
        if workload.micro_batches == 1:
            return 0.0, 0.0 if workload.cpu_offload else whole
        if self.sharded and not workload.reduce_each and not workload.lora_rank:
            unsharded = (dense + experts + self._ends()) * 4.0
            return unsharded, unsharded
        return whole, whole

    def _last_gradients(self) -> float:
        """Return the bytes of the gradients that follow the first layer's backward: the embedding's."""
        return 0.0 if self.workload.lora_rank else self.first * self.table_size * self.storage / self.shards

    # ---- what comes and goes -----------------------------------------------------------------------------------------

    def _largest_layer(self) -> tuple[float, float]:
        """Return (dense, expert) parameters of the largest layer here."""
        if any(stage.experts for stage in self.stages):
            return self.mixed.dense, self.mixed.experts
        return self.dense, 0.0

    def _gathered(self) -> float:
        """Return the bytes of weights that FSDP has gathered: of a few layers or all, and of what is outside layers."""
        workload = self.workload
        if not self.sharded and not workload.cpu_offload:
            return 0.0
        width = workload.base_bytes if workload.lora_rank else self.compute
        dense, experts = self._largest_layer()
        own = (dense if self.shards > 1 else 0.0) + (experts if self.expert_shards > 1 else 0.0)
        layers: float = GATHERED_LAYERS
        if not workload.reshard:
            layers = 1 + sum(stage.dense + stage.experts for stage in self.stages)
        return (layers * own + self._ends()) * width

    def _summed(self) -> float:
        """Return the bytes of gradients on their way to the ranks that keep them."""
        workload = self.workload
        if not self.sharded or workload.lora_rank:
            return 0.0
        if workload.micro_batches > 1 and not workload.reduce_each:
            return 0.0
        dense, experts = self._largest_layer()
        own = dense + (experts if self.expert_shards > 1 else 0.0)
        return SUMMED_LAYERS * own * (self.compute + 4.0)

    def _activations(self) -> float:
        workload = self.workload
        held = held_microbatches(
            workload.schedule, workload.layout.pp, workload.micro_batches, workload.stages_per_rank, self.place
        )
        of_stages = sum(stage.dense * self._layer(False) + stage.experts * self._layer(True) for stage in self.stages)
        ends = self.first + self.last * ENDS[self.device]
        rows = workload.tokens * workload.arch.dim * self.compute / workload.stream_share
        return held / len(self.stages) * of_stages + ends * rows

    def _layer(self, with_experts: bool) -> float:
        """Return the bytes that one layer keeps of one micro-batch under this run's policy."""
        ways, tokens, mode = self.table.get(with_experts, {}), self.workload.tokens, self.workload.recompute
        if not ways:
            return 0.0
        whole = ways[self._way()].bytes(tokens)
        if self.workload.compute == "float8" and not with_experts:  # SwiGLU's result, which bfloat16 recomputes
            whole += tokens * self.workload.arch.ffn_dim / self.workload.layout.tp
        if mode == "offload":
            layers = sum(stage.dense + stage.experts for stage in self.stages)
            return whole * min(1.0, 2 / layers + 1 - 1 / self.workload.offload_every)
        if mode.isdecimal():
            return whole + (ways["full"].bytes(tokens) - whole) / int(mode)
        return ways[mode].bytes(tokens) if mode in ways else whole

    def _way(self) -> str:
        if self.device == "cpu":
            return "cpu"
        return "compiled" if self.workload.compiled else "eager"

    def _working(self) -> float:
        """Return the working memory of a layer's backward: gradients around the widest product, and recomputed results.

        A compiled block holds all of it until it ends. On a CPU, each gradient takes the place of its tensor.
        """
        workload, arch, tp = self.workload, self.workload.arch, self.workload.layout.tp
        width = arch.ffn_dim if any(stage.dense for stage in self.stages) else 0
        if arch.moe is not None:
            width = max(width, arch.moe.shared_dim + arch.moe.top_k * arch.moe.expert_dim)
        inside, outside = WORKING[self.device]
        numbers = inside * width / tp + outside * arch.dim / workload.stream_share
        again = 0.0
        if workload.recompute in ("full", "op") or workload.recompute.isdecimal():
            again = max(self._layer_again(kind) for kind in self.table)
        return workload.tokens * self.compute * numbers + max(0.0, again)

    def _layer_again(self, with_experts: bool) -> float:
        """Return the bytes that a recomputed layer keeps for its own backward, beyond what it has kept until then."""
        if not any(stage.experts if with_experts else stage.dense for stage in self.stages):
            return 0.0
        return self.table[with_experts][self._way()].bytes(self.workload.tokens) - self._layer(with_experts)

    def _head_gradient(self) -> float:
        trained = self.last and not self.workload.lora_rank
        return self.table_size * max(self.storage, 4.0) if trained else 0.0

    def _loss_buffers(self) -> float:
        workload, arch, tp = self.workload, self.workload.arch, self.workload.layout.tp
        limit = CHUNK_BYTES[self.device]
        if self.device == "cuda" and self.capacity:
            limit = min(limit, int(self.capacity) // 64)
        rows = math.ceil(arch.vocab_size / tp)
        most = max(128, limit // (rows * int(self.compute)))
        chunks = max(1, math.ceil(workload.tokens / most))
        chunk = min(workload.tokens, math.ceil(workload.tokens / chunks / 128) * 128)
        logits = chunk * rows * self.compute
        casts = not self.sharded and self.storage != self.compute and not workload.lora_rank
        copy = self.table_size * self.compute if casts else 0.0
        return min(SLICES[self.device], logits) + logits + copy + 2 * workload.tokens * arch.dim * self.compute
