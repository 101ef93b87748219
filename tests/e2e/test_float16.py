"""float16: the loss is scaled, steps with gradients that it cannot hold are skipped, and the factor is saved."""

import pytest

from shardline.config.check import check
from shardline.config.load import load_config
from shardline.errors import ConfigError, UserError
from shardline.precision import loss_scale
from shardline.precision.loss_scale import LossScale
from shardline.training.trainer import Trainer
from tests.e2e.tiny import rows, run, tiny_config

HALF = {"training__mixed_precision_param": "float16"}


def test_losses_are_those_of_float32_within_rounding(tmp_path):
    half, whole = run(tmp_path / "half", **HALF), run(tmp_path / "whole")
    for a, b in zip(half, whole, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    assert [row["loss"] for row in half] != [row["loss"] for row in whole]


@pytest.mark.parametrize("clips", [0.0, 0.1])
def test_the_factor_does_not_change_the_steps(tmp_path, monkeypatch, clips):
    found = []
    for factor in (2.0**10, 2.0**14):
        monkeypatch.setattr(loss_scale, "FIRST", factor)
        found.append(run(tmp_path / f"{factor}", **HALF, training__max_norm=clips))
    for a, b in zip(*found, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_gradients_that_overflow_skip_the_step_and_halve_the_factor(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**24)
    trainer = Trainer(tiny_config(tmp_path / "run", **HALF, training__steps=16))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(trainer.loader.step())
    assert trainer.stepper.loss_scale.value == 2.0**23
    assert all((p == before[name]).all() for name, p in trainer.model.named_parameters())
    trainer.train()
    assert rows(tmp_path / "run")[-1]["loss"] < rows(tmp_path / "run")[0]["loss"]


def test_a_resumed_run_has_the_factor_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**24)
    settings = {**HALF, "checkpoint__enable": True, "checkpoint__interval": 8, "debug__deterministic": True}
    whole = run(tmp_path / "whole", **settings, training__steps=16)
    run(tmp_path / "parts", **settings, training__steps=8, lr_scheduler__total_steps=16)
    again = run(tmp_path / "parts", **settings, training__steps=16, lr_scheduler__total_steps=16)
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]


def test_the_factor_doubles_after_many_good_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "GOOD_STEPS", 2)
    scale = LossScale(dynamic=True)
    for _ in range(4):
        scale.advance()
    assert scale.state() == (4 * loss_scale.FIRST, 0)
    scale.value = loss_scale.LEAST
    with pytest.raises(UserError, match=r"step 5: .* float16's range is too small for this model"):
        scale.back_off(5)


def test_what_float16_cannot_do_is_refused():
    settings = {"training.mixed_precision_param": "float16"}
    with pytest.raises(ConfigError, match="a step may have to be skipped"):
        check(load_config(overrides={**settings, "optimizer.early_step_in_backward": True, "training.max_norm": 0.0}))
    with pytest.raises(ConfigError, match="float16 needs weights in float32"):
        check(load_config(overrides={**settings, "training.dtype": "bfloat16"}))
