"""The learning rate of a step: warmup, a stable stretch, then decay. A pure function of the step.

    factor
     1 |     ______________
       |    /              \\
       |   /                \\__ min_lr_factor
       +--/------------------------> step
         warmup    stable    decay
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from shardline.config.schema import Config
from shardline.errors import UserError

log = logging.getLogger("shardline")

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


def check_resumed(trainer: Mapping[str, Any], config: Config, peak: float, end: int, where: object) -> None:
    """Refuse a schedule, of a run to step `end`, that would have given the last step another learning rate.

    `trainer` is the state that the checkpoint `where` keeps. A schedule of another length, shape or peak would bend the
    curve unnoticed; `lr_scheduler.bend_on_resume` allows it. A run that had reached its last step can go on only with
    another schedule: there it is a note.
    """
    anew = "lr_scheduler" in set(config.checkpoint.exclude_from_loading) - set(trainer.get("excluded", ()))
    if anew or not trainer["step"] or "lr" not in trainer or end <= trainer["step"]:
        return
    step, origin, before, planned = trainer["step"], trainer["schedule_start"], trainer["lr"], trainer["last_step"]
    now, following = (peak * lr_factor(done - origin, config, end - origin) for done in (step - 1, step))
    if math.isclose(now, before, rel_tol=1e-6):
        return
    if step >= planned or config.lr_scheduler.bend_on_resume:
        log.info("note: the learning rate goes on at %.3g; it was %.3g in step %d", following, before, step)
        return
    raise UserError(
        f"{where}: step {step} had a learning rate of {before:.3g}; by this config it would have had {now:.3g}."
        f" Give the settings that the run had: it was to end at step {planned}, and"
        f" --lr_scheduler.total_steps={planned - origin} keeps its schedule for another length. Or begin a new schedule"
        " with --checkpoint.exclude_from_loading=lr_scheduler, or accept the bend with --lr_scheduler.bend_on_resume"
    )


RATIO = "lr_ratio"  # of a group of parameters: its learning rate over that of the run


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(RATIO, 1.0)
