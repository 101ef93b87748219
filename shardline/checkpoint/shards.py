"""Which parts of each logical tensor a rank holds, and how data read from files is put back into them.

A parameter may be fused, and it may be a DTensor of which this rank has some rows and columns. However it is sharded,
the shard holds at most one rectangle of each logical tensor, because fused rows keep the order of each weight:

    wqkv rows   | q0 q1 k0 v0 | q2 q3 k1 v1 |      held rows 2 to 6:  k0 v0 q2 q3
                      ^---------------^            = rows 2:4 of wq, 0:1 of wk, 0:1 of wv

So a shard is a list of pieces of logical tensors, and no file knows of fused weights, meshes or placements.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.adapters.lora import trained_parameters
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import is_halved, keeps_type, logical_names, logical_rows
from shardline.optim.state import has_columns_of, has_rows_of, optimizer_state


class Place(NamedTuple):
    """A rectangle of a tensor: its first element and its size in each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def within(self, outer: Place) -> Place:
        """The same place, counted from the start of another."""
        return Place(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def part(self, slices: Sequence[slice]) -> Place:
        """The part of this place that `slices` select, the first of them in the first dimension."""
        ranges = [range(size)[cut] for size, cut in zip(self.size, slices, strict=False)]
        start = [first + each.start for first, each in zip(self.start, ranges, strict=False)]
        rest = len(ranges)
        return Place((*start, *self.start[rest:]), (*map(len, ranges), *self.size[rest:]))

    def meet(self, other: Place) -> Place:
        """The intersection of two places, perhaps empty (a size of 0)."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        end = [min(a + n, b + m) for a, n, b, m in ends]
        return Place(start, tuple(max(0, b - a) for a, b in zip(start, end, strict=True)))


class TensorPiece(NamedTuple):
    """A piece of the logical tensor `name`, whose full shape is `shape`, within a tensor that this rank holds.

    `rows` are the rows of the held tensor that form the piece, in the order of the logical tensor; None: all of them.
    """

    name: str
    shape: tuple[int, ...]
    place: Place
    rows: Tensor | None
    half: int | None = None  # in a fused weight of experts: the index in the second dimension of the held tensor

    @property
    def key(self) -> str:
        """The name in a file: `name` for the whole tensor, else with its place, as in `name[512:1024,0:64]`."""
        return place_key(self.name, self.shape, self.place)

    def within(self, held: Tensor) -> Tensor:
        """The part of the held tensor in which this piece lies, with the piece's number of dimensions."""
        return held if self.half is None else held[:, self.half]


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that this rank holds, and the pieces it consists of; its replicas on other ranks have the same `key`."""

    key: int
    tensor: Tensor  # local
    dtype: torch.dtype  # the type in which it is written
    pieces: tuple[TensorPiece, ...]
    changes_in_backward: bool = False  # rather than only in the optimizer's step

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * sum(piece.place.elements for piece in self.pieces)


def place_key(name: str, shape: Sequence[int], place: Place) -> str:
    if place == whole_place(shape):
        return name
    return f"{name}[{','.join(f'{a}:{a + n}' for a, n in zip(place.start, place.size, strict=True))}]"


def whole_place(shape: Sequence[int]) -> Place:
    return Place((0,) * len(shape), tuple(shape))


def tile(shape: Sequence[int], places: Sequence[Place]) -> bool:
    """Whether places cover a shape without overlapping.

    A box is determined by its corners, each with the sign (-1) ** (number of coordinates at the box's end). If places
    tile the shape, their signed corners add up to those of the whole, in any order.
    """
    whole = whole_place(shape)
    if len(places) == 1 or not whole.elements:
        return all(place == whole for place in places if place.elements or whole.elements)
    left: Counter[tuple[int, ...]] = Counter()
    for place, sign in ((whole, -1), *((place, 1) for place in places)):
        ends = [((first, 1), (first + size, -1)) for first, size in zip(place.start, place.size, strict=True)]
        for corner in itertools.product(*ends):
            left[tuple(at for at, _ in corner)] += sign * math.prod(way for _, way in corner)
    return not any(left.values())


def cut(arch: Architecture, name: str, shape: Sequence[int], place: Place) -> list[TensorPiece]:
    """Return the non-empty pieces of a parameter of full shape `shape`, of which this rank holds `place`."""
    names = logical_names(arch, name)
    if is_halved(name):
        held = Place((place.start[0], *place.start[2:]), (place.size[0], *place.size[2:]))
        pieces = [TensorPiece(half, (shape[0], *shape[2:]), held, None, n) for n, half in enumerate(names)]
    elif names == [name]:
        pieces = [TensorPiece(name, tuple(shape), place, None)]
    else:
        pieces = []
        for rows in logical_rows(arch, name, shape[0], slice(place.start[0], place.start[0] + place.size[0])):
            held = Place((rows.start, *place.start[1:]), (rows.stop - rows.start, *place.size[1:]))
            pieces.append(TensorPiece(rows.name, (rows.size, *shape[1:]), held, rows.places))
    return [piece for piece in pieces if piece.place.elements]


def place_of(tensor: Tensor) -> Place:
    """Where this rank's shard lies in the full tensor."""
    if not hasattr(tensor, "placements"):
        return whole_place(tensor.shape)
    slices = local_slices(tensor)
    return Place(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def held_weights(model: Decoder, dtype: torch.dtype | None = None) -> list[HeldTensor]:
    """The model's weights (with LoRA, the trained ones); tied weights occur once, under the embedding's name."""
    return [
        _held(model.arch, "model/", name, parameter.detach(), None if keeps_type(name) else dtype)
        for name, parameter in trained_parameters(model).named_parameters()
    ]


def held_state(model: Decoder, optimizer: torch.optim.Optimizer) -> list[HeldTensor]:
    """Optimizer state under `optimizer/<kind>/<logical name>`; scalars are repeated under each name."""
    parameters = dict(model.named_parameters())
    held = []
    for key, tensor in optimizer_state(optimizer, model).items():
        kind, name = key.split(".", 1)
        prefix, place = f"optimizer/{kind}/", place_of(tensor)
        pieces = state_pieces(model.arch, kind, name, tensor, parameters[name])
        pieces = [piece._replace(name=prefix + piece.name) for piece in pieces]
        held.append(HeldTensor(held_key(prefix + name, place), local(tensor), tensor.dtype, tuple(pieces)))
    return held


def state_pieces(arch: Architecture, kind: str, name: str, state: Tensor, parameter: Tensor) -> list[TensorPiece]:
    """The pieces of logical tensors in one kind of optimizer state of a parameter."""
    names, place, shape = logical_names(arch, name), place_of(state), tuple(state.shape)
    if has_rows_of(kind, state, parameter):
        return cut(arch, name, shape, place)
    if not has_columns_of(kind, state, parameter):
        _check_other_shape(f"{kind}.{name}", state, parameter)
        return [TensorPiece(logical, shape, place, None) for logical in names]
    if is_halved(name) or len(names) == 1:
        return cut(arch, name, shape, place)
    one, row = (1, *shape[1:]), Place((0, *place.start[1:]), (1, *place.size[1:]))
    pieces = [TensorPiece(logical, one, row, torch.tensor([number])) for number, logical in enumerate(names)]
    return [piece for piece in pieces if piece.place.elements]


def _held(arch: Architecture, prefix: str, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> HeldTensor:
    place = place_of(tensor)
    pieces = [piece._replace(name=prefix + piece.name) for piece in cut(arch, name, tensor.shape, place)]
    return HeldTensor(held_key(prefix + name, place), local(tensor), dtype or tensor.dtype, tuple(pieces))


def _check_other_shape(key: str, state: Tensor, parameter: Tensor) -> None:
    """Refuse per-row or per-column state in a plain tensor: nothing says to which rows it belongs."""
    cut_up = hasattr(parameter, "placements") and local(parameter).shape != parameter.shape
    if state.ndim and cut_up and not hasattr(state, "placements"):
        raise UserError(
            f"the optimizer keeps {key} as a plain tensor of shape {tuple(state.shape)} for a sharded parameter, so"
            " a checkpoint cannot tell which rows it belongs to: keep it as a DTensor, or as a 0-d tensor"
        )


def held_key(name: str, place: Place) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name} {place}".encode(), digest_size=8).digest(), "little")


class Scratch:
    """Reusable host memory for pieces that cannot be written from where they are."""

    def __init__(self, size: int = 32 << 20) -> None:
        self.size = size
        self._memory: Tensor | None = None

    def rows(self, count: int, like: Tensor) -> Tensor:
        shape = (count, *like.shape[1:])
        needed = math.prod(shape) * like.element_size()
        if self._memory is None or self._memory.numel() < needed:
            pinned = torch.cuda.is_available()
            self._memory = torch.empty(max(needed, self.size), dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:needed].view(like.dtype).view(shape)


def take(held: HeldTensor, piece: TensorPiece, scratch: Scratch) -> Iterator[Tensor]:
    """Copy a piece to the host, some rows at a time; each batch of rows may overwrite the one before."""
    tensor, order = piece.within(held.tensor), piece.rows
    if not tensor.ndim:
        yield tensor.to("cpu")
    elif order is None and not tensor.is_cuda and tensor.is_contiguous():
        yield tensor
    else:
        step = max(1, scratch.size * piece.place.size[0] // max(1, piece.place.elements * tensor.element_size()))
        for first in range(0, piece.place.size[0], step):
            count = min(step, piece.place.size[0] - first)
            rows = scratch.rows(count, tensor)
            if order is None:
                rows.copy_(tensor[first : first + count])
            elif tensor.is_cuda:
                rows.copy_(tensor.index_select(0, order[first : first + count].to(tensor.device)))
            else:
                torch.index_select(tensor, 0, order[first : first + count], out=rows)
            yield rows


def put(tensor: Tensor, piece: TensorPiece, place: Place, block: Tensor) -> None:
    """Copy `block`, which is `place` of the piece's logical tensor, into the held tensor."""
    here, tensor = place.within(piece.place).slices, piece.within(tensor)
    with torch.no_grad():
        if piece.rows is None:
            tensor[here].copy_(block)
        else:
            rows = piece.rows[here[0]].to(tensor.device)
            tensor[(slice(None), *here[1:])].index_copy_(0, rows, block.to(tensor.device, tensor.dtype))
