"""Rules of forward and backward: what is recomputed, compiled, and recorded in CUDA graphs."""

from __future__ import annotations

from shardline.config.rules.data import trains_on_pairs
from shardline.config.rules.optimizer import steps_early
from shardline.config.rules.rule import Rule, Test, below, idle, idle_unless, refuse
from shardline.config.schema import Config


def records_graphs(config: Config) -> bool:
    return config.compile.enable and config.compile.cuda_graphs


def _compiles_model(config: Config) -> bool:
    return config.compile.enable and "model" in config.compile.components


RECOMPUTING = ("full", "selective")  # modes of activation checkpointing

# What a CUDA graph of a pass would leave out.
NOT_RECORDED: dict[str, Test] = {
    "a step in backward": steps_early,
    "training.enable_cpu_offload": lambda c: c.training.enable_cpu_offload,
    'activation_checkpoint.mode = "offload"': lambda c: c.activation_checkpoint.mode == "offload",
    "the objective of pairs": trains_on_pairs,
    "training.neftune_alpha": lambda c: c.training.neftune_alpha is not None,
    "lora.dropout": lambda c: c.lora.enable and c.lora.dropout > 0,
}


REFUSED: list[Rule] = [
    refuse(
        "activation_checkpoint.mode",
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not _compiles_model(c),
        "memory_budget is a setting of the compiler",
        remedy="set compile.enable = true with 'model' in compile.components, or choose 'selective'",
    ),
    refuse(
        "activation_checkpoint.preserve_rng_state",
        lambda c: (
            not c.activation_checkpoint.preserve_rng_state
            and c.activation_checkpoint.mode in RECOMPUTING
            and c.lora.enable
            and c.lora.dropout > 0
        ),
        "recomputation would drop other elements than lora.dropout dropped in forward",
        remedy="set it to true, or lora.dropout = 0",
    ),
    *(
        refuse(
            "compile.cuda_graphs",
            lambda c, holds=holds: records_graphs(c) and holds(c),  # type: ignore[misc]
            f"{what} needs the host in each pass, and a recorded pass runs without it",
            remedy="set compile.cuda_graphs = false",
        )
        for what, holds in NOT_RECORDED.items()
    ),
]

IDLE: list[Rule] = [
    idle("training.gc_debug collects garbage every step", lambda c: c.training.gc_debug, "training.gc_freq"),
    idle("compile.components is empty", lambda c: not c.compile.components, "compile.enable"),
    idle(
        "the compiler decides what is recomputed",
        lambda c: c.activation_checkpoint.mode in RECOMPUTING and _compiles_model(c),
        *below("activation_checkpoint", "early_stop determinism_check debug"),
    ),
    idle_unless(
        "activation_checkpoint.mode",
        RECOMPUTING,
        *below("activation_checkpoint", "early_stop preserve_rng_state determinism_check debug"),
    ),
    idle_unless("activation_checkpoint.mode", ["selective"], "activation_checkpoint.selective_ac_option"),
    idle_unless("activation_checkpoint.mode", ["offload"], "activation_checkpoint.offload_every"),
    idle(
        "only mode 'selective' with selective_ac_option 'op' reads it",
        lambda c: c.activation_checkpoint.mode != "selective" or c.activation_checkpoint.selective_ac_option != "op",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    ),
    idle_unless(
        "activation_checkpoint.mode",
        ["memory_budget"],
        *below("activation_checkpoint", "memory_budget visualize_memory_budget_pareto"),
    ),
]
