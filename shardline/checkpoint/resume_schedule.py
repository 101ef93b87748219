"""Keeps the learning rate of a resumed run on its curve: another length, shape or peak would bend it unnoticed.

rate  |  \\                     resumed with training.steps = 400: the rate of the next step jumps from the
      |   \\  .  .  400 steps   curve of 200 steps to that of 400. A checkpoint has the rate of its last step,
      |    x                   so a schedule that gives that step another rate is noticed.
      +-------- step
"""

from __future__ import annotations

import logging
import math

from shardline.checkpoint.format import Saved
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.optim.lr_schedule import lr_factor
from shardline.optim.optimizer import scaled_lr

log = logging.getLogger("shardline")


def check_schedule(saved: Saved, config: Config, end: int, batch: int) -> None:
    """Refuse a schedule, of a run to step `end`, that would have given the last step another learning rate.

    `lr_scheduler.bend_on_resume` allows it. A run that had reached its last step can go on only with another schedule,
    or with none: there it is a note.
    """
    trainer, section = saved.trainer, config.checkpoint
    anew = "lr_scheduler" in set(section.exclude_from_loading) - set(trainer.get("excluded", ()))
    if anew or not trainer["step"] or "lr" not in trainer or end <= trainer["step"]:
        return
    step, origin, before, planned = trainer["step"], trainer["schedule_start"], trainer["lr"], trainer["last_step"]
    peak = scaled_lr(config, batch)
    now, following = (peak * lr_factor(done - origin, config, end - origin) for done in (step - 1, step))
    if math.isclose(now, before, rel_tol=1e-6):
        return
    if step >= planned or config.lr_scheduler.bend_on_resume:
        log.info("note: the learning rate goes on at %.3g; it was %.3g in step %d", following, before, step)
        return
    raise UserError(
        f"{saved.path}: step {step} had a learning rate of {before:.3g}; by this config it would have had {now:.3g}."
        f" Give the settings that the run had: it was to end at step {planned}, and"
        f" --lr_scheduler.total_steps={planned - origin} keeps its schedule for another length. Or begin a new schedule"
        " with --checkpoint.exclude_from_loading=lr_scheduler, or accept the bend with --lr_scheduler.bend_on_resume"
    )
