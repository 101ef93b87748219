"""Rules of the update: the keys that an optimizer does not read, and steps in backward."""

from __future__ import annotations

from shardline.config.names import LAYERWISE
from shardline.config.rules.rule import Rule, below, idle, idle_if, idle_unless, idle_without, refuse, starting
from shardline.config.schema import Config


def steps_early(config: Config) -> bool:
    return config.optimizer.early_step_in_backward


REFUSED: list[Rule] = [
    refuse(
        "optimizer.early_step_in_backward",
        lambda c: steps_early(c) and c.training.max_norm > 0 and c.optimizer.early_step_clipping == "refuse",
        "clipping needs the norm of all gradients before the first step",
        remedy='set optimizer.early_step_clipping = "two_pass" (forward and backward twice) or training.max_norm = 0',
    ),
    refuse(
        "training.nonfinite",
        lambda c: steps_early(c) and c.training.nonfinite == "skip" and c.training.max_norm == 0,
        "a step in backward cannot be undone",
        remedy='set training.nonfinite = "stop", or clip with optimizer.early_step_clipping = "two_pass"',
    ),
]

IDLE: list[Rule] = [
    idle_if("optimizer.name", LAYERWISE, *below("optimizer", "implementation decay_norms")),
    idle_if("optimizer.name", ["SGD", "Lion", "Adafactor"], "optimizer.implementation"),
    idle_if("optimizer.name", ["LARS", "SGD", "Adafactor"], *below("optimizer", "beta2 eps")),
    idle_if("optimizer.name", ["Adafactor"], "optimizer.beta1"),
    idle_unless("optimizer.name", ["Adafactor"], *starting("optimizer.adafactor_")),
    idle_without("optimizer.adafactor_relative_step", "optimizer.adafactor_warmup_init"),
    idle(
        "optimizer.adafactor_relative_step sets the learning rate",
        lambda c: c.optimizer.name == "Adafactor" and c.optimizer.adafactor_relative_step,
        *below("optimizer", "lr lr_scaling lr_scaling_base_batch"),
        "lr_scheduler.",
    ),
    idle_if("optimizer.name", ["Lion"], "optimizer.eps"),
]

# Rules that are reported after those of the schedule.
MORE_IDLE: list[Rule] = [
    idle_unless("optimizer.name", ["LARS"], "optimizer.trust_coefficient"),
    idle_unless(
        "optimizer.name", ["Muon"], *below("optimizer", "muon_lr_factor muon_momentum muon_ns_steps muon_adjust_lr")
    ),
    idle_without("optimizer.lr_scaling", "optimizer.lr_scaling_base_batch"),
    idle(
        "it is only for clipping with optimizer.early_step_in_backward",
        lambda c: not steps_early(c) or c.training.max_norm == 0,
        "optimizer.early_step_clipping",
    ),
    idle_if("training.dtype", ["bfloat16"], "optimizer.state_dtype"),
]
