"""The values that LoRA's matrices start with: those of `peft`, different for every matrix and every expert."""

import math

import pytest
import torch
from torch import Tensor

from shardline.adapters.lora import adaptation, attach
from shardline.adapters.start import draw_matrices
from shardline.config.architecture import Architecture
from shardline.config.schema import Lora
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import is_low_rank, low_rank_name

ARCH = Architecture(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    vocab_size=64,
    moe={"n_experts": 3, "top_k": 1, "expert_dim": 80, "first_dense": 1},
)


def drawn(seed: int, *targets: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Decoder(ARCH)
    attach(model, adaptation(Lora(rank=16, target_modules=list(targets)), ARCH), torch.float32, torch.float32)
    model.to_empty(device="cpu")
    draw_matrices(model, seed)
    return {low_rank_name(name): one.detach() for name, one in model.named_parameters() if is_low_rank(name)}


def test_a_is_uniform_within_a_bound_by_its_columns_and_b_is_zero() -> None:
    found = drawn(3, "all-linear")
    for name, columns in (("attention.wq", 32), ("attention.wv", 32), ("feed_forward.w2", 48)):
        a = found[f"layers.0.{name}.lora.a"]
        assert a.abs().max().item() == pytest.approx(1 / math.sqrt(columns), rel=0.05)
        assert a.abs().max().item() <= 1 / math.sqrt(columns)
        assert a.std().item() == pytest.approx(1 / math.sqrt(3 * columns), rel=0.1)
    assert all(not one.any() for name, one in found.items() if name.endswith(".b"))
    assert not torch.equal(found["layers.0.attention.wq.lora.a"], found["layers.1.attention.wq.lora.a"])
    again, other = drawn(3, "all-linear"), drawn(4, "all-linear")
    for name, one in found.items():
        assert torch.equal(one, again[name])
        assert torch.equal(one, other[name]) == name.endswith(".b")


def test_every_expert_begins_with_numbers_of_its_own() -> None:
    a = drawn(3, "experts")["layers.1.moe.experts.w2.lora.a"]
    assert a.shape == (3, 16, 80)
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[1], a[2])
    assert a.abs().amax((1, 2)).tolist() == pytest.approx([1 / math.sqrt(80)] * 3, rel=0.05)


def test_of_an_embedding_b_is_normal_and_a_is_zero() -> None:
    found = drawn(3, "embed_tokens")
    assert not found["tok_embeddings.lora.a"].any()
    assert found["tok_embeddings.lora.b"].std().item() == pytest.approx(1.0, rel=0.1)
