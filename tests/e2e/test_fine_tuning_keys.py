"""Keys that fine-tuning runs have: accumulation, cadences, limits of the loss, noise, weights that are frozen."""

import pytest
import torch

from shardline.checkpoint.format import find_checkpoint
from shardline.checkpoint.resume import RunPosition
from shardline.checkpoint.resume_batch import batch_to_keep
from shardline.config.layout import resolve_layout, with_degrees
from shardline.data.order import global_batch
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import resolve
from shardline.models.fused_weights import unfuse
from shardline.run.options import TrainOptions
from shardline.training.setup import set_determinism
from shardline.training.trainer import Trainer
from tests.e2e.tiny import run, tiny_config
from tests.model_state import logical_state

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
    config = tiny_config(tmp_path / "run", **settings)
    kept = batch_to_keep(config, resolve(config.model))
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


STANDING_STILL = {  # no step changes a weight, so no validation is better than the first
    "optimizer__lr": 1e-30,
    "optimizer__weight_decay": 0.0,
    "validation__enable": True,
    "validation__freq": 2,
    "validation__seq_len": 32,
    "validation__steps": 1,
    "training__steps": 20,
}


def test_a_run_whose_validation_gets_no_better_ends_early_and_is_finished(tmp_path, caplog):
    settings = {**SAVING, **STANDING_STILL, "checkpoint__last_save_model_only": True}
    written = run(tmp_path / "run", **settings, validation__patience=3)
    assert [row["step"] for row in written if "validation_loss" in row] == [1, 2, 4, 6]
    assert max(row["step"] for row in written) == 6
    saved = find_checkpoint(tmp_path / "run" / "checkpoint")
    assert (saved.step, saved.kind) == (6, "model")  # the last save, as the config has it
    caplog.set_level("INFO")
    assert Trainer(tiny_config(tmp_path / "run", **settings, validation__patience=3)).train().finished_before
    assert "already finished at step 6" in caplog.text


def trainer_with(**settings):
    """One that has only what is asked after a step."""
    trainer = object.__new__(Trainer)
    trainer.config, trainer.progress, trainer.high_losses = tiny_config("x", **settings), RunPosition(), 0
    trainer.total_steps, trainer._kept = 100, lambda: ""
    return trainer


def test_high_losses_count_in_a_row():
    trainer = trainer_with(training__max_loss=2.0, training__max_loss_steps=2)
    for loss in (3.0, 1.0, 3.0, 2.0, 3.0):
        trainer._check_loss(loss)
    with pytest.raises(UserError, match="for 2 steps"):
        trainer._check_loss(2.5)


def test_a_better_validation_begins_patience_anew():
    trainer, ends = trainer_with(validation__patience=2), []
    for step, loss in enumerate((5.0, 6.0, 4.0, 4.5, None, 4.25), start=1):
        trainer.progress.step = step
        trainer._stop_if_worse(loss)
        ends.append(trainer.total_steps)
    assert ends == [100] * 5 + [6]


def test_patience_counts_over_a_resumption(tmp_path):
    settings = {**SAVING, **STANDING_STILL, "checkpoint__interval": 3}
    run(tmp_path / "run", **settings | {"training__steps": 3, "lr_scheduler__total_steps": 20}, validation__patience=3)
    written = run(tmp_path / "run", TrainOptions(resume=True), **settings, validation__patience=3)
    assert [row["step"] for row in written if "validation_loss" in row] == [1, 2, 3, 4]  # 3 was the last step
    longer = run(tmp_path / "run", TrainOptions(resume=True), **settings, validation__patience=5)
    assert max(row["step"] for row in longer) == 8


def test_a_run_that_gets_better_is_not_ended(tmp_path):
    settings = STANDING_STILL | {"optimizer__lr": 1e-3, "training__steps": 6, "validation__freq": 1}
    assert len(run(tmp_path / "run", **settings, validation__patience=1)) == 12


def test_noise_changes_training_and_not_validation_and_is_the_same_after_a_resumption(tmp_path):
    settings = {**SAVING, **STANDING_STILL, "training__steps": 4, "lr_scheduler__total_steps": 8}
    plain = run(tmp_path / "plain", **settings)
    noisy = run(tmp_path / "noisy", **settings, training__neftune_alpha=50.0)
    for a, b in zip(plain, noisy, strict=True):
        name = "validation_loss" if "validation_loss" in a else "loss"
        assert (a[name] == b[name]) == (name == "validation_loss"), name
    learning = {**SAVING, "training__neftune_alpha": 50.0, "lr_scheduler__total_steps": 6}
    straight = run(tmp_path / "straight", **learning)
    run(tmp_path / "parts", **learning, training__steps=3)
    parts = run(tmp_path / "parts", TrainOptions(resume=True), **learning)
    assert [row["loss"] for row in parts] == [row["loss"] for row in straight]


TRAINED = {"layers.0.attention.wo.weight", "layers.1.feed_forward.w2.weight", "norm.weight"}
UNFROZEN = {"training__unfrozen_parameters": [r"model\.layers\.0\.self_attn\.o_proj", ".*1.mlp.down", "^model.norm"]}


def test_only_weights_that_are_named_are_trained_and_have_a_state(tmp_path):
    settings = {**SAVING, **UNFROZEN, "optimizer__weight_decay": 0.1, "checkpoint__interval": 3}
    trainer = Trainer(tiny_config(tmp_path / "run", **settings))
    before = {name: tensor.clone() for name, tensor in logical_state(trainer.model).items()}
    trainer.train()
    changed = {name for name, tensor in logical_state(trainer.model).items() if not torch.equal(tensor, before[name])}
    assert changed == TRAINED
    saved = find_checkpoint(tmp_path / "run" / "checkpoint")
    assert {name.split("/", 2)[2] for name in saved.shards if name.startswith("optimizer/")} == TRAINED
    assert {name.removeprefix("model/") for name in saved.shards if name.startswith("model/")} == before.keys()
    assert "trained      10,304 of" in (tmp_path / "run" / "log" / "rank-0.log").read_text()


def test_a_run_with_frozen_weights_resumes_exactly(tmp_path):
    settings = {**SAVING, **UNFROZEN, "lr_scheduler__total_steps": 6}
    straight = run(tmp_path / "straight", **settings)
    run(tmp_path / "parts", **settings, training__steps=3)
    parts = run(tmp_path / "parts", TrainOptions(resume=True), **settings)
    assert [row["loss"] for row in parts] == [row["loss"] for row in straight]


IN_PART = {
    "training__unfrozen_parameters": [r"layers.\d.attention.wk", "model.layers.1.mlp.gate_proj"],
    "optimizer__weight_decay": 0.5,
}
IN_PART_NAMES = {f"layers.{layer}.attention.wk.weight" for layer in (0, 1)} | {"layers.1.feed_forward.w1.weight"}
OPTIMIZERS = ["AdamW", "Adam", "SGD", "Lion", "LAMB", "Muon", "Adafactor"]
EARLY = {"optimizer__early_step_in_backward": True, "training__max_norm": 0.0}


@pytest.mark.parametrize(
    "settings",
    [{}, EARLY, *(pytest.param({"optimizer__name": name}, marks=pytest.mark.slow) for name in OPTIMIZERS[1:])],
    ids=["AdamW", "early", *OPTIMIZERS[1:]],
)
def test_rows_of_a_fused_weight_that_are_not_named_stay_bit_by_bit(tmp_path, settings):
    trainer = Trainer(tiny_config(tmp_path / "run", **IN_PART, **settings))
    before = {part: tensor.clone() for part, tensor in logical_state(trainer.model).items()}
    trainer.train()
    after = logical_state(trainer.model)
    assert {part for part in after if not torch.equal(after[part], before[part])} == IN_PART_NAMES
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert "3 tensors trained in part" in (tmp_path / "run" / "log" / "rank-0.log").read_text()


def test_gradients_of_rows_that_are_not_named_count_nowhere(tmp_path):
    """Those of the others are those of full training, and the norm is theirs."""

    def gradients(folder, **settings):
        trainer = Trainer(tiny_config(folder, **settings))
        trainer.stepper.forward_backward(trainer.loader.step())
        named = [(name, one) for name, one in trainer.model.named_parameters() if one.grad is not None]
        trainer.close()
        return {part: rows for name, one in named for part, rows in unfuse(trainer.model.arch, name, one.grad).items()}

    whole, some = gradients(tmp_path / "whole"), gradients(tmp_path / "some", **IN_PART)
    assert len(some) == 2 * 3 + 2
    for name, gradient in some.items():
        assert torch.equal(gradient, whole[name] if name in IN_PART_NAMES else torch.zeros_like(gradient)), name
    norm = torch.stack([whole[name].square().sum() for name in IN_PART_NAMES]).sum().sqrt().item()
    assert run(tmp_path / "run", **IN_PART)[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


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
