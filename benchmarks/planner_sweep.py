"""The sweep of the Ultra-Scale Playbook: which version of nanotron measured a layout, and what nanotron refuses."""

from __future__ import annotations

import math
from dataclasses import replace

from planner_memory import peak_memory
from planner_trainers import traits_of

from shardline.plan.hardware import Hardware
from shardline.plan.stages import blocks_by_costs
from shardline.plan.work import Workload

USABLE = 0.95  # of a GPU's memory: NCCL and the context need the rest


def sweep_edition(workload: Workload, hardware: Hardware) -> str:
    """Return which version of nanotron measured a layout of the playbook's sweep.

    Its script (scripts/scaling_benchmarks.py) repeats layouts with a pipeline from a certain job on, uses ZeRO 0 only
    with 32 data ranks or more, and sweeps 2 stages separately. Layouts that were not repeated have slow transfers
    between stages and keep less; rows measured both ways show this for all models. A layout that ran out of memory in
    the repetition has its first measurement.
    """
    edition = _edition(workload, hardware)
    if edition == "nanotron_first" or workload.layout.world_size <= hardware.per_node:
        return edition
    if _held(workload, edition) > USABLE * hardware.memory:
        return "nanotron_first" if workload.layout.pp > 1 else "nanotron_again"
    return edition


def _edition(workload: Workload, hardware: Hardware) -> str:
    layout, micro = workload.layout, workload.micro_batch
    gpus, dp = layout.world_size, layout.data_ranks
    if layout.pp == 1:
        return "nanotron_again" if layout.tp >= 16 and micro > 1 and 1 < dp <= 4 else "nanotron"
    if gpus >= 256:
        repeated = (micro == 1 and (dp == 1 or (gpus < 512 and dp <= 16))) or (workload.zero == 0 and dp >= 32)
    else:
        repeated = dp == 1 or workload.zero == 1 or micro > 1 or dp >= 32 or gpus < 32
    if not repeated:
        return "nanotron_first"
    two_lean = layout.tp >= 16 or not _largest_micro_batch(workload, hardware)
    if layout.tp >= 32 or (layout.pp == 2 and two_lean):
        return "nanotron_lean"
    return "nanotron_piped"


def _largest_micro_batch(workload: Workload, hardware: Hardware) -> bool:
    """Whether a larger micro-batch would not fit: layouts with two stages were repeated only with the largest one."""
    if workload.micro_batches == 1:
        return True
    larger = replace(
        workload, micro_batch=2 * workload.micro_batch, micro_batches=math.ceil(workload.micro_batches / 2)
    )
    return _held(larger, "nanotron_piped") > USABLE * hardware.memory


def _held(workload: Workload, trainer: str) -> float:
    return peak_memory(workload, replace(traits_of(trainer), reports_first=True)).total


def impossible(workload: Workload) -> bool:
    """Whether nanotron refuses a layout: fewer micro-batches than later stages, or a stage without a block."""
    if workload.micro_batches < workload.layout.pp - 1:
        return True
    return not all(blocks_by_costs(workload))
