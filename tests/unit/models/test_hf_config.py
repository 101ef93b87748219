"""config.json of every family, both layouts of its rotary settings, and the refusal of what is not built."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardline.config.architecture import Architecture, MixtureOfExperts, RopeScaling
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import FLAVORS
from shardline.models.huggingface.config import (
    CLASSES,
    architecture_from_dict,
    architecture_from_hf,
    export_family,
    hf_config,
)

LLAMA_31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


def read(model_type: str, **changes: Any) -> Architecture:
    return architecture_from_dict({"model_type": model_type, **SMALL, **changes})


def test_llama_as_published() -> None:
    arch = architecture_from_dict(LLAMA_31)
    assert (arch.dim, arch.n_layers, arch.n_heads, arch.n_kv_heads, arch.head_dim) == (4096, 32, 32, 8, 128)
    assert (arch.ffn_dim, arch.vocab_size, arch.max_seq_len, arch.norm_eps) == (14336, 128256, 131072, 1e-5)
    assert arch.rope_theta == 500000.0
    assert arch.rope_scaling == RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=8192)
    assert (arch.qkv_bias, arch.qk_norm, arch.tie_word_embeddings, arch.sliding_window) == (False, False, False, None)


def test_mixtral_as_published() -> None:
    published = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    }
    assert architecture_from_dict(published) == FLAVORS["mixtral"]["8x7B"]


def test_qwen3_moe_as_published() -> None:
    published = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    flavor = FLAVORS["qwen3"]["30B-A3B"]
    assert architecture_from_dict(published) == flavor.with_overrides({"moe": {"balance_coeff": 0.0}})
    # transformers 5 gives the number of experts another name.
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in published.items()}
    assert architecture_from_dict(renamed) == architecture_from_dict(published)


def test_layers_without_experts() -> None:
    def dense(**changes: Any) -> list[int]:
        moe = read("qwen3_moe", **changes).moe
        assert moe is not None
        return [layer for layer in range(4) if not moe.holds(layer)]

    assert dense() == []
    assert dense(mlp_only_layers=[0, 1]) == [0, 1]
    assert dense(mlp_only_layers=[0, 1, 2, 3]) == [0, 1, 2, 3]
    assert dense(decoder_sparse_step=2) == [0, 2]
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == [0, 1, 2]


def test_both_rotary_layouts_are_one() -> None:
    new = {key: value for key, value in LLAMA_31.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA_31["rope_scaling"]}
    assert architecture_from_dict(new) == architecture_from_dict(LLAMA_31)
    old = read(
        "qwen2",
        rope_theta=1000000,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )
    assert old.rope_theta == 1000000.0
    assert old.rope_scaling == RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=32)
    # The length before scaling defaults to max_position_embeddings, as in transformers.
    implied = read("llama", max_position_embeddings=77, rope_scaling={"type": "yarn", "factor": 2.0})
    assert implied.rope_scaling is not None
    assert implied.rope_scaling.original_max_position_embeddings == 77


def test_defaults_of_keys_left_out() -> None:
    llama = read("llama")
    assert (llama.head_dim, llama.rope_theta, llama.norm_eps, llama.max_seq_len) == (16, 10000.0, 1e-6, 2048)
    assert read("qwen3").head_dim == 128
    assert read("mistral").sliding_window == 4096
    assert read("mistral", sliding_window=None).sliding_window is None
    assert read("llama", num_key_value_heads=None).n_kv_heads == 4
    mixtral, qwen = read("mixtral"), read("qwen3_moe")
    assert (mixtral.norm_eps, mixtral.rope_theta, mixtral.sliding_window, mixtral.head_dim) == (1e-5, 1e6, None, 16)
    assert mixtral.moe == MixtureOfExperts(n_experts=8, top_k=2, expert_dim=96, normalize=True)
    assert qwen.moe == MixtureOfExperts(n_experts=128, top_k=8, expert_dim=768)
    assert (qwen.norm_eps, qwen.rope_theta, qwen.sliding_window, qwen.qk_norm) == (1e-6, 10000.0, None, True)
    # One mask for all of its layers, whatever max_window_layers says.
    windowed = read("qwen3_moe", use_sliding_window=True, max_window_layers=3)
    assert (windowed.sliding_window, windowed.sliding_window_layers) == (4096, None)


def test_biases() -> None:
    def flags(arch: Architecture) -> tuple[bool, bool, bool]:
        return arch.qkv_bias, arch.out_bias, arch.mlp_bias

    assert flags(read("llama", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert flags(read("qwen3", attention_bias=True)) == (True, True, False)
    assert flags(read("qwen2")) == (True, False, False)
    assert flags(read("mistral", attention_bias=True)) == (False, False, False)  # Mistral's own model ignores it


def test_sliding_windows() -> None:
    def window(**changes: Any) -> tuple[int | None, tuple[int, ...] | None]:
        arch = read("qwen3", sliding_window=8, **changes)
        return arch.sliding_window, arch.sliding_window_layers

    assert window() == (None, None)
    assert window(use_sliding_window=True) == (None, None)  # max_window_layers is 28, there are 4
    assert window(use_sliding_window=True, max_window_layers=3) == (8, (3,))
    assert window(use_sliding_window=True, max_window_layers=0) == (8, None)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert window(use_sliding_window=True, layer_types=kinds) == (8, (1, 3))
    with pytest.raises(ConfigError, match="layer_types"):
        window(use_sliding_window=True, layer_types=["chunked_attention"] * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported (supported: llama, mistral, qwen2, qwen3, "),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not supported"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers [1] is not supported"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 2]}, "mlp_only_layers [0, 2] is not supported"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "top_k (9) must not exceed n_experts (8)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type 'proportional' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' needs short_factor"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supp"),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop 0.1 is not supported"),
        ({"model_type": "olmo2", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_type 'llama3' needs low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "rope_scaling.factor: expected a finite number above 0, got 'x'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8) is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "n_kv_heads (3) must divide n_heads (4)"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, **changes}))
    with pytest.raises(ConfigError) as error:
        architecture_from_hf(tmp_path, "native")
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert ('model.implementation = "transformers"' in str(error.value)) == ("not supported" in str(error.value))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        architecture_from_hf(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^there is no folder .*none: set one that has config\.json, or a name on the"
    ):
        architecture_from_hf(tmp_path / "none")
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"config\.json"):
            architecture_from_hf(tmp_path)


ropes = st.one_of(
    st.none(),
    st.builds(RopeScaling, type=st.just("linear"), factor=st.sampled_from([2.0, 3.5])),
    st.builds(RopeScaling, type=st.just("llama3"), factor=st.just(8.0), original_max_position_embeddings=st.just(64)),
    st.builds(
        RopeScaling,
        type=st.just("yarn"),
        factor=st.just(4.0),
        original_max_position_embeddings=st.just(64),
        attention_factor=st.sampled_from([None, 1.25]),
        mscale=st.sampled_from([None, 0.7]),
        mscale_all_dim=st.sampled_from([None, 0.3]),
        truncate=st.booleans(),
        beta_fast=st.sampled_from([32.0, 16.0]),
    ),
)


experts = st.builds(
    MixtureOfExperts,
    n_experts=st.just(6),
    top_k=st.sampled_from([1, 3]),
    expert_dim=st.just(72),  # of Mixtral, which has one width for both, this is ffn_dim too
    first_dense=st.sampled_from([0, 1, 2]),
    every=st.sampled_from([1, 2]),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    score=st.sampled_from(["softmax", "sigmoid"]),
)


@settings(deadline=None, max_examples=300)
@given(
    st.builds(
        Architecture,
        dim=st.just(64),
        n_layers=st.just(3),
        n_heads=st.just(4),
        n_kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([16, 32]),
        ffn_dim=st.just(72),
        vocab_size=st.just(11),
        rope_scaling=ropes,
        qkv_bias=st.booleans(),
        out_bias=st.booleans(),
        mlp_bias=st.booleans(),
        qk_norm=st.booleans(),
        tie_word_embeddings=st.booleans(),
        sliding_window=st.sampled_from([None, 4]),
        sliding_window_layers=st.sampled_from([None, (0, 2), (1, 2)]),
        family=st.sampled_from(list(CLASSES)),
        init_std=st.just(0.03),
        moe=st.one_of(st.none(), experts),
    )
)
def test_written_config_reads_back_to_the_same_architecture(arch: Architecture) -> None:
    try:
        family = export_family(arch)
    except UserError:
        assume(False)
    layers = arch.sliding_window_layers if arch.sliding_window is not None else None
    again = architecture_from_dict(json.loads(json.dumps(hf_config(arch))))
    assert again == arch.with_overrides({"family": family, "sliding_window_layers": layers})


EXPERTS = {"n_experts": 4, "top_k": 2, "expert_dim": 72}
FAMILIES = [
    {
        "family": "llama4_text",
        "rope_pairs": "neighbors",
        "window_kind": "chunked",
        "moe": {**EXPERTS, "shared_dim": 72, "score": "sigmoid", "scale_input": True, "every": 2},
    },
    {
        "family": "gpt_oss",
        "sinks": True,
        "mlp_bias": True,
        "moe": {**EXPERTS, "normalize": True, "router_bias": True, "activation": "clamped"},
    },
]
LLAMA4_CHANGES: list[dict[str, Any]] = [
    {"rope_layers": (0, 1, 3), "rotated_norm": True, "query_scale": 0.1, "query_scale_step": 64},
    {"sliding_window": 8, "sliding_window_layers": (0, 1), "ffn_dim": 100},
    {"sliding_window": 8, "qkv_bias": True, "out_bias": True},
]
GPT_OSS_CHANGES: list[dict[str, Any]] = [
    {"sliding_window": 8, "sliding_window_layers": (0, 2), "qkv_bias": True, "out_bias": True},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}},
    {"sliding_window": 8},
]


@pytest.mark.parametrize(
    ("base", "changes"),
    [*((FAMILIES[0], changes) for changes in LLAMA4_CHANGES), *((FAMILIES[1], changes) for changes in GPT_OSS_CHANGES)],
)
def test_configs_with_experts_read_back_to_the_same_architecture(base: dict[str, Any], changes: dict[str, Any]) -> None:
    sizes = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 72, "vocab_size": 11}
    arch = Architecture(**{**sizes, **base, **changes})
    assert export_family(arch) == base["family"]
    assert architecture_from_dict(json.loads(json.dumps(hf_config(arch)))) == arch


def test_no_family_has_sinks_with_chunks() -> None:
    sizes = {"dim": 64, "n_layers": 4, "n_heads": 4, "ffn_dim": 72, "vocab_size": 11}
    arch = Architecture(**{**sizes, **FAMILIES[1], "window_kind": "chunked", "sliding_window": 8})
    with pytest.raises(UserError, match=r"Llama4ForCausalLM .*; GptOssForCausalLM has no chunks"):
        export_family(arch)


def test_llama4_defaults() -> None:
    arch = read("llama4_text", intermediate_size=40)
    assert arch.rope_layers == arch.sliding_window_layers == (0, 1, 2)
    assert (arch.sliding_window, arch.window_kind, arch.rope_pairs) == (8192, "chunked", "neighbors")
    assert (arch.rotated_norm, arch.query_scale, arch.query_scale_step) == (True, 0.1, 8192)
    assert (arch.ffn_dim, arch.head_dim, arch.rope_theta) == (16384, 128, 500000.0)
    assert arch.moe is not None
    assert (arch.moe.n_experts, arch.moe.top_k, arch.moe.expert_dim, arch.moe.shared_dim) == (16, 1, 40, 40)
    text = {"model_type": "llama4_text", **SMALL, "intermediate_size": 40}
    both = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    assert architecture_from_dict(both) == arch
    with pytest.raises(ConfigError, match=r"moe_layers \[1, 2\] is not supported"):
        read("llama4_text", moe_layers=[1, 2])
    with pytest.raises(ConfigError, match=r"quantization_config \(fp8\)"):
        architecture_from_dict({**both, "quantization_config": {"quant_method": "fp8"}})


def test_gpt_oss_defaults() -> None:
    arch = read("gpt_oss", quantization_config={"quant_method": "mxfp4"})  # its files are read
    assert arch.sinks
    assert (arch.sliding_window, arch.sliding_window_layers) == (128, (0, 2))
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == (True, True, True)
    assert arch.rope_theta == 150000.0
    assert arch.rope_scaling is not None
    assert (arch.rope_scaling.factor, arch.rope_scaling.truncate) == (32.0, False)
    assert arch.moe is not None
    assert (arch.moe.n_experts, arch.moe.top_k, arch.moe.activation) == (128, 4, "clamped")
    with pytest.raises(ConfigError, match=r"swiglu_limit 5\.0"):
        read("gpt_oss", swiglu_limit=5.0)


def test_an_override_moves_to_the_family_that_computes_it() -> None:
    base = read("llama")
    assert export_family(base) == "llama"
    assert export_family(base.with_overrides({"qk_norm": True})) == "qwen3"
    assert export_family(base.with_overrides({"sliding_window": 8})) == "mistral"
    assert export_family(base.with_overrides({"qkv_bias": True})) == "qwen2"
    with pytest.raises(UserError, match="QK norm"):
        export_family(base.with_overrides({"qk_norm": True, "mlp_bias": True}))
    mixed = base.with_overrides({"moe": {"n_experts": 4, "top_k": 2, "expert_dim": 8, "normalize": True}})
    assert export_family(mixed) == "mixtral"
    assert export_family(mixed.with_overrides({"qk_norm": True})) == "qwen3_moe"
    with pytest.raises(UserError, match=r"LlamaForCausalLM has no experts; .*Mixtral.* always has moe\.scale = 1\.0"):
        export_family(mixed.with_overrides({"moe": {"scale": 2.0}}))
    with pytest.raises(UserError, match=r"MixtralForCausalLM always has moe\.normalize = True"):
        export_family(mixed.with_overrides({"moe": {"normalize": False}}))


def test_no_torch_before_it_is_needed() -> None:
    code = "import sys, shardline.models.flavors, shardline.models.huggingface.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
