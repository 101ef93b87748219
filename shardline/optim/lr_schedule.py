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
    notes: tuple[str, ...]


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


def schedule_notes(config: Config, steps: int | None = None) -> list[str]:
    """What had to be shortened to fit, one line each, to be logged once."""
    return list(find_phases(config, steps).notes)


def find_phases(config: Config, steps: int | None = None) -> Phases:
    section = config.lr_scheduler
    total = section.total_steps or steps or config.training.steps
    notes = []
    warmup = section.warmup_steps
    if warmup > total:
        notes.append(f"lr_scheduler.warmup_steps = {warmup} is longer than the schedule: {total} used instead")
        warmup = total
    decay = total - warmup
    if section.decay_ratio is not None:
        wanted = round(total * section.decay_ratio)
        if wanted > decay:
            notes.append(
                f"lr_scheduler.decay_ratio = {section.decay_ratio} is {wanted} of {total} steps, which does not fit"
                f" after {warmup} of warmup: the decay takes {decay}"
            )
        decay = min(decay, wanted)
    return Phases(warmup, decay, total, tuple(notes))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
