"""Rules of workers that train apart (DiLoCo, asynchronous), and of replica groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardline.config.rules.rule import (
    Rule,
    Test,
    below,
    idle,
    idle_if,
    idle_unless,
    idle_without,
    missing,
    not_built,
    refuse,
)
from shardline.config.schema import Config

OUTER_KEYS = (
    *("semi_sync_method", "sync_steps", "num_fragments", "fragment_sync_delay", "fragment_update_alpha"),
    *("should_quantize", "quantized_dtype", "outer_lr", "outer_momentum"),
)
EARLY_STEP, COMPRESSION = "optimizer.early_step_in_backward", "parallelism.gradient_compression"

ASYNC_KEYS = ("async_staleness", "async_lr_power", "async_late", "async_late_seconds")
SERVED_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")  # whose update of an element needs no other element


def _in_async(test: Callable[[Config], Any]) -> Test:
    """A test that holds for workers that do not wait for each other alone."""
    return lambda config: config.parallelism.data_parallel_mode == "async" and bool(test(config))


def _in_groups(test: Callable[[Config], Any]) -> Test:
    """A test that holds for replica groups alone."""
    return lambda config: config.fault_tolerance.enable and bool(test(config))


def has_workers(config: Config) -> bool:
    """Whether the copies of the model are workers that train apart."""
    return config.parallelism.data_parallel_mode != "sync"


def _averages_now_and_then(config: Config) -> bool:
    return config.parallelism.data_parallel_mode == "diloco"


def _worker_rules() -> list[Rule]:
    mode, section = "parallelism.data_parallel_mode", "fault_tolerance"
    return [
        refuse(
            mode,
            lambda c: _averages_now_and_then(c) and c.parallelism.data_parallel_replicate_degree == 1,
            "workers are copies of the model, and there is one",
            "set parallelism.data_parallel_replicate_degree to the number of workers",
        ),
        refuse(
            mode,
            lambda c: has_workers(c) and c.optimizer.early_step_in_backward,
            "a worker's gradient norm is known only after its backward",
            "set optimizer.early_step_in_backward = false",
        ),
        refuse(
            f"{section}.num_fragments",
            lambda c: _averages_now_and_then(c) and c.fault_tolerance.sync_steps % c.fault_tolerance.num_fragments != 0,
            lambda c: f"fault_tolerance.sync_steps = {c.fault_tolerance.sync_steps} is no multiple of it",
            "fragments follow each other at even distances: change one of the two",
        ),
        refuse(
            f"{section}.fragment_sync_delay",
            lambda c: (
                _averages_now_and_then(c)
                and c.fault_tolerance.sync_steps % c.fault_tolerance.num_fragments == 0
                and c.fault_tolerance.fragment_sync_delay
                >= c.fault_tolerance.sync_steps // c.fault_tolerance.num_fragments
            ),
            lambda c: (
                "the next fragment is sent"
                f" {c.fault_tolerance.sync_steps // c.fault_tolerance.num_fragments} steps later (sync_steps /"
                " num_fragments)"
            ),
            "give fewer steps of delay",
        ),
    ]


def _idle_worker_rules() -> list[Rule]:
    section = "fault_tolerance"
    return [
        idle(
            "neither fault_tolerance.enable is true nor parallelism.data_parallel_mode 'diloco'",
            lambda c: not _averages_now_and_then(c) and not c.fault_tolerance.enable,
            *(f"{section}.{name}" for name in OUTER_KEYS),
        ),
        idle(
            "parallelism.data_parallel_mode is not 'async'",
            lambda c: c.parallelism.data_parallel_mode != "async",
            *(f"{section}.{name}" for name in ASYNC_KEYS),
        ),
        idle_if(f"{section}.async_late", ["wait"], f"{section}.async_late_seconds"),
        idle_unless(f"{section}.should_quantize", [True], f"{section}.quantized_dtype"),
        idle_if(f"{section}.semi_sync_method", ["local_sgd"], *below(section, "outer_lr outer_momentum")),
    ]


NOT_BUILT: list[Rule] = [
    *(
        not_built(f"asynchronous data parallel with {what}", key, when=_in_async(test))
        for what, key, test in (
            ("saves in the background", "checkpoint.async_mode", lambda c: c.checkpoint.async_mode != "disabled"),
            ("this optimizer", "optimizer.name", lambda c: c.optimizer.name not in SERVED_OPTIMIZERS),
            ("narrow state", "optimizer.state_dtype", lambda c: c.optimizer.state_dtype != "parameter"),
            ("pairs of answers", "training.objective", lambda c: c.training.objective == "dpo"),
            ("CUDA graphs", "compile.cuda_graphs", lambda c: c.compile.enable and c.compile.cuda_graphs),
            ("weights on the host", "training.enable_cpu_offload", lambda c: c.training.enable_cpu_offload),
        )
    ),
]

GROUPS_NOT_BUILT: list[Rule] = [
    not_built(
        "replica groups of workers that train apart",
        "parallelism.data_parallel_mode",
        when=lambda c: c.fault_tolerance.enable and has_workers(c),
    ),
    not_built(
        "semi-synchronous training of replica groups",
        "fault_tolerance.semi_sync_method",
        when=lambda c: c.fault_tolerance.enable and c.fault_tolerance.semi_sync_method is not None,
    ),
    not_built(
        "replica groups connected by anything but gloo",
        "fault_tolerance.process_group",
        when=lambda c: c.fault_tolerance.enable and c.fault_tolerance.process_group != "gloo",
    ),
    *(
        not_built(f"replica groups with {what}", key, when=_in_groups(test))
        for what, key, test in (
            ("pairs of answers", "training.objective", lambda c: c.training.objective == "dpo"),
            ("updates in backward", EARLY_STEP, lambda c: c.value(EARLY_STEP)),
            ("CUDA graphs", "compile.cuda_graphs", lambda c: c.compile.enable and c.compile.cuda_graphs),
            ("compressed gradients", COMPRESSION, lambda c: c.value(COMPRESSION) != "none"),
        )
    ),
]

MISSING: list[Rule] = [
    missing(
        "torchft",
        "fault_tolerance.enable",
        lambda c: c.fault_tolerance.enable,
        "pip install 'shardline[ft]'",
        lambda c: True,
    ),
]

GROUPS_IDLE: list[Rule] = [
    idle_without(
        "fault_tolerance.enable",
        *below("fault_tolerance", "process_group process_group_timeout_ms replica_id group_size min_replica_size"),
    ),
]

GROUPS_SAVE: list[Rule] = [
    idle_without("fault_tolerance.enable", "checkpoint.enable_ft_dataloader_checkpoints"),
]
REFUSED = _worker_rules()
IDLE = _idle_worker_rules()
