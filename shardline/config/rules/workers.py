"""Rules of workers that train independently (DiLoCo, asynchronous), and of replica groups."""

from __future__ import annotations

from shardline.config.rules.data import trains_on_pairs
from shardline.config.rules.optimizer import steps_early
from shardline.config.rules.passes import records_graphs
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

MODE = "parallelism.data_parallel_mode"
OUTER_KEYS = (
    *below("fault_tolerance", "semi_sync_method sync_steps num_fragments fragment_sync_delay fragment_update_alpha"),
    *below("fault_tolerance", "should_quantize quantized_dtype"),
)
OUTER_STEP_KEYS = below("fault_tolerance", "outer_lr outer_momentum")
SERVED_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")  # whose update of an element needs no other element


def has_workers(config: Config) -> bool:
    """Whether the copies of the model are workers that train independently."""
    return config.parallelism.data_parallel_mode != "sync"


def _averages_now_and_then(config: Config) -> bool:
    return config.parallelism.data_parallel_mode == "diloco"


def _waits_for_nobody(config: Config) -> bool:
    return config.parallelism.data_parallel_mode == "async"


def _makes_local_steps(config: Config) -> bool:
    return _waits_for_nobody(config) and config.fault_tolerance.async_steps > 1


def _has_groups(config: Config) -> bool:
    return config.fault_tolerance.enable


def _fragments_are_even(config: Config) -> bool:
    return config.fault_tolerance.sync_steps % config.fault_tolerance.num_fragments == 0


def _steps_to_the_next(config: Config) -> int:
    """The steps from one fragment to the next."""
    return config.fault_tolerance.sync_steps // config.fault_tolerance.num_fragments


def _both(first: Test, second: Test) -> Test:
    return lambda config: first(config) and second(config)


Part = tuple[str, str, Test]  # of a run: its name, its key, and whether the config asks for it
PAIRS: Part = ("pairs of answers", "training.objective", trains_on_pairs)
GRAPHS: Part = ("CUDA graphs", "compile.cuda_graphs", records_graphs)


def _not_built_with(whom: str, holds: Test, *parts: Part) -> list[Rule]:
    """Parts that are not built for workers or groups."""
    return [not_built(f"{whom} with {name}", key, when=_both(holds, asked)) for name, key, asked in parts]


REFUSED: list[Rule] = [
    refuse(
        MODE,
        lambda c: _averages_now_and_then(c) and c.parallelism.data_parallel_replicate_degree == 1,
        "workers are copies of the model, and there is only one",
        "set parallelism.data_parallel_replicate_degree to the number of workers",
    ),
    refuse(
        MODE,
        lambda c: has_workers(c) and steps_early(c),
        "a worker's gradient norm is known only after its backward",
        "set optimizer.early_step_in_backward = false",
    ),
    refuse(
        "fault_tolerance.num_fragments",
        lambda c: _averages_now_and_then(c) and not _fragments_are_even(c),
        lambda c: f"fault_tolerance.sync_steps = {c.fault_tolerance.sync_steps} is not a multiple of it",
        "fragments follow each other at even intervals: change one of the two",
    ),
    refuse(
        "fault_tolerance.fragment_sync_delay",
        lambda c: (
            _averages_now_and_then(c)
            and _fragments_are_even(c)
            and c.fault_tolerance.fragment_sync_delay >= _steps_to_the_next(c)
        ),
        lambda c: f"the next fragment is sent {_steps_to_the_next(c)} steps later (sync_steps / num_fragments)",
        "set a shorter delay",
    ),
]

PENDING = _not_built_with(
    "asynchronous data parallel",
    _waits_for_nobody,
    ("saves in the background", "checkpoint.async_mode", lambda c: c.checkpoint.async_mode != "disabled"),
    ("this optimizer", "optimizer.name", lambda c: c.optimizer.name not in SERVED_OPTIMIZERS),
    ("narrow state", "optimizer.state_dtype", lambda c: c.optimizer.state_dtype != "parameter"),
    PAIRS,
    GRAPHS,
    ("weights on the host", "training.enable_cpu_offload", lambda c: c.training.enable_cpu_offload),
)

GROUPS_PENDING: list[Rule] = [
    not_built("replica groups of independent workers", MODE, when=_both(_has_groups, has_workers)),
    not_built(
        "semi-synchronous training of replica groups",
        "fault_tolerance.semi_sync_method",
        when=lambda c: _has_groups(c) and c.fault_tolerance.semi_sync_method is not None,
    ),
    not_built(
        "replica groups connected by anything but gloo",
        "fault_tolerance.process_group",
        when=lambda c: _has_groups(c) and c.fault_tolerance.process_group != "gloo",
    ),
    *_not_built_with(
        "replica groups",
        _has_groups,
        PAIRS,
        ("updates in backward", "optimizer.early_step_in_backward", steps_early),
        GRAPHS,
        (
            "compressed gradients",
            "parallelism.gradient_compression",
            lambda c: c.parallelism.gradient_compression != "none",
        ),
    ),
]

MISSING: list[Rule] = [
    missing("torchft", "fault_tolerance.enable", _has_groups, "pip install 'shardline[ft]'"),
]

IDLE: list[Rule] = [
    idle(
        "neither fault_tolerance.enable is true nor parallelism.data_parallel_mode 'diloco'",
        lambda c: not _averages_now_and_then(c) and not _has_groups(c),
        *OUTER_KEYS,
    ),
    idle(
        "nothing makes outer steps: neither fault_tolerance.enable is true nor parallelism.data_parallel_mode 'diloco',"
        " nor 'async' with fault_tolerance.async_steps above 1",
        lambda c: not (_averages_now_and_then(c) or _has_groups(c) or _makes_local_steps(c)),
        *OUTER_STEP_KEYS,
    ),
    idle_unless(
        MODE,
        ["async"],
        *below("fault_tolerance", "async_staleness async_steps async_lr_power async_late async_late_seconds"),
    ),
    idle_if("fault_tolerance.async_late", ["wait"], "fault_tolerance.async_late_seconds"),
    idle_unless("fault_tolerance.should_quantize", [True], "fault_tolerance.quantized_dtype"),
    idle_if("fault_tolerance.semi_sync_method", ["local_sgd"], *below("fault_tolerance", "outer_lr outer_momentum")),
]

GROUPS_IDLE: list[Rule] = [
    idle_without(
        "fault_tolerance.enable",
        *below("fault_tolerance", "process_group process_group_timeout_ms replica_id group_size min_replica_size"),
    ),
]

GROUPS_DATA_IDLE: list[Rule] = [
    idle_without("fault_tolerance.enable", "checkpoint.enable_ft_dataloader_checkpoints"),
]
