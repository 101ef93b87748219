"""config.json of the dense families beyond Llama, as published, and architectures that none of them has."""

import json
from typing import Any

import pytest
import torch

from shardline.config.architecture import Architecture, RopeScaling, build
from shardline.errors import ConfigError, UserError
from shardline.models.decoder import Decoder
from shardline.models.flavors import FLAVORS
from shardline.models.huggingface.config import architecture_from_dict, export_family, hf_config
from shardline.models.init import init_weights
from tests.unit.models.test_hf_config import read

FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def test_gemma2_as_published() -> None:
    published = {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    }
    assert architecture_from_dict(published) == FLAVORS["gemma2"]["27B"]


def test_gemma3_as_published() -> None:
    small = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    }
    assert architecture_from_dict(small) == FLAVORS["gemma3"]["1B"]
    large = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    both = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": large}
    assert architecture_from_dict(both) == FLAVORS["gemma3"]["4B"]


def test_phi4_mini_as_published() -> None:
    arch = architecture_from_dict(
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {**FACTORS, "type": "longrope"},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        }
    )
    assert (arch.rope_dim, arch.head_dim, arch.sliding_window) == (96, 128, 262144)
    assert arch.rope_scaling is not None
    assert (arch.rope_scaling.type, arch.rope_scaling.factor) == ("longrope", 32.0)
    assert arch.rope_scaling.original_max_position_embeddings == 4096
    older = read("phi3", hidden_size=512, rope_scaling={**FACTORS, "type": "su"}, partial_rotary_factor=0.75)
    assert older.rope_scaling is not None
    assert older.rope_scaling.type == "longrope"


def test_olmo3_as_published() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    arch = read("olmo3", rope_scaling=yarn, rope_theta=500000, sliding_window=4096)
    assert (arch.sliding_window_layers, arch.window_rope_theta, arch.norm_places) == ((0, 1, 2), 500000.0, "after")
    assert arch.rope_scaling is not None
    assert read("olmo3").window_rope_theta is None  # both kinds of layers rotate alike


def test_rates_of_dropout_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Granite and StarCoder2 were published with some; they change training alone, and there is none here."""
    read("starcoder2", attention_dropout=0.1, residual_dropout=0.1)
    assert "attention_dropout 0.1, residual_dropout 0.1; there is no dropout here" in caplog.text


def test_other_defaults_of_keys_left_out() -> None:
    granite, smollm, glm, cohere2 = (read(name) for name in ("granite", "smollm3", "glm4", "cohere2"))
    assert (granite.attention_scale, granite.logit_scale, granite.residual_scale) == (1.0, 1.0, 1.0)
    assert (smollm.rope_layers, smollm.rope_theta, smollm.sliding_window) == ((0, 1, 2), 2000000.0, None)
    assert (glm.rope_dim, glm.head_dim, glm.qkv_bias, glm.out_bias) == (64, 128, True, False)
    assert cohere2.rope_layers == cohere2.sliding_window_layers == (0, 1, 2)
    assert read("cohere2", sliding_window=None).rope_layers == ()


def test_a_layer_type_with_a_scaling_of_its_own_is_refused() -> None:
    tables = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    }
    with pytest.raises(ConfigError, match="rope_type 'linear' of layers with a window is not supported"):
        read("gemma3_text", rope_parameters=tables)


SIZES: dict[str, Any] = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 72, "vocab_size": 11}


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"norm_places": "after", "qk_norm": True, "qk_norm_over": "width"}, "olmo2"),
        ({"residual_scale": 0.5}, "granite"),
        ({"rope_layers": (0, 2)}, "smollm3"),
        ({"rope_fraction": 0.5, "rope_pairs": "neighbors"}, "glm"),
        ({"rope_fraction": 0.5}, "phi3"),
        ({"norm_kind": "layer", "parallel_block": True, "rope_pairs": "neighbors"}, "cohere"),
    ],
)
def test_an_architecture_moves_to_the_family_that_computes_it(changes: dict[str, Any], family: str) -> None:
    arch = Architecture(**SIZES, **changes)
    assert export_family(arch) == family
    assert architecture_from_dict(json.loads(json.dumps(hf_config(arch)))) == arch.with_overrides({"family": family})


def test_no_family_has_caps_without_the_rest_of_gemma() -> None:
    with pytest.raises(UserError, match=r"LlamaForCausalLM has no score_cap; .*Gemma2ForCausalLM has norm_kind"):
        export_family(Architecture(**SIZES, score_cap=5.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_bias": True}, "norm_bias needs norm_kind 'layer', not 'rms'"),
        ({"parallel_block": True, "norm_places": "both"}, "parallel_block needs norm_places 'before', not 'both'"),
        ({"qk_norm_over": "width", "norm_kind": "layer"}, "qk_norm_over 'width' needs a norm_kind without a mean"),
        ({"rope_fraction": 0.2}, r"rope_fraction \(0.2\) of head_dim 16 must be an even number"),
        ({"gated": False, "moe": {"n_experts": 2, "top_k": 1, "expert_dim": 8}}, "with experts, activation must be"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8}},
            "rope_scaling.short_factor has 0 numbers, but 16 dimensions rotate: it needs 8",
        ),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "needs 4 or more dimensions that rotate, not 2",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope scaling needs original_max_position"),
        (
            {"latent": {"kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 8}, "n_kv_heads": 4, "score_cap": 2.0},
            "latent attention cannot have score_cap",
        ),
    ],
)
def test_fields_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build({**SIZES, **changes})


def test_norms_start_as_factors_of_one() -> None:
    for kind, start in (("rms", 1.0), ("rms_plus_one", 0.0), ("layer", 1.0)):
        arch = Architecture(**SIZES, norm_kind=kind, norm_bias=kind == "layer", norm_places="both", qk_norm=True)
        model = Decoder(arch)
        init_weights(model, 0)
        norms = {name: value for name, value in model.named_parameters() if "norm" in name}
        assert len(norms) == 4 * (6 if kind != "layer" else 10) + (2 if kind == "layer" else 1)
        for name, value in norms.items():
            assert torch.equal(value, torch.full_like(value, 0.0 if name.endswith("bias") else start)), name


def test_scaling_tables_take_lists() -> None:
    scaling = RopeScaling(type="longrope", factor=2.0, original_max_position_embeddings=8, short_factor=[1, 2])
    assert scaling.short_factor == (1.0, 2.0)
