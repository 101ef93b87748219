"""How matrices are shared out: exactly one owner each, work in balance, and every piece arrives where it belongs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from shardline.optim import matrices
from shardline.optim.matrices import Matrix, MatrixExchange, share_out


def held(shape, ranks, placements, at):
    """What DTensor gives a rank, dimension of the mesh after dimension: equal parts, the last ones smaller or empty."""
    slices = [slice(0, size) for size in shape]
    for size, place, cut in zip(ranks, at, placements, strict=True):
        if isinstance(cut, Shard):
            first, length = slices[cut.dim].start, slices[cut.dim].stop - slices[cut.dim].start
            each = -(-length // size)
            slices[cut.dim] = slice(first + min(place * each, length), first + min((place + 1) * each, length))
    return tuple(slices)


def matrix(shape, ranks, placements, index=(), rows=None):
    parameter = SimpleNamespace(shape=shape, placements=placements)
    size = (shape[-2] if rows is None else len(rows), shape[-1])
    return Matrix(parameter, index, rows, size, lambda at: held(shape, ranks, placements, at))


@st.composite
def layouts(draw):
    """A mesh and matrices on it: plain, fused and of experts, cut and copied in different ways."""
    ranks = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = st.sampled_from([Shard(0), Shard(1), Replicate()])
    found = []
    for _ in range(draw(st.integers(1, 12))):
        placements = tuple(draw(cuts) for _ in ranks)
        rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        kind = draw(st.sampled_from(["plain", "fused", "experts"]))
        if kind == "plain":
            found.append(matrix((rows, columns), ranks, placements))
        elif kind == "fused":
            order = np.arange(2 * rows).reshape(-1, 2)
            found += [matrix((2 * rows, columns), ranks, placements, rows=order[:, part]) for part in (0, 1)]
        else:
            shape = (draw(st.integers(1, 4)), rows, columns)
            found += [matrix(shape, ranks, placements, (expert,)) for expert in range(shape[0])]
    return ranks, found


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_matrix_has_one_owner(layout):
    ranks, every = layout
    rounds = share_out(every, ranks)
    tasks = [task for tasks in rounds for task in tasks]
    assert sorted(map(id, (task.matrix for task in tasks))) == sorted(map(id, every))
    for tasks in rounds:
        owners = [task.owner for task in tasks]
        assert len(set(owners)) == len(owners), "a rank has two matrices in a round"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 8), st.integers(8, 64)), min_size=1, max_size=40))
def test_no_rank_has_more_work_than_another_by_more_than_one_matrix(size, shapes):
    """Every rank has rows of every matrix: one without any (8 rows over 5 ranks) owns none."""
    every = [matrix((rows * size, columns), (size,), (Shard(0),)) for rows, columns in shapes]
    work = dict.fromkeys(range(size), 0)
    for task in itertools.chain(*share_out(every, (size,))):
        work[task.owner[0]] += task.matrix.work
    assert max(work.values()) - min(work.values()) <= max(one.work for one in every)


def test_rounds_are_as_few_as_can_be_where_matrices_are_alike():
    every = [matrix((32, 64), (2, 4), (Shard(0), Shard(1))) for _ in range(24)]
    rounds = share_out(every, (2, 4))
    assert [len(tasks) for tasks in rounds] == [8, 8, 8]


class Ranks:
    """All ranks of a mesh in one process: every rank's plan, and a network that hands their messages over."""

    def __init__(self, ranks, every):
        self.exchanges = {}
        for at in itertools.product(*map(range, ranks)):
            mesh = SimpleNamespace(
                shape=ranks,
                get_coordinate=lambda at=at: list(at),
                mesh_dim_names=tuple(map(str, range(len(ranks)))),
                device_type="cpu",
            )
            self.exchanges[at] = MatrixExchange(every, mesh)

    def run(self, number, legs, pieces, empty):
        """One leg after the other, on all ranks at once."""
        for leg_number in range(len(next(iter(self.exchanges.values())).ranks)):
            pieces = self._leg(
                pieces,
                {at: getattr(exchange, legs)[number][leg_number] for at, exchange in self.exchanges.items()},
                empty,
            )
        return pieces

    def _leg(self, pieces, legs, empty):
        """Ask every rank for its messages, then give each what the others had for it; a missing one would be a hang."""
        messages = {}

        def note(flat, sent, received, dimension):
            messages[self.at] = flat.split(sent)
            return torch.zeros(sum(received))

        def deliver(flat, sent, received, dimension):
            at, d = self.at, int(dimension)
            parts = [messages[(*at[:d], peer, *at[d + 1 :])][at[d]] for peer in range(len(received))]
            assert [len(part) for part in parts] == received
            return torch.cat(parts)

        after = pieces
        for carry in (note, deliver):
            after = {}
            for self.at, leg in legs.items():
                with patch.object(matrices, "exchange_runs", carry):
                    after[self.at] = pieces[self.at] if leg is None else leg.run(pieces[self.at], empty)
        return after


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_every_piece_travels_to_its_owner_and_back(layout):
    """Each rank ends with its part of the changed matrix, replicas included."""
    ranks, every = layout
    wholes = [torch.randn(one.shape, generator=torch.Generator().manual_seed(n)) for n, one in enumerate(every)]
    value = {id(one): whole for one, whole in zip(every, wholes, strict=True)}
    world, empty = Ranks(ranks, every), torch.empty(0)
    any_rank = next(iter(world.exchanges.values()))
    done = set()
    for number, tasks in enumerate(any_rank.rounds):
        pieces = {}
        for at, exchange in world.exchanges.items():
            parts = [(key, tasks[key[0]].matrix) for key in exchange._held(tasks, at, 0, back=False)]
            pieces[at] = {key: value[id(one)][one.place(at)].flatten() for key, one in parts}
        pieces = world.run(number, "_in", pieces, empty)
        for at, exchange in world.exchanges.items():
            assert len({key[0] for key in pieces[at]}) <= 1
            pieces[at] = exchange._changed(tasks, pieces[at], lambda whole: whole.neg() + whole.sum(), empty)
        pieces = world.run(number, "_back", pieces, empty)
        for at in world.exchanges:
            wanted = {n for n, task in enumerate(tasks) if task.matrix.place(at) is not None}
            assert set(pieces[at]) == {(n, at) for n in wanted}
            for n in wanted:
                whole, place = value[id(tasks[n].matrix)], tasks[n].matrix.place(at)
                torch.testing.assert_close(pieces[at][n, at], (whole.neg() + whole.sum())[place].flatten())
                done.add(id(tasks[n].matrix))
    assert done == set(value)


def test_experts_that_no_ranks_share_stay_where_they_are():
    ranks, placements = (2, 2), (Shard(0), Shard(0))
    every = [matrix((4, 8, 6), ranks, placements, (expert,)) for expert in range(4)]
    world = Ranks(ranks, every)
    for exchange in world.exchanges.values():
        assert [len(tasks) for tasks in exchange.rounds] == [4]
        assert exchange._in == exchange._back[::-1] == [[None, None]]
