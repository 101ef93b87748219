"""Rules of expert parallelism."""

from __future__ import annotations

from shardline.config.rules.rule import Rule, below, idle_without, missing, refuse
from shardline.config.schema import Config

EXPERT_BACKEND = "parallelism.expert_parallel_comm_backend"


def splits_experts(config: Config) -> bool:
    return config.parallelism.expert_parallel_degree > 1


def _sends_by_deepep(config: Config) -> bool:
    return splits_experts(config) and config.parallelism.expert_parallel_comm_backend == "deepep"


REFUSED: list[Rule] = [
    refuse(
        "parallelism.expert_parallel_dispatch_dtype",
        lambda c: _sends_by_deepep(c) and c.parallelism.expert_parallel_dispatch_dtype == "float8",
        f"float8 is not supported with {EXPERT_BACKEND} = 'deepep'",
        remedy="set it to 'same', or the backend to 'standard'",
    ),
    refuse(
        "debug.deterministic",
        lambda c: _sends_by_deepep(c) and c.debug.deterministic,
        "it fills new memory first, and DeepEP's kernels write to that memory without waiting",
        remedy=f"set {EXPERT_BACKEND} = 'standard'",
    ),
]

MISSING: list[Rule] = [
    missing("deep_ep", EXPERT_BACKEND, _sends_by_deepep, instead="'standard' sends tokens without it"),
]

IDLE: list[Rule] = [
    idle_without(
        "parallelism.expert_parallel_degree",
        *below("parallelism", "expert_tensor_parallel_degree expert_parallel_comm_backend"),
        *below("parallelism", "expert_parallel_dispatch_dtype pipeline_parallel_expert_parallel_overlap"),
    ),
]
