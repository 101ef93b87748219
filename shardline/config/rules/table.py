"""The table of rules: combinations that are refused, keys whose feature is not built, keys without effect.

Messages follow the order of the rows, so a theme whose rows are not adjacent has more than one list.
"""

from __future__ import annotations

from shardline.config.names import ALTERNATIVES
from shardline.config.rules import (
    adapters,
    checkpoint,
    data,
    experts,
    learning_rate,
    models,
    optimizer,
    parallelism,
    passes,
    precision,
    telemetry,
    values,
    workers,
)
from shardline.config.rules.rule import Rule, idle, idle_without, instead, not_built

RULES: list[Rule] = [
    # Refused: values and combinations that cannot work.
    *values.REFUSED,
    *models.REFUSED,
    *(instead(alternative, key) for key, alternative in ALTERNATIVES.items()),
    *telemetry.REFUSED,
    *checkpoint.REFUSED,
    *passes.REFUSED,
    *data.DEMO,
    *optimizer.REFUSED,
    *precision.TYPES,
    *learning_rate.REFUSED,
    *parallelism.REFUSED,
    *experts.REFUSED,
    *precision.GATHERED,
    *adapters.REFUSED,
    *data.NOISE,
    *precision.CONVERTED_EXPERTS,
    *checkpoint.INTERVAL,
    *workers.REFUSED,
    *data.REFUSED,
    # Pending: features that are not built yet.
    *workers.PENDING,
    *values.PENDING,
    *workers.GROUPS_PENDING,
    not_built("custom config keys", "job.custom_config_module", "experimental.custom_args_module"),
    # Missing: packages that are not installed, and data that is not named.
    *workers.MISSING,
    *experts.MISSING,
    *telemetry.MISSING,
    *data.MISSING,
    # Idle: keys that are set and have no effect. If there are several reasons, the first is reported.
    *experts.IDLE,
    *telemetry.TRACES,
    *parallelism.PIPELINE,
    *checkpoint.IDLE,
    *workers.IDLE,
    *(idle_without(f"{part}.enable", f"{part}.") for part in ("validation", "compile")),
    *workers.GROUPS_IDLE,
    idle_without("memory_estimation.enable", "memory_estimation."),
    idle("generation.prompts is empty", lambda c: not c.generation.prompts, "generation."),
    idle("generation.temperature is 0", lambda c: c.generation.temperature == 0, "generation.top_k", "generation.seed"),
    *adapters.IDLE,
    *workers.GROUPS_DATA_IDLE,
    *precision.IDLE,
    *telemetry.IDLE,
    *models.IDLE,
    *data.IDLE,
    *passes.IDLE,
    *optimizer.IDLE,
    *learning_rate.IDLE,
    idle_without("training.max_loss", "training.max_loss_steps"),
    *telemetry.WANDB,
    *optimizer.MORE_IDLE,
    *parallelism.IDLE,
    idle_without("debug.deterministic", "debug.deterministic_warn_only"),
    # Notes: keys that do not have their full effect, and fields of the architecture that have none.
    *data.NOTES,
    *models.NOTES,
    *parallelism.NOTES,
    *learning_rate.NOTES,
]
