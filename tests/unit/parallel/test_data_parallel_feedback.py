"""Gradients in 8 bits and the largest alone: what is sent, what is lost, and that it comes back; DDP and HSDP."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.parallel.data.error_feedback import BLOCK, FeedbackExchange, Int8Exchange, TopKExchange
from tests.parity.harness import Harness
from tests.unit.parallel.test_data_parallel import ranks
from tests.unit.parallel.test_data_parallel_fsdp import backward, build

SHAPES = [torch.Size((24, 40)), torch.Size((40,)), torch.Size(())]
ELEMENTS = 24 * 40 + 41
CPU = torch.device("cpu")


def gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * 10.0**rank for shape in SHAPES]


def wanted(count: int) -> Tensor:
    return sum(flat(gradients(rank)) for rank in range(count))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def make(kind: str, count: int) -> tuple[FeedbackExchange, int]:
    mesh = Mesh(Layout(dp_replicate=count), "cpu")
    if kind == "int8":
        return Int8Exchange(SHAPES, torch.float32, "dp_replicate"), mesh.rank
    return TopKExchange(SHAPES, torch.float32, "dp_replicate", float(kind)), mesh.rank


def exchange(codec: FeedbackExchange, tensors: list[Tensor | None]) -> Tensor:
    codec.start(tensors, CPU)
    codec.advance()
    codec.advance()  # must not matter
    return flat(codec.finish())


def once(kind: str, count: int) -> tuple[Tensor, Tensor, float]:
    codec, rank = make(kind, count)
    job.traffic.take()
    result = exchange(codec, gradients(rank))
    return result, flat(codec.memories(CPU)), job.traffic.take()["dp_replicate"]


@pytest.mark.parametrize("count", [2, 3])
def test_int8_sends_a_quarter_and_is_off_by_half_a_code(count):
    runs = ranks().run(count, functools.partial(once, "int8", count))
    part = -(-ELEMENTS // count // BLOCK) * BLOCK
    sums = wanted(count)
    codes = [float(flat(gradients(rank)).abs().max()) / 127 for rank in range(count)]
    bound = (sum(codes) + float(sums.abs().max()) * 1.01 / 127) / 2  # each rank rounds once, and the owner once more
    for result, _, sent in runs:
        assert torch.equal(result, runs[0][0])
        assert 0 < float((result - sums).abs().max()) <= bound
        assert sent == 2 * (count - 1) * part * (1 + 4 / BLOCK)
    owed = sum(error for _, error, _ in runs)
    torch.testing.assert_close(runs[0][0] + owed, sums, rtol=1e-4, atol=1e-4)  # nothing is lost


def test_all_of_the_largest_are_all():
    (first, owed, _), (second, _, _) = ranks().run(2, once, "1.0", 2)
    assert torch.equal(first, wanted(2))
    assert torch.equal(first, second)
    assert not owed.any()


def test_the_largest_travel_and_the_rest_is_owed():
    runs = ranks().run(3, once, "0.1", 3)
    sent = -(-ELEMENTS // 10)
    for rank, (result, owed, traffic) in enumerate(runs):
        assert torch.equal(result, runs[0][0])
        assert traffic == 2 * sent * 8
        mine = flat(gradients(rank))
        left = owed != 0
        assert int(left.sum()) == ELEMENTS - sent
        assert torch.equal(owed[left], mine[left])
        assert mine[~left].abs().min() >= mine[left].abs().max()
    torch.testing.assert_close(runs[0][0] + sum(owed for _, owed, _ in runs), wanted(3))


def repeated(kind: str, forget: bool, times: int) -> float:
    """The same gradients again and again: the distance of all results together from what they should add up to."""
    codec, rank = make(kind, 2)
    total = torch.zeros(ELEMENTS)
    for _ in range(times):
        total += exchange(codec, gradients(rank))
        if forget:
            codec.error.zero_()
    return float((total / times - wanted(2)).norm() / wanted(2).norm())


@pytest.mark.parametrize(("kind", "gain"), [("int8", 8), ("0.05", 4)])
def test_what_is_left_out_is_sent_later(kind, gain):
    kept, forgotten = (ranks().run(2, repeated, kind, forget, 40)[0] for forget in (False, True))
    assert kept * gain < forgotten


def recovering(kind: str) -> tuple[Tensor, Tensor]:
    codec, rank = make(kind, 2)
    broken = [torch.full(shape, torch.nan if rank else 1.0) for shape in SHAPES]
    seen = exchange(codec, broken)
    none: list[Tensor | None] = [None] * len(SHAPES)
    for _ in range(3):
        exchange(codec, none)
    return seen, exchange(codec, gradients(rank))


@pytest.mark.parametrize("kind", ["int8", "0.5"])
def test_a_gradient_that_is_not_finite_is_seen_and_does_not_stay(kind):
    (seen, first), (_, second) = ranks().run(2, recovering, kind)
    assert not torch.isfinite(seen).all()
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


# ---- HSDP ------------------------------------------------------------------------------------------------------------


def sharded(kind: str, fraction: float, layout: Layout, batches: int = 3, **more):
    """Bytes between replicas, this rank's gradients, and how many elements its modules sum."""
    config, model = build(
        layout, gradient_compression=kind, **({"topk_fraction": fraction} if fraction else {}), **more
    )
    job.traffic.take()
    backward(config, model, batches)
    found = [p.grad.to_local() for p in model.parameters()]
    return job.traffic.take()["dp_replicate"], found, sum(g.numel() for g in found)


HSDP = Layout(dp_replicate=2, dp_shard=2)


@pytest.mark.parametrize(("kind", "fraction", "near"), [("bfloat16", 0, 2e-2), ("int8", 0, 2e-2), ("topk", 1.0, 0)])
def test_shards_are_summed_between_replicas_in_fewer_bytes(kind, fraction, near):
    plain = ranks().run(4, functools.partial(sharded, "none", 0, HSDP))
    small = ranks().run(4, functools.partial(sharded, kind, fraction, HSDP))
    for (whole, sums, _), (sent, found, elements) in zip(plain, small, strict=True):
        share = {"bfloat16": 0.5, "int8": 0.25, "topk": 2.0}[kind]
        assert share * whole <= sent <= 1.1 * share * whole
        assert whole == 4 * elements
        seen, exact = flat(found), flat(sums)
        assert torch.equal(seen, exact) == (near == 0)
        assert float((seen - exact).norm()) <= near * float(exact.norm())


@pytest.mark.parametrize(("kind", "count", "share"), [("int8", 2, 0.27), ("topk", 4, 0.41)])
def test_training_learns_with_what_is_sent(tmp_path, kind, count, share):
    """DDP on two ranks, HSDP on four: the loss falls nearly as far as with whole gradients."""
    harness = Harness(ranks(), tmp_path)
    layout = {
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": count // 2,
    }
    plain = harness.run(layout, count)
    changes = {"parallelism.gradient_compression": kind} | (
        {"parallelism.topk_fraction": 0.2} if kind == "topk" else {}
    )
    small = harness.run(layout | changes, count)
    assert small.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    fall = plain.losses[0] - plain.losses[-1]
    assert small.losses[-1] < small.losses[0] - 0.7 * fall
    if kind == "int8":
        assert small.losses == pytest.approx(plain.losses, rel=2e-3)
    assert small.losses[-1] != plain.losses[-1]
    assert small.comm_bytes[0]["dp_replicate"] < share * plain.comm_bytes[0]["dp_replicate"]
