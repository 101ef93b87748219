"""The product with matrices of low rank: its numbers and gradients, and what it does not compute or keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.models import feed_forward
from shardline.models.adapted.low_rank import Adapted, LowRankPart, adapted_down, merges, some_groups
from shardline.models.adapted.quantized import quantize
from shardline.models.feed_forward import FeedForwardWeights, Products
from shardline.models.products.linear import linear

RUNS = (4, 2, 2)  # rows of q, k and v in a group; two groups
RANKS, SCALES = (3, 1, 2), (0.5, 2.0, 0.5)
K, ROWS = 64, 16
FEW, MANY = 5, 20  # rows of x for which B A is, and is not, more work than the low-rank term
RANDOM = torch.Generator()


def numbers(*shape: int, trained: bool = False) -> Tensor:
    return torch.randn(*shape, generator=RANDOM, dtype=torch.float64).to(torch.float32).requires_grad_(trained)


def adapted(missing: int | None = None, magnitude: bool = False, kind: str = "", dropout: float = 0.0) -> Adapted:
    RANDOM.manual_seed(0)
    weight = numbers(ROWS, K)
    stored = (weight,) if not kind else tuple(one for one in quantize(weight, kind, None) if one is not None)
    parts: list[LowRankPart | None] = []
    for number, (run, rank, scale) in enumerate(zip(RUNS, RANKS, SCALES, strict=True)):
        length = (numbers(2 * run).abs() + 1).requires_grad_() if magnitude else None
        part = LowRankPart(numbers(rank, K, trained=True), numbers(2 * run, rank, trained=True), length, scale)
        parts.append(None if number == missing else part)
    return Adapted(stored, kind, tuple(parts), RUNS, dropout)


def merged(w: Adapted) -> Tensor:
    """The whole weight, projection by projection."""
    places = torch.arange(ROWS).view(2, -1).split(RUNS, dim=1)
    whole = w.weight.clone()
    for part, rows in zip(w.parts, places, strict=True):
        if part is not None:
            change = w.weight[rows.flatten()] + part.scale * part.b @ part.a
            if part.magnitude is not None:
                change = change * (part.magnitude / change.norm(dim=1).detach())[:, None]
            whole = whole.index_copy(0, rows.flatten(), change)
    return whole


@pytest.mark.parametrize("kind", ["", "nf4", "int8"])
@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("missing", [None, 1])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_the_product_and_its_gradients_are_those_of_the_merged_weight(
    rows: int, missing: int | None, magnitude: bool, kind: str
) -> None:
    w, bias = adapted(missing, magnitude, kind), torch.randn(ROWS)
    trained = [one for part in w.parts if part is not None for one in part if isinstance(one, Tensor)]
    x = numbers(2, rows, K, trained=True)
    assert merges(x, w) == (rows == MANY)
    seen, wanted = linear(x, w, bias), x @ merged(w).t() + bias
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(seen, [x, *trained], gradient),
        torch.autograd.grad(wanted, [x, *trained], gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_groups_of_heads_are_rows_of_all_projections() -> None:
    w, x = adapted(), numbers(3, K)
    torch.testing.assert_close(linear(x, some_groups(w, 1, 1), None), linear(x, w, None)[:, ROWS // 2 :])


class ProductShapes(TorchDispatchMode):
    """The sizes of all results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if any(word in str(function) for word in ("mm", "linear", "bmm")) and isinstance(found, Tensor):
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize(("rows", "products_of_its_shape"), [(2 * FEW, 0), (2 * MANY, 1)])
def test_the_gradient_of_the_frozen_weight_is_never_computed_and_little_is_kept(
    rows: int, products_of_its_shape: int
) -> None:
    """One is B A."""
    w, x = adapted(), numbers(rows, K, trained=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        out = linear(x, w, None)
    wide = {one.untyped_storage().data_ptr() for one in kept if one.numel() >= x.numel() and one.shape[0] == len(x)}
    assert wide == {x.untyped_storage().data_ptr()}, "only x is kept of what has a row for each token"
    with ProductShapes() as products:
        out.sum().backward()
    assert products.shapes.count((ROWS, K)) == products_of_its_shape
    assert w.weight.grad is None


def test_dropout_is_before_a_and_only_in_training() -> None:
    w, x = adapted(dropout=0.5), numbers(64, K)
    plain = linear(x, w._replace(dropout=0.0), None)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w, None), plain)
    torch.manual_seed(0)
    seen = linear(x, w, None)
    assert (seen - plain).abs().max() > 0.1
    torch.manual_seed(0)
    kept = torch.nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(seen - x @ w.weight.t(), kept @ (merged(w) - w.weight).t(), rtol=1e-3, atol=1e-3)
    a = w.parts[0]
    assert a is not None
    (of_a,) = torch.autograd.grad(seen.sum(), [a.a])
    (wanted,) = torch.autograd.grad((kept @ (merged(w) - w.weight).t()).sum(), [a.a])
    torch.testing.assert_close(of_a, wanted, rtol=1e-3, atol=1e-3)


def test_a_compiled_product_is_the_eager_one() -> None:
    w, x = adapted(magnitude=True), numbers(8, K, trained=True)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    seen, wanted = compiled(x, w, None), linear(x, w, None)
    torch.testing.assert_close(seen, wanted)
    of = [x, *(part.a for part in w.parts if part is not None)]
    for a, b in zip(torch.autograd.grad(seen.sum(), of), torch.autograd.grad(wanted.sum(), of), strict=True):
        torch.testing.assert_close(a, b)


def down(product: Tensor, w: Adapted, bias: Tensor | None) -> Tensor:
    """The definition: gate and up in blocks of 8 columns."""
    gate, up = product.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return linear((torch.nn.functional.silu(gate) * up).flatten(-2), w, bias)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "magnitude"), [("", False), ("", True), ("nf4", False), ("int8", True)])
def test_swiglu_and_the_product_after_it(kind: str, magnitude: bool, compiled: bool) -> None:
    w, bias, product = adapted(None, magnitude, kind), numbers(ROWS, trained=True), numbers(7, 2 * K, trained=True)
    function = torch.compile(adapted_down, backend="aot_eager", fullgraph=True) if compiled else adapted_down
    seen, wanted = function(product, w, bias, 8), down(product, w, bias)
    torch.testing.assert_close(seen, wanted)
    trained = [one for part in w.parts if part is not None for one in part if isinstance(one, Tensor)]
    of, gradient = [product, bias, *trained], torch.randn_like(wanted)
    for a, b in zip(torch.autograd.grad(seen, of, gradient), torch.autograd.grad(wanted, of, gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def functions_before(function: Any) -> Iterator[str]:
    """Names of all that a backward runs; between two functions of ours some CPUs reshape."""
    yield type(function).__name__
    for before, _ in function.next_functions:
        if before is not None:
            yield from functions_before(before)


@pytest.mark.parametrize("kind", ["", "nf4"])
@pytest.mark.parametrize("missing", [None, 0])
def test_gate_and_up_on_a_cpu(kind: str, missing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows, and those of B, are put in two halves; the numbers are those of the general way."""
    RANDOM.manual_seed(0)
    weight, wide = numbers(32, K), numbers(K, 16)
    stored = (weight,) if not kind else tuple(one for one in quantize(weight, kind, None) if one is not None)
    parts = [LowRankPart(numbers(rank, K, trained=True), numbers(16, rank, trained=True), None, 0.5) for rank in (2, 3)]
    w13 = Adapted(stored, kind, tuple(None if n == missing else part for n, part in enumerate(parts)), (8, 8), 0.0)
    x, bias = numbers(2, 30, K, trained=True), numbers(32, trained=True)
    weights = FeedForwardWeights(w13, bias, wide, None)
    of = [x, bias, *(one for part in w13.parts if part is not None for one in (part.a, part.b))]
    seen = feed_forward.feed_forward(x, weights, 8, Products())
    assert any("_Gated" in name for name in functions_before(seen.grad_fn))
    gradient = numbers(2, 30, K)
    found = torch.autograd.grad(seen, of, gradient)
    monkeypatch.setattr(feed_forward, "merges", lambda x, w: False)
    wanted = feed_forward.feed_forward(x, weights, 8, Products())
    torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-4)
    for a, b in zip(found, torch.autograd.grad(wanted, of, gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_what_swiglu_gives_is_not_kept() -> None:
    w, product = adapted(), numbers(32, 2 * K, trained=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        adapted_down(product, w, None, 8)
    wide = [one for one in kept if one.shape[0] == len(product) and one.shape[1] >= K]
    assert [one.untyped_storage().data_ptr() for one in wide] == [product.untyped_storage().data_ptr()]


def test_without_matrices_nothing_is_kept_of_what_is_read() -> None:
    w = adapted(kind="int8")._replace(parts=(None, None, None))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        linear(numbers(32, K, trained=True), w, None).sum().backward()
    assert all(one.shape[0] != 32 or one.numel() == 0 for one in kept)
