"""Runs with LoRA: what changes and what does not, what is kept of it, and what comes out for `peft`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.adapters.lora import more_flops
from shardline.checkpoint import format as files
from shardline.checkpoint.convert import export
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.models.decoder import Adaptable
from shardline.run.device import flops_per_token
from shardline.training.loss import Head
from shardline.training.setup import Setup
from shardline.training.trainer import Trainer
from tests.e2e.tiny import TINY, rows, run, tiny_config

pytestmark = pytest.mark.usefixtures("on_cpu")
LORA: dict[str, Any] = {"lora__enable": True, "lora__rank": 4, "lora__alpha": 8.0, "optimizer__lr": 1e-2}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False}


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_frozen_weights_stay_bit_by_bit_and_have_no_gradient_and_no_state(tmp_path: Path, caplog: Any) -> None:
    trainer = Trainer(tiny_config(tmp_path / "run", lora__modules_to_save=["norm"], **LORA))
    before = state(trainer)
    trainer.train()
    arch = trainer.arch
    assert trainer.telemetry.meter.flops == flops_per_token(arch, 32) + more_flops(trainer.model)
    assert more_flops(trainer.model) < 0, "frozen weights have no gradient"
    after, trained = state(trainer), {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name for name in after if not torch.equal(before[name], after[name])} == trained
    assert trained == {name for name in after if ".lora." in name or name == "norm.weight"}
    plain = Trainer(tiny_config(tmp_path / "plain"))
    own = state(plain)
    assert all(torch.equal(before[name], own[name]) for name in own), "frozen weights are those of a run without LoRA"
    held = {p for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {p for p in trainer.model.parameters() if p.requires_grad} == set(trainer.optimizer.state)
    count, whole = sum(after[name].numel() for name in trained), sum(one.numel() for one in after.values())
    share = f"trained      {count:,} of {whole:,} parameters ({100 * count / whole:.3g} %)"
    assert share in (tmp_path / "run" / "log" / "rank-0.log").read_text()


def test_a_run_begins_with_the_model_as_it_is_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, adapted = run(tmp_path / "plain"), run(tmp_path / "lora", training__steps=12, **LORA)
    assert adapted[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6), "B is zero"
    assert adapted[-1]["loss"] < adapted[0]["loss"] - 0.05
    # switched off in the code, nothing is learnt and no gradient arrives
    monkeypatch.setattr(Adaptable, "used", lambda self, part: part(self.weight))
    with pytest.raises((RuntimeError, UserError, AssertionError)):
        run(tmp_path / "off", **LORA)


@pytest.mark.parametrize("kind", ["same", "nf4", "int8"])
def test_memory_is_what_the_formula_says(tmp_path: Path, kind: str) -> None:
    """Frozen: 2 bytes, 1/2 + 1/64 + 4/K + 4/K or 1 + 4/K; trained: 4 bytes, and 8 of state."""
    overrides = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    config = tiny_config(
        tmp_path / kind,
        model__overrides={**overrides, "vocab_size": 272},
        training__mixed_precision_param="bfloat16",
        lora__base_dtype=kind,
        **LORA,
    )
    trainer = Trainer(config)
    trainer.train()
    linear = {"wqkv": (128, 64), "wo": (64, 64), "w13": (256, 64), "w2": (64, 128)}
    each = {"same": lambda k: 2.0, "nf4": lambda k: 1 / 2 + 1 / 64 + 8 / k, "int8": lambda k: 1 + 4 / k}[kind]
    frozen = 2 * sum(n * k * each(k) for n, k in linear.values()) + 2 * (2 * 272 * 64 + 5 * 64)
    counts = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "wo": (64, 64), "w1": (128, 64), "w3": (128, 64)}
    trained = 2 * sum(4 * (n + k) for n, k in [*counts.values(), (64, 128)])
    held = {True: 0, False: 0}
    for parameter in trainer.model.parameters():
        held[parameter.requires_grad] += parameter.nbytes
    assert held == {True: 4 * trained, False: frozen}
    kept = [one for state in trainer.optimizer.state.values() for one in state.values() if one.ndim]
    assert sum(one.nbytes for one in kept) == 8 * trained
    assert not any(p.grad is not None for p in trainer.model.parameters() if not p.requires_grad)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one_and_its_checkpoints_are_small(tmp_path: Path) -> None:
    sizes = {"model__overrides": {**TINY["model.overrides"], "ffn_dim": 128}}
    options = {**LORA, **SAVING, **sizes, "training__steps": 6, "lora__base_dtype": "nf4"}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "run", **{**options, "training__steps": 4, "lr_scheduler__total_steps": 6})
    resumed = run(tmp_path / "run", **options)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    saved = files.find_checkpoint(tmp_path / "run")
    assert set(saved.tensors("model/")) == {name for name in saved.tensors("model/") if ".lora." in name}
    assert saved.trainer["lora"]["base"]["kind"] == "seed"
    with pytest.raises(UserError, match=r"another adapter \(lora.rank: 4 -> 8"):
        run(tmp_path / "run", **{**options, "training__steps": 8, "lora__rank": 8})
    others = {"checkpoint__exclude_from_loading": ["dataloader"]}
    with pytest.raises(UserError, match="other weights"):
        run(tmp_path / "run", **{**options, "training__steps": 8, "debug__seed": 7, **others})


@pytest.mark.slow
def test_ranks_by_pattern_and_biases_resume_and_others_are_refused(tmp_path: Path) -> None:
    biased = {**TINY["model.overrides"], "qkv_bias": True}
    options = {**LORA, **SAVING, "model__overrides": biased, "lora__rank_pattern": {"wk": 2}, "lora__bias": "all"}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "run", **{**options, "training__steps": 4, "lr_scheduler__total_steps": 6})
    resumed = run(tmp_path / "run", **options)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    saved = files.find_checkpoint(tmp_path / "run").tensors("model/")
    assert saved["layers.0.attention.wk.lora.a"].shape == (2, 64)
    assert saved["layers.1.attention.wv.bias"].any(), "it has left its first value, 0"
    longer = {**options, "training__steps": 8}
    with pytest.raises(UserError, match=r"another adapter \(lora.ranks: .*'layers.1.attention.wk': 2.* -> {}"):
        run(tmp_path / "run", **{**longer, "lora__rank_pattern": {}})
    with pytest.raises(UserError, match=r"another adapter \(lora.bias: all -> none"):
        run(tmp_path / "run", **{**longer, "lora__bias": "none"})


@pytest.mark.slow
def test_layers_with_ranks_of_their_own_compile(tmp_path: Path) -> None:
    """More kinds of blocks than the compiler makes graphs of one function by itself."""
    sizes = {**TINY["model.overrides"], "n_layers": 10, "dim": 32, "head_dim": 8, "ffn_dim": 32}
    ranks = {rf"layers\.{layer}\..*": layer + 1 for layer in range(10)}
    options = {**LORA, "model__overrides": sizes, "training__steps": 2, "lora__rank_pattern": ranks}
    plain = run(tmp_path / "plain", **options)
    compiled = run(tmp_path / "compiled", compile__enable=True, compile__backend="aot_eager", **options)
    assert [row["loss"] for row in compiled] == pytest.approx([row["loss"] for row in plain], rel=1e-5)


def test_b_learns_faster_with_a_ratio(tmp_path: Path) -> None:
    trainer = Setup(tiny_config(tmp_path / "run", lora__lr_ratio=16.0, **LORA), *_no_options())
    names = {p: name for name, p in trainer.model.named_parameters()}
    from shardline.optim.lr_schedule import set_lr

    set_lr(trainer.optimizer, 0.5)
    for group in trainer.optimizer.param_groups:
        assert {names[p].endswith(".b") for p in group["params"]} == {group["lr"] == 8.0}


def _no_options() -> Any:
    import contextlib

    from shardline.run.options import TrainOptions

    return TrainOptions(), contextlib.ExitStack()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora.rank=0"], "lora.rank: expected a whole number, 1 or more, got 0"),
        (["--lora.dropout=1.5"], "lora.dropout: expected a number from 0 to below 1"),
        (["--lora.target_modules=['q_prj']"], "no module of this model is named 'q_prj', did you mean 'q_proj'?"),
        (["--lora.modules_to_save=['head']"], "lora.modules_to_save: no module of this model is named 'head'"),
        (["--lora.layers=[9]"], "lora.layers: expected numbers from 0 to 1"),
        (["--lora.base_dtype=nf4", "--model.overrides.ffn_dim=96"], "blocks of 64"),
        (["--lora.base_dtype=fp4"], "lora.base_dtype: expected"),
        (["--lora.adapter_path=/nowhere"], "lora.adapter_path: /nowhere is not an adapter"),
        (["--optimizer.name=Muon"], "Muon with LoRA"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path: Path, flags: list[str], words: str, capsys: Any) -> None:
    small = ["--model.overrides.n_layers=2", "--training.steps=1", f"--job.dump_folder={tmp_path / 'run'}"]
    code = main(["train", "--preset", "lora-demo", *small, *flags])
    error = capsys.readouterr().err
    assert code == 2
    assert words in error, error
    assert "Traceback" not in error


# ---- with transformers and peft --------------------------------------------------------------------------------------


def test_a_fine_tuned_folder_goes_to_peft_and_back_and_merged_text_is_the_same(tmp_path: Path, capsys: Any) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from tests.e2e.hf_folders import write_model

    base = write_model(tmp_path / "base")
    source = {"model__name": "auto", "model__hf_assets_path": str(base), "checkpoint__initial_load_in_hf": True}
    options = {**LORA, **SAVING, **source, "model__overrides": {}, "lora__modules_to_save": ["norm"]}
    run(tmp_path / "run", **options, checkpoint__last_save_in_hf=True)
    last = tmp_path / "run" / "checkpoint" / "step-6"
    assert json.loads((last / "adapter_config.json").read_text())["r"] == 4
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(model, last).eval()

    def out(*words: str) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    assert main(["export", str(last), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(last), str(tmp_path / "merged"), "--merge"]) == 0
    capsys.readouterr()
    prompt = ("--prompt", "the green wall", "--max-new-tokens", "24")
    folders = (tmp_path / "run", tmp_path / "adapter", tmp_path / "merged")
    texts = [out("generate", str(folder), *prompt) for folder in folders]
    assert len(set(texts)) == 1
    assert texts[0] != out("generate", str(base), *prompt)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(20).view(1, -1)
    with torch.no_grad():
        assert (merged(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4
    # a run that starts from the adapter starts where the other ended
    again = {**options, "lora__adapter_path": str(tmp_path / "adapter"), "training__steps": 1}
    first = run(tmp_path / "again", **again)[0]["loss"]
    assert first == pytest.approx(rows(tmp_path / "run")[-1]["loss"], rel=0.2)
    assert first < rows(tmp_path / "run")[0]["loss"] - 0.05
    run(tmp_path / "plain", **SAVING)
    with pytest.raises(UserError, match="--merge is for adapters"):
        export(tmp_path / "plain", tmp_path / "no", merge=True)


@pytest.mark.slow
def test_the_demo_runs_within_a_minute(tmp_path: Path) -> None:
    assert main(["train", "--preset", "lora-demo", "--job.dump_folder", str(tmp_path / "run")]) == 0
    written = rows(tmp_path / "run")
    assert written[-1]["loss"] < written[0]["loss"] - 1


def test_the_step_of_the_base_is_not_a_step_of_the_run(tmp_path: Path) -> None:
    """`checkpoint.load_step` chooses among the base's steps at first, and among the run's own when it is resumed."""
    run(tmp_path / "base", training__steps=4, **SAVING)
    based = {"checkpoint__initial_load_path": str(tmp_path / "base" / "checkpoint"), **SAVING, **LORA}
    first = {**based, "checkpoint__initial_load_model_only": True, "checkpoint__load_step": 2}
    run(tmp_path / "lora", training__steps=4, lr_scheduler__total_steps=8, **first)
    again = {**based, "checkpoint__initial_load_model_only": True, "lr_scheduler__total_steps": 8}
    run(tmp_path / "lora", training__steps=6, **again)  # of which the base has no newest one: it has 4, this run 2
    run(tmp_path / "lora", training__steps=7, checkpoint__load_step=6, **again)  # of which the base has none
    assert [row["step"] for row in rows(tmp_path / "lora")] == list(range(1, 8))


def test_a_run_of_the_whole_model_is_not_continued_as_an_adapter(tmp_path: Path) -> None:
    run(tmp_path / "run", training__steps=2, **SAVING)
    with pytest.raises(UserError, match="holds a whole model, not an adapter"):
        run(tmp_path / "run", training__steps=4, lr_scheduler__total_steps=4, **SAVING, **LORA)


def test_dropout_that_the_output_layer_cannot_have_is_said(tmp_path: Path, caplog: Any) -> None:
    run(tmp_path, training__steps=1, lora__target_modules=["output"], lora__dropout=0.1, **LORA)
    assert "lora.dropout has no effect on output" in caplog.text


def test_small_updates_of_the_output_layer_count_in_bfloat16(tmp_path: Path) -> None:
    """B A is far below the precision of the weight, but not its effect on logits of hidden states along A."""
    bfloat16 = {"training__mixed_precision_param": "bfloat16", "lora__target_modules": ["output"]}
    model = Trainer(tiny_config(tmp_path, **LORA, **bfloat16)).model.train()
    output, dim = model.output, model.arch.dim
    pair = output.lora["output"]
    with torch.no_grad():
        output.weight.fill_(1.0)
        pair.a.copy_(torch.tensor([1.0, -1.0]).repeat(dim // 2))
        pair.b.copy_(4e-4 * torch.linspace(-1, 1, pair.b.numel()).view(pair.b.shape))
    hidden = (4.0 * pair.a.detach()[:1].expand(1, 6, dim)).to(torch.bfloat16)  # W has no effect on it
    labels = torch.tensor([[3, 200, -100, 7, 100, 30]])
    loss = Head(None, 0, None).loss(model, hidden, labels, 1.0)
    loss.backward()
    scale = model.adaptation.scale_of("output")
    a, b = (one.detach().double().requires_grad_() for one in (pair.a, pair.b))
    logits = hidden[0].double() @ (output.weight.double() + scale * b @ a).T
    wanted = torch.nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")
    wanted.backward()
    assert (scale * pair.b @ pair.a).abs().max() < 2**-8, "less than half of the last bit of the weight"
    assert logits.amax() - logits.amin() > 0.5
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-3)
    for seen, exact in ((pair.a, a), (pair.b, b)):
        assert (seen.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()
