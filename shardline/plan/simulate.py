"""How long a step takes: passes of each stage, the pipeline around them, sums of gradients, and the update.

One rank has three clocks: the device computes, the links carry, and the host starts kernels. What runs beside each other
and what waits is written in the functions below; docs/planner.md says it in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shardline.plan import collectives
from shardline.plan.hardware import Hardware
from shardline.plan.pipeline import Passes, pipeline_seconds
from shardline.plan.traits import Traits
from shardline.plan.work import (
    LayerWork,
    Product,
    Sent,
    Workload,
    expert_layers,
    head_products,
    layer_parameters,
    layer_work,
)

SHARP = 8.0  # how sharply the slower of device and host decides: the norm in which their times are combined


class StageLayers(NamedTuple):
    """What one pipeline stage has."""

    dense: int
    experts: int
    first: bool
    last: bool


class Costs(NamedTuple):
    """Seconds of one pass of a part of the model."""

    compute: float = 0.0
    exposed: tuple[tuple[str, float], ...] = ()  # by axis
    host: float = 0.0


@dataclass
class StepTime:
    """Seconds of a step on the rank that decides, and what they consist of."""

    total: float
    compute: float
    bubble: float
    optimizer: float
    host: float
    exposed: dict[str, float] = field(default_factory=dict)  # by axis of the layout


class StagePasses(NamedTuple):
    forward: Costs
    backward: Costs
    weights: float  # seconds of weight gradients, a part of backward


def step_time(workload: Workload, hardware: Hardware, traits: Traits) -> StepTime:
    stages = cut(workload, traits)
    passes = [stage_passes(workload, stage, hardware, traits) for stage in stages]
    timed = [Passes(_seconds(one.forward), _seconds(one.backward), one.weights) for one in passes]
    layout, n = workload.layout, workload.micro_batches
    transfer = _transfer_seconds(workload, hardware, traits)
    flow = pipeline_seconds(
        workload.schedule, layout.pp, n, workload.stages_per_rank, timed, transfer, traits.p2p_blocks
    )
    place = _slowest(workload, timed)
    own = [index for index in range(len(stages)) if index % layout.pp == place]
    compute = n * sum(passes[i].forward.compute + passes[i].backward.compute for i in own)
    busy = n * sum(timed[i].forward + timed[i].backward for i in own)
    exposed: dict[str, float] = {}
    for index in own:
        for axis, seconds in (*passes[index].forward.exposed, *passes[index].backward.exposed):
            exposed[axis] = exposed.get(axis, 0.0) + n * seconds
    host = max(0.0, busy - compute - sum(exposed.values()))
    summed = max(_gradient_seconds(workload, stage, timed[i], hardware, traits) for i, stage in enumerate(stages))
    if summed > 0:
        exposed["dp"] = exposed.get("dp", 0.0) + summed
    update = max(_update_seconds(workload, stage, hardware, traits) for stage in stages)
    nodes = max(1, layout.world_size // hardware.per_node)
    idle = traits.step + traits.step_rank * (nodes.bit_length() - 1)
    total = flow + summed + update + idle
    return StepTime(total, compute, max(0.0, flow - busy), update, host + idle, exposed)


def _seconds(costs: Costs) -> float:
    """A pass takes as long as the slower of device and host."""
    device = costs.compute + sum(seconds for _, seconds in costs.exposed)
    if costs.host <= 0:
        return device
    slower, faster = max(device, costs.host), min(device, costs.host)
    return slower * (1 + (faster / slower) ** SHARP) ** (1 / SHARP)


# ---- stages ----------------------------------------------------------------------------------------------------------


def cut(workload: Workload, traits: Traits) -> list[StageLayers]:
    """The layers of each stage, those with experts spread evenly."""
    arch = workload.arch
    counts = workload.layers_of_stages or CUTS[traits.cut](workload)
    experts, done = expert_layers(arch), 0
    found = []
    for index, count in enumerate(counts):
        done += count
        with_experts = round(experts * done / arch.n_layers) - round(experts * (done - count) / arch.n_layers)
        found.append(StageLayers(count - with_experts, with_experts, index == 0, index == len(counts) - 1))
    return found


def _even(workload: Workload) -> tuple[int, ...]:
    count, layers = workload.layout.pp * workload.stages_per_rank, workload.arch.n_layers
    return tuple(layers // count + (index < layers % count) for index in range(count))


def _balanced(workload: Workload) -> tuple[int, ...]:
    from shardline.parallel.pipeline.stages import balanced_layers  # needs torch

    count = workload.layout.pp * workload.stages_per_rank
    return tuple(len(own) for own in balanced_layers(workload.arch, workload.seq_len, count))


def by_costs(workload: Workload) -> tuple[int, ...]:
    """A stage ends with the block that brings the sum of costs above its share; the output layer is a block, too."""
    arch, ranks = workload.arch, workload.layout.pp
    layer = sum(layer_parameters(arch, False, type(workload.layout)())[:2])
    costs = [layer] * arch.n_layers + [float(arch.vocab_size * arch.dim)]
    counts, stage, sum_of_costs = [0] * ranks, 0, 0.0
    for index, cost in enumerate(costs):
        counts[stage] += index < arch.n_layers
        sum_of_costs += cost
        if sum_of_costs > sum(costs) * (stage + 1) / ranks:
            stage = min(stage + 1, ranks - 1)
    return tuple(counts)


CUTS = {"even": _even, "balanced": _balanced, "costs": by_costs}


def _slowest(workload: Workload, timed: Sequence[Passes]) -> int:
    """The rank of the pipeline that computes longest."""
    ranks = workload.layout.pp
    busy = [sum(one.forward + one.backward for one in timed[rank::ranks]) for rank in range(ranks)]
    return busy.index(max(busy))


# ---- passes ----------------------------------------------------------------------------------------------------------


def stage_passes(workload: Workload, stage: StageLayers, hardware: Hardware, traits: Traits) -> StagePasses:
    """One stage's forward and backward pass for one micro-batch."""
    forward, backward = [], []
    weights = 0.0
    for count, with_experts in ((stage.dense, False), (stage.experts, True)):
        if count:
            ahead, back, own_weights = _layer_costs(workload, with_experts, hardware, traits)
            forward.append((count, ahead))
            backward.append((count, back))
            weights += count * own_weights
    if stage.last:
        ahead, back, own_weights = _head_costs(workload, hardware, traits)
        forward.append((1, ahead))
        backward.append((1, back))
        weights += own_weights
    if stage.first:
        size = workload.tokens * workload.arch.dim * 2.0
        forward.append((1, Costs(hardware.copy_seconds(3 * size))))
        backward.append((1, Costs(hardware.copy_seconds(4 * size))))
    host = traits.host_pass / (2 * workload.stages_per_rank)
    return StagePasses(_sum(forward, host), _sum(backward, host), weights)


def _sum(parts: Iterable[tuple[int, Costs]], host: float) -> Costs:
    compute, exposed = 0.0, {}
    for count, costs in parts:
        compute += count * costs.compute
        host += count * costs.host
        for axis, seconds in costs.exposed:
            exposed[axis] = exposed.get(axis, 0.0) + count * seconds
    return Costs(compute, tuple(exposed.items()), host)


def _layer_costs(
    workload: Workload, with_experts: bool, hardware: Hardware, traits: Traits
) -> tuple[Costs, Costs, float]:
    """(forward, backward, weight gradients) of one layer."""
    work, arch = layer_work(workload, with_experts), workload.arch
    products = sum(_product(workload, one, hardware, traits) for one in work.products)
    gradients = sum(_product(workload, _input_gradient(one), hardware, traits) for one in work.products)
    weights = sum(_product(workload, _weight_gradient(one), hardware, traits) for one in work.products)
    weights = 0.02 * weights if workload.lora_rank else weights
    scores = work.attention / (2.0 * (arch.head_dim + arch.v_dim)) * 2  # those that are computed
    spread = hardware.copy_seconds(scores * traits.score_bytes)
    kernel, rate = traits.attention, traits.attention_rate
    sizes = kernel, arch.head_dim, workload.seq_len
    attention = hardware.attention_seconds(work.attention, False, *sizes) / rate + spread / 3
    attention_back = hardware.attention_seconds(2.5 * work.attention, True, *sizes) / rate + spread * 2 / 3
    narrow = workload.compute in ("float8", "float4")
    moved = hardware.copy_seconds(work.moved * (traits.moved + (traits.rounding if narrow else 0.0)))
    ahead = products + attention + moved
    back = gradients + weights + attention_back + 2 * moved
    out_of_heads = _product(workload, work.products[work.out_of_heads], hardware, traits)
    back += _recomputed(workload, products, out_of_heads, attention, moved)
    sent = _exposed(work.sent, products, workload, hardware, traits)
    sent_back = _exposed(work.sent_backward, gradients + weights, workload, hardware, traits)
    if traits.tp_again and workload.layout.tp > 1:
        again = [one for one in work.sent if one.axis == "tp" and one.kind == "all_gather"]
        sent_back = _joined(sent_back, _exposed(again, weights, workload, hardware, traits))
    if workload.recompute == "full":
        sent_back = _joined(sent_back, sent)
    ahead, sent, back, sent_back = _with_gathers(
        workload, with_experts, ahead, sent, back, sent_back, hardware, traits
    )
    host = traits.host_layer + (traits.host_tp if workload.layout.tp > 1 else 0.0)
    host += (traits.host_experts if with_experts else 0.0) + _beside_pipeline(workload, hardware, traits)
    share = 0.5 if workload.recompute == "full" else 2 / 3
    host = host * (4 / 3 if workload.recompute == "full" else 1.0)
    return Costs(ahead, sent, host * (1 - share) / 1, ), Costs(back, sent_back, host * share), weights


def _beside_pipeline(workload: Workload, hardware: Hardware, traits: Traits) -> float:
    """More time of each layer where tensor-parallel collectives run beside transfers between nodes."""
    layout = workload.layout
    if layout.tp == 1 or layout.pp == 1 or collectives.axis_group(layout, "pp", hardware.per_node).nodes == 1:
        return 0.0
    each, square = traits.tp_beside_pp
    return each * layout.tp + square * layout.tp**2


def _product(workload: Workload, product: Product, hardware: Hardware, traits: Traits) -> float:
    dtype = workload.experts_compute if product.experts else workload.compute
    rows, columns, inner, count, _ = product
    rate = traits.products * (traits.products_float8 if dtype in ("float8", "float4") else 1.0)
    rate *= traits.products_experts if product.experts else 1.0
    return hardware.product_seconds(rows, columns, inner, dtype, count) / rate


def _input_gradient(product: Product) -> Product:
    return product._replace(columns=product.inner, inner=product.columns)


def _weight_gradient(product: Product) -> Product:
    return product._replace(rows=product.columns, columns=product.inner, inner=product.rows)


def _recomputed(
    workload: Workload, products: float, out_of_heads: float, attention: float, moved: float
) -> float:
    """What backward computes again.

    By operation, the second product of each part is not kept; that of the feed-forward part ends the block, and
    nothing needs it.
    """
    mode = workload.recompute
    if mode == "full":
        return products + attention + moved
    if mode == "op":
        return out_of_heads + moved
    if mode.isdecimal():
        return (products + attention + moved) / int(mode)
    return attention if mode == "attention" else 0.0


def _joined(*parts: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for axis, seconds in (pair for part in parts for pair in part):
        found[axis] = found.get(axis, 0.0) + seconds
    return tuple(found.items())


def _exposed(
    sent: Sequence[Sent], beside: float, workload: Workload, hardware: Hardware, traits: Traits
) -> tuple[tuple[str, float], ...]:
    """What stays visible of a layer's collectives."""
    hidden = {"tp": traits.tp_hidden, "cp": traits.cp_hidden, "ep": traits.ep_hidden}
    found: dict[str, float] = {}
    for axis, kind, size in sent:
        group = collectives.axis_group(workload.layout, axis, hardware.per_node)
        if axis == "ep" and traits.ep_once:
            size *= _distinct(workload, group)
        seconds = collectives.seconds(hardware, group, kind, size, traits.network, traits.delay)
        found[axis] = found.get(axis, 0.0) + seconds * (1 - hidden[axis])
    return tuple(found.items())


def _distinct(workload: Workload, group: collectives.Group) -> float:
    """The share of a token's rows that is left if it travels once to each node (or rank) that it goes to."""
    assert workload.arch.moe is not None
    chosen, places = workload.arch.moe.top_k, group.nodes if group.nodes > 1 else group.ranks
    return min(1.0, places * (1 - (1 - 1 / places) ** chosen) / chosen)


def _head_costs(workload: Workload, hardware: Hardware, traits: Traits) -> tuple[Costs, Costs, float]:
    arch, tp = workload.arch, workload.layout.tp
    plain = workload if workload.compute == "bfloat16" else None
    dtype = "bfloat16" if plain is None or workload.compute == "bfloat16" else workload.compute
    parts = head_products(workload)

    def timed(turn: object) -> float:
        rows, columns, inner, count, _ = turn  # type: ignore[misc]
        return hardware.product_seconds(rows, columns, inner, dtype, count) / traits.products

    ahead = sum(timed(one) for one in parts)
    weights = 0.0 if workload.lora_rank else sum(timed(_weight_gradient(one)) for one in parts)
    back = sum(timed(_input_gradient(one)) for one in parts) + weights
    logits = hardware.copy_seconds(workload.tokens * arch.vocab_size / tp * traits.logit_bytes)
    sent: tuple[tuple[str, float], ...] = ()
    if tp > 1:
        size = workload.tokens * arch.dim * 2.0
        kind = "all_gather" if workload.sequence_parallel else "all_reduce"
        sent = _exposed((Sent("tp", kind, size),), 0.0, workload, hardware, traits)
    host = traits.host_layer
    return Costs(ahead + logits / 3, sent, host / 3), Costs(back + logits * 2 / 3, sent, host * 2 / 3), weights


def _with_gathers(
    workload: Workload,
    with_experts: bool,
    ahead: float,
    sent: tuple[tuple[str, float], ...],
    back: float,
    sent_back: tuple[tuple[str, float], ...],
    hardware: Hardware,
    traits: Traits,
) -> tuple[float, tuple[tuple[str, float], ...], float, tuple[tuple[str, float], ...]]:
    """Add FSDP's collectives: the next layer's weights are gathered, the last one's gradients summed, beside a layer.

    Communication slows down what runs beside it; what takes longer than the layer stays visible.
    """
    layout = workload.layout
    if workload.zero < 3 or layout.dp_shard * layout.cp == 1:
        return ahead, sent, back, sent_back
    gather, reduce = _layer_gathers(workload, with_experts, hardware, traits)
    each = workload.reduce_each or workload.micro_batches == 1 or layout.pp == 1
    reduce = reduce if each else 0.0
    share = 1.0 if workload.reduce_each else 1.0 / workload.micro_batches
    reduce *= share
    once = 1.0 if workload.reshard else 1.0 / workload.micro_batches
    gather_back = gather if workload.reshard else 0.0
    ahead, visible = _beside(ahead, gather * once, traits)
    back, visible_back = _beside(back, gather_back + reduce, traits)
    return ahead, _joined(sent, (("dp_shard", visible),)), back, _joined(sent_back, (("dp_shard", visible_back),))


def _beside(compute: float, carried: float, traits: Traits) -> tuple[float, float]:
    if not traits.gather_hidden:
        return compute, carried
    hidden = min(compute, carried)
    slower = compute + (traits.slowdown - 1) * hidden
    return slower, max(0.0, carried - slower)


def _layer_gathers(
    workload: Workload, with_experts: bool, hardware: Hardware, traits: Traits
) -> tuple[float, float]:
    """Seconds to gather one layer's weights, and to sum its gradients."""
    layout = workload.layout
    sizes = layer_parameters(workload.arch, with_experts, layout)
    gather = reduce = 0.0
    for axis, count in (("dp_shard", sizes.dense), ("expert_shard", sizes.experts)):
        group = collectives.axis_group(layout, axis, hardware.per_node)
        gather += collectives.seconds(hardware, group, "all_gather", count * traits.gather_bytes, traits.network, traits.delay)
        trained = 0.01 * count if workload.lora_rank else count
        reduce += collectives.seconds(
            hardware, group, "reduce_scatter", trained * traits.reduce_bytes, traits.network, traits.delay
        )
        if layout.dp_replicate > 1:
            copies = collectives.axis_group(layout, "dp_replicate", hardware.per_node)
            size = trained * traits.reduce_bytes / group.ranks
            reduce += collectives.seconds(hardware, copies, "all_reduce", size, traits.network, traits.delay)
    return gather, reduce


def _transfer_seconds(workload: Workload, hardware: Hardware, traits: Traits) -> float:
    layout = workload.layout
    if layout.pp == 1:
        return 0.0
    group = collectives.axis_group(layout, "pp", hardware.per_node)
    size = workload.tokens * workload.arch.dim * 2.0 / workload.stream_share
    between = traits.p2p if group.nodes > 1 else 0.0
    return collectives.seconds(hardware, group, "send", size, traits.network, traits.delay) + between


# ---- after the passes ------------------------------------------------------------------------------------------------


def stage_parameters(workload: Workload, stage: StageLayers) -> tuple[float, float]:
    """(dense, expert) parameters of a stage on a rank, before data parallelism shards them."""
    arch, layout = workload.arch, workload.layout
    dense = layer_parameters(arch, False, layout)
    mixed = layer_parameters(arch, True, layout)
    table = arch.vocab_size * arch.dim / layout.tp
    ends = table * (stage.first + stage.last)
    if stage.first and stage.last and arch.tie_word_embeddings:
        ends = table
    return stage.dense * dense.dense + stage.experts * mixed.dense + ends, stage.experts * mixed.experts


def _gradient_seconds(
    workload: Workload, stage: StageLayers, passes: Passes, hardware: Hardware, traits: Traits
) -> float:
    """What is visible of sums of gradients (and of gathered weights) beside FSDP's own, at the end of a step."""
    layout = workload.layout
    dense, experts = stage_parameters(workload, stage)
    if workload.lora_rank:
        dense, experts = 0.01 * dense, 0.01 * experts
    if workload.zero == 3 and layout.dp_shard * layout.cp > 1:
        if layout.pp == 1:
            return 0.0
        parts = [("dp_shard", "reduce_scatter", dense, traits.reduce_bytes)]
        parts += [("expert_shard", "reduce_scatter", experts, traits.reduce_bytes)]
    else:
        kind = "reduce_scatter" if workload.zero else "all_reduce"
        parts = [("dp", kind, dense, traits.reduce_bytes), ("expert_dp", kind, experts, traits.reduce_bytes)]
        if workload.zero:
            parts += [("dp", "all_gather", dense, traits.gather_bytes)]
            parts += [("expert_dp", "all_gather", experts, traits.gather_bytes)]
    seconds = 0.0
    for axis, kind, count, width in parts:
        group = collectives.axis_group(layout, axis, hardware.per_node)
        reached = traits.network * (traits.scattered if workload.zero in (1, 2) else 1.0)
        seconds += collectives.seconds(hardware, group, kind, count * width, reached, traits.delay)
    if workload.zero not in traits.dp_hidden:
        return seconds
    layers = max(1, stage.dense + stage.experts)
    window = passes.backward + (passes.forward if workload.zero else 0.0)
    slowed = (traits.slowdown - 1) * min(window, seconds)
    return max(seconds - window, seconds / layers) + slowed


def _update_seconds(workload: Workload, stage: StageLayers, hardware: Hardware, traits: Traits) -> float:
    layout = workload.layout
    dense, experts = stage_parameters(workload, stage)
    shared = layout.dp_shard * layout.cp if workload.zero else 1
    own = dense / shared + experts / (layout.expert_shard if workload.zero else 1)
    if workload.lora_rank:
        own *= 0.01
    if workload.cpu_offload:
        return 3 * 4.0 * own / hardware.host_link
    return hardware.copy_seconds(own * traits.optimizer_bytes)
