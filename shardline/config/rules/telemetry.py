"""Rules of telemetry: profiles, metrics, records of collectives."""

from __future__ import annotations

from shardline.config.rules.parallelism import one_rank
from shardline.config.rules.rule import Rule, below, idle, idle_without, missing, refuse, starting

REFUSED: list[Rule] = [
    refuse(
        "profiling.profile_freq",
        lambda c: (
            c.profiling.enable_profiling
            and c.profiling.profile_freq < c.profiling.profiler_active + c.profiling.profiler_warmup
        ),
        lambda c: (
            f"{c.profiling.profile_freq} steps are fewer than profiler_warmup ({c.profiling.profiler_warmup})"
            f" and profiler_active ({c.profiling.profiler_active}) together"
        ),
        remedy="raise it, or lower the other two",
    ),
]

MISSING: list[Rule] = [
    *(
        missing(
            package,
            f"metrics.enable_{package}",
            lambda c, package=package: bool(c.value(f"metrics.enable_{package}")),  # type: ignore[misc]
            f"pip install 'shardline[{package}]'",
        )
        for package in ("wandb", "tensorboard")
    ),
]

TRACES: list[Rule] = [
    idle(
        "comm.trace_buf_size = 0: there is no flight recorder",
        lambda c: c.comm.trace_buf_size == 0,
        *below("comm", "save_traces_folder save_traces_file_prefix"),
    ),
]

IDLE: list[Rule] = [
    idle_without(
        "profiling.enable_profiling",
        *below("profiling", "save_traces_folder profiler_active profiler_warmup"),
        *below("profiling", "record_shapes with_stack top_ops"),
    ),
    idle(
        "neither profiling.enable_profiling nor profiling.enable_memory_snapshot is true",
        lambda c: not c.profiling.enable_profiling and not c.profiling.enable_memory_snapshot,
        "profiling.profile_freq",
    ),
    idle_without("profiling.enable_memory_snapshot", "profiling.save_memory_snapshot_folder"),
    idle_without("metrics.enable_tensorboard", "metrics.save_tb_folder"),
    idle(
        "the layout has one rank",
        one_rank,
        *("comm.init_timeout_seconds", "comm.train_timeout_seconds", "metrics.save_for_all_ranks"),
    ),
    idle(
        "neither metrics.enable_tensorboard nor metrics.enable_wandb is true",
        lambda c: not c.metrics.enable_tensorboard and not c.metrics.enable_wandb,
        "metrics.save_for_all_ranks",
    ),
]

WANDB: list[Rule] = [
    idle_without("metrics.enable_wandb", *starting("metrics.wandb_")),
]
