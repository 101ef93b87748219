"""The learning rate of a step: linear warmup, a stable stretch, then decay. A pure function of the step.

    factor
     1 |     ______________
       |    /              \\
       |   /                \\__ min_lr_factor
       +--/------------------------> step
         warmup    stable    decay
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardline.config.schema import Config

# progress of the decay, from 0 to 1 -> share of the way from min_lr_factor to 1 that is left
DECAYS = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


@dataclass(frozen=True)
class Phases:
    """Lengths in steps; `total` is where the decay ends."""

    warmup: int
    decay: int
    total: int


def lr_factor(step: int, config: Config, steps: int | None = None) -> float:
    """Share of `optimizer.lr` for the step after `step` finished ones (0 for the first).

    The schedule lasts `lr_scheduler.total_steps`, else `steps`, else `training.steps`. Its end, where the factor is
    min_lr_factor, is one step after the last: the last step still learns something when that is 0.
    """
    section, phases = config.lr_scheduler, find_phases(config, steps)
    if step < phases.warmup:
        return (step + 1) / phases.warmup
    decayed = step - (phases.total - phases.decay)
    if decayed <= 0 or phases.decay == 0:
        return 1.0
    left = DECAYS[section.decay_type](min(1.0, decayed / phases.decay))
    return section.min_lr_factor + (1 - section.min_lr_factor) * left


def find_phases(config: Config, steps: int | None = None) -> Phases:
    """Warmup and decay, cut to what fits into the schedule (`rules.notes` reports that)."""
    section = config.lr_scheduler
    total = section.total_steps or steps or config.training.steps
    warmup = min(section.warmup_steps, total)
    decay = total - warmup
    if section.decay_ratio is not None:
        decay = min(decay, round(total * section.decay_ratio))
    return Phases(warmup, decay, total)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
