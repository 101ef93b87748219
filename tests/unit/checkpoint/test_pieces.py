"""Pieces: whatever the cut, all ranks together have every element, and what is cut up comes back bit by bit."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.checkpoint.shards import (
    HeldTensor,
    Place,
    Scratch,
    TensorPiece,
    _check_other_shape,
    cut,
    place_key,
    put,
    take,
    whole_place,
)
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.fused_weights import fuse, logical_names, logical_shapes, unfuse
from tests.examples import examples

NAMES = (
    "layers.0.attention.wqkv.weight",
    "layers.0.attention.wqkv.bias",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wkv.weight",
    "layers.0.attention.wkv.bias",
    "layers.0.attention.wo.weight",
    "layers.0.feed_forward.w13.weight",
    "layers.0.feed_forward.w13.bias",
    "layers.0.feed_forward.w2.weight",
    "tok_embeddings.weight",
    "norm.weight",
)


@st.composite
def architectures(draw):
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    return Architecture(
        dim=draw(st.sampled_from([4, 6])),
        n_layers=1,
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        ffn_dim=draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(1, 30)),
        qkv_bias=True,
        mlp_bias=True,
    )


def fused_tensor(arch, name):
    """The parameter `name` with a different number in every element."""
    shapes = logical_shapes(arch)
    parts, count = {}, 0
    for part in logical_names(arch, name):
        size = math.prod(shapes[part])
        parts[part] = torch.arange(count, count + size, dtype=torch.float32).view(shapes[part])
        count += size
    return fuse(arch, name, parts), parts


def ranges(length, ends):
    """Contiguous ranges that make up 0..length; some may be empty, as with fewer rows than ranks."""
    marks = [0, *sorted(min(end, length) for end in ends), length]
    return list(itertools.pairwise(marks))


@st.composite
def cuts(draw):
    """An architecture, a parameter of it, and the places that ranks hold: rows and columns cut anywhere."""
    arch, name = draw(architectures()), draw(st.sampled_from(NAMES))
    tensor, parts = fused_tensor(arch, name)
    grids = []
    for _ in range(2):
        rows = ranges(tensor.shape[0], draw(st.lists(st.integers(0, tensor.shape[0]), max_size=4)))
        columns = [(0, 0)]
        if tensor.ndim == 2:
            columns = ranges(tensor.shape[1], draw(st.lists(st.integers(0, tensor.shape[1]), max_size=2)))
        grids.append([_place(tensor, row, column) for row in rows for column in columns])
    return arch, name, tensor, parts, grids


def _place(tensor, row, column):
    ends = (row, column)[: tensor.ndim]
    return Place(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def pieces_of(arch, name, tensor, grid):
    """What all ranks of a grid hold: (piece, its values)."""
    found = []
    for place in grid:
        held = tensor[place.slices].contiguous()
        for piece in cut(arch, name, tensor.shape, place):
            part, scratch = HeldTensor(0, held, held.dtype, (piece,)), Scratch(48)  # some rows at a time
            found.append((piece, torch.cat([rows.clone() for rows in take(part, piece, scratch)])))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(cuts())
def test_pieces_of_all_ranks_are_the_logical_tensors_each_element_once(given_cuts):
    arch, name, tensor, parts, (grid, _) = given_cuts
    seen = {part: torch.full(values.shape, -1.0) for part, values in parts.items()}
    counts = {part: torch.zeros(values.shape, dtype=torch.int64) for part, values in parts.items()}
    for piece, values in pieces_of(arch, name, tensor, grid):
        assert piece.shape == tuple(parts[piece.name].shape)
        seen[piece.name][piece.place.slices] = values
        counts[piece.name][piece.place.slices] += 1
    for part, values in parts.items():
        assert torch.equal(seen[part], values)
        assert bool((counts[part] == 1).all())


@settings(max_examples=examples(150), deadline=None)
@given(cuts())
def test_another_cut_is_filled_from_the_pieces_of_one_and_back(given_cuts):
    arch, name, tensor, _, (one, two) = given_cuts
    for source, target in ((one, two), (two, one)):
        stored = pieces_of(arch, name, tensor, source)
        rebuilt = torch.full_like(tensor, -1.0)
        for place in target:
            held = torch.full(place.size, -1.0)
            for piece in cut(arch, name, tensor.shape, place):
                for other, values in stored:
                    if other.name == piece.name:
                        shared = other.place.meet(piece.place)
                        if shared.elements:
                            put(held, piece, shared, values[shared.within(other.place).slices])
            rebuilt[place.slices] = held
        assert torch.equal(rebuilt, tensor)


def test_fused_rows_are_those_of_unfuse():
    arch = Architecture(
        dim=4, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=2, ffn_dim=16, vocab_size=8, qkv_bias=False
    )
    name = "layers.0.attention.wqkv.weight"
    tensor, _ = fused_tensor(arch, name)
    for piece in cut(arch, name, tensor.shape, whole_place(tensor.shape)):
        assert torch.equal(tensor[piece.rows], unfuse(arch, name, tensor)[piece.name])


def test_a_key_tells_where_a_piece_lies_unless_it_is_all():
    assert place_key("a", (4, 6), Place((0, 0), (4, 6))) == "a"
    assert place_key("a", (), Place((), ())) == "a"
    assert place_key("a", (4, 6), Place((2, 0), (2, 3))) == "a[2:4,0:3]"
    assert TensorPiece("a", (4,), Place((1,), (2,)), None).key == "a[1:3]"


def test_values_are_converted_to_the_type_held():
    arch = Architecture(dim=4, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=2, ffn_dim=8, vocab_size=8)
    name = "layers.0.feed_forward.w13.weight"
    held = torch.zeros(16, 4, dtype=torch.bfloat16)
    for piece in cut(arch, name, (16, 4), whole_place((16, 4))):
        put(held, piece, piece.place, torch.full(piece.place.size, 1.5))
    assert bool((held == 1.5).all())


class Sharded:
    """Enough of a DTensor of which this rank has half the rows."""

    placements = ("Shard(0)",)
    shape = (8, 4)

    def to_local(self):
        return torch.zeros(4, 4)


def test_state_that_cannot_be_placed_is_refused():
    with pytest.raises(UserError, match=r"row_sums.w as a plain tensor of shape \(4,\) for a sharded parameter"):
        _check_other_shape("row_sums.w", torch.zeros(4), Sharded())
    _check_other_shape("step.w", torch.zeros(()), Sharded())
    _check_other_shape("row_sums.w", torch.zeros(8), torch.zeros(8, 4))
