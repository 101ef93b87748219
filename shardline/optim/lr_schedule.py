"""The learning rate of a step: warmup, a stable stretch, then decay. A pure function of the step.

    factor
     1 |     ______________
       |    /              \\
       |   /                \\__ min_lr_factor
       +--/------------------------> step
         warmup    stable    decay

The first and the last step have a learning rate above the curve's ends, which lie one step before and one step after
them. With `include_ends`, the ends are the first and the last step, as in one-cycle schedules, whose momentum falls and
rises opposite to the learning rate (`momentum_range`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardline.config.schema import Config, LRScheduler
from shardline.errors import UserError

log = logging.getLogger("shardline")

# progress of the decay, from 0 to 1 -> height between min_lr_factor (0) and the peak (1)
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "rex": lambda progress: (1 - progress) / (0.1 + 0.9 * (1 - progress)),  # reflected exponential, arXiv 2107.04197
    "constant": lambda progress: 1.0,
}
# progress of the warmup, from 0 to 1 -> height between its start (0) and the peak (1)
WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "quadratic": lambda done: done**2,
    "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(1 - done),
}
INVERSE_SQRT_STEPS = 10_000  # timescale of a schedule without warmup


def learning_rate(peak: float, step: int, config: Config, steps: int | None = None) -> float:
    """The learning rate of the step after `step` finished ones; Adafactor may have a schedule of its own."""
    section = config.optimizer
    if section.name != "Adafactor" or not section.adafactor_relative_step:
        return peak * lr_factor(step, config, steps)
    return min(1e-6 * (step + 1) if section.adafactor_warmup_init else 1e-2, 1 / math.sqrt(step + 1))


def lr_factor(step: int, config: Config, steps: int | None = None) -> float:
    """The fraction of `optimizer.lr` for the step after `step` finished ones (0 for the first).

    The schedule lasts `lr_scheduler.total_steps`, else `steps`, else `training.steps`; warmup and decay are cut to fit
    into it (`rules.notes` reports that).
    """
    height, lowest = _height(step, config.lr_scheduler, _length(config, steps))
    return lowest + (1 - lowest) * height


def momentum(step: int, config: Config, steps: int | None = None) -> float | None:
    """The momentum that `momentum_range` gives a step: highest when the learning rate is lowest."""
    section = config.lr_scheduler
    if section.momentum_range is None:
        return None
    lowest, highest = section.momentum_range
    height, _ = _height(step, section, _length(config, steps))
    return highest - (highest - lowest) * height


def _length(config: Config, steps: int | None) -> int:
    return config.lr_scheduler.total_steps or steps or config.training.steps


def _height(step: int, section: LRScheduler, total: int) -> tuple[float, float]:
    """The height of the curve at a step, from 0 to 1, and the factor that height 0 stands for."""
    warmup = section.warmup(total)
    if step < warmup:
        done = step / max(1, warmup - 1) if section.include_ends and warmup > 1 else (step + 1) / warmup
        return WARMUPS[section.warmup_type](done), section.warmup_start_factor
    end = total if section.decay_end_ratio is None else max(warmup, int(total * section.decay_end_ratio))
    decay = min(end - warmup, section.decay(total, end - warmup))
    decayed = step - (end - decay) + section.include_ends
    if decayed <= 0 or decay == 0:
        return 1.0, section.min_lr_factor
    return _left(decayed, decay, warmup, section), section.min_lr_factor


def _left(decayed: int, decay: int, warmup: int, section: LRScheduler) -> float:
    """The height after `decayed` of `decay` steps."""
    if section.decay_type == "inverse_sqrt":  # has no end
        timescale = section.timescale or warmup or INVERSE_SQRT_STEPS
        return 1 / math.sqrt(1 + decayed / timescale)
    progress = min(1.0, decayed / decay)
    if progress < 1:  # every cycle starts at the top
        progress = section.cycles * progress % 1
    if section.decay_type == "polynomial":
        return (1 - progress) ** section.decay_power
    return DECAYS[section.decay_type](progress)


def check_resumed(trainer: Mapping[str, Any], config: Config, peak: float, end: int, where: object) -> None:
    """Refuse a schedule (of a run to step `end`) that would have given the last step another learning rate.

    `trainer` is the trainer state in the checkpoint `where`. A schedule of another length, shape or peak would bend the
    curve unnoticed; `lr_scheduler.bend_on_resume` allows it. A run that had reached its last step can continue only
    with another schedule, so then a note is logged instead.
    """
    anew = "lr_scheduler" in set(config.checkpoint.exclude_from_loading) - set(trainer.get("excluded", ()))
    if anew or not trainer["step"] or "lr" not in trainer or end <= trainer["step"]:
        return
    step, origin, before, planned = trainer["step"], trainer["schedule_start"], trainer["lr"], trainer["last_step"]
    now, following = (learning_rate(peak, done - origin, config, end - origin) for done in (step - 1, step))
    if math.isclose(now, before, rel_tol=1e-6):
        return
    if step >= planned or config.lr_scheduler.bend_on_resume:
        log.info("note: the learning rate continues at %.3g; it was %.3g in step %d", following, before, step)
        return
    raise UserError(
        f"{where}: step {step} had a learning rate of {before:.3g}; with this config it would have had {now:.3g}."
        f" Restore the settings that the run had: it was to end at step {planned}, and"
        f" --lr_scheduler.total_steps={planned - origin} keeps its schedule for another length. Or start a new schedule"
        " with --checkpoint.exclude_from_loading=lr_scheduler, or accept the bend with --lr_scheduler.bend_on_resume"
    )


RATIO = "lr_ratio"  # key of a parameter group: its learning rate divided by the run's


def set_lr(optimizer: torch.optim.Optimizer, lr: float, momentum: float | None = None) -> None:
    """Set the learning rate of every group and, if one is given, its momentum, which is Adam's beta1."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(RATIO, 1.0)
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif momentum is not None:
            group["momentum"] = momentum
