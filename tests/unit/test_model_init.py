"""Initial weights depend on (seed, logical name) alone."""

import hashlib
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.architecture import Architecture
from shardline.models import init
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import fuse
from shardline.models.init import BLOCK_ROWS, draw_rows, init_weights, initial_std
from shardline.models.state import logical_state

ARCH = Architecture(
    dim=48, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=304, vocab_size=700, qk_norm=True, qkv_bias=True
)


def build(seed: int = 0, arch: Architecture = ARCH) -> Decoder:
    model = Decoder(arch)
    init_weights(model, seed)
    return model


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 3 * BLOCK_ROWS), st.integers(1, 5))
def test_a_slice_is_a_slice_of_the_whole(data: st.DataObject, rows: int, columns: int) -> None:
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole = draw_rows(5, "a.weight", (rows, columns), 0, rows, 0.02)
    assert torch.equal(draw_rows(5, "a.weight", (rows, columns), start, stop, 0.02), whole[start:stop])


def test_every_rank_of_a_row_cut_draws_its_own_part() -> None:
    """What a rank draws for its rows of a fused weight is the row cut of the whole model's weight."""
    name = "layers.1.attention.wqkv.weight"
    whole = dict(build().named_parameters())[name]
    std = ARCH.init_std
    for ranks in (1, 2, 4):
        for rank, shard in enumerate(whole.chunk(ranks)):
            parts = {}
            for part, rows in (("wq", 512), ("wk", 256), ("wv", 256)):
                logical, size = f"layers.1.attention.{part}.weight", rows // ranks
                parts[logical] = draw_rows(0, logical, (rows, 48), rank * size, (rank + 1) * size, std)
            assert torch.equal(fuse(ARCH, name, parts), shard)


def test_values_are_those_of_the_generator_of_their_block() -> None:
    """The recipe itself: changing it changes every run that was ever reported."""
    digest = hashlib.blake2b(b"9\0output.weight\x001", digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    block = torch.empty(BLOCK_ROWS, 48).normal_(0, 0.02, generator=generator).clamp(-0.06, 0.06)
    assert torch.equal(build(9).output.weight[BLOCK_ROWS : 2 * BLOCK_ROWS], block)


def test_seed_and_name_matter_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    first = logical_state(build(1))
    torch.manual_seed(12345)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(init, "IN_FLIGHT_BYTES", 0)
    again = logical_state(build(1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = logical_state(build(2))
    drawn = [name for name in first if initial_std(ARCH, name) is not None]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(first["layers.0.attention.wk.weight"], first["layers.1.attention.wk.weight"])
    more = logical_state(build(1, ARCH.with_overrides({"n_heads": 4, "tie_word_embeddings": True})))
    assert torch.equal(more["layers.0.attention.wk.weight"], first["layers.0.attention.wk.weight"])


def test_spread() -> None:
    state = logical_state(build())
    deep = ARCH.init_std / math.sqrt(2 * ARCH.n_layers)
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            assert tensor.eq(1).all()
        elif name.endswith(".bias"):
            assert tensor.eq(0).all()
        else:
            std = deep if name.endswith(("wo.weight", "w2.weight")) else ARCH.init_std
            assert float(tensor.std()) == pytest.approx(std, rel=0.03), name
            assert float(tensor.abs().max()) <= 3 * std + 1e-9, name
            assert abs(float(tensor.mean())) < std / 20, name


def test_a_model_in_another_type_gets_the_rounded_values() -> None:
    model = Decoder(ARCH).to(torch.bfloat16)
    init_weights(model, 0)
    assert torch.equal(model.output.weight, build().output.weight.to(torch.bfloat16))
