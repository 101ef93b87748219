"""`shardline plan` finds layouts that fit and predicts their speed; `--check` says whether a config fits."""

from __future__ import annotations

import json as json_lines
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.config.check import check as check_rules
from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.errors import ConfigError, UserError
from shardline.plan.check import architecture_of, judge
from shardline.plan.hardware import GIB, Hardware, find_profile, local_gpu, on_nodes, profile_for
from shardline.plan.memory import Memory
from shardline.plan.of_config import kept_by
from shardline.plan.report import as_json, dominant, report, verdict_lines
from shardline.plan.search import MARGIN, Candidate, PlanProblem, candidates, config_of, memory_of, search
from shardline.storage.atomic import write_atomically

GOALS = ("speed", "memory", "cost")
MOST_RANKS = 65_536  # the most that are tried when nothing fits
FEWER = 8  # numbers of GPUs that the goal cost tries, each half of the one before


def command(
    config: Config,
    fixed: dict[str, Any],
    gpus: int | None,
    nodes: int | None,
    gpu: str | None,
    gpus_per_node: int | None,
    global_batch: int | None,
    top: int,
    goal: str,
    price: float | None,
    tokens: float | None,
    write: str | None,
    check: bool,
    json: bool,
) -> int:
    hardware, device = _hardware(gpu, gpus_per_node)
    ranks = _ranks(gpus, nodes, hardware)
    if check:
        return _check(config, hardware, ranks, device, json)
    if ranks is None:
        raise UserError("shardline plan: --gpus N (or --nodes N) is missing: how many are there?")
    arch = architecture_of(config)
    batch = global_batch or _batch(config, ranks)
    problem = PlanProblem(config, arch, hardware, ranks, batch, fixed, kept_by(config, arch, device), device)
    found = _search(problem, top, goal)
    if not found:
        raise UserError(_nothing(problem))
    if json:
        print("\n".join(json_lines.dumps(row) for row in as_json(problem, found)))
    else:
        print(
            report(replace(problem, ranks=found[0].ranks), found, {"tokens": tokens, "price": price or hardware.price})
        )
    if write is not None:
        write_atomically(Path(write), to_toml(config_of(problem, found[0].workload)))
        if not json:
            print(f"\nwrote {write}: {_start(write, found[0].ranks, hardware.per_node)}")
    return 0


def _start(file: str, ranks: int, per_node: int) -> str:
    nodes = f" --nnodes {ranks // per_node} --rdzv-endpoint HOST:PORT" if ranks > per_node else ""
    return f"shardline train {file} --nproc {min(ranks, per_node)}{nodes}"


def _hardware(gpu: str | None, per_node: int | None) -> tuple[Hardware, str]:
    """Return the profile, by default that of this machine's GPU, and the kind of device."""
    if gpu is None:
        name = local_gpu()
        found = None if name is None else profile_for(name)
        if name is not None and found is None:
            found = find_profile(name)  # the error says how to measure one
        gpu = "cpu" if found is None else None
    else:
        found = None
    hardware = found or find_profile(str(gpu))
    return on_nodes(hardware, per_node), "cpu" if "cpu" in hardware.attention else "cuda"


def _ranks(gpus: int | None, nodes: int | None, hardware: Hardware) -> int | None:
    if gpus is not None and nodes is not None and gpus != nodes * hardware.per_node:
        raise UserError(
            f"--gpus {gpus} and --nodes {nodes} contradict each other: {nodes} nodes have {nodes * hardware.per_node}"
            " GPUs; use only one of them, or set --gpus-per-node"
        )
    return nodes * hardware.per_node if gpus is None and nodes is not None else gpus


def _batch(config: Config, ranks: int) -> int:
    """Return the sequences per step: what the config says, or by default one local batch for each rank."""
    training = config.training
    if training.global_batch_size > 0:
        return training.global_batch_size
    if training.gradient_accumulation_steps is not None:
        return training.local_batch_size * training.gradient_accumulation_steps * ranks
    return training.local_batch_size * ranks


def _search(problem: PlanProblem, top: int, goal: str) -> list[Candidate]:
    """Return the best candidates; for the goal `cost`, also on fewer GPUs."""
    if goal != "cost":
        return search(problem, top, goal)
    counts = [problem.ranks // 2**power for power in range(FEWER) if problem.ranks % 2**power == 0]
    found = [one for count in counts for one in search(replace(problem, ranks=count), top, goal)]
    return sorted(found, key=lambda one: -one.tokens_per_second)[:top]


# ---- nothing fits ----------------------------------------------------------------------------------------------------


def _nothing(problem: PlanProblem) -> str:
    """Say why there is no layout: none divides evenly, or none fits; in the latter case also what would fit."""
    smallest = _smallest(problem)
    if smallest is None:
        given = ", ".join(f"{key} = {value}" for key, value in problem.fixed.items())
        because = f" with {given}" if given else ""
        return (
            f"no layout of {problem.ranks} GPUs{because} can run: {problem.global_batch} sequences a step must divide"
            " evenly among the data ranks, heads and layers among the others; change --global-batch, or fix fewer keys"
        )
    room = MARGIN * problem.room / GIB
    needs = f"the smallest needs {smallest.total / GIB:.1f} GiB of {room:.1f}, mostly {dominant(smallest)}"
    more, feature = _enough(problem), _feature(problem)
    ways = [f"{more} GPUs" if more else "", feature or ""]
    enough = " or ".join(filter(None, ways))
    words = f"{enough} would do" if enough else "more GPUs alone do not help: take a shorter --seq, or LoRA"
    return f"no layout of {problem.ranks} x {problem.hardware.name} fits: {needs}; {words}"


def _smallest(problem: PlanProblem) -> Memory | None:
    found = [memory_of(problem, replace(one, recompute="full")) for one in candidates(problem)]
    return min(found, key=lambda memory: memory.total, default=None)


def _enough(problem: PlanProblem) -> int | None:
    """Double the GPUs until a layout fits, with at least one sequence per GPU; return their number."""
    ranks = problem.ranks
    while ranks < MOST_RANKS:
        ranks *= 2
        larger = replace(problem, ranks=ranks, global_batch=max(problem.global_batch, ranks))
        smallest = _smallest(larger)
        if smallest is not None and smallest.total <= MARGIN * problem.room:
            return ranks
    return None


FEATURES: tuple[dict[str, Any], ...] = (  # from the fastest to the slowest
    {"parallelism.accumulation_sync": "micro_batch"},
    {"optimizer.state_dtype": "bfloat16"},
    {"optimizer.state_dtype": "int8"},
    {"training.enable_cpu_offload": True},
)


def _feature(problem: PlanProblem) -> str | None:
    """Return the cheapest setting, as flags, with which a layout fits on these GPUs."""
    for keys in FEATURES:
        if keys.keys() & problem.fixed.keys():
            continue
        try:
            check_rules(problem.config.replace(keys))
        except ConfigError:
            continue
        smallest = _smallest(replace(problem, config=problem.config.replace(keys)))
        if smallest is not None and smallest.total <= MARGIN * problem.room:
            return " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
    return None


# ---- one config ------------------------------------------------------------------------------------------------------


def _check(config: Config, hardware: Hardware, ranks: int | None, device: str, json: bool) -> int:
    from shardline.config.layout import fewest_ranks

    ranks = ranks or fewest_ranks(config.parallelism)
    verdict = judge(config, hardware, ranks, device)
    if json:
        memory = {name: getattr(verdict.memory, name) for name in ("weights", "gradients", "optimizer", "activations")}
        print(
            json_lines.dumps(
                {
                    "fits": verdict.fits,
                    "memory_gib": verdict.memory.total / GIB,
                    "room_gib": verdict.room / GIB,
                    "memory": memory,
                    "step_seconds": verdict.seconds,
                    "changes": [{"keys": one.keys, "memory_gib": one.memory.total / GIB} for one in verdict.changes],
                }
            )
        )
    else:
        print(verdict_lines(verdict, hardware))
    return 0 if verdict.fits else 1
