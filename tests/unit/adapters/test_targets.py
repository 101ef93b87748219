"""Names of targets: ours and Hugging Face's, endings and expressions; a name that means nothing is an error."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardline.adapters.lora import adaptation, attach, more_flops
from shardline.adapters.targets import adaptable, chosen_targets, saved_modules
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.config.schema import Lora
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.fused_weights import parameter_count
from shardline.models.huggingface.config import architecture_from_hf
from shardline.parallel.apply import _check_dropout
from shardline.parallel.tensor.async_tp import beside_products
from shardline.parallel.tensor.tensor import TensorParallel

ARCH = Architecture(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64)
ATTENTION = ["wq", "wk", "wv", "wo"]


def short(targets: list[str]) -> list[str]:
    return [name.split(".", 1)[1].rpartition(".")[2] for name in targets if name.startswith("layers.0.")]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], ["wq", "wk", "wv", "wo", "w1", "w3", "w2"]),
        ("all-linear", ["wq", "wk", "wv", "wo", "w1", "w3", "w2"]),
        (["q_proj", "v_proj"], ["wq", "wv"]),
        (["wq", "down_proj"], ["wq", "w2"]),
        (["self_attn.o_proj"], ["wo"]),
        (["layers.0.attention.wk"], ["wk"]),
        (r".*\.self_attn\..*", ATTENTION),
        (r"layers\.\d+\.feed_forward\.w[13]", ["w1", "w3"]),
        ("q_proj", ["wq"]),
    ],
)
def test_targets_have_several_spellings(given: list[str] | str, wanted: list[str]) -> None:
    assert short(chosen_targets(ARCH, given, None)) == wanted


def test_layers_limit_the_blocks_but_not_what_is_outside() -> None:
    found = chosen_targets(ARCH, ["q_proj", "embed_tokens", "lm_head"], [1])
    assert found == ["tok_embeddings", "layers.1.attention.wq", "output"]
    with pytest.raises(ConfigError, match="from 0 to 1"):
        chosen_targets(ARCH, [], [2])


@pytest.mark.parametrize(("given", "words"), [(["q_prj"], "did you mean 'q_proj'"), ("(", "not a regular expression")])
def test_what_means_nothing_is_an_error_with_the_nearest_name(given: list[str] | str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules") as caught:
        chosen_targets(ARCH, given, None)
    assert words in str(caught.value)


def test_modules_to_save_are_whole_and_not_targets_too() -> None:
    assert saved_modules(ARCH, ["embed_tokens", "norm"]) == ["tok_embeddings", "norm"]
    tied = ARCH.model_copy(update={"tie_word_embeddings": True})
    assert saved_modules(tied, ["lm_head"]) == ["tok_embeddings"]
    with pytest.raises(ConfigError, match="name it in one of them"):
        adaptation(Lora(target_modules=["lm_head"], modules_to_save=["output"]), ARCH)
    with pytest.raises(ConfigError, match="cannot have a magnitude"):
        adaptation(Lora(target_modules=["embed_tokens"], use_dora=True), ARCH)


def test_the_scale_and_the_number_of_parameters() -> None:
    how = adaptation(Lora(rank=4, alpha=8.0, target_modules=["q_proj", "up_proj"]), ARCH)
    assert how.scale_of("layers.0.attention.wq") == 2.0
    assert adaptation(Lora(rank=4, alpha=8.0, use_rslora=True), ARCH).scale_of("layers.0.attention.wq") == 4.0
    assert how.added(ARCH) == 2 * 4 * ((32 + 32) + (48 + 32))


def test_patterns_give_some_targets_another_rank_and_alpha() -> None:
    patterns = {"layers.1.self_attn.q_proj": 2, "wq": 6, "(up|gate)_proj": 3}
    how = adaptation(Lora(rank=4, alpha=8.0, rank_pattern=patterns, alpha_pattern={"w3": 3.0}), ARCH)
    assert [how.rank_of(f"layers.{layer}.attention.wq") for layer in (0, 1)] == [6, 2]
    assert how.rank_of("layers.0.attention.wk") == 4
    assert how.rank_of("layers.1.feed_forward.w1") == 3
    assert how.scale_of("layers.1.feed_forward.w3") == 1.0
    assert how.scale_of("layers.1.feed_forward.w1") == 8 / 3
    assert how.shapes(ARCH)["layers.1.attention.wq.lora.a"] == (2, 32)
    for patterns, words in (
        ({"q_prj": 2}, "lora.rank_pattern: no target ends with 'q_prj', did you mean 'q_proj'"),
        ({"lm_head": 2}, "no target ends with 'lm_head'"),
        ({"(q_proj": 2}, "lora.rank_pattern: a pattern is not a regular expression"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            adaptation(Lora(rank_pattern=patterns), ARCH)


def test_biases_that_are_one_tensor_are_trained_together() -> None:
    biased = ARCH.model_copy(update={"qkv_bias": True})
    assert "layers.1.attention.wk.bias" in adaptation(Lora(bias="all", target_modules=["wo"]), biased).whole(biased)
    with torch.device("meta"):
        model = Decoder(biased)
    with pytest.raises(ConfigError, match=r"lora.bias: layers.0.attention.wq.bias shares one tensor with"):
        attach(model, adaptation(Lora(bias="lora_only", target_modules=["q_proj"]), biased), *[torch.float32] * 2)
    with pytest.raises(ConfigError, match=r"lora.bias = 'all': the model has no biases"):
        adaptation(Lora(bias="all"), ARCH)
    with pytest.raises(ConfigError, match=r"lora.bias = 'lora_only': the targets have no biases"):
        adaptation(Lora(bias="lora_only", target_modules=["wo"]), biased)


def test_async_tp_measures_products_with_the_width_of_a() -> None:
    """A product that was not measured would run without overlap."""

    def widths(**options: Any) -> tuple[set[tuple[int, ...]], ...]:
        given = {"lora.enable": True, "lora.rank": 4, **{f"lora.{name}": value for name, value in options.items()}}
        beside = beside_products(load_config(overrides=given), ARCH, "")
        return beside((("wq", "wk", "wv"),)), beside((("wq",), ("wk", "wv"))), beside((("w1", "w3"),))

    assert widths() == ({(12,)}, {(4, 8)}, {(8,)})
    assert widths(target_modules=["q_proj", "v_proj"], layers=[1]) == ({(), (8,)}, {(), (4, 4)}, {()})
    assert widths(rank_pattern={"wk": 2, "layers.0.attention.wq": 6}) == ({(10,), (12,)}, {(4, 6), (6, 6)}, {(8,)})
    assert widths(dropout=0.1) == ({()}, {()}, {()}), "x A^T travels by itself"


def test_frozen_weights_cost_no_gradient() -> None:
    with torch.device("meta"):
        model = Decoder(ARCH)
    assert more_flops(model) == 0
    how = adaptation(Lora(rank=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), ARCH)
    attach(model, how, torch.float32, torch.float32)
    frozen = parameter_count(ARCH) - 2 * 64 * 32  # neither the embedding, which is no product, nor the head
    assert more_flops(model) == 6 * how.added(ARCH) - 2 * frozen


def test_a_model_of_transformers_has_its_own_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.foreign_types import write_tiny

    write_tiny("gpt2", tmp_path / "gpt2")
    arch = architecture_from_hf(tmp_path / "gpt2")
    layer = [f"transformer.h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert chosen_targets(arch, [], [1]) == chosen_targets(arch, "all-linear", [1]) == layer
    assert chosen_targets(arch, ["mlp.c_proj", "wte"], [1]) == ["transformer.wte", layer[-1]]
    assert chosen_targets(arch, r"transformer\.h\.1\..*c_proj", None) == [layer[1], layer[3]]
    assert saved_modules(arch, ["lm_head", "ln_f"]) == ["transformer.wte", "transformer.ln_f"], "one weight is both"
    assert adaptable(arch)["transformer.h.0.mlp.c_fc"] == (128, 32), "rows first"
    with pytest.raises(ConfigError, match="'wpe' is not a linear layer"):
        chosen_targets(arch, ["wpe"], None)
    write_tiny("olmoe", tmp_path / "olmoe")
    with pytest.raises(ConfigError, match="'experts' is not a linear layer"):
        chosen_targets(architecture_from_hf(tmp_path / "olmoe"), ["experts"], None)


@pytest.mark.parametrize("targets", [["experts", "wkv_a"], ["experts", "wkv_b"], ["wkv_a", "wo"]])
def test_dropout_that_would_part_copies_of_latent_projections_is_refused(targets: list[str]) -> None:
    """Experts draw random numbers for the tokens that they receive, which differ between tensor-parallel ranks."""
    arch = resolve(load_config(overrides={"model.name": "deepseek_v3", "model.flavor": "debugmodel"}).model)
    how = adaptation(Lora(enable=True, target_modules=targets, dropout=0.1), arch)
    model: Any = SimpleNamespace(arch=arch, adaptation=how)
    tensor, layout = TensorParallel(2, False, True), Layout(tp=2, ep=2)
    refused = pytest.raises(ConfigError, match=r"lora\.dropout = 0\.1")
    with refused if targets == ["experts", "wkv_a"] else contextlib.nullcontext():
        _check_dropout(model, tensor, layout)
    _check_dropout(model, tensor._replace(sequence_parallel=True), layout)
    _check_dropout(model, tensor, Layout(dp_shard=2, tp=2, ep=2, etp=2))
