"""Training on pairs of answers: the loss of `trl`, the reference, resuming, and what is refused."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.adapters.lora import NOTHING
from shardline.cli.main import main
from shardline.config.schema import Dpo
from shardline.data.batch import IGNORE, Batch
from shardline.errors import UserError
from shardline.models.fused_weights import unfuse
from shardline.run.device import flops_per_token
from shardline.training import pairs
from shardline.training.trainer import Trainer
from tests.e2e.hf_folders import write_model
from tests.e2e.tiny import rows, run, tiny_config
from tests.model_state import hf_state, logical_state

pytestmark = pytest.mark.usefixtures("on_cpu")
PAIRS = Path(__file__).parents[1] / "parity" / "pairs.jsonl"
SOURCE = {"path": str(PAIRS), "type": {"field_chosen": "chosen", "field_rejected": "rejected"}}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False}
LORA = {"lora__enable": True, "lora__rank": 4, "lora__alpha": 8.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))


def dpo(**more: Any) -> dict[str, Any]:
    named = {"training__objective": "dpo", "data__sources": [SOURCE], "model__tokenizer_path": "bytes"}
    return {**named, **more}


def from_folder(folder: Path) -> dict[str, Any]:
    named = {"model__name": "auto", "model__hf_assets_path": str(folder), "model__overrides": {}}
    return named | {"model__tokenizer_path": None, "checkpoint__enable": True, "checkpoint__initial_load_in_hf": True}


@contextlib.contextmanager
def moved(folder: Path, **options: Any) -> Iterator[Trainer]:
    """A run whose trained weights have moved away from those that it began with."""
    trainer = Trainer(tiny_config(folder, **options))
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=chance))
    yield trainer
    trainer.close()


# ---- the loss of others ----------------------------------------------------------------------------------------------


def log_probabilities(model: Any, batch: Batch) -> Tensor:
    """(2B,) in float64, from the logits of transformers."""
    log_p = model(batch.tokens).logits.log_softmax(-1)
    targets = batch.labels != IGNORE
    picked = log_p.gather(2, batch.labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets, picked, 0).sum(1)


def written_out(policy: Tensor, reference: Tensor, tokens: Tensor, loss: str, beta: float, swapped: float) -> Tensor:
    better, worse = ((policy - reference)[first::2] for first in (0, 1))
    x = better - worse
    if loss == "ipo":
        return ((better / tokens[::2] - worse / tokens[1::2] - 1 / (2 * beta)) ** 2).mean()
    if loss == "hinge":
        return (1 - beta * x).clamp(min=0).mean()
    right, wrong = -torch.log(torch.sigmoid(beta * x)), -torch.log(torch.sigmoid(-beta * x))
    mixed = (1 - swapped) * right + (swapped if loss == "sigmoid" else -swapped) * wrong
    return (mixed / (1 if loss == "sigmoid" else 1 - 2 * swapped)).mean()


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients of a run under the names of transformers."""
    parts: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        parts |= unfuse(trainer.arch, name, parameter.grad)
    return hf_state(trainer.arch, parts)


def theirs(trainer: Trainer, base: Path) -> tuple[Any, Any]:
    """The policy and the reference as models of transformers, in float64."""
    transformers = pytest.importorskip("transformers")
    models = [transformers.LlamaForCausalLM.from_pretrained(base).double().eval() for _ in range(2)]
    models[0].load_state_dict(hf_state(trainer.arch, logical_state(trainer.model)))
    return models[0], models[1]


def assert_gradients(trainer: Trainer, model: Any) -> None:
    ours = gradients_of(trainer)
    for name, parameter in model.named_parameters():
        difference = (ours[name].double() - parameter.grad.double()).norm() / parameter.grad.norm()
        assert difference < 1e-4, f"{name}: {difference}"


@pytest.mark.parametrize(
    ("loss", "swapped"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
)
def test_loss_and_gradients_are_those_of_the_formula(tmp_path: Path, loss: str, swapped: float) -> None:
    base = write_model(tmp_path / "base")
    options = dpo(dpo__loss=loss, dpo__beta=0.3, dpo__label_smoothing=swapped, **from_folder(base))
    with moved(tmp_path / "run", **options) as trainer:
        (batch,) = trainer.loader.step()
        shown, margin, accuracy = trainer.stepper.forward_backward([batch]).tolist()
        policy_model, reference_model = theirs(trainer, base)
        policy = log_probabilities(policy_model, batch)
        with torch.no_grad():
            reference = log_probabilities(reference_model, batch)
        tokens = (batch.labels != IGNORE).sum(1)
        expected = written_out(policy, reference, tokens, loss, 0.3, swapped)
        expected.backward()
        assert shown == pytest.approx(expected.item(), rel=1e-4)
        margins = 0.3 * (policy - reference).detach().view(-1, 2) @ torch.tensor([1.0, -1.0]).double()
        assert margin == pytest.approx(margins.mean().item(), rel=1e-4)
        assert accuracy == pytest.approx((margins > 0).double().mean().item())
        assert_gradients(trainer, policy_model)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_loss_and_gradients_are_those_of_trl(tmp_path: Path, loss: str) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    base = write_model(tmp_path / "base")
    with moved(tmp_path / "run", **dpo(dpo__loss=loss, **from_folder(base))) as trainer:
        (batch,) = trainer.loader.step()
        shown = trainer.stepper.forward_backward([batch])[0].item()
        policy, reference = (model.float() for model in theirs(trainer, base))
        records = [json.loads(line) for line in PAIRS.read_text().splitlines()[:4]]
        judge = trl.DPOTrainer(
            policy,
            reference,
            args=trl.DPOConfig(
                str(tmp_path / "trl"), beta=0.1, loss_type=[loss], use_cpu=True, bf16=False, report_to=[]
            ),
            train_dataset=datasets.Dataset.from_list(records),
            processing_class=transformers.AutoTokenizer.from_pretrained(base, pad_token="</s>"),
        )
        turn = torch.cat([torch.arange(0, len(batch.tokens), 2), torch.arange(1, len(batch.tokens), 2)])
        answers = F.pad(batch.labels[:, :-1] != IGNORE, (1, 0)).long()
        inputs = {"input_ids": batch.tokens, "attention_mask": torch.ones_like(answers), "completion_mask": answers}
        judge.model.train()
        expected = judge.compute_loss(judge.model, {name: rows[turn] for name, rows in inputs.items()})
        expected.backward()
        assert shown == pytest.approx(expected.item(), rel=1e-4)
        assert_gradients(trainer, policy)


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_prompts_do_not_count(tmp_path: Path) -> None:
    """Another target in the prompt's place would change the log-probabilities; the answer's tokens alone do."""
    trainer = Trainer(tiny_config(tmp_path / "run", data__shuffle=False, **dpo()))
    (batch,) = trainer.loader.step()
    first = json.loads(PAIRS.read_text().splitlines()[0])
    for row, which in enumerate(("chosen", "rejected")):
        text = first["prompt"] + first[which]
        ids = [256, *text.encode(), 257]
        trained = [IGNORE] * len(first["prompt"].encode()) + [*first[which].encode(), 257]
        assert batch.tokens[row][: len(ids)].tolist() == ids
        assert batch.labels[row][: len(trained)].tolist() == trained
        assert (batch.labels[row][len(trained) :] == IGNORE).all()
    trainer.close()


@pytest.mark.parametrize("kind", ["same", "nf4"])
def test_the_reference_of_lora_is_the_frozen_model(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    options = {"model__overrides": {**sizes, "vocab_size": 272}, "lora__base_dtype": kind, **LORA}
    everywhere = {"lora__target_modules": ["all-linear", "tok_embeddings", "output"]}
    plain = {"lora__enable": True, "lora__target_modules": ["wq"], "lora__base_dtype": kind}
    untouched = Trainer(tiny_config(tmp_path / "plain", **dpo(**{**options, **plain})))  # B is zero
    with moved(tmp_path / "run", **dpo(**options, **everywhere)) as trainer:
        (batch,) = trainer.loader.step()
        paired: Any = trainer.stepper.passes
        assert paired.reference == pairs.Reference("base")
        with torch.no_grad():
            frozen, policy = (
                one.stepper.head.log_probabilities(one.model, one.model.hidden(batch.tokens), batch.labels)
                for one in (untouched, trainer)
            )
        torch.testing.assert_close(paired._reference(batch), frozen, rtol=1e-6, atol=1e-5)
        assert (frozen - policy).abs().min() > 1e-2
        assert trainer.model.training
        margin = trainer.stepper.forward_backward([batch])[1].item()
        assert abs(margin) > 1e-3
        monkeypatch.setattr(pairs, "frozen_alone", lambda model: contextlib.nullcontext())
        assert abs(trainer.stepper.forward_backward([batch])[1].item()) < 1e-5, "with adapters both are the same model"
    untouched.close()


def test_the_copy_stays_as_it_was_and_has_the_type_of_computing(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path / "run", **dpo(training__mixed_precision_param="bfloat16")))
    copy = trainer.stepper.passes.reference.copy  # type: ignore[union-attr]
    before = {name: one.detach().clone() for name, one in copy.named_parameters()}
    first = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    assert {one.dtype for one in before.values()} == {torch.bfloat16}
    assert not any(one.requires_grad for one in copy.parameters())
    assert all(torch.equal(before[name], first[name].bfloat16()) for name in first)
    # The copy's forward pass is a third of a step's.
    assert trainer.telemetry.meter.flops == pytest.approx(4 / 3 * flops_per_token(trainer.arch, 32))
    trainer.train()
    assert all(torch.equal(before[name], one) for name, one in copy.named_parameters())


def test_the_reference_is_a_copy_where_the_model_itself_is_trained() -> None:
    config = tiny_config("x", training__objective="dpo")
    adapters = {"alone": NOTHING, "norm": replace(NOTHING, saved=("norm",)), "biases": replace(NOTHING, bias="all")}
    kinds = {name: pairs.reference_kind(config, how) for name, how in adapters.items()}
    assert kinds == {"alone": "base", "norm": "copy", "biases": "copy"}
    assert pairs.reference_kind(config, None) == "copy"
    assert pairs.reference_kind(tiny_config("x"), NOTHING) is None


def test_without_a_reference_rewards_are_log_probabilities(tmp_path: Path) -> None:
    first, with_copy = (run(tmp_path / name, **dpo(dpo__reference=name))[0] for name in ("none", "copy"))
    assert with_copy["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert abs(first["reward_margin"]) > 0.01 > abs(with_copy["reward_margin"])


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, how: str) -> None:
    options = dpo(training__steps=6, data__held_out=0.2, validation__enable=True, validation__seq_len=32, **SAVING)
    options |= {"validation__freq": 3} | (LORA if how == "lora" else {})
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "run", **{**options, "training__steps": 4, "lr_scheduler__total_steps": 6})
    resumed = run(tmp_path / "run", **options)
    names = ("loss", "reward_margin", "reward_accuracy")
    steps = [[row[name] for name in names] for row in whole if "loss" in row]
    assert [[row[name] for name in names] for row in resumed if "loss" in row] == steps
    assert resumed[-1] == whole[-1]
    assert set(whole[-1]) == {"step", *(f"validation_{name}" for name in names)}
    assert steps[-1][0] < steps[0][0]
    assert steps[-1][1] > 0.05
    others = {"training__steps": 8, "debug__seed": 7, "checkpoint__exclude_from_loading": ["dataloader"]}
    with pytest.raises(UserError, match="other weights"):
        run(tmp_path / "run", **{**options, **others})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.sources=[]"], "'dpo' compares the two answers of a pair, and plain text has none; name records"),
        (["--dpo.reference=base"], "dpo.reference: only LoRA has frozen weights beside the trained ones"),
        (
            ["--dpo.reference=base", "--lora.enable", "--lora.modules_to_save=['norm']"],
            "dpo.reference: lora.modules_to_save = ['norm'] are trained in full, so they change",
        ),
        (["--dpo.loss=robust", "--dpo.label_smoothing=0.5"], "'robust' divides by 1 - 2 x label_smoothing"),
        (["--dpo.loss=kto"], "dpo.loss: expected"),
        (["--dpo.beta=0"], "dpo.beta: expected"),
        (["--parallelism.pipeline_parallel_degree=2"], "DPO with PP"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path: Path, flags: list[str], words: str, capsys: Any) -> None:
    sources = f"--data.sources=[{{path='{PAIRS}', type={{field_chosen='chosen', field_rejected='rejected'}}}}]"
    given = ["--training.objective=dpo", sources, f"--job.dump_folder={tmp_path / 'run'}", "--training.steps=1"]
    assert main(["train", *given, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error, error
    assert "Traceback" not in error


def test_records_with_one_answer_are_refused(tmp_path: Path) -> None:
    single = {"path": str(PAIRS), "type": {"field_instruction": "prompt", "field_output": "chosen"}}
    with pytest.raises(UserError, match=r"holds single answers, and training\.objective = 'dpo' compares"):
        run(tmp_path / "run", **dpo(data__sources=[single]))


def test_each_loss_has_the_slope_of_its_formula() -> None:
    chance = torch.Generator().manual_seed(1)
    policy, reference = (torch.randn(6, 2, generator=chance, dtype=torch.float64) * 5 for _ in range(2))
    tokens = torch.randint(1, 9, (6, 2), generator=chance)
    for loss in pairs.LOSSES:
        section = Dpo(loss=loss, beta=0.2, label_smoothing=0.1 if loss in ("sigmoid", "robust") else 0.0)
        found = pairs.pair_losses(policy, reference, tokens, section).mean()
        flat = [one.reshape(-1) for one in (policy, reference, tokens)]
        torch.testing.assert_close(found, written_out(*flat, loss, 0.2, section.label_smoothing))


@pytest.mark.slow
def test_the_demo_learns_to_prefer(tmp_path: Path) -> None:
    assert main(["train", "--preset", "dpo-demo", "--job.dump_folder", str(tmp_path / "run")]) == 0
    last = rows(tmp_path / "run")[-1]
    assert last["validation_reward_accuracy"] > 0.95
    assert last["validation_loss"] < 0.3


def test_a_dry_run_counts_both_rows_and_the_copy(tmp_path: Path, capsys: Any) -> None:
    flags = ["--dry-run", "--world-size=2", "--parallelism.data_parallel_shard_degree=2"]
    assert main(["train", "--preset", "dpo-demo", *flags]) == 0
    shown = capsys.readouterr().out
    assert "micro-batch: 8 pairs x 2 x 128 = 2,048 tokens" in shown
    assert "reference of pairs: a frozen copy, " in shown
    gathers = re.findall(r"dp_shard +all-gather +(\d+) x", shown)
    assert main(["train", "--preset", "dpo-demo", *flags, "--dpo.reference=none"]) == 0
    without = capsys.readouterr().out
    assert "reference of pairs" not in without
    assert int(gathers[0]) > int(re.findall(r"dp_shard +all-gather +(\d+) x", without)[0])
