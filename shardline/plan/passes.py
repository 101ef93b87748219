"""How long one stage's passes take for one micro-batch, forward and backward, and how much communication is exposed.

The device runs one kernel after another. Collectives of tensor, context and expert parallelism run between kernels,
except for the share that a trainer hides. FSDP's collectives run beside a layer. While it computes, they gather the
next layer's weights and sum the previous one's gradients. They slow it down, and their time beyond it is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardline.plan import collectives
from shardline.plan.hardware import Hardware
from shardline.plan.stages import StageLayers
from shardline.plan.traits import Traits
from shardline.plan.work import (
    LayerWork,
    MatrixProduct,
    Sent,
    Workload,
    expert_shards,
    head_product,
    kept_numbers,
    layer_parameters,
    layer_work,
)

Exposed = tuple[tuple[str, float], ...]  # seconds by axis
NARROW = ("float8", "float4")
ADAPTED = 0.01  # LoRA's parameters, as a share of the frozen ones


class Costs(NamedTuple):
    """Seconds of one pass of a part of the model."""

    compute: float = 0.0
    exposed: Exposed = ()
    host: float = 0.0


class PartCosts(NamedTuple):
    """Costs of a layer, the head or a stage; `weights` is the part of backward that computes weight gradients."""

    forward: Costs
    backward: Costs
    weights: float


def stage_passes(workload: Workload, stage: StageLayers, hardware: Hardware, traits: Traits) -> PartCosts:
    """Return the costs of one stage's passes for one micro-batch."""
    model = PassModel(workload, hardware, traits)
    parts = [(count, model.layer(kind)) for count, kind in ((stage.dense, False), (stage.experts, True)) if count]
    if stage.last:
        parts.append((1, model.head()))
    if stage.first:
        parts.append((1, model.embedding()))
    host = traits.host_pass / (2 * workload.stages_per_rank)
    return PartCosts(
        _sum(((count, part.forward) for count, part in parts), host),
        _sum(((count, part.backward) for count, part in parts), host),
        sum(count * part.weights for count, part in parts),
    )


def _sum(parts: Iterable[tuple[int, Costs]], host: float) -> Costs:
    compute, exposed = 0.0, []
    for count, costs in parts:
        compute += count * costs.compute
        host += count * costs.host
        exposed.append(tuple((axis, count * seconds) for axis, seconds in costs.exposed))
    return Costs(compute, joined(*exposed), host)


def joined(*parts: Exposed) -> Exposed:
    found: dict[str, float] = {}
    for axis, seconds in (pair for part in parts for pair in part):
        found[axis] = found.get(axis, 0.0) + seconds
    return tuple(found.items())


class PassModel:
    """Costs of a workload's parts on this hardware with this trainer."""

    def __init__(self, workload: Workload, hardware: Hardware, traits: Traits) -> None:
        self.workload, self.hardware, self.traits = workload, hardware, traits

    # ---- layers ------------------------------------------------------------------------------------------------------

    def layer(self, with_experts: bool) -> PartCosts:
        workload, work = self.workload, layer_work(self.workload, with_experts)
        products, gradients, weights = self._products(work.products)
        weights *= ADAPTED if workload.lora_rank else 1.0
        attention, attention_back = self._attention(work)
        moved = self._moved(work)
        ahead = products + attention + moved
        back = gradients + weights + attention_back + 2 * moved
        back += self._again(work, products, attention, moved)
        sent, sent_back = self._visible(work.sent), self._visible(work.sent_backward)
        if self.traits.tp_again:
            gathers = [one for one in work.sent if one.axis == "tp" and one.kind == "all_gather"]
            sent_back = joined(sent_back, self._visible(gathers))
        if workload.recompute == "full":
            sent_back = joined(sent_back, sent)
        if workload.recompute == "offload":
            away = kept_numbers(workload, work) * workload.number / workload.offload_every / self.hardware.host_link
            sent = joined(sent, (("host_link", max(0.0, away - ahead)),))
            sent_back = joined(sent_back, (("host_link", max(0.0, away - back)),))
        ahead, back, gathers_ahead, gathers_back = self._beside_gathers(with_experts, ahead, back)
        host = self._host(with_experts)
        again = 1.0 if workload.recompute == "full" else 1.0 - self.traits.host_forward
        return PartCosts(
            Costs(ahead, joined(sent, gathers_ahead), host * self.traits.host_forward),
            Costs(back, joined(sent_back, gathers_back), host * again),
            weights,
        )

    def _products(self, products: Sequence[MatrixProduct]) -> tuple[float, float, float]:
        """Return the seconds of products, of their input gradients, and of their weight gradients."""
        ahead = gradients = weights = 0.0
        for one in products:
            ahead += self._product(one)
            gradients += self._product(one._replace(columns=one.inner, inner=one.columns))
            weights += self._product(one._replace(rows=one.columns, columns=one.inner, inner=one.rows))
        return ahead, gradients, weights

    def _product(self, product: MatrixProduct, dtype: str | None = None) -> float:
        traits, workload = self.traits, self.workload
        kind = dtype or (workload.experts_compute if product.experts else workload.compute)
        rate = traits.products * (traits.products_float8 if kind in NARROW else 1.0)
        rate *= traits.products_experts if product.experts else 1.0
        rows, columns, inner, repeat, _ = product
        return self.hardware.product_seconds(rows, columns, inner, kind, repeat) / rate

    def _attention(self, work: LayerWork) -> tuple[float, float]:
        """Return seconds forward and backward; attention in several kernels also moves all scores of the square."""
        workload, traits, arch = self.workload, self.traits, self.workload.arch
        scores = work.attention / (arch.head_dim + arch.v_dim)
        spread = self.hardware.copy_seconds(scores * traits.score_bytes)
        sizes = traits.attention, arch.head_dim, workload.seq_len
        ahead = self.hardware.attention_seconds(work.attention, False, *sizes) / traits.attention_rate
        back = self.hardware.attention_seconds(2.5 * work.attention, True, *sizes) / traits.attention_rate
        return ahead + spread / 3, back + spread * 2 / 3

    def _moved(self, work: LayerWork) -> float:
        passes = self.traits.moved + (self.traits.rounding if self.workload.compute in NARROW else 0.0)
        return self.hardware.copy_seconds(work.moved * passes)

    def _again(self, work: LayerWork, products: float, attention: float, moved: float) -> float:
        """Return the seconds that backward spends on recomputation.

        Checkpointing by operation does not keep the second product of each part. That of the feed-forward part ends
        the block and is not needed again.
        """
        mode = self.workload.recompute
        if mode == "full":
            return products + attention + moved
        if mode == "op":
            return self._product(work.products[work.out_of_heads]) + moved
        if mode.isdecimal():
            return (products + attention + moved) / int(mode)
        return attention if mode == "attention" else 0.0

    def _host(self, with_experts: bool) -> float:
        """Return the seconds that the host takes to start a layer's kernels for one forward and one backward pass."""
        traits, layout = self.traits, self.workload.layout
        host = traits.host_layer + (traits.host_experts if with_experts else 0.0)
        if layout.tp == 1:
            return host
        crosses = layout.pp > 1 and collectives.axis_group(layout, "pp", self.hardware.per_node).nodes > 1
        each, square = traits.tp_beside_pp if crosses else (0.0, 0.0)
        return host + traits.host_tp + each * layout.tp + square * layout.tp**2

    # ---- communication -----------------------------------------------------------------------------------------------

    def _visible(self, sent: Sequence[Sent]) -> Exposed:
        """Return the exposed seconds of a layer's collectives."""
        traits = self.traits
        hidden = {"tp": traits.tp_hidden, "cp": traits.cp_hidden, "ep": traits.ep_hidden}
        return joined(*(((one.axis, self.seconds(*one) * (1 - hidden[one.axis])),) for one in sent))

    def seconds(self, axis: str, kind: str, size: float) -> float:
        """Return the time of one collective over an axis."""
        group = collectives.axis_group(self.workload.layout, axis, self.hardware.per_node)
        if axis == "ep" and self.traits.ep_once:
            size *= self._distinct(group)
        return collectives.seconds(self.hardware, group, kind, size, self.traits.network, self.traits.delay)

    def _distinct(self, group: collectives.Group) -> float:
        """Return the share of a token's rows that remains if it is sent only once to each of its nodes (or ranks)."""
        assert self.workload.arch.moe is not None
        chosen, places = self.workload.arch.moe.top_k, group.nodes if group.nodes > 1 else group.ranks
        return min(1.0, places * (1 - (1 - 1 / places) ** chosen) / chosen)

    def _beside_gathers(self, with_experts: bool, ahead: float, back: float) -> tuple[float, float, Exposed, Exposed]:
        """Return the seconds of a layer's passes beside FSDP's collectives, and the exposed seconds of these."""
        workload, layout = self.workload, self.workload.layout
        if workload.zero < 3 or layout.dp_shard * layout.cp == 1:
            return ahead, back, (), ()
        gather, reduce = self._layer_gathers(with_experts)
        if layout.pp > 1 and not workload.reduce_each and workload.micro_batches > 1:
            reduce = 0.0  # stages sum their gradients at the end of a step
        reduce *= 1.0 if workload.reduce_each else 1.0 / workload.micro_batches
        once = 1.0 if workload.reshard else 1.0 / workload.micro_batches
        ahead, visible = self._beside(ahead, gather * once)
        back, visible_back = self._beside(back, reduce + (gather if workload.reshard else 0.0))
        return ahead, back, (("dp_shard", visible),), (("dp_shard", visible_back),)

    def _beside(self, compute: float, carried: float) -> tuple[float, float]:
        if not self.traits.gather_hidden:
            return compute, carried
        slower = compute + (self.traits.slowdown - 1) * min(compute, carried)
        return slower, max(0.0, carried - slower)

    def _layer_gathers(self, with_experts: bool) -> tuple[float, float]:
        """Return the seconds that gathering one layer's weights and reducing its gradients take."""
        workload, layout, traits = self.workload, self.workload.layout, self.traits
        sizes = layer_parameters(workload.arch, with_experts, layout)
        gather = reduce = 0.0
        for axis, ranks, count in (
            ("dp_shard", layout.dp_shard * layout.cp, sizes.dense),
            ("expert_shard", expert_shards(layout), sizes.experts),
        ):
            summed = count * traits.reduce_bytes * (ADAPTED if workload.lora_rank else 1.0)
            gather += self.seconds(axis, "all_gather", count * traits.gather_bytes)
            reduce += self.seconds(axis, "reduce_scatter", summed)
            if layout.dp_replicate > 1:
                reduce += self.seconds("dp_replicate", "all_reduce", summed / ranks)
        return gather, reduce

    # ---- ends --------------------------------------------------------------------------------------------------------

    def head(self) -> PartCosts:
        """Return the costs of the output layer, in the type of activations, and of the loss."""
        workload, traits, tp = self.workload, self.traits, self.workload.layout.tp
        one = head_product(workload)
        dtype = "bfloat16" if workload.compute in NARROW else workload.compute
        ahead = self._product(one, dtype)
        weights = (
            0.0
            if workload.lora_rank
            else self._product(one._replace(rows=one.columns, columns=one.inner, inner=one.rows), dtype)
        )
        back = self._product(one._replace(columns=one.inner, inner=one.columns), dtype) + weights
        logits = self.hardware.copy_seconds(workload.tokens * workload.arch.vocab_size / tp * traits.logit_bytes)
        sent: Exposed = ()
        if tp > 1:
            kind = "all_gather" if workload.sequence_parallel else "all_reduce"
            sent = self._visible([Sent("tp", kind, workload.tokens * workload.arch.dim * workload.number)])
        host = traits.host_layer
        return PartCosts(
            Costs(ahead + logits / 3, sent, host * self.traits.host_forward),
            Costs(back + logits * 2 / 3, sent, host * (1 - self.traits.host_forward)),
            weights,
        )

    def embedding(self) -> PartCosts:
        rows = self.workload.tokens * self.workload.arch.dim * self.workload.number
        return PartCosts(Costs(self.hardware.copy_seconds(3 * rows)), Costs(self.hardware.copy_seconds(4 * rows)), 0.0)
