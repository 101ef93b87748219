"""LoRA beside the layers of a model that transformers computes: what is trained, kept, written, read and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.checkpoint import format as files
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.models.decoder import Adaptable
from shardline.training.trainer import Trainer
from tests.e2e.tiny import flags, rows, run, tiny_config

transformers = pytest.importorskip("transformers")
from tests.foreign_types import settings, write_tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")
LORA: dict[str, Any] = {"lora__enable": True, "lora__rank": 4, "lora__alpha": 8.0, "optimizer__lr": 1e-2}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
KEPT = {"checkpoint__last_save_in_hf": False, "checkpoint__last_save_model_only": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("foreign")
    write_tiny("gpt2", place / "gpt2", n_embd=64)
    write_tiny("phi", place / "phi", **WIDE)
    write_tiny("bart", place / "bart")
    return {path.name: path for path in place.iterdir()}


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return settings(folder, **{**LORA, **KEPT, "checkpoint__interval": 2, **changes})


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("phi", marks=pytest.mark.slow)])
def test_frozen_weights_stay_bit_by_bit_in_the_type_of_products(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    norm = {"gpt2": "ln_f", "phi": "final_layernorm"}[kind]
    narrow = {"training__mixed_precision_param": "bfloat16"}
    trainer = Trainer(tiny_config(tmp_path / "run", **options(folders[kind], lora__modules_to_save=[norm], **narrow)))
    before = state(trainer)
    trainer.train()
    after, parameters = state(trainer), dict(trainer.model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {name for name in after if ".lora." in name or f".{norm}." in name}
    assert {name for name in after if not torch.equal(before[name], after[name])} == trained
    assert all(parameters[name].dtype == (torch.float32 if name in trained else torch.bfloat16) for name in after)
    assert not any(parameters[name].grad is not None for name in after if name not in trained)
    held = {parameter for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert held == set(trainer.optimizer.state) == {parameters[name] for name in trained}
    own = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(after[name], own[name]) for name in after if name not in trained), "those of the folder"


def test_a_run_begins_with_the_model_as_it_is_and_learns_by_the_adapter_alone(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(tmp_path / "plain", **settings(folders["gpt2"], training__steps=1))
    adapted = run(tmp_path / "lora", **options(folders["gpt2"], training__steps=12))
    assert adapted[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6), "B is zero"
    assert adapted[-1]["loss"] < adapted[0]["loss"] - 0.05
    monkeypatch.setattr(Adaptable, "used", lambda self, part: part(self.weight))
    with pytest.raises((RuntimeError, UserError, AssertionError)):
        run(tmp_path / "off", **options(folders["gpt2"]))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt2", {"lora__base_dtype": "nf4", "lora__use_dora": True}),
        pytest.param("phi", {"lora__base_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("phi", {"lora__dropout": 0.1, "lora__lr_ratio": 16.0}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_and_saves_what_is_trained(
    kind: str, more: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", **options(folders[kind], training__steps=4, **more))
    half = options(folders[kind], training__steps=2, lr_scheduler__total_steps=4, **more)
    run(tmp_path / "run", **half)
    resumed = run(tmp_path / "run", **{**half, "training__steps": 4})
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    saved = files.find_checkpoint(tmp_path / "run")
    assert all(".lora." in name for name in saved.tensors("model/"))
    assert saved.trainer["lora"]["base"]["kind"] == "hf"


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gpt2", ["all-linear", "wte"]), pytest.param("phi", ["fc1", "lm_head"], marks=pytest.mark.slow)],
)
def test_run_adapter_and_merged_folder_give_the_same_text(
    kind: str, targets: list[str], folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    run(tmp_path / "run", **options(folders[kind], lora__target_modules=targets, training__steps=8))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    capsys.readouterr()

    def text(folder: Path) -> str:
        words = ["--prompt", "the green wall", "--max-new-tokens", "12", "--tokenizer=bytes"]
        assert main(["generate", str(folder), *words]) == 0
        return capsys.readouterr().out

    texts = {text(tmp_path / place) for place in ("run", "adapter", "merged")}
    assert len(texts) == 1
    assert texts != {text(folders[kind])}
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[kind])
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(20).view(1, -1)
    with torch.no_grad():
        assert (merged(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4
    again = options(folders[kind], lora__adapter_path=str(tmp_path / "adapter"), training__steps=1)
    first = run(tmp_path / "again", **again)[0]["loss"]
    assert first < rows(tmp_path / "run")[0]["loss"] - 0.05, "it begins where the other ended"


@pytest.mark.slow
def test_weights_that_a_seed_draws_are_those_of_a_run_without_lora(folders: dict[str, Path], tmp_path: Path) -> None:
    drawn = {"checkpoint__initial_load_in_hf": False, "training__steps": 2}
    plain = Trainer(tiny_config(tmp_path / "plain", **settings(folders["gpt2"], **drawn, **KEPT)))
    own, trainer = state(plain), Trainer(tiny_config(tmp_path / "run", **options(folders["gpt2"], **drawn)))
    before = state(trainer)
    assert all(torch.equal(before[name], own[name]) for name in own)
    trainer.train()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, trainer.model.eval()(tokens), rtol=1e-4, atol=1e-5)


def test_a_dry_run_counts_what_is_trained(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    given = {key: value for key, value in options(folders["gpt2"]).items() if not key.startswith("checkpoint__")}
    words = flags(tmp_path / "run", **given)
    assert main(["train", *words, "--lora.target_modules=['c_fc']", "--dry-run", "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    own = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_pretrained(folders["gpt2"]).parameters())
    matrices = 2 * 4 * (64 + 256)
    assert f"{matrices // 2:,} trained of {(own + matrices) // 2:,} parameters" in out
    assert f"with copies counted once: {own + matrices:,}, the parameters of the model" in out
    assert "reduce-scatter" in out


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (
            "gpt2",
            ["--lora.target_modules=['c_atn']"],
            "no module of this model is named 'c_atn', did you mean 'c_attn'?",
        ),
        ("gpt2", ["--lora.target_modules=['mlp']"], "'mlp' is not a linear layer"),
        ("gpt2", ["--lora.layers=[2]"], "lora.layers: expected numbers from 0 to 1"),
        ("gpt2", ["--lora.target_modules=['wte']", "--lora.use_dora"], "transformer.wte cannot have a magnitude"),
        ("bart", [], "does not call model.decoder.layers.0.encoder_attn.k_proj"),
        ("bart", ["--lora.base_dtype=nf4"], "cannot be split into blocks of 64"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    kind: str, words: list[str], message: str, folders: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    assert main(["train", *flags(tmp_path / "run", **options(folders[kind])), *words]) == 2
    error = capsys.readouterr().err
    assert message in error, error
    assert "Traceback" not in error
