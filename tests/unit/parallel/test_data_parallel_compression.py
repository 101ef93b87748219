"""PowerSGD: what it sends, what it loses, and that it gets it back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.parallel.data.compression import LowRankExchange, is_worthwhile
from tests.parity.harness import Harness
from tests.unit.parallel.test_data_parallel import ranks

ROWS, COLUMNS, RANK = 24, 40, 4
SHAPES = [torch.Size((ROWS, COLUMNS)), torch.Size((COLUMNS,)), torch.Size((3, 2))]
CPU = torch.device("cpu")


def gradient(rank: int, of_rank: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, of_rank, generator=generator) @ torch.randn(of_rank, COLUMNS, generator=generator)


def make(shapes=SHAPES) -> tuple[LowRankExchange, int]:
    mesh = Mesh(Layout(dp_replicate=2), "cpu")
    names = [f"p{index}" for index in range(len(shapes))]
    return LowRankExchange(names, shapes, RANK, torch.float32, "dp_replicate"), mesh.rank


def exchange(codec: LowRankExchange, *gradients: Tensor | None) -> list[Tensor]:
    codec.start(gradients, CPU)
    codec.advance()
    return codec.finish()


def once(of_rank: int):
    codec, rank = make()
    job.traffic.take()
    sums = exchange(codec, gradient(rank, of_rank), torch.full((COLUMNS,), rank + 1.0), None)
    return sums, job.traffic.take()["dp_replicate"]


def test_a_sum_of_low_rank_is_exact_and_small():
    (first, sent), (second, _) = ranks().run(2, once, 2)  # two gradients of rank 2: their sum has rank 4
    torch.testing.assert_close(first[0], gradient(0, 2) + gradient(1, 2), rtol=1e-4, atol=1e-4)
    assert first[1].unique().tolist() == [3.0]
    assert first[2].tolist() == [[0.0] * 2] * 3  # too small for thin matrices, and without gradient
    assert sent == 4 * ((ROWS + COLUMNS) * RANK + COLUMNS + 6)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def repeated(forget: str, times: int) -> tuple[list[float], float]:
    """The same gradients again and again: each result's distance from the sum, and that of all results together."""
    codec, rank = make(SHAPES[:1])
    wanted, total, distances = gradient(0) + gradient(1), torch.zeros(ROWS, COLUMNS), []
    for _ in range(times):
        (result,) = exchange(codec, gradient(rank))
        distances.append(float((result - wanted).norm() / wanted.norm()))
        total += result
        if forget == "errors":
            codec.errors[0].zero_()
    return distances, float((total - times * wanted).norm() / (times * wanted).norm())


def test_what_is_left_out_is_sent_later():
    kept, forgotten = (ranks().run(2, repeated, forget, 40)[0] for forget in ("", "errors"))
    assert kept[0][0] > 0.5  # one result alone is far from a sum of full rank
    assert kept[1] < 0.1
    assert forgotten[1] > 0.5


def test_each_step_starts_from_the_last_ones_directions():
    distances, _ = ranks().run(2, repeated, "errors", 10)[0]
    u = torch.linalg.svdvals(gradient(0) + gradient(1))
    best = float(u[RANK:].norm() / u.norm())  # no product of this rank is nearer
    assert distances[0] > 1.05 * best
    assert distances[-1] < 1.02 * best


def recovering():
    codec, rank = make(SHAPES[:1])
    exchange(codec, torch.full((ROWS, COLUMNS), torch.inf if rank else 1.0))
    return [exchange(codec, gradient(rank, 2))[0] for _ in range(2)][-1]


def test_a_gradient_that_is_not_finite_does_not_stay():
    first, second = ranks().run(2, recovering)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("shape", "worth"), [((24, 40), True), ((8, 8), False), ((9, 9), True), ((3, 100), False), ((64,), False)]
)
def test_only_matrices_that_shrink_are_compressed(shape, worth):
    assert is_worthwhile(torch.Size(shape), RANK) == worth


@pytest.mark.parametrize(("tp", "count"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_training_with_thin_gradients_learns(tmp_path, tp, count):
    harness = Harness(ranks(), tmp_path)
    layout = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.tensor_parallel_degree": tp}
    plain = harness.run(layout, count)
    thin = harness.run(layout | {"parallelism.gradient_compression": "powersgd"}, count)
    assert thin.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    fall = plain.losses[0] - plain.losses[-1]
    assert thin.losses[-1] < thin.losses[0] - 0.7 * fall
    assert thin.losses[-1] != plain.losses[-1]
    assert thin.comm_bytes[0]["dp_replicate"] < 0.3 * plain.comm_bytes[0]["dp_replicate"]
