"""Float8 kernels of a GPU against the same numbers multiplied in a wider type."""

import pytest
import torch

from shardline.precision import float8
from shardline.precision.convert import CAPABLE
from shardline.precision.float8 import Recipe
from shardline.precision.float8_experts import emulated_linear, grouped_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABLE, reason="the GPU has no float8"
    ),
]


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 5e-3


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients(name, compiled):
    x, weight, gradient = drawn(512, 256).requires_grad_(), drawn(384, 256).requires_grad_(), drawn(512, 384)
    seen = []
    for emulate in (False, True):
        recipe = Recipe(name, emulate)
        function = torch.compile(float8.linear, fullgraph=True) if compiled else float8.linear
        out = function(x, weight, recipe)
        seen.append([out, *torch.autograd.grad(out, (x, weight), gradient)])
    assert all(close(a, b) for a, b in zip(*seen, strict=True))


def test_rows_that_have_travelled_are_multiplied_where_they_lie():
    x, weight = drawn(64, 256), drawn(128, 256)
    recipe = Recipe("tensorwise", emulate=False)
    rows = float8.from_bytes(float8.to_bytes(float8.quantize(x)), float8.E4M3)
    found = float8.product(rows, float8.for_rows(weight, recipe), recipe, torch.bfloat16)
    wanted = float8.product(rows, float8.for_rows(weight, recipe), recipe._replace(emulate=True), torch.bfloat16)
    assert close(found, wanted)


def test_grouped_products():
    rows, weight = drawn(200, 256).requires_grad_(), drawn(4, 128, 256).requires_grad_()
    ends = torch.tensor([7, 7, 100, 200], dtype=torch.int32, device="cuda")
    gradient, seen = drawn(200, 128), []
    for function in (grouped_linear, emulated_linear):
        out = function(rows, weight, ends)
        seen.append([out, *torch.autograd.grad(out, (rows, weight), gradient)])
    assert all(close(a, b) for a, b in zip(*seen, strict=True))
