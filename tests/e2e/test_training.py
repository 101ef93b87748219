"""One-process runs: what they write, that they repeat, that accumulation, precision and stopping do what they say."""

import gc
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from shardline import registry
from shardline.errors import UserError
from shardline.training.trainer import Trainer
from shardline.training.whole_model import WholeModel
from tests.e2e.tiny import rows, run, tiny_config

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tokens_per_second_per_device", "step_seconds",
    "data_seconds", "memory_gib", "mfu", "comm_bytes",
}  # fmt: skip


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_a_run_learns_and_writes_what_the_contract_says(tmp_path):
    written = run(tmp_path / "run", training__steps=40)
    assert [row["step"] for row in written] == list(range(1, 41))
    assert all(row.keys() == KEYS for row in written)
    assert written[-1]["loss"] < 0.8 * written[0]["loss"]
    assert written[0]["loss"] == pytest.approx(math.log(272), rel=0.05)  # fresh weights guess evenly
    assert written[-1]["tokens"] == 40 * 4 * 32
    for name in ("config.toml", "log/rank-0.log", "log/ranks.json"):
        assert (tmp_path / "run" / name).is_file(), name


def test_rows_are_of_the_first_the_last_and_every_few_steps(tmp_path):
    assert [row["step"] for row in run(tmp_path / "run", training__steps=7, metrics__log_freq=3)] == [1, 3, 6, 7]


def test_two_runs_are_bitwise_equal_and_the_seed_matters(tmp_path):
    kept = ("loss", "grad_norm", "lr")
    results = [
        [[row[key] for key in kept] for row in run(tmp_path / name, debug__deterministic=True, debug__seed=seed)]
        for name, seed in (("a", 7), ("b", 7), ("c", 8))
    ]
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_the_seed_decides_weights_and_the_order_of_samples(tmp_path):
    found = []
    for seed in (7, 8):
        trainer = Trainer(tiny_config(tmp_path / str(seed), debug__seed=seed))
        found.append((next(trainer.model.parameters()).detach().clone(), trainer.loader.step()[0].tokens))
        trainer.close()
    (weights, tokens), (other_weights, other_tokens) = found
    assert not torch.equal(weights, other_weights)
    assert not torch.equal(tokens, other_tokens)


@pytest.mark.parametrize(("wanted", "warns"), [(True, False), (True, True), (False, False)])
def test_deterministic_algorithms_are_in_force(tmp_path, wanted, warns):
    keys = {"debug__deterministic": wanted, "debug__deterministic_warn_only": warns}
    Trainer(tiny_config(tmp_path / "run", **keys)).close()
    assert torch.are_deterministic_algorithms_enabled() == wanted
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warns


def test_ranks_meet_within_the_time_of_the_config(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("shardline.training.setup.start_process_group", lambda *given: bool(seen.append(given)))
    Trainer(tiny_config(tmp_path / "run", comm__init_timeout_seconds=7)).close()
    assert [seconds for _, seconds, _ in seen] == [7]


def test_what_is_logged_on_request(tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy.toml"
    Trainer(tiny_config(folder)).close()
    asked = {"job__print_config": True, "job__description": "a test", "model__print_after_conversion": True}
    Trainer(tiny_config(tmp_path / "asked", job__save_config_file=str(copy), **asked)).close()
    silent, full = ((path / "log" / "rank-0.log").read_text() for path in (folder, tmp_path / "asked"))
    for words in ("[lr_scheduler]\n", "Decoder(\n", " a test\n"):
        assert words in full
        assert words not in silent
    assert "[lr_scheduler]\n" in copy.read_text()


def test_garbage_is_collected_every_few_steps_alone(tmp_path, monkeypatch):
    trainer, seen = Trainer(tiny_config(tmp_path / "run", training__steps=5, training__gc_freq=2)), []
    monkeypatch.setattr(gc, "collect", lambda *given: seen.append((trainer.telemetry.number, *given, gc.isenabled())))
    trainer.train()
    assert seen == [(0, False), (2, 1, False), (4, 1, False)]
    assert gc.isenabled()


def test_garbage_is_collected_and_counted_in_every_step_on_request(tmp_path):
    run(tmp_path / "run", training__steps=3, training__gc_debug=True)
    lines = (tmp_path / "run" / "log" / "rank-0.log").read_text().splitlines()
    found = [line for line in lines if " unreachable objects" in line]
    assert [f"step {step}: gc found " in line for step, line in enumerate(found, start=1)] == [True] * 3


@pytest.mark.parametrize("mask", ["causal", "block_causal"])
def test_accumulation_equals_the_large_batch(tmp_path, mask):
    overrides = {**tiny_config(tmp_path / "x").model.overrides, "attn_mask_type": mask}
    settings = {"training__global_batch_size": 8, "model__overrides": overrides}
    whole = run(tmp_path / "whole", training__local_batch_size=8, **settings)
    parts = run(tmp_path / "parts", training__local_batch_size=2, **settings)
    for a, b in zip(whole, parts, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "stored", "computed"),
    [
        ({}, torch.float32, torch.float32),
        ({"training__mixed_precision_param": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"training__dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_is_really_in_force(tmp_path, settings, stored, computed):
    trainer = Trainer(tiny_config(tmp_path / "run", **settings))
    batches = trainer.loader.step()
    hidden = trainer.model.hidden(batches[0].tokens)
    trainer.stepper.forward_backward(batches)
    assert hidden.dtype == computed
    assert {p.dtype for p in trainer.model.parameters()} == {stored}
    assert {p.grad.dtype for p in trainer.model.parameters()} == {stored}
    trainer.close()


def test_bfloat16_is_near_float32(tmp_path):
    full = run(tmp_path / "full")
    mixed = run(tmp_path / "mixed", training__mixed_precision_param="bfloat16")
    assert [row["loss"] for row in mixed] != [row["loss"] for row in full]
    for a, b in zip(full, mixed, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-2)


def poison(name):
    def hook(model, config):
        with torch.no_grad():
            dict(model.named_parameters())[name][0, 0] = float("inf")

    return hook


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setitem(registry.hooks, "after_build", [poison("layers.1.feed_forward.w2.weight")])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_nonfinite_weights_stop_with_names_and_change_nothing(nonfinite, tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run", training__nonfinite=nonfinite, checkpoint__enable=True))
    before = parameters(trainer)
    with pytest.raises(
        UserError, match=r"step 1: loss nan.* weights of layers\.1\.feed_forward\.w2\.weight\."
    ) as caught:
        trainer.train()
    assert "checkpoint.load_step" in str(caught.value)
    assert "optimizer.lr" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))


def spoil_gradient(trainer):
    trainer.model.layers["1"].attention.wo.weight.register_hook(lambda gradient: gradient * float("inf"))


def test_a_nonfinite_gradient_is_named(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run"))
    spoil_gradient(trainer)
    with pytest.raises(UserError, match=r"gradient norm (nan|inf); .* gradient of layers\.1\.attention\.wo\.weight\."):
        trainer.train()


def test_a_nonfinite_step_can_be_skipped(tmp_path, caplog):
    trainer = Trainer(tiny_config(tmp_path / "run", training__nonfinite="skip", training__steps=3))
    spoil_gradient(trainer)
    before = parameters(trainer)
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert (tmp_path / "run" / "log" / "rank-0.log").read_text().count("step skipped") == 3


def test_clipping_is_applied(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run", training__max_norm=0.01))
    seen = []
    step = trainer.optimizer.step

    def recorded(*arguments):
        seen.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
        return step(*arguments)

    trainer.optimizer.step = recorded
    trainer.train()
    assert seen == pytest.approx([0.01] * 6, rel=1e-3)
    assert all(row["grad_norm"] > 0.1 for row in rows(tmp_path / "run"))  # what is reported is the norm before clipping


def test_validation_rows(tmp_path, monkeypatch):
    trained, losses = [], WholeModel.losses

    def noted(self, batches):
        trained.append(self.model.training)
        return losses(self, batches)

    monkeypatch.setattr(WholeModel, "losses", noted)
    samples = {"generation__prompts": ["A"], "generation__max_new_tokens": 1}
    trainer = Trainer(tiny_config(tmp_path / "run", validation__enable=True, validation__freq=3, validation__steps=2,
                                  validation__seq_len=32, validation__local_batch_size=4, **samples))  # fmt: skip
    trainer.train()
    written = rows(tmp_path / "run")
    validated = {row["step"]: row["validation_loss"] for row in written if "validation_loss" in row}
    assert validated.keys() == {1, 3, 6}
    assert validated[6] < validated[1]
    assert trained == [False] * 3 * 2, "dropout is for training alone"
    assert trainer.model.training, "and is on again after validations and samples"


@pytest.mark.parametrize(
    ("number", "steps", "validated", "saved"),
    [(signal.SIGTERM, 3, [1], ["step-3"]), (signal.SIGUSR1, 6, [1, 3, 6], ["step-3", "step-6"])],
)
def test_a_signal_within_validation(tmp_path, monkeypatch, number, steps, validated, saved):
    """One to stop does not wait for its end; one to save does."""
    counted, losses = [], WholeModel.losses

    def count(self, batches):
        counted.append(batches)
        if len(counted) == 4 + 2:  # four batches at step 1, then the second at step 3
            os.kill(os.getpid(), number)
        return losses(self, batches)

    monkeypatch.setattr(WholeModel, "losses", count)
    written = run(tmp_path / "run", validation__enable=True, validation__freq=3, validation__steps=4,
                  validation__seq_len=32, validation__local_batch_size=4, checkpoint__enable=True,
                  checkpoint__interval=1000)  # fmt: skip
    assert [row["step"] for row in written if "validation_loss" not in row] == list(range(1, steps + 1))
    assert [row["step"] for row in written if "validation_loss" in row] == validated
    assert len(counted) == (4 + 2 if number == signal.SIGTERM else 3 * 4)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").glob("step-*")) == saved
    left = "step 3: stopping, validation is skipped" in (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert left == (number == signal.SIGTERM)


def test_epochs_instead_of_steps(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("a small corpus of words. " * 200)
    trainer = Trainer(
        tiny_config(
            tmp_path / "run",
            training__dataset_path=str(text),
            training__epochs=2,
            training__cache_folder=str(tmp_path / "cache"),
            model__tokenizer_path="bytes",
        )
    )
    samples = (len(text.read_bytes()) + 2 - 1) // 32
    assert trainer.loader.samples_per_epoch == pytest.approx(samples, abs=1)
    assert trainer.total_steps == math.ceil(2 * trainer.loader.samples_per_epoch / 4)
    trainer.close()


def test_the_example_module_registers_everything(tmp_path, monkeypatch):
    for name in ("flavors", "sources", "optimizers"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr(registry, "hooks", {event: [] for event in registry.hooks})
    monkeypatch.delitem(sys.modules, "shardline_custom_custom_module", raising=False)
    example = Path(__file__).parents[2] / "examples" / "custom_module.py"
    written = run(
        tmp_path / "run",
        experimental__custom_import=str(example),
        model__flavor="tiny",
        model__overrides={},
        training__dataset="counting",
        optimizer__name="PlainSGD",
        optimizer__lr=0.1,
        training__cache_folder=str(tmp_path / "cache"),
        model__tokenizer_path="bytes",
    )
    del sys.modules["shardline_custom_custom_module"]
    assert len(written) == 6
    assert all(registry.hooks[event] for event in ("before_build", "after_build", "after_step"))


def test_a_hook_reads_what_the_run_is_made_of(tmp_path, monkeypatch):
    seen = []

    def hook(trainer, row):
        text = trainer.tokenizer.decode(trainer.tokenizer.encode("abc"))
        tokens = next(trainer.validation.epoch(1)).tokens.shape[1]
        seen.append((row["step"], trainer.layout.world_size, trainer.precision.compute, text, tokens))

    monkeypatch.setitem(registry.hooks, "after_step", [hook])
    written = run(tmp_path / "run", validation__enable=True, validation__seq_len=16, validation__steps=1)
    assert [step for step, *_ in seen] == list(range(1, seen[-1][0] + 1))
    assert seen[0][1:] == (1, torch.float32, "abc", 16)
    assert written
