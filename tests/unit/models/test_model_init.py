"""Initial weights depend on (seed, logical name) alone."""

import hashlib
import math
import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor

from shardline.comm.fake import fake_group
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import KEYS, Layout
from shardline.config.load import load_config
from shardline.models import init
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.flavors import resolve
from shardline.models.init import BLOCK_ROWS, init_weights, initial_std
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model
from tests.model_state import logical_state

ARCH = Architecture(
    dim=48, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=304, vocab_size=700, qk_norm=True, qkv_bias=True
)


def build(seed: int = 0, arch: Architecture = ARCH) -> Decoder:
    model = Decoder(arch)
    init_weights(model, seed)
    return model


# ---- what a rank of many draws ---------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SMALL = {"dim": 40, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 64, "vocab_size": 271}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}
TIED = {"tie_word_embeddings": True}


def build_rank(layout: Layout, fields: dict[str, object], **settings: object) -> Decoder:
    """The model of this rank, as a run makes it: cut and transformed on the meta device, then given memory."""
    config = load_config(overrides={"model.overrides": fields, **settings})
    config = config.replace({f"parallelism.{key}": getattr(layout, axis) for axis, key in KEYS.items()})
    precision = choose_precision(config, CPU, True)
    return build_model(resolve(config.model), CPU, precision, Mesh(layout, "cpu"), config)[0]


@pytest.mark.parametrize(
    ("layout", "fields", "settings"),
    [
        (Layout(dp_shard=8), {}, {}),
        (Layout(dp_shard=4), {**TIED, "vocab_size": 3}, {}),  # the last rank holds no row of it
        (Layout(dp_shard=2), {}, {"training.enable_cpu_offload": True}),
        (Layout(dp_shard=2), {}, {"training.dtype": "bfloat16"}),
        (Layout(dp_replicate=2), {}, {}),
        (Layout(dp_replicate=2, dp_shard=2), {}, {}),
        (Layout(dp_shard=4, tp=2), {}, {}),  # strided shards, and rows of some ranks with columns of others
        (Layout(dp_shard=2, tp=4), {**TIED, "n_kv_heads": 2}, {}),  # every rank holds K and V
        (Layout(dp_shard=2, cp=2, tp=2), {}, {}),
        (Layout(tp=4), TIED, {}),
        (Layout(pp=2, dp_shard=2), TIED, {}),
        (Layout(pp=2, dp_shard=2, tp=2), {}, {}),
    ],
    ids=str,
)
def test_every_rank_of_a_layout_gets_the_values_of_one_process(layout, fields, settings, monkeypatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ROWS", 24)  # several blocks in each of these small tensors
    expected: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank in range(layout.world_size):
        debug._clear_sharding_prop_cache()  # it takes the mesh of one rank for that of another
        with fake_group(rank, layout.world_size):
            model = build_rank(layout, SMALL | BIASES | fields, **settings)
            init_weights(model, 3)
            if not expected:
                whole = Decoder(model.arch, split_kv=model.blocks()[0].attention.wkv is not None)
                init_weights(whole, 3)
                expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
                seen = {name: torch.zeros_like(parameter) for name, parameter in expected.items()}
            for name, parameter in model.named_parameters():
                place = local_slices(parameter)
                assert torch.equal(local(parameter.detach()), expected[name][place].to(parameter.dtype)), (rank, name)
                seen[name][place] = 1
    assert all(places.all() for places in seen.values())


def test_a_rank_draws_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks that share the rows draw an eighth each, and not much more: a block is drawn whole."""
    drawn: list[int] = []
    normal = torch.Tensor.normal_

    def counted(tensor, *arguments, **options):
        drawn.append(tensor.numel())
        return normal(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    wide = {"dim": 2048, "n_layers": 1, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 4096, "vocab_size": 4096}
    debug._clear_sharding_prop_cache()
    with fake_group(5, 8):
        model = build_rank(Layout(dp_shard=8), wide)
        init_weights(model, 0)
    share = sum(drawn) / sum(parameter.numel() for parameter in model.parameters())
    assert 0.99 / 8 < share < 1.1 / 8


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_shard_is_a_shard_of_the_whole(data: st.DataObject) -> None:
    """Any sizes, cuts and ranks, also those that hold nothing; torch's own split of the whole model is compared."""
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 3]))
    arch = Architecture(
        dim=data.draw(st.integers(1, 20)),
        n_layers=1,
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([2, 6])),
        ffn_dim=data.draw(st.integers(1, 20)),
        vocab_size=data.draw(st.integers(1, 40)),
        qkv_bias=data.draw(st.booleans()),
    )
    split_kv = data.draw(st.booleans())
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    placements = {0: [Shard(0), Replicate()], 1: [Shard(0), Shard(1), Replicate()]}
    rank = data.draw(st.integers(0, math.prod(shape) - 1))
    with patch.object(init, "BLOCK_ROWS", data.draw(st.integers(1, 12))):
        whole = Decoder(arch, split_kv)
        init_weights(whole, 7)
        debug._clear_sharding_prop_cache()
        with fake_group(rank, math.prod(shape)), torch.no_grad():
            mesh = init_device_mesh("cpu", shape) if math.prod(shape) > 1 else None
            model = Decoder(arch, split_kv)
            expected = {}
            for name, parameter in whole.named_parameters():
                module = model.get_submodule(name.rsplit(".", 1)[0])
                if mesh is not None:
                    cut = [data.draw(st.sampled_from(placements[min(parameter.ndim - 1, 1)])) for _ in shape]
                    empty = distribute_tensor(torch.full_like(parameter, math.nan), mesh, cut, src_data_rank=None)
                    setattr(module, name.rsplit(".", 1)[1], torch.nn.Parameter(empty))
                    parameter = distribute_tensor(parameter.detach(), mesh, cut, src_data_rank=None)
                expected[name] = local(parameter)
            init_weights(model, 7)
            for name, parameter in model.named_parameters():
                assert torch.equal(local(parameter), expected[name]), name


# ---- the values ------------------------------------------------------------------------------------------------------


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
