"""Keys of workers that train apart: what is refused, and what has no effect."""

from __future__ import annotations

import pytest

from shardline.config.check import checked_layout, notes, pending
from shardline.config.load import load_config
from shardline.errors import ConfigError
from shardline.training.overview import _workers

TWO = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_mode": "diloco"}
FT = "fault_tolerance."


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"parallelism.data_parallel_replicate_degree": 1},
            "there is only one; set parallelism.data_parallel_replicate_deg",
        ),
        ({"optimizer.early_step_in_backward": True, "parallelism.data_parallel_shard_degree": 2}, "after its backward"),
        ({FT + "sync_steps": 10, FT + "num_fragments": 3}, "fault_tolerance.sync_steps = 10 is not a multiple of it"),
        (
            {FT + "sync_steps": 10, FT + "num_fragments": 2, FT + "fragment_sync_delay": 5},
            "the next fragment is sent 5 steps later",
        ),
        ({FT + "semi_sync_method": "dilco"}, "'diloco'"),
        ({FT + "fragment_update_alpha": 1.5}, "a number from 0 to 1"),
    ],
)
def test_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        checked_layout(load_config(overrides=TWO | keys), 4)


ASYNC = TWO | {"parallelism.data_parallel_mode": "async"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.async_mode", "async"),
        ("optimizer.name", "Muon"),
        ("optimizer.state_dtype", "int8"),
        ("training.enable_cpu_offload", True),
    ],
)
def test_what_asynchronous_workers_do_not_do_is_refused(key, value):
    assert pending(load_config(overrides=ASYNC)) == {}
    assert key in pending(load_config(overrides=ASYNC | {key: value}))
    assert key not in pending(load_config(overrides=TWO | {key: value}))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"parallelism.data_parallel_mode": "sync", FT + "sync_steps": 7}, "sync_steps has no effect: neither"),
        ({FT + "quantized_dtype": "float8"}, "quantized_dtype has no effect: fault_tolerance.should_quantize is not"),
        ({FT + "semi_sync_method": "local_sgd", FT + "outer_lr": 0.5}, "outer_lr has no effect: fault_tolerance.semi"),
        ({"parallelism.gradient_bucket_mib": 3.0}, "gradient_bucket_mib has no effect: only plain replicas"),
        ({FT + "async_staleness": 1}, "async_staleness has no effect: parallelism.data_parallel_mode is not 'async'"),
        (ASYNC | {FT + "async_late_seconds": 1.0}, "async_late_seconds has no effect: fault_tolerance.async_late is"),
        (ASYNC | {FT + "outer_lr": 0.5}, "outer_lr has no effect: nothing makes outer steps: neither"),
        ({FT + "async_steps": 2}, "async_steps has no effect: parallelism.data_parallel_mode is not 'async'"),
        ({FT + "group_size": 3}, "group_size has no effect: fault_tolerance.enable is false"),
    ],
)
def test_idle(keys, line):
    assert any(line in one for one in notes(load_config(overrides=TWO | keys)))


def test_keys_that_have_an_effect_are_not_idle():
    keys = {FT + "sync_steps": 8, FT + "num_fragments": 2, FT + "outer_momentum": 0.5, FT + "fragment_sync_delay": 2}
    keys |= {FT + "should_quantize": True, FT + "quantized_dtype": "float8", FT + "fragment_update_alpha": 0.5}
    assert not [line for line in notes(load_config(overrides=TWO | keys)) if "fault_tolerance" in line]


def test_local_steps_of_asynchronous_workers_have_an_outer_step():
    config = load_config(overrides=ASYNC | {FT + "async_steps": 2, FT + "outer_lr": 0.5, FT + "outer_momentum": 0.5})
    assert not [line for line in notes(config) if "fault_tolerance" in line]
    assert _workers(config, 2) == (
        "2, asynchronous; contributions of 2 local steps (outer rate 0.5, momentum 0.5) at most 2 steps late,"
        " late workers waited for"
    )


def test_the_table_of_the_start_says_how_workers_meet():
    config = load_config(overrides=TWO | {FT + "sync_steps": 8, FT + "num_fragments": 2, FT + "fragment_sync_delay": 1})
    assert _workers(config, 2) == (
        "2, each clips by its own gradient norm; averaged every 8 steps in 2 fragments, applied 1 step later"
        " (DiLoCo, outer rate 0.7, momentum 0.9)"
    )
    config = load_config(overrides=TWO | {FT + "semi_sync_method": "local_sgd", FT + "should_quantize": True})
    assert _workers(config, 3) == (
        "3, each clips by its own gradient norm; averaged every 5 steps, sent in int8 (local SGD)"
    )
