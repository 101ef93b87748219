"""The learning rate of a step: warmup, a stable stretch, then decay. A pure function of the step.

    factor
     1 |     ______________
       |    /              \\
       |   /                \\__ min_lr_factor
       +--/------------------------> step
         warmup    stable    decay
"""

from __future__ import annotations

import math

import torch

from shardline.config.schema import Config

# progress of the decay, from 0 to 1 -> share of the way from min_lr_factor to 1 that is left
DECAYS = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "rex": lambda progress: (1 - progress) / (0.1 + 0.9 * (1 - progress)),  # reflected exponential, arXiv 2107.04197
    "constant": lambda progress: 1.0,
}

WARMUPS = {"linear": 1, "quadratic": 2}  # shape -> power of the share of the warmup that is done


def lr_factor(step: int, config: Config, steps: int | None = None) -> float:
    """Share of `optimizer.lr` for the step after `step` finished ones (0 for the first).

    The schedule lasts `lr_scheduler.total_steps`, else `steps`, else `training.steps`; warmup and decay are cut to what
    fits into it (`rules.notes` reports that). Its end, where the factor is min_lr_factor, is one step after the last:
    the last step still learns something when that is 0.
    """
    section = config.lr_scheduler
    total = section.total_steps or steps or config.training.steps
    warmup = section.warmup(total)
    end = total if section.decay_end_ratio is None else max(warmup, int(total * section.decay_end_ratio))
    decay = end - warmup
    if section.decay_ratio is not None:
        decay = min(decay, round(total * section.decay_ratio))
    if step < warmup:
        return float((step + 1) / warmup) ** WARMUPS[section.warmup_type]
    decayed = step - (end - decay)
    if decayed <= 0 or decay == 0:
        return 1.0
    left = DECAYS[section.decay_type](min(1.0, decayed / decay))
    return section.min_lr_factor + (1 - section.min_lr_factor) * left


RATIO = "lr_ratio"  # of a group of parameters: its learning rate over that of the run


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(RATIO, 1.0)
