"""Whether a config fits a device, what fills it, and the cheapest changes that make it fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardline.comm.store import ranks_from_environment
from shardline.config.architecture import Architecture
from shardline.config.check import check, checked_layout
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.data.loader import fitted
from shardline.errors import ConfigError
from shardline.models.flavors import resolve
from shardline.plan.hardware import Hardware, find_profile, profile_for
from shardline.plan.memory import Memory
from shardline.plan.of_config import kept_by, workload_of
from shardline.plan.search import PlanProblem, memory_of, timed
from shardline.run.device import available_memory, device_name

MOST_SHOWN = 3


@dataclass(frozen=True)
class Change:
    """A change to the config, with the memory and step time of the changed run."""

    words: str
    keys: dict[str, Any]
    memory: Memory
    seconds: float

    @property
    def flags(self) -> str:
        return " ".join(f"--{key}={_shown(value)}" for key, value in self.keys.items() if value is not None)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Verdict:
    memory: Memory
    room: float
    seconds: float
    layout: Layout
    changes: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room


def problem_of(config: Config, hardware: Hardware, ranks: int, device: str = "cuda") -> tuple[PlanProblem, Layout]:
    """Return the planning problem of the unchanged config on this many ranks."""
    layout = checked_layout(config, ranks)
    arch = fitted(resolve(config.model), config)
    kept = kept_by(config, arch, device)
    return PlanProblem(config, arch, hardware, ranks, 0, {}, kept, device), layout


def judge(config: Config, hardware: Hardware, ranks: int, device: str = "cuda", changes: bool = True) -> Verdict:
    """Return whether the config fits; with `changes`, also the cheapest changes that make it fit."""
    problem, layout = problem_of(config, hardware, ranks, device)
    return verdict_of(problem, layout, changes)


def verdict_of(problem: PlanProblem, layout: Layout, changes: bool = True) -> Verdict:
    workload = workload_of(problem.config, problem.arch, layout, problem.device)
    memory = memory_of(problem, workload)
    found: tuple[Change, ...] = ()
    if memory.total > problem.room and changes:
        found = tuple(cheapest(problem, layout))
    return Verdict(memory, problem.room, timed(problem, workload).total, layout, found)


# ---- changes ---------------------------------------------------------------------------------------------------------


def cheapest(problem: PlanProblem, layout: Layout) -> list[Change]:
    """Return the changes, alone or in pairs, that make a run fit and slow it down least."""
    single = list(_tried(problem, layout, [(words, keys) for words, keys in single_changes(problem, layout)]))
    fits = [change for change in single if change.memory.total <= problem.room]
    if not fits:
        pairs = [
            (f"{a.words}, and {b.words}", {**a.keys, **b.keys})
            for a, b in itertools.combinations(single, 2)
            if not a.keys.keys() & b.keys.keys()
        ]
        fits = [change for change in _tried(problem, layout, pairs) if change.memory.total <= problem.room]
    return sorted(fits, key=lambda change: change.seconds)[:MOST_SHOWN]


def single_changes(problem: PlanProblem, layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    config, arch = problem.config, problem.arch
    section, training = config.parallelism, config.training
    mode = config.activation_checkpoint.mode
    keys: dict[str, Any]
    if mode == "none":
        keys = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
        yield "selective checkpointing", keys
    if mode != "full":
        yield "full checkpointing", {"activation_checkpoint.mode": "full"}
    if problem.device == "cuda" and mode == "none":
        yield "activations in host memory", {"activation_checkpoint.mode": "offload"}
    yield from _smaller_batches(config, layout)
    if config.optimizer.name in ("AdamW", "Adam") and config.optimizer.state_dtype == "parameter":
        for kind in ("bfloat16", "int8"):
            yield f"optimizer state in {kind}", {"optimizer.state_dtype": kind}
    if layout.dp_replicate > 1:
        keys = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
        yield "sharding instead of copies", keys
    for tp in (2, 4, 8):
        if tp > layout.tp and layout.dp_shard % (tp // layout.tp) == 0:
            keys = {"parallelism.tensor_parallel_degree": tp, "parallelism.data_parallel_shard_degree": -1}
            yield f"tensor parallelism over {tp}", keys
            break
    if arch.moe is not None and layout.ep == 1 and layout.dp_shard > 1:
        yield f"expert parallelism over {layout.dp_shard}", {"parallelism.expert_parallel_degree": layout.dp_shard}
    if section.accumulation_sync == "step" and layout.dp_shard > 1:
        yield "gradients summed each micro-batch", {"parallelism.accumulation_sync": "micro_batch"}
    if problem.device == "cuda" and not training.enable_cpu_offload:
        yield "weights and optimizer state in host memory", {"training.enable_cpu_offload": True}


def _smaller_batches(config: Config, layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    training, section = config.training, config.parallelism
    if layout.pp > 1:
        size = section.pipeline_parallel_microbatch_size
        if size > 1:
            yield "micro-batches of 1", {"parallelism.pipeline_parallel_microbatch_size": 1}
        return
    whole = training.global_batch_size
    if whole == -1:
        whole = training.local_batch_size * layout.data_ranks * (training.gradient_accumulation_steps or 1)
    keys = {"training.global_batch_size": whole, "training.gradient_accumulation_steps": None}
    size = training.local_batch_size // 2
    while size >= 1:
        if training.local_batch_size % size == 0:
            yield f"micro-batches of {size} (the same step)", {"training.local_batch_size": size, **keys}
        size //= 2


def _tried(problem: PlanProblem, layout: Layout, changes: list[tuple[str, dict[str, Any]]]) -> Iterator[Change]:
    for words, keys in changes:
        try:
            config = problem.config.replace(keys)
            check(config)
            here = checked_layout(config, layout.world_size)
            workload = workload_of(config, problem.arch, here, problem.device)
            other = replace(problem, config=config)
            yield Change(words, keys, memory_of(other, workload), timed(other, workload).total)
        except ConfigError:
            continue


# ---- a run that starts -----------------------------------------------------------------------------------------------


def before_start(config: Config, arch: Architecture, layout: Layout, device: torch.device) -> Verdict:
    """Compare the memory that a run will need with what is free here, and suggest changes if it needs too much.

    Times only rank the changes, so a GPU without a profile is treated as an H100.
    """
    free = available_memory(device, ranks_from_environment("LOCAL_WORLD_SIZE", layout.world_size))
    profile = (
        (profile_for(device_name(device)) or find_profile("h100")) if device.type == "cuda" else find_profile("cpu")
    )
    hardware = replace(profile, memory=math.inf if free is None else free, allowance=0)
    kept = kept_by(config, arch, device.type)
    return verdict_of(PlanProblem(config, arch, hardware, layout.world_size, 0, {}, kept, device.type), layout)


def architecture_of(config: Config) -> Architecture:
    return fitted(resolve(config.model), config)
