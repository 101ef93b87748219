"""Llama 4 and gpt-oss: logits, gradients and generation against transformers in float32, on tiny random models."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardline.models.decoder import Decoder
from shardline.models.fused_weights import fuse, logical_shapes
from shardline.models.generate import generate
from shardline.models.huggingface.config import architecture_from_dict
from shardline.models.huggingface.files import read_hf, write_hf
from shardline.models.huggingface.mxfp4 import dequantize
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import Entry
from tests import proven
from tests.model_state import logical_state

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
LLAMA4: dict[str, Any] = {"intermediate_size_mlp": 72, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.7}
SHARP = {  # of the published Llama 4: between kept and divided frequencies there is no blend
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
    "rope_theta": 150.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4", LLAMA4),
    "llama4-sharp": ("Llama4", {**LLAMA4, "rope_parameters": SHARP}),
    "llama4-interleaved": (  # as the model with 128 experts
        "Llama4",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 1},
    ),
    "llama4-one-chunk": ("Llama4", {**LLAMA4, "attention_chunk_size": 64, "attn_temperature_tuning": False}),
    "gpt-oss": ("GptOss", {"sliding_window": 7, "rope_parameters": YARN}),
    "gpt-oss-mxfp4": ("GptOss", {"intermediate_size": 64, "sliding_window": 7}),
    "gpt-oss-one-kv-head": ("GptOss", {"sliding_window": 7, "num_key_value_heads": 1, "attention_bias": False}),
}
_OUTSIDE = {"embed_tokens.weight": "tok_embeddings.weight", "norm.weight": "norm.weight"}
_INSIDE = {
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.sinks": "attention.sinks",
    **{f"self_attn.{letter}_proj.": f"attention.w{letter}." for letter in "qkvo"},
    **{
        f"{theirs}.{name}_proj.": f"{ours}.{weight}."
        for theirs, ours in (("feed_forward", "feed_forward"), ("feed_forward.shared_expert", "moe.shared_experts"))
        for name, weight in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    "feed_forward.router.": "moe.router.gate.",
    "mlp.router.": "moe.router.gate.",
}


def theirs(case: str) -> Any:
    name, changes = CASES[case]
    torch.manual_seed(7)
    options = {**SIZES, **changes, "attn_implementation": "eager"}
    config = getattr(transformers, "Llama4TextConfig" if name == "Llama4" else f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name:  # constants would hide a missing or swapped one
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if "gate_up_proj" in name and "sliding_window" in changes:  # beyond the limit of the clamped activation
                parameter.mul_(5)
    return model


def logical(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of theirs as logical tensors: their experts are fused, and transposed."""
    found = {}
    for name, tensor in named.items():
        name = name.removeprefix("model.")
        if name == "lm_head.weight":
            found["output.weight"] = tensor
        elif name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
        elif ".experts." in name:
            found.update(_experts(name, tensor))
        else:
            _, layer, rest = name.split(".", 2)
            old, new = next(pair for pair in _INSIDE.items() if rest.startswith(pair[0]))
            found[f"layers.{layer}.{new}{rest.removeprefix(old)}"] = tensor
    return found


def _experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    place, ending = f"layers.{name.split('.')[1]}.moe.experts", "bias" if name.endswith("_bias") else "weight"
    rows = tensor if ending == "bias" else tensor.transpose(1, 2)
    if ".down_proj" in name:
        return {f"{place}.w2.{ending}": rows}
    gate, up = (rows[:, ::2], rows[:, 1::2]) if ".mlp." in name else rows.chunk(2, dim=1)
    return {f"{place}.w1.{ending}": gate, f"{place}.w3.{ending}": up}


def ours(reference: Any) -> Decoder:
    model = Decoder(architecture_from_dict(reference.config.to_dict()))
    tensors = logical(dict(reference.named_parameters()))
    assert tensors.keys() == logical_shapes(model.arch).keys()
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
    proven.note("family", CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_folders_are_read_and_written_bit_for_bit(case: str, tmp_path: Path) -> None:
    reference = theirs(case)
    reference.save_pretrained(tmp_path / "theirs")
    tensors = read_hf(tmp_path / "theirs")
    model = Decoder(tensors.arch)
    load_logical_state(model, tensors)
    state, out = logical_state(model), tmp_path / "ours"
    expected = logical(dict(reference.named_parameters()))
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
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


def test_packed_experts_of_a_folder_are_read(tmp_path: Path) -> None:
    """A folder as published: the experts in MXFP4, everything else in bfloat16."""
    reference = theirs("gpt-oss-mxfp4")
    reference.save_pretrained(tmp_path)
    source, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=source)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=source)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_hf(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = dequantize(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(read["layers.1.moe.experts.w1.weight"], whole[:, ::2])
    assert torch.equal(read["layers.1.moe.experts.w3.weight"], whole[:, 1::2])
    assert torch.equal(
        read.part("layers.1.moe.experts.w3.weight", (slice(2, 4), slice(1, 5))), whole[2:4, 1::2][:, 1:5]
    )
    assert read.dtype("layers.1.moe.experts.w1.weight") == torch.bfloat16


@pytest.mark.parametrize("case", ["llama4", "gpt-oss"])
def test_gradients_equal_transformers(case: str) -> None:
    reference = theirs(case)
    model, tokens = ours(reference), torch.randint(0, 97, (2, 24))
    for output in (reference(tokens).logits, model(tokens)):
        torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    expected = logical({name: gradient for name, gradient in gradients.items() if gradient is not None})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = logical_state(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", ["llama4", "gpt-oss"])
def test_generation_equals_whole_sequences(case: str) -> None:
    """With the cache of keys and values, each token is the likeliest one of theirs, beyond window and chunk too."""
    reference = theirs(case)
    prompt = [5, 9, 30, 2, 61, 8, 8, 90, 11]
    sequence = prompt + list(generate(ours(reference), prompt, 20))
    with torch.no_grad():
        likeliest = reference(torch.tensor([sequence])).logits[0].argmax(-1)
    assert sequence[len(prompt) :] == likeliest[len(prompt) - 1 : -1].tolist()
