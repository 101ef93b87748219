"""How long a step takes: the passes of every stage, the pipeline around them, sums of gradients, and the update.

A rank has three clocks: the device computes, the links transfer data, and the host starts kernels. passes.py predicts
how long one stage's pass takes, and pipeline.py when each pass of a schedule runs; docs/planner.md has the assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardline.plan import collectives
from shardline.plan.hardware import Hardware
from shardline.plan.passes import ADAPTED, Costs, stage_passes
from shardline.plan.pipeline import Passes, pipeline_seconds, stages_of_ranks
from shardline.plan.stages import StageLayers, cut, stage_parameters
from shardline.plan.traits import Traits
from shardline.plan.work import Workload, expert_shards

HOST_UPDATE = 0.68e-9  # seconds in which a host updates one parameter (docs/memory.md: CPU offload, H200 machine)
SHARP = 8.0  # the p of the p-norm of device and host times; the higher it is, the more the slower one decides


@dataclass
class StepTime:
    """Seconds of a step on the rank that computes longest, and their parts."""

    total: float
    compute: float
    bubble: float
    optimizer: float
    host: float
    exposed: dict[str, float] = field(default_factory=dict)  # by axis of the layout


def step_time(workload: Workload, hardware: Hardware, traits: Traits, simulated: bool = True) -> StepTime:
    """Return the time of a step. Without `simulated`, the bubble comes from a closed form for equal stages."""
    layout, n = workload.layout, workload.micro_batches
    stages = cut(workload, traits)
    costs = {stage: stage_passes(workload, stage, hardware, traits) for stage in set(stages)}
    times = {stage: Passes(_seconds(one.forward), _seconds(one.backward), one.weights) for stage, one in costs.items()}
    passes = [times[stage] for stage in stages]
    placed = stages_of_ranks(workload.schedule, layout.pp, workload.stages_per_rank)
    own = max(placed, key=lambda held: _busy(passes, held))
    transfer = _transfer_seconds(workload, hardware, traits)
    if simulated:
        counts = (layout.pp, n, workload.stages_per_rank)
        flow = pipeline_seconds(workload.schedule, *counts, passes, transfer, traits.p2p_blocks)
    else:
        fill = (layout.pp - 1) / workload.stages_per_rank
        flow = _busy(passes, own) * (n + fill) + 2 * (layout.pp - 1) * transfer
    compute = n * sum(costs[stages[index]].forward.compute + costs[stages[index]].backward.compute for index in own)
    exposed: dict[str, float] = {}
    for index in own:
        one = costs[stages[index]]
        for axis, seconds in (*one.forward.exposed, *one.backward.exposed):
            exposed[axis] = exposed.get(axis, 0.0) + n * seconds
    busy = n * _busy(passes, own)
    host = max(0.0, busy - compute - sum(exposed.values()))
    exposed["dp"] = max(_sum_seconds(workload, stage, times[stage], hardware, traits) for stage in costs)
    update = max(_update_seconds(workload, stage, hardware, traits) for stage in costs)
    nodes = max(1, layout.world_size // hardware.per_node)
    idle = traits.step + traits.step_rank * (nodes.bit_length() - 1)
    total = flow + exposed["dp"] + update + idle
    return StepTime(total, compute, max(0.0, flow - busy), update, host + idle, exposed)


def _busy(passes: Sequence[Passes], held: Sequence[int]) -> float:
    return sum(passes[stage].forward + passes[stage].backward for stage in held)


def _seconds(costs: Costs) -> float:
    """Return the seconds of a pass: about those of the slower of device and host."""
    device = costs.compute + sum(seconds for _, seconds in costs.exposed)
    if costs.host <= 0:
        return device
    slower, faster = max(device, costs.host), min(device, costs.host)
    return slower * float((1 + (faster / slower) ** SHARP) ** (1 / SHARP))


def _transfer_seconds(workload: Workload, hardware: Hardware, traits: Traits) -> float:
    """Return the seconds that activations take to reach the next stage."""
    if workload.layout.pp == 1:
        return 0.0
    group = collectives.axis_group(workload.layout, "pp", hardware.per_node)
    size = workload.tokens * workload.arch.dim * workload.number / workload.stream_share
    more = traits.p2p if group.nodes > 1 else 0.0
    return collectives.seconds(hardware, group, "send", size, traits.network, traits.delay) + more


def _sum_seconds(workload: Workload, stage: StageLayers, passes: Passes, hardware: Hardware, traits: Traits) -> float:
    """Return the exposed seconds of gradient sums at the end of a step, apart from those of FSDP's layers.

    Where the trainer can hide them, they run beside the last backward pass, except for the last layer's.
    """
    sent = _sums(workload, stage, traits)
    reached = traits.network * (traits.scattered if workload.zero in (1, 2) else 1.0)
    seconds = 0.0
    for axis, kind, size in sent:
        group = collectives.axis_group(workload.layout, axis, hardware.per_node)
        seconds += collectives.seconds(hardware, group, kind, size, reached, traits.delay)
    if workload.zero not in traits.dp_hidden:
        return seconds
    window = passes.backward + (passes.forward if workload.zero else 0.0)
    slowed = (traits.slowdown - 1) * min(window, seconds)
    return max(seconds - window, seconds / max(1, stage.layers)) + slowed


def _sums(workload: Workload, stage: StageLayers, traits: Traits) -> list[tuple[str, str, float]]:
    """Return (axis, collective, bytes) of a stage's gradients, and of weights that ZeRO gathers after the update."""
    layout, (dense, experts) = workload.layout, stage_parameters(workload, stage)
    share = ADAPTED if workload.lora_rank else 1.0
    reduced = [size * share * traits.reduce_bytes for size in (dense, experts)]
    if workload.zero == 3 and layout.dp_shard * layout.cp > 1:
        if layout.pp == 1:
            return []
        return [("dp_shard", "reduce_scatter", reduced[0]), ("expert_shard", "reduce_scatter", reduced[1])]
    if not workload.zero:
        return [("dp", "all_reduce", reduced[0]), ("expert_dp", "all_reduce", reduced[1])]
    sent = [("dp", "reduce_scatter", reduced[0]), ("expert_dp", "reduce_scatter", reduced[1])]
    gathered = [size * share * traits.gather_bytes for size in (dense, experts)]
    return [*sent, ("dp", "all_gather", gathered[0]), ("expert_dp", "all_gather", gathered[1])]


def _update_seconds(workload: Workload, stage: StageLayers, hardware: Hardware, traits: Traits) -> float:
    layout, (dense, experts) = workload.layout, stage_parameters(workload, stage)
    own = dense + experts
    if workload.zero:
        own = dense / (layout.dp_shard * layout.cp) + experts / expert_shards(layout)
    own *= ADAPTED if workload.lora_rank else 1.0
    if workload.cpu_offload:
        return own * (12.0 / hardware.host_link + HOST_UPDATE)  # gradients to the host, weights back, the update there
    return hardware.copy_seconds(own * traits.optimizer_bytes)
