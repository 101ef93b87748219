"""Gradient norm and clipping against torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from shardline.optim.clip import clip_, nonfinite_parameters, squared_norm
from shardline.optim.norms import squared_row_sums, squared_sum, squared_sums


def model_with_gradients(size: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn_like(parameter)
    model[2].bias.grad = None
    return model


def grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return squared_norm(parameters).sqrt()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [0.01, 1.0, 1000.0])
def test_equals_torch(size):
    ours, reference = model_with_gradients(size), model_with_gradients(size)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    norm = grad_norm(ours.parameters())
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
    clip_(ours.parameters(), norm.item(), 1.0)
    torch.testing.assert_close(gradients(ours), gradients(reference))
    assert grad_norm(ours.parameters()) <= 1.0 + 1e-6


@pytest.mark.parametrize("max_norm", [0, -1.0, math.inf])
def test_no_clipping(max_norm):
    model = model_with_gradients(100.0)
    before = gradients(model)
    clip_(model.parameters(), grad_norm(model.parameters()).item(), max_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))


def test_bfloat16_gradients_are_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0)
    assert grad_norm([parameter]).item() == pytest.approx(math.sqrt(1000), rel=1e-6)  # bfloat16 has 31.625 nearby
    clip_([parameter], grad_norm([parameter]).item(), 1.0)
    assert parameter.grad.dtype == torch.bfloat16
    assert grad_norm([parameter]).item() == pytest.approx(1.0, rel=0.01)


def test_squared_sums_are_per_gradient():
    sums = squared_sums([torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])])
    assert sums.tolist() == pytest.approx([25.0, 4.0])


def uneven(rows: int, columns: int) -> torch.Tensor:
    """A gradient of an embedding: a few frequent tokens have large rows, the others small ones."""
    torch.manual_seed(0)
    gradient = 1e-3 * torch.randn(rows, columns)
    gradient[:40] *= 1000
    return gradient


@pytest.mark.parametrize(
    "gradient",
    [
        uneven(2051, 256),  # torch's own norm is 2.5e-5 too small on a CPU
        uneven(3001, 77),
        uneven(2051, 256).T,
        uneven(2051, 256).bfloat16(),
        torch.full((3000, 3000), 0.1),  # 9e-3 too small
        torch.full((4, 100_000), 0.1).index_fill_(1, torch.tensor(0), 1000.0),
    ],
    ids=["rows", "odd", "columns", "bfloat16", "equal", "one-large"],
)
def test_small_entries_count_beside_large_ones(gradient):
    exact = gradient.double().square()
    assert squared_sum(gradient).item() == pytest.approx(exact.sum().item(), rel=5e-7)
    assert squared_sums([gradient, gradient]).tolist() == pytest.approx([exact.sum().item()] * 2, rel=5e-7)
    torch.testing.assert_close(squared_row_sums(gradient).double(), exact.sum(1), rtol=5e-6, atol=0)


def test_no_gradients():
    parameter = nn.Parameter(torch.zeros(3))
    assert grad_norm([parameter]).item() == 0
    clip_([parameter], grad_norm([parameter]).item(), 1.0)
    assert nonfinite_parameters(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_show_in_the_norm_and_are_named(bad):
    model = model_with_gradients()
    assert nonfinite_parameters(model) == []
    model[1].weight.grad[2, 3] = bad
    model[0].bias.grad[0] = bad
    assert not math.isfinite(grad_norm(model.parameters()))
    assert nonfinite_parameters(model) == ["0.bias", "1.weight"]
