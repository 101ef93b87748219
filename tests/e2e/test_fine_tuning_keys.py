"""Keys that fine-tuning runs have: accumulation by count, cadences as fractions, a limit of the loss."""

import pytest
import torch

from shardline.checkpoint.resume_batch import batch_to_keep
from shardline.config.layout import resolve_layout, with_degrees
from shardline.data.order import global_batch
from shardline.errors import ConfigError, UserError
from shardline.training.setup import set_determinism
from tests.e2e.tiny import run, tiny_config

SAVING = {"checkpoint__enable": True}


def test_accumulation_counts_forward_passes(tmp_path):
    whole = run(tmp_path / "whole", training__local_batch_size=8)
    parts = run(tmp_path / "parts", training__local_batch_size=2, training__gradient_accumulation_steps=4)
    assert [row["tokens"] for row in parts] == [row["tokens"] for row in whole]
    for a, b in zip(whole, parts, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_the_global_batch_grows_with_the_ranks():
    section = tiny_config("x", training__gradient_accumulation_steps=3).training
    assert [global_batch(section, ranks) for ranks in (1, 2, 8)] == [12, 24, 96]


def test_a_resumed_run_keeps_its_global_batch(tmp_path):
    settings = {**SAVING, "training__gradient_accumulation_steps": 2, "training__steps": 2}
    run(tmp_path / "run", **settings)
    kept = batch_to_keep(tiny_config(tmp_path / "run", **settings))
    assert kept is not None
    assert kept.size == 8


def test_checkpoints_and_validations_come_after_fractions_of_the_run(tmp_path):
    written = run(
        tmp_path / "run",
        **SAVING,
        checkpoint__interval_ratio=0.25,
        validation__enable=True,
        validation__freq_ratio=0.5,
        validation__seq_len=32,
        validation__steps=1,
        training__steps=8,
    )
    saved = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoint").glob("step-*"))
    assert saved == [2, 4, 6, 8]
    assert [row["step"] for row in written if "validation_loss" in row] == [1, 4, 8]


@pytest.mark.parametrize(("ratio", "steps"), [(1 / 3, 4), (0.3, 3), (0.35, 4), (1.0, 10), (0.0, 1), (1 / 12, 1)])
def test_a_fraction_is_rounded_up(ratio, steps):
    assert tiny_config("x", checkpoint__interval_ratio=ratio).checkpoint.every(10) == steps


def test_a_loss_that_stays_high_ends_the_run_before_it_is_saved(tmp_path):
    with pytest.raises(UserError, match=r"step 2: the loss was above training.max_loss = 0.5 for 2 steps"):
        run(tmp_path / "run", **SAVING, training__max_loss=0.5, training__max_loss_steps=2, checkpoint__interval=2)
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))
    assert len(run(tmp_path / "other", training__max_loss=50.0)) == 6


def test_tf32_sets_the_precision_of_products_on_gpus(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    for tf32 in (True, False):
        set_determinism(tiny_config("x", training__tf32=tf32), torch.device("cuda"))
    set_determinism(tiny_config("x", training__tf32=True), torch.device("cpu"))
    assert seen == ["high", "highest"]


def test_replicas_take_the_remaining_ranks():
    config = tiny_config(
        "x",
        parallelism__data_parallel_replicate_degree=-1,
        parallelism__data_parallel_shard_degree=1,
        parallelism__tensor_parallel_degree=2,
    )
    layout = resolve_layout(config.parallelism, 8)
    assert (layout.dp_replicate, layout.dp_shard) == (4, 1)
    assert with_degrees(config, layout).parallelism.data_parallel_replicate_degree == 4
    with pytest.raises(ConfigError, match=r"dp_replicate -1 .* = 2 does not match 3 ranks, which it must divide"):
        resolve_layout(config.parallelism, 3)
    open_ended = config.replace({"parallelism.data_parallel_shard_degree": -1})
    with pytest.raises(ConfigError, match="only one of them can take the remaining ranks"):
        resolve_layout(open_ended.parallelism, 8)
