"""Dense families beyond Llama: logits, gradients, folders, generation against transformers, on tiny random models."""

import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardline.models.attention import document_lengths
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.models.huggingface.config import architecture_from_dict
from shardline.models.huggingface.files import read_hf, write_hf
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import Entry
from tests import proven
from tests.model_state import hf_state, logical_state

transformers = pytest.importorskip("transformers")

LENGTH = 40  # beyond every window and every original length below
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {"head_dim": 24}  # not hidden_size / heads
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0],
    "rope_theta": 500.0,
}
SHORTER = {name: LONG[name][:6] for name in ("short_factor", "long_factor")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 700.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", HEADS),
    "gemma2": (
        "Gemma2",
        {**HEADS, "sliding_window": 7, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2-scalar": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 36, "attention_bias": True}),
    "gemma2-no-caps": (
        "Gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {**HEADS, "sliding_window": 7, "num_hidden_layers": 7, "query_pre_attn_scalar": 24}),
    "gemma3-scaled": (
        "Gemma3",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phi3-long": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "phi3-short": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3-partial": (
        "Phi3",
        {
            "rope_parameters": {**LONG, **SHORTER, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-one-kv-head": ("Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 7}),
    "olmo3-yarn": (
        "Olmo3",
        {"sliding_window": 7, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 700.0}}},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 7.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    ),
    "glm": ("Glm", HEADS),
    "glm4": ("Glm4", HEADS),
    "glm4-quarter": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 7}),
    "llama-dynamic": (
        "Llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0},
        },
    ),
    "llama-longrope": (
        "Llama",
        {"rope_parameters": {**LONG, "factor": 6.0, "original_max_position_embeddings": 16}},
    ),
    "falcon3": ("Llama", {"head_dim": 32, "rope_theta": 1000042}),
}
FAMILIES = [name for name in CASES if "-" not in name] + ["llama-dynamic", "phi3-partial", "cohere-qk-norm"]


def theirs(case: str) -> Any:
    name, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # constants would hide a missing or swapped one
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def ours(case: str, folder: Path) -> Decoder:
    theirs(case).save_pretrained(folder / case)
    tensors = read_hf(folder / case)
    model = Decoder(tensors.arch)
    load_logical_state(model, tensors)
    return model


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_folders_equal_transformers(case: str, tmp_path: Path) -> None:
    reference, model = theirs(case), ours(case, tmp_path)
    with torch.no_grad():
        expected, found = reference(tokens()).logits, model(tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
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
        assert torch.equal(again(tokens()).logits, expected)  # config.json says the same
    assert read_hf(out).arch == model.arch
    proven.note("family", CASES[case][0])


@pytest.mark.parametrize("case", FAMILIES)
def test_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    reference, model = theirs(case), ours(case, tmp_path)
    reference.zero_grad()
    for output in (reference(tokens(24)).logits, model(tokens(24))):
        torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens(24)[:, 1:].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = hf_state(model.arch, logical_state(model))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("case", [*FAMILIES, "phi3-long"])
def test_generation_equals_whole_sequences(case: str, tmp_path: Path) -> None:
    """With the cache of keys and values, each token is the likeliest one of theirs, beyond window and length too."""
    reference = theirs(case)
    prompt = [5, 9, 30, 2, 61, 8, 8, 90, 11, 3, 17, 64, 70, 22, 1, 49]
    sequence = prompt + list(generate(ours(case, tmp_path), prompt, 22))
    for end in range(len(prompt), len(sequence)):
        with torch.no_grad():
            likeliest = reference(torch.tensor([sequence[:end]])).logits[0, -1].argmax(-1)
        assert sequence[end] == likeliest, end


def test_gemma3_beside_a_model_of_images(tmp_path: Path) -> None:
    """The published folders of 4B and more hold the text model under a prefix, and its sizes in `text_config`."""
    model = ours("gemma3", tmp_path)
    folder = tmp_path / "gemma3"
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures",)}
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): value for name, value in stored.items()}
        save_file({**renamed, "vision_tower.x.weight": torch.zeros(2)}, folder / "model.safetensors")
        whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
        (folder / "config.json").write_text(json.dumps(whole))
        read = read_hf(folder)
        assert read.arch == model.arch
        for name, value in logical_state(model).items():
            assert torch.equal(read[name], value), name


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES.values()}))
def test_keys_left_out_have_the_values_of_transformers(name: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if key.startswith(("hidden", "intermediate", "vocab"))}
    sizes |= {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**sizes)
    assert architecture_from_dict({"model_type": config.model_type, **sizes}) == architecture_from_dict(
        config.to_dict()
    )


@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope"])
def test_a_packed_document_has_the_frequencies_of_its_own_length(case: str, tmp_path: Path) -> None:
    plain = ours(case, tmp_path)
    packed = Decoder(plain.arch.model_copy(update={"attn_mask_type": "block_causal"}))
    packed.load_state_dict(plain.state_dict())
    ends = [[0, 20, 32], [0, 9, 14, 32]]  # below and above the original 16
    numbers = [[sum(place >= end for end in row[1:]) for place in range(32)] for row in ends]
    with torch.no_grad():
        found = packed(tokens(32), documents=torch.tensor(numbers, dtype=torch.int32))
        for row, cuts in enumerate(ends):
            for a, b in pairwise(cuts):
                torch.testing.assert_close(found[row, a:b], plain(tokens(32)[row : row + 1, a:b])[0], atol=1e-5, rtol=0)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3))
def test_lengths_of_documents(rows: list[list[int]]) -> None:
    width = max(map(sum, rows))
    rows = [[*row, width - sum(row)] if sum(row) < width else row for row in rows]
    documents = torch.stack([torch.cat([torch.full((size,), n) for n, size in enumerate(row)]) for row in rows])
    expected = [[size for size in row for _ in range(size)] for row in rows]
    assert document_lengths(documents).tolist() == expected
