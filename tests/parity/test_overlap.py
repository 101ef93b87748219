"""The overlapped products give what one process computes: values, gradients, whatever the chunks, ranks and delays."""

import random
import time
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.transfers import Exchange, distances, pieces
from shardline.models.products.linear import accumulate, weight_queue
from shardline.parallel.tensor import overlap
from shardline.parallel.tensor.async_tp import usable_backends
from shardline.parallel.tensor.backend_table import Choice, backends, choices
from shardline.parallel.tensor.serial_and_ring import Serial
from tests.parity.harness import DEVICE
from tests.parity.pool import Pool

K, N, ROWS = 6, 10, 5  # rows of each rank: no number of chunks but 1 and 5 divides them
OPERATIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear")


def join_tp() -> tuple[int, int]:
    """A tp axis of all ranks of this case, or of this process alone."""
    if not dist.is_initialized():
        job.set_axes({})
        return 0, 1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job.set_axes({name: collectives.Axis(name, dist.group.WORLD, ranks, rank) for name in ("tp", "world")})
    return rank, ranks


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expected(operation: str, rank: int, ranks: int) -> list[Tensor]:
    """Result and gradients of this rank, computed in one process from what every rank has."""
    first = operation in ("all_gather_linear", "copy_linear")
    shared = operation in ("copy_linear",)
    rows = ROWS if operation == "all_gather_linear" else ROWS * ranks
    xs = [drawn(rows, K, seed=0 if shared else r).requires_grad_() for r in range(ranks)]
    x_all = [xs[0]] * ranks if shared else xs
    weights = [
        [drawn(N, K, seed=100 + r).requires_grad_(), drawn(N + 2, K, seed=200 + r).requires_grad_()]
        for r in range(ranks)
    ]
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    mine: list[Tensor] = []
    if first:
        for r in range(ranks):
            x = torch.cat(xs) if operation == "all_gather_linear" else x_all[r]
            outs = [x @ w.t() for w in weights[r]]
            mine = outs if r == rank else mine
            total = total + sum((out * probe(out, r)).sum() for out in outs)
    else:
        whole = sum(xs[r] @ weights[r][0].t() for r in range(ranks))
        for r in range(ranks):
            out = whole[r * ROWS : (r + 1) * ROWS] if operation == "linear_reduce_scatter" else whole
            mine = [out] if r == rank else mine
            scale = 1.0 if operation == "linear_reduce_scatter" else 1.0 / ranks
            total = total + (out * probe(out, r if scale == 1.0 else 0)).sum() * scale
    total.backward()
    x = xs[0] if shared else xs[rank]
    used = weights[rank] if first else weights[rank][:1]
    return [*(out.detach() for out in mine), x.grad, *(w.grad for w in used)]


def probe(out: Tensor, rank: int) -> Tensor:
    """The gradient that comes in; sums that every rank has get the same one everywhere."""
    return drawn(*out.shape, seed=300 + rank)


def computed(operation: str, deferred: bool = False) -> list[Tensor]:
    rank, ranks = join_tp()
    rows = ROWS if operation == "all_gather_linear" else ROWS * ranks
    x = drawn(rows, K, seed=0 if operation == "copy_linear" else rank).requires_grad_()
    weights = [drawn(N, K, seed=100 + rank).requires_grad_(), drawn(N + 2, K, seed=200 + rank).requires_grad_()]
    if operation not in ("all_gather_linear", "copy_linear"):
        weights = weights[:1]
    outs = list(getattr(overlap, operation)(x, weights, "tp"))
    same = operation == "linear_all_reduce"
    loss = sum((out * probe(out, 0 if same else rank)).sum() for out in outs)
    if deferred:
        with weight_queue.deferring():
            loss.backward()
        assert all(weight.grad is None for weight in weights)
        assert len(weight_queue) == 1
        accumulate(weight_queue.take())
        assert len(weight_queue) == 0
    else:
        loss.backward()
    return [*(out.detach() for out in outs), x.grad, *(w.grad for w in weights)]


def check(operation: str, choice: Choice, ops: bool, deferred: bool) -> None:
    rank, ranks = join_tp()
    wanted = expected(operation, rank, ranks)
    with choices.forced(choice), patch.object(choices, "visible", ops):
        seen = computed(operation, deferred)
    for number, (a, b) in enumerate(zip(wanted, seen, strict=True)):
        torch.testing.assert_close(
            b, a, rtol=1e-12, atol=1e-12, msg=lambda m, n=number: f"{operation} {choice} {n}: {m}"
        )


def check_all() -> int:
    _, ranks = join_tp()
    done = 0
    device = torch.device(DEVICE)
    names = usable_backends("auto", device, []) if ranks > 1 else ["serial", "ring"]
    names = [name for name in names if name != "fused"]  # which wants whole tiles: test_fused_gpu.py
    for operation, backend, chunks, ops in product(OPERATIONS, names, (1, 2, 3, 8), (False, True)):
        check(operation, Choice(backend, chunks), ops, deferred=False)
        done += 1
    for operation, backend in product(OPERATIONS, names):
        check(operation, Choice(backend, 2), ops=False, deferred=ranks > 1)
    return done // len(names)


# On a GPU each in a session of its own: symmetric memory outlives the group that it was made for.
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_values_and_gradients_are_those_of_one_process(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, check_all) == [32] * ranks


def traced() -> None:
    """Each operation in one graph, without a break, forward and backward."""
    rank, ranks = join_tp()
    for operation in OPERATIONS:
        torch._dynamo.reset()
        wanted = expected(operation, rank, ranks)
        with choices.forced(Choice("ring", 2)):
            function = getattr(overlap, operation)
            with patch.object(overlap, operation, torch.compile(function, fullgraph=True, backend="aot_eager")):
                seen = computed(operation)
        for a, b in zip(wanted, seen, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_one_graph_each(pool: Pool) -> None:
    pool.run(2, traced)


def frozen() -> None:
    """Only what is asked for gets a gradient."""
    rank, _ = join_tp()
    for backend in ("serial", "ring"):
        with choices.forced(Choice(backend, 2)):
            x, weight = drawn(ROWS, K, seed=rank), drawn(N, K, seed=100).requires_grad_()
            (out,) = overlap.all_gather_linear(x, (weight,), "tp")
            out.sum().backward()
            assert weight.grad is not None
            x, weight = drawn(ROWS, K, seed=rank).requires_grad_(), drawn(N, K, seed=100)
            (out,) = overlap.all_gather_linear(x, (weight,), "tp")
            overlap.linear_reduce_scatter(out, (drawn(K, N, seed=5),), "tp")[0].sum().backward()
            assert x.grad is not None
            assert weight.grad is None


def test_frozen_weights_and_inputs(pool: Pool) -> None:
    pool.run(2, frozen)


class Generous(Serial):
    """Computes the gradient of the input also where it is not needed, as backends on CUDA do."""

    def linear_scatter_backward(self, gradient, x, weight, axis, chunks, needs):  # type: ignore[no-untyped-def]
        return super().linear_scatter_backward(gradient, x, weight, axis, chunks, needs._replace(x=True))


def partial() -> None:
    """Ops with results that nothing reads, and with a gradient that nothing needs, give what eager functions give."""
    rank, ranks = join_tp()
    for operation in ("all_gather_linear", "copy_linear"):
        found = []
        for visible in (False, True):
            x = drawn(ROWS, K, seed=rank).requires_grad_()
            weights = [drawn(N, K, seed=100).requires_grad_(), drawn(N, K, seed=101).requires_grad_()]
            with patch.object(choices, "visible", visible):
                getattr(overlap, operation)(x, weights, "tp")[1].sum().backward()
            found.append([x.grad, weights[1].grad])
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    x, weight = drawn(ROWS * ranks, K, seed=rank), drawn(N, K, seed=100).requires_grad_()
    with patch.dict(backends, generous=Generous()), patch.object(choices, "visible", True):
        with choices.forced(Choice("generous")):
            overlap.linear_reduce_scatter(x, (weight,), "tp")[0].sum().backward()
    wanted = torch.ones(ROWS * ranks, N, dtype=x.dtype).t() @ x
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-12, atol=1e-12)


def test_ops_whose_results_or_gradients_are_used_in_part(pool: Pool) -> None:
    pool.run(2, partial)


def delayed(repetitions: int, seed: int) -> int:
    """Ranks that are late at random places; every repetition gives the same bits."""
    rank, _ = join_tp()
    late = random.Random(seed * 100 + rank)
    swap = Exchange.swap

    def slow_swap(self: Exchange, *arguments: object) -> object:
        if late.random() < 0.1:
            time.sleep(late.random() * 2e-3)
        return swap(self, *arguments)

    first: dict[str, list[Tensor]] = {}
    with patch.object(Exchange, "swap", slow_swap):
        for repetition in range(repetitions):
            operation = OPERATIONS[repetition % 2]
            if late.random() < 0.05:
                time.sleep(late.random() * 3e-3)
            with choices.forced(Choice("ring", 1 + repetition // 2 % 2 * 3)):
                seen = computed(operation)
            wanted = first.setdefault(f"{operation} {repetition // 2 % 2}", seen)
            assert all(torch.equal(a, b) for a, b in zip(wanted, seen, strict=True)), (repetition, operation)
    return repetitions


@pytest.mark.parametrize(
    ("ranks", "repetitions"),
    [(2, 200), (3, 100), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1000), (3, 500)))],
)
def test_delays_change_nothing(pool: Pool, ranks: int, repetitions: int) -> None:
    assert pool.run(ranks, delayed, repetitions, ranks) == [repetitions] * ranks


def counted() -> dict[str, dict[str, int]]:
    join_tp()
    sent = {}
    for backend, operation in product(("serial", "ring"), OPERATIONS):
        job.traffic.take()
        with choices.forced(Choice(backend, 2)):
            computed(operation)
        sent[f"{backend} {operation}"] = job.traffic.take()
    return sent


def test_backends_send_the_same_bytes(pool: Pool) -> None:
    for sent in pool.run(3, counted):
        for operation in OPERATIONS:
            assert sent[f"ring {operation}"] == sent[f"serial {operation}"] != {}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_block_goes_to_everyone_once_nearest_first(ranks: int) -> None:
    found = distances(ranks)
    assert sorted(found) == list(range(1, ranks))
    near = [min(d, ranks - d) for d in found]
    assert near == sorted(near)


@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (1, 8), (5, 3), (8, 8), (7, 2), (3, 8)])
def test_pieces_cover_the_rows(rows: int, chunks: int) -> None:
    found = pieces(rows, chunks)
    assert [row for piece in found for row in range(rows)[piece]] == list(range(rows))
    sizes = [piece.stop - piece.start for piece in found]
    assert len(found) == min(rows, chunks)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
