"""SwiGLU with the product behind it, as GPUs compute it: values and gradients of the plain definition."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models import feed_forward
from shardline.models.feed_forward import FeedForwardWeights, Products, _Down, narrow
from shardline.models.products.linear import weight_queue
from shardline.models.products.swiglu import swiglu, swiglu_op
from shardline.precision.convert import products_here
from shardline.precision.float8 import Recipe

RUN = 8


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = (10, 2 * 48), (16, 48), (16,)  # rows of the first product, the second weight and its bias
    product, weight, bias = (torch.randn(shape, generator=source).to(device, dtype) for shape in shapes)
    return product.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def plain(product: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = product.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return F.linear((F.silu(gate) * up).flatten(-2), weight, bias)


def gradients(function: object, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = function(*given)
    wanted = [tensor for tensor in given if tensor is not None]
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)


def down(product: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Down.apply(product, weight, bias, RUN)


@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(with_bias: bool) -> None:
    product, weight, bias = inputs()
    given = (product, weight, bias if with_bias else None)
    torch.testing.assert_close(gradients(down, given), gradients(plain, given))


def test_compiled_it_is_one_graph_with_the_same_gradients() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(down, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, inputs()), gradients(plain, inputs()))


def test_the_weight_gradient_can_wait() -> None:
    product, weight, _ = inputs()
    with weight_queue.deferring():
        down(product, weight, None).sum().backward()
    assert weight.grad is None
    assert len(weight_queue.take()) == 1


def test_weights_of_rows() -> None:
    """Experts: gate and up are halves, and each row has a weight, which is trained."""
    product, _, _ = inputs()
    weights = torch.rand(10, 1, requires_grad=True)
    gate, up = product.chunk(2, dim=1)
    expected = torch.autograd.grad((F.silu(gate) * up * weights).square().sum(), (product, weights))
    found = torch.autograd.grad(swiglu(product, weights, 48).square().sum(), (product, weights))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_float8_takes_the_kernels_where_rows_are_kept_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    product, weight, _ = inputs("cuda", torch.bfloat16)
    calls = []
    monkeypatch.setattr(feed_forward, "swiglu", lambda *a: (calls.append(a), swiglu(*a))[1])
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        products = products_here(None, Recipe(recipe, emulate=True))
        out = narrow(product, FeedForwardWeights(weight, None, weight, None), RUN, products)
        assert (out - plain(product, weight, None)).norm() < 0.1 * out.norm()
    assert len(calls) == 2


def test_rows_that_are_not_there() -> None:
    assert swiglu_op(torch.zeros(0, 32), None, RUN).shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_takes_the_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    product, weight, bias = inputs("cuda", dtype)
    calls = []
    monkeypatch.setattr(feed_forward, "swiglu_gradient_op", lambda *a: (calls.append(a), swiglu_gradient(*a))[1])
    found = gradients(
        lambda p, w, b: narrow(p, FeedForwardWeights(w, None, w, b), RUN, Products()), (product, weight, bias)
    )
    assert len(calls) == 1
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in (product, weight, bias))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, gradients(plain, wide), strict=True):
        assert (one.double() - other).norm() < bound * other.norm()


swiglu_gradient = feed_forward.swiglu_gradient_op
