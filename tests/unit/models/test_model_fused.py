"""Fused weights: fuse and unfuse are inverse, and a plain row cut is a cut of every logical part."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import fuse, gate_block, logical_names, logical_shapes, parameter_count, unfuse
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from tests.model_state import logical_state

QKV, W13 = "layers.0.attention.wqkv", "layers.0.feed_forward.w13"


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Architecture(
        dim=draw(st.integers(1, 5)),
        n_layers=1,
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        ffn_dim=draw(st.integers(1, 60)),
        vocab_size=3,
        qkv_bias=True,
        mlp_bias=True,
    )


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def fused_tensors(arch: Architecture) -> list[tuple[str, Tensor]]:
    qkv_rows = (arch.n_heads + 2 * arch.n_kv_heads) * arch.head_dim
    return [
        (f"{QKV}.weight", numbered(qkv_rows, arch.dim)),
        (f"{QKV}.bias", numbered(qkv_rows)),
        (f"{W13}.weight", numbered(2 * arch.ffn_dim, arch.dim)),
        (f"{W13}.bias", numbered(2 * arch.ffn_dim)),
    ]


@settings(deadline=None, max_examples=60)
@given(architectures())
def test_fuse_is_the_inverse_of_unfuse(arch: Architecture) -> None:
    shapes = logical_shapes(arch)
    for name, tensor in fused_tensors(arch):
        parts = unfuse(arch, name, tensor)
        assert list(parts) == logical_names(arch, name)
        assert {part: tuple(value.shape) for part, value in parts.items()} == {part: shapes[part] for part in parts}
        assert torch.equal(fuse(arch, name, parts), tensor)


@settings(deadline=None, max_examples=60)
@given(architectures(), st.integers(1, 6))
def test_a_row_cut_cuts_every_part(arch: Architecture, ranks: int) -> None:
    for name, tensor in fused_tensors(arch):
        pieces = arch.n_kv_heads if "wqkv" in name else arch.ffn_dim // gate_block(arch.ffn_dim)
        if pieces % ranks:
            continue
        parts = unfuse(arch, name, tensor)
        for rank, shard in enumerate(tensor.chunk(ranks)):
            cut = {part: value.chunk(ranks)[rank] for part, value in parts.items()}
            assert torch.equal(fuse(arch, name, cut), shard)
            assert all(torch.equal(value, cut[part]) for part, value in unfuse(arch, name, shard).items())


def test_order_of_rows() -> None:
    arch = Architecture(dim=1, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=2, ffn_dim=12, vocab_size=3)
    parts = unfuse(arch, f"{QKV}.weight", numbered(16, 1))
    assert [value.flatten().tolist() for value in parts.values()] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 12, 13],
        [6, 7, 14, 15],
    ]
    gate, up = unfuse(arch, f"{W13}.weight", numbered(24, 1)).values()
    assert gate.flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert up.flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_model_and_table_of_shapes_agree(changes: dict[str, bool], kv_heads: int) -> None:
    arch = Architecture(dim=8, n_layers=2, n_heads=2, n_kv_heads=kv_heads, ffn_dim=12, vocab_size=5, **changes)
    model = Decoder(arch)
    init_weights(model, 0)
    state = logical_state(model)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == logical_shapes(arch)
    assert parameter_count(arch) == sum(parameter.numel() for parameter in model.parameters())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)  # each its own memory
    other = Decoder(arch)
    load_logical_state(other, state)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_loading_names_what_does_not_fit() -> None:
    arch = Architecture(dim=8, n_layers=1, n_heads=2, ffn_dim=12, vocab_size=5)
    model = Decoder(arch)
    init_weights(model, 0)
    state = {name: tensor.clone() for name, tensor in logical_state(model).items()}
    renamed = {("w" if name == "norm.weight" else name): tensor for name, tensor in state.items()}
    with pytest.raises(UserError, match=r"missing: norm\.weight; unexpected: w"):
        load_logical_state(model, renamed)
    with pytest.raises(UserError, match=r"norm\.weight has shape \(3,\), but the model needs \(8,\)"):
        load_logical_state(model, {**state, "norm.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"wqkv\.weight needs .*wk\.weight.*only layers\.0\.attention\.wq\.weight"):
        load_logical_state(model, {"layers.0.attention.wq.weight": state["layers.0.attention.wq.weight"]}, strict=False)
    load_logical_state(model, {"norm.weight": torch.full((8,), 3.0)}, strict=False)
    assert model.norm.weight.tolist() == [3.0] * 8
