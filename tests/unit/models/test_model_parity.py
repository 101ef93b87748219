"""Logits and gradients against transformers in float32, on tiny random checkpoints of every family."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardline.config.architecture import Architecture
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.models.huggingface.files import read_hf, write_hf
from shardline.models.rope import inverse_frequencies
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import Entry
from tests import proven
from tests.model_state import hf_state, logical_state

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 3,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "rope_theta": 100.0, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "llama-yarn-factor": (
        "Llama",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 100.0,
                "attention_factor": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biases": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 7, "head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}),
    "qwen3-moe-normalized": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32, "attention_bias": True}),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {**EXPERTS, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6},
    ),
    "deepseek-v2-dense": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3-dense": ("DeepseekV3", {**LATENT, "q_lora_rank": 28, "tie_word_embeddings": True}),
}


def theirs(case: str) -> Any:
    name, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # their constants would hide a missing or swapped one
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(folder: Path) -> Decoder:
    tensors = read_hf(folder)
    model = Decoder(tensors.arch)
    load_logical_state(model, tensors)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = theirs(case)
    reference.save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    tokens = torch.randint(0, 97, (2, 40))
    with torch.no_grad():
        expected, found = reference(tokens).logits, model(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    # And back: what we write opens there, with every bit the same.
    state, out = logical_state(model), tmp_path / "ours"
    entries = [Entry(name, tuple(t.shape), t.dtype, functools.partial(state.get, name)) for name, t in state.items()]
    write_hf(entries, model.arch, out)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(again) is type(reference)
    for name, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, expected, atol=1e-6, rtol=0)
    proven.note("family", CASES[case][0])


@pytest.mark.parametrize("case", ["llama", "qwen3-tied-biases", "mixtral", "qwen3-moe", "qwen3-moe-normalized"])
def test_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = theirs(case)
    reference.save_pretrained(tmp_path)
    model = ours(tmp_path)
    tokens = torch.randint(0, 97, (2, 24))
    for output in (reference(tokens).logits, model(tokens)):
        torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in (*reference.parameters(), *model.parameters()):
            parameter.copy_(parameter.grad)
    reference.save_pretrained(tmp_path / "gradients")  # under the names of files, where experts are apart
    expected = load_file(tmp_path / "gradients" / "model.safetensors")
    found = hf_state(model.arch, logical_state(model))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", ["llama-llama3", "mistral-window", "qwen3-window", "mixtral-window", "qwen3-moe"])
def test_greedy_generation_equals_transformers(case: str, tmp_path: Path) -> None:
    reference = theirs(case)
    reference.save_pretrained(tmp_path)
    prompt = [5, 9, 30, 2, 61, 8, 8, 90, 11]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(generate(ours(tmp_path), prompt, 20)) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("given", "factor"), [(1.25, 1.25), (None, (1 + math.log(4) / math.log(16)) ** 0.5)])
def test_longrope_scales_by_its_attention_factor(given, factor):
    scaling = {"type": "longrope", "factor": 4.0, "attention_factor": given, "original_max_position_embeddings": 16}
    scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 16, "vocab_size": 16}
    arch = Architecture(**sizes, rope_theta=10000.0, norm_eps=1e-5, rope_scaling=scaling)
    (short, of_short), (long, of_long) = (inverse_frequencies(arch, length) for length in (16, 17))
    assert (of_short, of_long) == (pytest.approx(factor), pytest.approx(factor))
    torch.testing.assert_close(short, 2 * long)
