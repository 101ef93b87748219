"""Latent attention against transformers' DeepSeek-V2 and -V3 in float32, and what follows from its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from shardline.config.architecture import Architecture
from shardline.errors import ConfigError, UserError
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import fuse, logical_shapes
from shardline.models.generate import generate
from shardline.models.huggingface.config import architecture_from_dict, hf_config
from shardline.models.huggingface.files import read_hf
from shardline.models.huggingface.stored import stored_as
from tests.model_state import logical_state

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
LOW = {"q_lora_rank": 28}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-greedy": ("DeepseekV2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v2-groups": ("DeepseekV2", {"topk_method": "group_limited_greedy", **GROUPS}),
    "v2-q-lora-yarn": ("DeepseekV2", {"topk_method": "greedy", "rope_parameters": YARN, **LOW}),
    "v3": ("DeepseekV3", GROUPS),
    "v3-q-lora-yarn": ("DeepseekV3", {"rope_parameters": YARN, **GROUPS, **LOW}),
    "v3-halves": ("DeepseekV3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "v3-dense": ("DeepseekV3", {"first_k_dense_replace": 3, "rms_norm_eps": 1e-5, **LOW}),
}


def theirs(case: str) -> Any:
    name, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias") or "norm" in name:  # their constants would hide a missing or swapped one
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


def their_tensors(arch: Architecture, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' module, which holds all experts in two, under our logical names."""
    found = {}
    for name in logical_shapes(arch):
        layer, _, inside = name.removeprefix("layers.").partition(".moe.")
        mlp = f"model.layers.{layer}.mlp"
        if inside in ("experts.w1.weight", "experts.w3.weight"):
            found[name] = given[f"{mlp}.experts.gate_up_proj"].chunk(2, dim=1)[inside.startswith("experts.w3")]
        elif inside == "experts.w2.weight":
            found[name] = given[f"{mlp}.experts.down_proj"]
        elif inside == "router.gate.weight":
            found[name] = given[f"{mlp}.gate.weight"]
        elif inside == "router.balance":
            found[name] = given[f"{mlp}.gate.e_score_correction_bias"]
        elif inside:
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[inside.split(".")[1]]
            found[name] = given[f"{mlp}.shared_experts.{part}.weight"]
        else:
            how = stored_as(name, arch.family)
            assert how is not None
            found[name] = given[how.name]
    return found


def ours(reference: Any) -> Decoder:
    model = Decoder(architecture_from_dict(reference.config.to_dict()))
    tensors = their_tensors(model.arch, reference.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fuse(model.arch, name, tensors))
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    reference = theirs(case)
    model, tokens = ours(reference), torch.randint(0, 97, (2, 40))
    with torch.no_grad():
        expected, found = reference(tokens).logits, model(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_transformers(case: str) -> None:
    reference = theirs(case)
    model, tokens = ours(reference), torch.randint(0, 97, (2, 24))
    for output in (reference(tokens).logits, model(tokens)):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    gradients |= {name: torch.zeros_like(value) for name, value in reference.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = their_tensors(model.arch, gradients)
    for name, value in logical_state(model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_config_comes_back(case: str) -> None:
    """Written and read again, by us and by transformers, it is the same model."""
    arch = architecture_from_dict(theirs(case).config.to_dict())
    written = hf_config(arch)
    assert architecture_from_dict(written) == arch
    reread = transformers.AutoConfig.for_model(**written)
    assert architecture_from_dict(reread.to_dict()) == arch
    assert reread.head_dim == arch.rope_dim


@pytest.mark.parametrize("case", ["v2-q-lora-yarn", "v3"])
def test_generation_equals_transformers(case: str) -> None:
    reference = theirs(case)
    prompt = [5, 9, 30, 2, 61, 8, 8, 90, 11]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(torch.tensor([prompt]), **options)
    assert list(generate(ours(reference), prompt, 12)) == expected[0, len(prompt) :].tolist()


def test_the_softmax_scale_of_yarn_is_there() -> None:
    """Without the squared scale of all dimensions the logits differ."""
    reference = theirs("v3-q-lora-yarn")
    model, tokens = ours(reference), torch.randint(0, 97, (2, 40))
    scaling = {**model.arch.rope_scaling.model_dump(), "mscale": None, "mscale_all_dim": None}
    plain = Decoder(model.arch.with_overrides({"rope_scaling": {**scaling, "attention_factor": 1.0}}))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (plain(tokens) - model(tokens)).abs().max() > 1e-2


SMALL = {"dim": 32, "n_layers": 1, "n_heads": 4, "ffn_dim": 48, "vocab_size": 64}
LATENT = {"kv_rank": 12, "nope_dim": 10, "rope_dim": 6, "v_dim": 8}


def test_widths_of_heads_follow_the_sizes() -> None:
    arch = Architecture(**SMALL, latent=LATENT)
    assert (arch.head_dim, arch.rope_dim, arch.v_dim, arch.n_kv_heads) == (16, 6, 8, 4)
    wider = arch.with_overrides({"latent": {**LATENT, "nope_dim": 14}})
    assert (wider.head_dim, wider.rope_dim) == (20, 6)
    assert arch.with_overrides({"latent": None}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12}, r"head_dim \(12\) must be latent.nope_dim \+ latent.rope_dim \(16\)"),
        ({"n_kv_heads": 2}, r"n_kv_heads \(2\) must be n_heads \(4\)"),
        ({"qkv_bias": True}, "no qkv_bias"),
        ({"latent": {**LATENT, "v_dim": 17}}, r"latent.v_dim \(17\) must not exceed head_dim \(16\)"),
        ({"latent": {**LATENT, "rope_dim": 5}}, "rope_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Architecture(**SMALL, latent=LATENT).with_overrides(changes)
    with pytest.raises(ConfigError, match=r"latent\.nope_dim"):
        Architecture(**SMALL).with_overrides({"latent": {"kv_rank": 12}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ],
)
def test_what_a_config_cannot_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {**SIZES, "model_type": "deepseek_v2", "topk_method": "greedy"}
    assert architecture_from_dict(config).family == "deepseek_v2"
    with pytest.raises(ConfigError, match=message):
        architecture_from_dict({**config, **changes})


def test_other_routers_are_not_exported() -> None:
    arch = architecture_from_dict({**SIZES, "model_type": "deepseek_v3", **GROUPS})
    assert hf_config(arch)["model_type"] == "deepseek_v3"
    softmax = arch.with_overrides({"moe": {**arch.moe.model_dump(), "score": "softmax"}})
    with pytest.raises(UserError, match="DeepseekV3ForCausalLM has sigmoid scores"):
        hf_config(softmax)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's files hold a layer behind the last, which its model does not compute."""
    reference = theirs("v3-dense")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = {name: value for name, value in tensors.items() if "layers.2." in name}
    extra = {name.replace("layers.2.", "layers.3."): value.clone() for name, value in last.items()}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for further in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": further}))
        if further:
            assert set(read_hf(tmp_path)) == set(logical_shapes(ours(reference).arch))
        else:
            with pytest.raises(UserError, match=r"unexpected: model\.layers\.3"):
                read_hf(tmp_path)
