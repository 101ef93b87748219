"""Finds the best layouts for a number of GPUs: simulates and ranks the candidates that fit.

Candidates are all combinations of degrees, splits of the data ranks, micro-batches and schedules that divide evenly.
Each uses the least recomputation with which it fits. Cheap predictions come first: memory, then the step's time without
a simulation of the pipeline, and finally the simulation for those that can still be among the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardline.config.architecture import Architecture
from shardline.config.check import check, checked_layout
from shardline.config.layout import KEYS, Layout
from shardline.config.schema import Config
from shardline.errors import ConfigError
from shardline.parallel.tensor.tensor import check_tensor_parallel
from shardline.plan.hardware import Hardware
from shardline.plan.memory import KeptOf, Memory, peak_memory
from shardline.plan.of_config import traits_for, workload_of
from shardline.plan.simulate import StepTime, step_time
from shardline.plan.work import Workload

RECOMPUTE = ("none", "op", "full")  # from the fastest to the one that keeps least
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4))
SPLIT_SCHEDULES = (("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2))  # not with compiled blocks
LARGEST_MICRO_BATCH = 16  # sequences
SHORTEST_SLICE = 4096  # tokens that a context-parallel rank should have at least
MARGIN = 0.95  # share of the room to plan for: predictions are off by a few percent
SIMULATED = 60  # candidates to simulate for every ten layouts to show


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and the time of its step."""

    workload: Workload
    memory: Memory
    time: StepTime

    @property
    def ranks(self) -> int:
        return self.workload.layout.world_size

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on each GPU."""
        return self.workload.step_tokens / self.time.total / self.ranks


@dataclass(frozen=True)
class PlanProblem:
    """The input of a search: a model and a batch on a number of devices of one kind."""

    config: Config
    arch: Architecture
    hardware: Hardware
    ranks: int
    global_batch: int  # sequences per step
    fixed: Mapping[str, Any]  # keys that the user has set on the command line
    kept: KeptOf
    device: str = "cuda"

    @property
    def room(self) -> float:
        """Bytes that a rank may use."""
        return self.hardware.memory - self.hardware.allowance


def search(problem: PlanProblem, top: int, goal: str = "speed") -> list[Candidate]:
    """Return the best candidates, best first; none if nothing fits."""
    bounded = []
    for number, workload in enumerate(candidates(problem)):
        fitted = _fitted(problem, workload, goal)
        if fitted is not None:
            chosen, memory = fitted
            bounded.append((_order(_bound(problem, chosen), memory, chosen, goal), number, chosen, memory))
    found: list[Candidate] = []
    for _, _, workload, memory in heapq.nsmallest(SIMULATED * max(1, top // 10 + 1), bounded):
        found.append(Candidate(workload, memory, timed(problem, workload)))
    found.sort(key=lambda one: _order(one.time.total, one.memory, one.workload, goal))
    return _allowed(problem, found, top)


def _order(seconds: float, memory: Memory, workload: Workload, goal: str) -> float:
    if goal == "memory":
        return memory.total * (1 + 1e-3 * seconds)
    return seconds * (workload.layout.world_size if goal == "cost" else 1) / workload.step_tokens


def timed(problem: PlanProblem, workload: Workload) -> StepTime:
    return step_time(workload, problem.hardware, traits_for(workload, problem.device))


def memory_of(problem: PlanProblem, workload: Workload) -> Memory:
    return peak_memory(workload, problem.kept, problem.device, problem.hardware.memory)


def _bound(problem: PlanProblem, workload: Workload) -> float:
    """Return the step's time with a closed form of the bubble in place of the simulation."""
    traits = traits_for(workload, problem.device)
    return step_time(workload, problem.hardware, traits, simulated=False).total


def _fitted(problem: PlanProblem, workload: Workload, goal: str) -> tuple[Workload, Memory] | None:
    """Return the workload with the least recomputation that makes it fit, or the most for the goal `memory`."""
    modes: Iterable[str] = RECOMPUTE if "activation_checkpoint.mode" not in problem.fixed else (workload.recompute,)
    for mode in reversed(list(modes)) if goal == "memory" else modes:
        chosen = replace(workload, recompute=mode)
        memory = memory_of(problem, chosen)
        if memory.total <= MARGIN * problem.room:
            return chosen, memory
    return None


def _allowed(problem: PlanProblem, found: list[Candidate], top: int) -> list[Candidate]:
    """Return the first candidates that the config's rules allow and that differ in more than a detail."""
    allowed: list[Candidate] = []
    seen = set()
    for candidate in found:
        layout = candidate.workload.layout
        like = (layout, candidate.workload.recompute, candidate.workload.micro_batch)
        if like in seen:
            continue
        try:
            written = config_of(problem, candidate.workload)
            check(written)
            checked_layout(written, layout.world_size)
            workload_of(written, problem.arch, layout, problem.device)
        except ConfigError:
            continue
        seen.add(like)
        allowed.append(candidate)
        if len(allowed) == top:
            break
    return allowed


# ---- candidates ------------------------------------------------------------------------------------------------------


def candidates(problem: PlanProblem) -> Iterator[Workload]:
    base = _base(problem)
    for layout in layouts(problem):
        if problem.global_batch % layout.data_ranks:
            continue
        local = problem.global_batch // layout.data_ranks
        for micro in _sizes(problem, local):
            placed = replace(
                base,
                layout=layout,
                micro_batch=micro * problem.config.training.rows_of_a_sample,
                micro_batches=local // micro,
                zero=3 if layout.dp_shard * layout.cp > 1 else 0,
                sequence_parallel=base.sequence_parallel and layout.tp > 1,
                reshard=layout.pp == 1,
                layers_of_stages=(),
            )
            yield from _schedules(problem, placed)


def _base(problem: PlanProblem) -> Workload:
    """Return the config's workload on one rank; candidates differ from it in layout, batch and schedule."""
    plain = {f"parallelism.{key}": 1 for key in KEYS.values()} | {
        "parallelism.expert_parallel_degree": 1,
        "parallelism.expert_tensor_parallel_degree": 1,
        "training.global_batch_size": -1,
        "training.gradient_accumulation_steps": None,
        "training.local_batch_size": 1,
    }
    config = problem.config.replace(plain)
    base = workload_of(config, problem.arch, Layout(), problem.device)
    wants_sequence_parallel = problem.config.parallelism.enable_sequence_parallel
    return replace(base, sequence_parallel=wants_sequence_parallel, keeps_narrow=False)


def _schedules(problem: PlanProblem, workload: Workload) -> Iterator[Workload]:
    layout, config = workload.layout, problem.config
    if layout.pp == 1:
        tp_ways = (False, True) if layout.tp > 1 and workload.micro_batches > 0 else (False,)
        for overlapped in tp_ways:
            yield replace(workload, async_tp=overlapped)
            if workload.zero == 3 and workload.micro_batches > 1:
                yield replace(workload, async_tp=overlapped, reshard=False)
        return
    options = SCHEDULES if workload.compiled else SCHEDULES + SPLIT_SCHEDULES
    asked = problem.fixed.get("parallelism.pipeline_parallel_schedule")
    for schedule, stages in options:
        if asked is not None and schedule.lower() != str(asked).lower():
            continue
        if workload.arch.n_layers < layout.pp * stages or workload.micro_batches < layout.pp:
            continue
        if config.parallelism.pipeline_parallel_layers_per_stage is not None and stages > 1:
            continue
        yield replace(workload, schedule=schedule, stages_per_rank=stages, async_tp=layout.tp > 1)


def _sizes(problem: PlanProblem, local: int) -> list[int]:
    """Return sequences per micro-batch: the fixed number, or powers of two that divide a rank's part of the batch."""
    fixed = problem.fixed.get("training.local_batch_size")
    if fixed is not None:
        return [int(fixed)] if local % int(fixed) == 0 else []
    sizes = [2**power for power in range(5) if local % 2**power == 0 and 2**power <= LARGEST_MICRO_BATCH]
    return sizes or [1]


def layouts(problem: PlanProblem) -> Iterator[Layout]:
    """Yield every layout of the ranks for which the model can be cut and which the fixed keys allow."""
    arch, ranks = problem.arch, problem.ranks
    per_node = problem.hardware.per_node
    for tp in _divisors(ranks, problem.fixed, "tp"):
        if not _can_cut(arch, tp) or (tp > per_node and "parallelism.tensor_parallel_degree" not in problem.fixed):
            continue
        for cp in _divisors(ranks // tp, problem.fixed, "cp"):
            if not _can_slice(problem, cp, tp):
                continue
            for pp in _divisors(ranks // (tp * cp), problem.fixed, "pp"):
                if pp > arch.n_layers:
                    continue
                data = ranks // (tp * cp * pp)
                for shard in _shards(data, tp * cp, per_node, problem.fixed):
                    whole = Layout(pp=pp, dp_replicate=data // shard, dp_shard=shard, cp=cp, tp=tp)
                    yield from _with_experts(problem, whole)


def _divisors(number: int, fixed: Mapping[str, Any], axis: str) -> list[int]:
    given = fixed.get(f"parallelism.{KEYS[axis]}")
    if given is not None:
        return [int(given)] if number % int(given) == 0 else []
    powers = (2**power for power in range(number.bit_length()))
    return [degree for degree in powers if number % degree == 0]


def _can_cut(arch: Architecture, tp: int) -> bool:
    try:
        check_tensor_parallel(arch, tp)
    except ConfigError:
        return False
    return True


def _can_slice(problem: PlanProblem, cp: int, tp: int) -> bool:
    length = problem.config.training.seq_len
    given = "parallelism.context_parallel_degree" in problem.fixed
    return cp == 1 or (length % (2 * cp * tp) == 0 and (given or length // cp >= SHORTEST_SLICE))


def _shards(data: int, inner: int, per_node: int, fixed: Mapping[str, Any]) -> list[int]:
    """Return how many ranks may share a copy of the weights: all, those of a node, or one."""
    given = fixed.get("parallelism.data_parallel_shard_degree")
    if given not in (None, -1):
        return [int(given)] if data % int(given) == 0 else []
    copies = fixed.get("parallelism.data_parallel_replicate_degree")
    if copies not in (None, -1):
        return [data // int(copies)] if data % int(copies) == 0 else []
    inside = max(1, per_node // inner)
    return [size for size in dict.fromkeys((data, inside, 1)) if size >= 1 and data % size == 0]


def _with_experts(problem: PlanProblem, layout: Layout) -> Iterator[Layout]:
    moe = problem.arch.moe
    given = problem.fixed.get("parallelism.expert_parallel_degree")
    if moe is None:
        yield layout
        return
    among = layout.dp_shard * layout.cp * layout.tp
    for ep in (int(given),) if given else (1, 2, 4, 8, 16, 32, 64):
        if ep > among or among % ep or moe.n_experts % ep or (ep == 1 and layout.tp > 1 and moe.expert_dim % layout.tp):
            continue
        etp = layout.tp if ep == 1 else 1
        yield replace(layout, ep=ep, etp=etp if ep > 1 else 1)


# ---- as a config -----------------------------------------------------------------------------------------------------


def config_of(problem: PlanProblem, workload: Workload) -> Config:
    """Return the config with the keys of a candidate."""
    return problem.config.replace(changes_of(problem, workload))


def changes_of(problem: PlanProblem, workload: Workload) -> dict[str, Any]:
    layout, micro = workload.layout, workload.micro_batch // problem.config.training.rows_of_a_sample
    changes: dict[str, Any] = {f"parallelism.{key}": getattr(layout, axis) for axis, key in KEYS.items()}
    changes |= {
        "parallelism.expert_parallel_degree": layout.ep,
        "parallelism.expert_tensor_parallel_degree": layout.etp if layout.ep > 1 else 1,
        "parallelism.enable_async_tensor_parallel": workload.async_tp,
        "training.global_batch_size": problem.global_batch,
        "training.gradient_accumulation_steps": None,
        "training.local_batch_size": micro,
        "activation_checkpoint.mode": {"op": "selective"}.get(workload.recompute, workload.recompute),
    }
    if workload.recompute == "op":
        changes["activation_checkpoint.selective_ac_option"] = "op"
    if layout.pp > 1:
        changes |= {
            "training.local_batch_size": micro * workload.micro_batches,
            "parallelism.pipeline_parallel_microbatch_size": micro,
            "parallelism.pipeline_parallel_schedule": workload.schedule,
            "parallelism.pipeline_parallel_schedule_csv": None,
            "parallelism.pipeline_parallel_layers_per_stage": _layers_per_stage(workload),
        }
    if workload.zero == 3 and layout.pp == 1:
        changes["parallelism.fsdp_reshard_after_forward"] = "default" if workload.reshard else "never"
    return {key: value for key, value in changes.items() if problem.config.value(key) != value}


def _layers_per_stage(workload: Workload) -> int | None:
    """Return the value of the key that gives a rank more stages than its schedule's minimum, None if not needed."""
    if workload.stages_per_rank <= 2:
        return None
    stages = workload.layout.pp * workload.stages_per_rank
    return -(-(workload.arch.n_layers + 2) // stages)
