"""Gathers each logical matrix on one rank, its owner, which changes it and sends the parts back.

    before            in               each rank its own       back
    A0 B0 C0 D0       A0 A1 A2 A3      f(A)                    f(A)0 f(B)0 f(C)0 f(D)0       rank 0
    A1 B1 C1 D1       B0 B1 B2 B3      f(B)                    f(A)1 f(B)1 f(C)1 f(D)1       rank 1
    ...               ...              ...                     ...

A round has at most one matrix for each rank, so that a rank never has more than two of them in memory. The largest come
first, each to the rank with the least work so far, so the matrices of a round have similar sizes and all ranks similar
work. Pieces travel over one mesh dimension after another: inward by all-to-alls from the first to the last, back in
reverse order. Over a dimension with replicas nothing travels inward, and every replica receives what one has computed.
A matrix that is not shared by ranks (one of an expert) stays where it is.

All ranks of a mesh compute the same plan from the placements of its parameters, without any communication.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardline.comm.collectives import exchange_runs
from shardline.models.dtensor import local, shard_slices
from shardline.models.fused_weights import unfuse

Coordinates = tuple[int, ...]  # of a rank in the mesh; () without a mesh
Key = tuple[int, Coordinates]  # a matrix's number in its round, and the rank whose piece it is
Pieces = dict[Key, Tensor]  # flat


@dataclass(frozen=True, eq=False)
class Matrix:
    """A logical matrix: rows of a fused parameter, one expert's part of a parameter, or a whole parameter."""

    parameter: nn.Parameter
    index: tuple[int, ...]  # in the dimensions before the last two: (), an expert, or an expert and gate or up
    rows: np.ndarray | None  # its rows in a fused parameter, ascending; None: all
    shape: tuple[int, int]
    held: Callable[[Coordinates], tuple[slice, ...]]  # the shard of the parameter on a rank

    @property
    def work(self) -> int:
        """A number proportional to the multiplications of Newton-Schulz."""
        low, high = sorted(self.shape)
        return low * low * (2 * high + low)

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """The mesh dimensions whose ranks hold the same part of it."""
        placements = getattr(self.parameter, "placements", ())
        return frozenset(at for at, placement in enumerate(placements) if placement.is_replicate())

    def place(self, at: Coordinates) -> tuple[slice, slice] | None:
        """The rows and columns of the matrix that the rank at these coordinates has; None if it has none."""
        *outer, rows, columns = self.held(at)
        if not all(held.start <= index < held.stop for index, held in zip(self.index, outer, strict=True)):
            return None
        if self.rows is not None:
            rows = slice(*np.searchsorted(self.rows, [rows.start, rows.stop]).tolist())
        return (rows, columns) if rows.start < rows.stop and columns.start < columns.stop else None

    def within(self, shard: Tensor, at: Coordinates) -> tuple[Tensor, Tensor | None]:
        """A view of the part of this rank's shard that contains the matrix, and the matrix's rows in it; None: all."""
        *outer, held, _ = self.held(at)
        part = shard[tuple(index - before.start for index, before in zip(self.index, outer, strict=True))]
        if self.rows is None:
            return part, None
        first, last = np.searchsorted(self.rows, [held.start, held.stop])
        return part, torch.from_numpy(self.rows[first:last] - held.start).to(shard.device)


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    in_block = name.startswith("layers.") and name.endswith(".weight")
    return in_block and len(shape) > 1 and ".router." not in name


def matrices_of(model: nn.Module) -> list[Matrix]:
    """The matrices of a model's blocks, except those of routers; embedding, head and biases do not count."""
    found, arch = list[Matrix](), getattr(model, "arch", None)
    layouts: dict[object, Callable[[Coordinates], tuple[slice, ...]]] = {}  # parameters sharded alike share one
    for name, parameter in model.named_parameters():
        if not (is_block_matrix(name, parameter.shape) and parameter.requires_grad):
            continue
        layout = (parameter.shape, getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None))
        held = layouts.setdefault(layout, functools.cache(functools.partial(_shard, parameter)))
        *outer, size, columns = parameter.shape
        orders = [] if arch is None or outer else list(unfuse(arch, name, torch.arange(size, device="cpu")).values())
        parts = [order.numpy() for order in orders] if len(orders) > 1 else [None]
        for index, rows in itertools.product(itertools.product(*map(range, outer)), parts):
            shape = (size if rows is None else len(rows), columns)
            found.append(Matrix(parameter, index, rows, shape, held))
    return found


def _shard(parameter: nn.Parameter, at: Coordinates) -> tuple[slice, ...]:
    if not hasattr(parameter, "placements"):
        return tuple(slice(0, size) for size in parameter.shape)
    return shard_slices(parameter, list(at))


class Task(NamedTuple):
    matrix: Matrix
    owner: Coordinates


def share_out(matrices: Sequence[Matrix], ranks: Coordinates) -> list[list[Task]]:
    """Plan rounds in which no rank of a mesh of this shape owns two matrices; every owner holds part of its matrix."""
    loads, counts = np.zeros(ranks), np.zeros(ranks, dtype=int)
    rounds: list[list[Task]] = []
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        able = _holders(matrix, ranks)
        least = np.unravel_index(loads[np.ix_(*able)].argmin(), [len(places) for places in able])
        owner = tuple(places[at] for places, at in zip(able, least, strict=True))
        if counts[owner] == len(rounds):
            rounds.append([])
        rounds[counts[owner]].append(Task(matrix, owner))
        loads[owner] += matrix.work
        counts[owner] += 1
    return rounds


def _holders(matrix: Matrix, ranks: Coordinates) -> list[list[int]]:
    """For each mesh dimension, the coordinates of ranks that hold a part, on the line through the first such rank."""
    first = next(at for at in itertools.product(*map(range, ranks)) if matrix.place(at) is not None)
    lines = [[(*first[:d], at, *first[d + 1 :]) for at in range(size)] for d, size in enumerate(ranks)]
    return [[at[d] for at in line if matrix.place(at) is not None] for d, line in enumerate(lines)]


class Leg(NamedTuple):
    """An all-to-all over a mesh dimension: what each of its ranks is sent, and what is received from it.

    Each entry is a key before, a key after, and a size; copies for replicas share one key before.
    """

    dimension: str
    sent: list[list[tuple[Key, Key, int]]]
    received: list[list[tuple[Key, Key, int]]]

    def run(self, pieces: Pieces, empty: Tensor) -> Pieces:
        flat = torch.cat([empty, *(pieces[before] for part in self.sent for before, _, _ in part)])
        sent, received = ([sum(size for _, _, size in part) for part in parts] for parts in (self.sent, self.received))
        arrived = exchange_runs(flat, sent, received, self.dimension)
        coming = [(key, size) for part in self.received for _, key, size in part]
        return dict(zip([key for key, _ in coming], arrived.split([size for _, size in coming]), strict=True))


class MatrixExchange:
    """The plan for one mesh's matrices, and one rank's part in it. `mesh` is None for plain tensors."""

    def __init__(self, matrices: Sequence[Matrix], mesh: DeviceMesh | None) -> None:
        self.ranks: Coordinates = () if mesh is None else tuple(mesh.shape)
        self.here: Coordinates = () if mesh is None else tuple(mesh.get_coordinate() or ())
        self.names = () if mesh is None else mesh.mesh_dim_names or ()
        self.device = local(matrices[0].parameter).device if mesh is None else torch.device(mesh.device_type)
        self.rounds = share_out(matrices, self.ranks)
        dimensions = range(len(self.ranks))
        self._in = [[self._leg(tasks, d, back=False) for d in dimensions] for tasks in self.rounds]
        self._back = [[self._leg(tasks, d, back=True) for d in reversed(dimensions)] for tasks in self.rounds]

    def run(
        self,
        take: Callable[[Matrix, Coordinates], Tensor],
        change: Callable[[Tensor], Tensor],
        put: Callable[[Matrix, Coordinates, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        """`take` parts of each matrix on every rank, bring them to its owner to `change`, and `put` the parts back."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        for tasks, into, back in zip(self.rounds, self._in, self._back, strict=True):
            held = self._held(tasks, self.here, 0, back=False)
            pieces = {key: take(tasks[key[0]].matrix, self.here).to(empty).flatten() for key in held}
            for leg in filter(None, into):
                pieces = leg.run(pieces, empty)
            pieces = self._changed(tasks, pieces, change, empty)
            for leg in filter(None, back):
                pieces = leg.run(pieces, empty)
            for (number, at), piece in pieces.items():
                matrix = tasks[number].matrix
                put(matrix, at, piece.view(_shape(matrix, at)))

    def _changed(self, tasks: list[Task], pieces: Pieces, change: Callable[[Tensor], Tensor], empty: Tensor) -> Pieces:
        """Change this rank's matrix, if it has one in this round, and return its pieces."""
        if not pieces:
            return pieces
        ((number, matrix),) = {(number, tasks[number].matrix) for number, _ in pieces}
        whole = empty.new_empty(matrix.shape)
        for (_, at), piece in pieces.items():
            whole[matrix.place(at)] = piece.view(_shape(matrix, at))
        whole = change(whole)
        return {(number, at): whole[matrix.place(at)].flatten() for _, at in pieces}

    def _leg(self, tasks: list[Task], dimension: int, back: bool) -> Leg | None:
        """The exchange over a dimension, as this rank sees it; None if none of its ranks has anything to send."""
        here = self.here
        line = [(*here[:dimension], at, *here[dimension + 1 :]) for at in range(self.ranks[dimension])]
        moves = [list(self._moves(tasks, at, dimension, back)) for at in line]
        if all(to == at for at, own in enumerate(moves) for to, _ in own):
            return None
        sent = [[move for to, move in moves[here[dimension]] if to == at] for at in range(len(line))]
        received = [[move for to, move in own if to == here[dimension]] for own in moves]
        return Leg(self.names[dimension], sent, received)

    def _moves(
        self, tasks: list[Task], at: Coordinates, dimension: int, back: bool
    ) -> Iterator[tuple[int, tuple[Key, Key, int]]]:
        """Where along a dimension a rank sends each piece that it has before a leg."""
        for number, source in self._held(tasks, at, dimension + back, back):
            matrix, owner = tasks[number]
            rows, columns = _shape(matrix, source)
            if not back:
                yield owner[dimension], ((number, source), (number, source), rows * columns)
                continue
            every = range(self.ranks[dimension]) if dimension in matrix.copied else [source[dimension]]
            for to in every:
                after = (*source[:dimension], to, *source[dimension + 1 :])
                yield to, ((number, source), (number, after), rows * columns)

    def _held(self, tasks: list[Task], at: Coordinates, gathered: int, back: bool) -> list[Key]:
        """The pieces that a rank has once the first dimensions are gathered; of copies, only the owner's counts."""
        found = []
        for number, (matrix, owner) in enumerate(tasks):
            copies = [] if back else [d for d in matrix.copied if d >= gathered]
            if owner[:gathered] != at[:gathered] or any(owner[d] != at[d] for d in copies):
                continue
            inner = [[owner[d]] if d in matrix.copied else range(self.ranks[d]) for d in range(gathered)]
            for source in itertools.product(*inner, *([place] for place in at[gathered:])):
                if matrix.place(source) is not None:
                    found.append((number, source))
        return found


def _shape(matrix: Matrix, at: Coordinates) -> tuple[int, int]:
    place = matrix.place(at)
    assert place is not None
    return place[0].stop - place[0].start, place[1].stop - place[1].start
