"""`training.enable_cpu_offload` on one rank: the numbers of a plain run, checkpoints that both kinds of run resume."""

import pytest
import torch
import torch.distributed as dist

from shardline.checkpoint import format as files
from shardline.errors import UserError
from shardline.training.trainer import Trainer
from tests.e2e.test_resume import SAVING, numbers
from tests.e2e.tiny import rows, run, tiny_config

OFFLOAD = {"training__enable_cpu_offload": True}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Where a GPU computes and the CPU steps, numbers differ in their last bits."""
    monkeypatch.setattr("shardline.training.setup.choose_device", lambda: torch.device("cpu"))


def same_state(a, b, step):
    one, two = (files.find_checkpoint(folder, step) for folder in (a, b))
    for prefix in ("model/", "optimizer/"):
        left, right = one.tensors(prefix), two.tensors(prefix)
        assert set(left) == set(right)
        assert all(left.dtype(name) == right.dtype(name) and torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("after", [OFFLOAD, pytest.param({}, marks=pytest.mark.slow)], ids=["offload", "plain"])
def test_a_run_with_offload_is_the_plain_one_and_resumes(tmp_path, after):
    plain = numbers(run(tmp_path / "plain", training__steps=8, **SAVING))
    folder = tmp_path / "run"
    run(folder, training__steps=5, lr_scheduler__total_steps=8, **SAVING, **OFFLOAD)
    resumed = Trainer(tiny_config(folder, training__steps=8, checkpoint__load_step=4, **SAVING, **after))
    assert resumed.progress.step == 4
    resumed.train()
    assert numbers(rows(folder)) == plain
    assert all(row["comm_bytes"] == {} and "dp_exposed_seconds" not in row for row in rows(folder))
    same_state(folder, tmp_path / "plain", 8)


def test_what_is_saved_after_validation_is_not_what_was_computed_with(tmp_path):
    """Validation leaves weights gathered, rounded to bfloat16."""
    rounded = {"training__mixed_precision_param": "bfloat16", "training__steps": 2, **SAVING, **OFFLOAD}
    validation = {"validation__enable": True, "validation__freq": 2, "validation__steps": 2, "validation__seq_len": 32}
    run(tmp_path / "plain", **rounded)
    run(tmp_path / "validated", **rounded, **validation)
    same_state(tmp_path / "plain", tmp_path / "validated", 2)


def test_there_is_a_process_group_with_offload_alone_and_as_long_as_the_run(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "plain"))
    assert not dist.is_initialized()
    trainer.close()
    trainer = Trainer(tiny_config(tmp_path / "run", **OFFLOAD))
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    trainer.train()
    assert not dist.is_initialized()
    with pytest.raises(UserError, match="--overwrite"):
        Trainer(tiny_config(tmp_path / "run", **OFFLOAD))
    assert not dist.is_initialized()
