"""Rules of checkpoints: what is loaded, and what is saved when."""

from __future__ import annotations

from shardline.config.rules.rule import Rule, below, differs, idle, idle_if, idle_without, refuse

REFUSED: list[Rule] = [
    refuse(
        "checkpoint.initial_load_in_hf",
        lambda c: c.checkpoint.initial_load_in_hf and not c.checkpoint.initial_load_model_only,
        "a Hugging Face folder holds weights only",
        remedy="set checkpoint.initial_load_model_only = true",
    ),
    refuse(
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.create_seed_checkpoint and (not c.checkpoint.enable or c.checkpoint.load_only),
        "a run that saves nothing cannot save its initial weights",
        remedy="set checkpoint.enable = true and checkpoint.load_only = false",
    ),
    *(
        refuse(
            key,
            lambda c, key=key: not c.checkpoint.enable and differs(c, key),  # type: ignore[misc]
            "weights are loaded only with checkpoint.enable = true",
            remedy="set that, or remove this key",
        )
        for key in below("checkpoint", "initial_load_path initial_load_in_hf")
    ),
]

INTERVAL: list[Rule] = [
    refuse(
        "checkpoint.interval_ratio",
        lambda c: c.checkpoint.interval_type == "seconds" and c.checkpoint.interval_ratio is not None,
        "is a fraction of the steps, and checkpoint.interval_type is 'seconds'",
        "set checkpoint.interval",
    ),
]

IDLE: list[Rule] = [
    idle_without("checkpoint.enable", "checkpoint."),
    idle_if(
        "checkpoint.load_only",
        [True],
        *below("checkpoint", "interval interval_ratio interval_type keep_latest_k async_mode"),
        *below("checkpoint", "save_timeout_seconds save_before last_save_model_only last_save_in_hf"),
        *below("checkpoint", "enable_first_step_checkpoint preempted_exit_code"),
    ),
    idle(
        "checkpoint.last_save_model_only and checkpoint.last_save_in_hf are false",
        lambda c: not c.checkpoint.last_save_model_only and not c.checkpoint.last_save_in_hf,
        "checkpoint.export_dtype",
    ),
    idle(
        "checkpoint.initial_load_path is not set",
        lambda c: c.checkpoint.initial_load_path is None,
        "checkpoint.initial_load_model_only",
    ),
]
