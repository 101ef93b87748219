"""What `shardline plan` prints: a table of layouts, the parts of the best one's step and memory, why others lose."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from shardline.plan.check import Verdict
from shardline.plan.hardware import GIB, Hardware
from shardline.plan.memory import Memory
from shardline.plan.search import Candidate, PlanProblem, changes_of
from shardline.plan.simulate import StepTime
from shardline.plan.work import Workload
from shardline.run.device import flops_per_token

# Four of five of the layouts that check the planner (docs/planner.md) are predicted within these errors.
TIME_BAND = {"node": 0.10, "nodes": 0.20}
MEMORY_BAND = 0.08
PARTS = {
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "tokens on their way to experts",
    "dp_shard": "gathering of sharded weights",
    "dp": "sums of gradients",
    "host_link": "copies to and from host memory",
    "compute": "computation",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer",
    "host": "the host",
}
RECOMPUTED = {"op": "sel.", "offload": "host"}
SCHEDULES = {"Interleaved1F1B": "int", "InterleavedZeroBubble": "zb", "ZBVZeroBubble": "zbv", "DualPipeV": "dual"}


def name_of(workload: Workload) -> str:
    """Return the layout in the words of users: `fsdp 8 tp 4`, or `hsdp 4x8` for four copies of eight ranks each."""
    layout, parts = workload.layout, []
    if layout.dp_replicate > 1:
        copies, shards = layout.dp_replicate, layout.dp_shard
        parts.append(f"hsdp {copies}x{shards}" if shards > 1 else f"ddp {copies}")
    elif layout.dp_shard > 1:
        parts.append(f"fsdp {layout.dp_shard}")
    parts += [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1]
    return " ".join(parts) or "one rank"


def _pipeline_word(workload: Workload) -> str:
    if workload.layout.pp == 1:
        return "kept" if workload.zero == 3 and not workload.reshard else ""
    schedule = SCHEDULES.get(workload.schedule, workload.schedule)
    return f"{schedule} {workload.stages_per_rank}" if workload.stages_per_rank > 1 else schedule


def parts_of(time: StepTime) -> dict[str, float]:
    found = {"compute": time.compute, **time.exposed, "bubble": time.bubble}
    return {**found, "optimizer": time.optimizer, "host": time.host}


def mfu(problem: PlanProblem, candidate: Candidate) -> float:
    """Return MFU by torchtitan's convention, against the peak for bfloat16; frozen weights compute no gradient."""
    flops = flops_per_token(problem.arch, candidate.workload.seq_len)
    if candidate.workload.lora_rank:
        flops -= 2 / 6 * flops_per_token(problem.arch, 0)
    return candidate.tokens_per_second * flops / problem.hardware.peak(candidate.workload.activations)


def report(problem: PlanProblem, found: Sequence[Candidate], options: dict[str, Any]) -> str:
    best = found[0]
    lines = [_title(problem), "", *_table(problem, found), "", *LEGEND]
    lines += ["", *_split(problem, best), "", *_memory_lines(best.memory, problem.room), *_cost_lines(best, options)]
    if len(found) > 1:
        lines += ["", "Why the next ones lose:"]
        lines += [f"{number:>3} {why(best, other)}" for number, other in enumerate(found[1:], start=2)]
    return "\n".join(lines)


def _title(problem: PlanProblem) -> str:
    from shardline.models.flavors import model_label

    tokens = f"{problem.global_batch} x {problem.config.training.seq_len} tokens a step"
    return f"{model_label(problem.config.model)} on {problem.ranks} x {problem.hardware.name}, {tokens}"


def _table(problem: PlanProblem, found: Sequence[Candidate]) -> Iterator[str]:
    yield f"{'':>3} {'layout':<27} {'batches':<8} {'AC':<5} {'':<6} {'':<5} {'tok/s/GPU':>9} {'MFU':>4} {'GiB':>5}"
    for number, one in enumerate(found, start=1):
        workload = one.workload
        batches = f"{workload.micro_batches} x {workload.micro_batch}"
        mode = RECOMPUTED.get(workload.recompute, workload.recompute)
        words = f"{name_of(workload):<27} {batches:<8} {mode:<5} {_pipeline_word(workload):<6}"
        numbers = f"{one.tokens_per_second:>9,.0f} {100 * mfu(problem, one):>3.0f}% {one.memory.total / GIB:>5.1f}"
        yield f"{number:>3} {words} {'async' * workload.async_tp:<5} {numbers}"


LEGEND = (
    "batches: micro-batches x their sequences; AC: activation checkpointing; int 2:",
    "Interleaved1F1B with 2 stages a rank; async: tensor-parallel overlap; kept:",
    "FSDP keeps gathered weights for a whole step",
)


def _split(problem: PlanProblem, best: Candidate) -> Iterator[str]:
    band = TIME_BAND["node" if best.ranks <= problem.hardware.per_node else "nodes"]
    low, high = best.time.total * (1 - band), best.time.total * (1 + band)
    yield f"The first one: a step of {best.time.total:.3g} s ({low:.3g} to {high:.3g}), of which"
    for part, seconds in sorted(parts_of(best.time).items(), key=lambda item: -item[1]):
        if seconds > 0.001 * best.time.total:
            yield f"  {100 * seconds / best.time.total:>5.1f} %  {PARTS[part]}"


def _memory_lines(memory: Memory, room: float) -> Iterator[str]:
    total = memory.total
    spread = f"{_gib(total * (1 - MEMORY_BAND))} to {_gib(total * (1 + MEMORY_BAND))}"
    yield f"Memory of the fullest rank at {memory.moment}: {_gib(total)} GiB ({spread}) of {_gib(room)}:"
    yield f"  {memory_words(memory)}"


def memory_words(memory: Memory) -> str:
    """Return the parts in GiB, except those below a thousandth of the total."""
    sizes = {name: getattr(memory, name) for name in MEMORY_NAMES}
    parts = [f"{name} {_gib(size)}" for name, size in sizes.items() if size > memory.total / 1000]
    return "\n  ".join(textwrap.wrap(", ".join(parts), 76))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 20 else f"{size / GIB:.2g}"


def _cost_lines(best: Candidate, options: dict[str, Any]) -> Iterator[str]:
    tokens, price = options.get("tokens"), options.get("price")
    if tokens is None:
        return
    hours = tokens / (best.tokens_per_second * best.ranks) / 3600
    words = f"{hours:,.1f} hours" if hours < 72 else f"{hours / 24:,.1f} days"
    line = f"{tokens:,.0f} tokens: {words}"
    if price is not None:
        line += f", {hours * best.ranks * price:,.0f} at {price:g} per GPU and hour"
    yield ""
    yield line


def why(best: Candidate, other: Candidate) -> str:
    """Say in which part of a step the other candidate loses most time per token."""
    here, there = (_per_token(one) for one in (best, other))
    slower = 1 - other.tokens_per_second / best.tokens_per_second
    worse = {part: there.get(part, 0.0) - here.get(part, 0.0) for part in {*here, *there}}
    part = max(worse, key=lambda name: worse[name])
    if slower <= 0:
        return f"as fast, with {other.memory.total / GIB:.1f} GiB instead of {best.memory.total / GIB:.1f}"
    share = 100 * worse[part] / sum(here.values())
    words = _computation(best.workload, other.workload) if part == "compute" else PARTS[part]
    return f"{100 * slower:.1f} % slower: {words}, {share:+.1f} % of a step"


def _computation(best: Workload, other: Workload) -> str:
    """Say why the same model takes longer to compute."""
    if other.recompute != best.recompute and other.recompute != "none":
        return "it computes activations again"
    if other.layout.pp * other.stages_per_rank > best.layout.pp * best.stages_per_rank:
        return "stages are less even"
    return "products are smaller"


def _per_token(one: Candidate) -> dict[str, float]:
    return {part: seconds / one.workload.step_tokens for part, seconds in parts_of(one.time).items()}


def as_json(problem: PlanProblem, found: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [
        {
            "layout": {axis: getattr(one.workload.layout, axis) for axis in AXES},
            "tokens_per_second_per_device": round(one.tokens_per_second, 1),
            "mfu": round(mfu(problem, one), 4),
            "step_seconds": one.time.total,
            "parts": parts_of(one.time),
            "memory_gib": round(one.memory.total / GIB, 2),
            "memory": {name: getattr(one.memory, name) for name in MEMORY_NAMES},
            "keys": changes_of(problem, one.workload),
        }
        for one in found
    ]


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
MEMORY_NAMES = ("weights", "gradients", "optimizer", "activations", "buffers", "fragments")


# ---- one config ------------------------------------------------------------------------------------------------------


def verdict_lines(verdict: Verdict, hardware: Hardware) -> str:
    lines = [_fits_line(verdict, hardware), f"  {memory_words(verdict.memory)}"]
    lines.append(f"most of it: {dominant(verdict.memory)}; a step takes about {verdict.seconds:.3g} s")
    return "\n".join([*lines, *_change_lines(verdict)])


def dominant(memory: Memory) -> str:
    return max(MEMORY_NAMES, key=lambda name: float(getattr(memory, name)))


def _fits_line(verdict: Verdict, hardware: Hardware) -> str:
    total, room = verdict.memory.total / GIB, verdict.room / GIB
    ranks = f"{verdict.layout.world_size} x " if verdict.layout.world_size > 1 else ""
    what = f"the fullest rank needs about {total:.1f} GiB of {room:.1f} ({ranks}{hardware.name})"
    if verdict.fits:
        sure = "fits" if total <= room * (1 - MEMORY_BAND) else "just fits"
        return f"{sure}: {what}, {room - total:.1f} GiB to spare"
    sure = "does not fit" if total > room * (1 + MEMORY_BAND) else "will probably not fit"
    return f"{sure}: {what}, {total - room:.1f} GiB too much"


def _change_lines(verdict: Verdict) -> Iterator[str]:
    if verdict.fits:
        return
    if not verdict.changes:
        yield "no single change and no two of them make it fit: it needs more ranks (shardline plan --gpus N)"
        return
    yield "cheapest changes that make it fit:"
    for change in verdict.changes:
        slower = change.seconds / verdict.seconds - 1
        yield f"  {change.words}: {change.memory.total / GIB:.1f} GiB, {100 * slower:+.0f} % time"
        yield f"    {change.flags}"
