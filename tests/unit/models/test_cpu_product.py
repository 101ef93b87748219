"""What a CPU computes in its own way: float32 products by oneDNN, SwiGLU over halves, rotations in place."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.models import feed_forward
from shardline.models.feed_forward import FeedForwardWeights, Products
from shardline.models.products import cpu_product
from shardline.models.products.cpu_product import multiply
from shardline.models.products.linear import linear
from shardline.models.rope import rotate

needs_op = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.backends.mkl.is_available(),
    reason="this torch has no such op",
)


class Ops(TorchDispatchMode):
    """Names of the ops that run, and the width of what silu reads."""

    def __init__(self):
        super().__init__()
        self.names, self.widths = [], []

    def __torch_dispatch__(self, op, types, arguments=(), keywords=None):
        self.names.append(op.name())
        if op.name() == "aten::silu":
            self.widths.append(arguments[0].shape[-1])
        return op(*arguments, **(keywords or {}))


@pytest.fixture(params=[pytest.param(False, marks=needs_op), True], ids=["amd", "intel"])
def intel(request, monkeypatch):
    monkeypatch.setattr(cpu_product, "_made_by_intel", lambda: request.param)
    cpu_product.onednn.cache_clear()
    yield request.param
    cpu_product.onednn.cache_clear()


def gradients(function, *inputs):
    """The result for copies of the inputs, and all gradients."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


def test_products_of_views(intel):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 24), torch.randn(16, 24), torch.randn(16)
    change = torch.randn(7, 2, 16)[:, 1]
    cases = [(x, weight, bias), (x, weight, None), (x[0], weight, None), (change, weight.t(), None)]
    cases += [(change.t(), torch.randn(24, 7), None), (x[:, :0], weight, bias)]
    for left, right, added in cases:
        wanted = F.linear(left.double(), right.double(), None if added is None else added.double())
        torch.testing.assert_close(multiply(left, right, added).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_and_its_gradients(intel, with_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, 24), torch.randn(16, 24), *([torch.randn(16)] if with_bias else [])]
    with Ops() as ops:
        found = gradients(lambda x, weight, bias=None: linear(x, weight, bias), *inputs)
    assert ops.names.count("mkldnn::_linear_pointwise") == (0 if intel else 3)
    for one, other in zip(found, gradients(F.linear, *(tensor.double() for tensor in inputs)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_other_types_are_torchs_own(intel):
    with Ops() as ops:
        gradients(lambda x, weight: linear(x, weight, None), torch.randn(4, 8).double(), torch.randn(8, 8).double())
        linear(torch.randn(4, 8).bfloat16(), torch.randn(8, 8), None)
    assert "mkldnn::_linear_pointwise" not in ops.names


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_feed_forward_over_halves(intel, monkeypatch, dtype, close, with_bias):
    """Against the definition in float64, with rows of w13 in alternating blocks of 4."""
    torch.manual_seed(0)
    sizes = [(3, 5, 16), (48, 16), (16, 24), *([(48,), (16,)] if with_bias else [])]
    inputs = [torch.randn(size) / 4 for size in sizes]
    inputs[0] = inputs[0].to(dtype)

    def ours(x, w13, w2, w13_bias=None, w2_bias=None):
        return feed_forward.feed_forward(x, FeedForwardWeights(w13, w13_bias, w2, w2_bias), 4, Products())

    def definition(x, w13, w2, w13_bias=None, w2_bias=None):
        product = F.linear(x, w13, w13_bias).unflatten(-1, (6, 2, 4))
        return F.linear((F.silu(product[..., 0, :]) * product[..., 1, :]).flatten(-2), w2, w2_bias)

    with Ops() as ops:
        found = gradients(ours, *inputs)
    assert ops.widths == [24, 24]  # whole rows, in forward and again in backward
    for one, other in zip(found, gradients(definition, *(tensor.double() for tensor in inputs)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=close, atol=close)


def test_without_gradients_no_weight_is_copied():
    """Generation multiplies few tokens: a copy of the weight would cost more than it saves."""
    weights = FeedForwardWeights(torch.randn(48, 16), None, torch.randn(16, 24), None)
    with torch.no_grad(), Ops() as ops:
        feed_forward.feed_forward(torch.randn(1, 1, 16), weights, 4, Products())
    assert ops.widths == [4]


def test_rotation_in_place_of_parts():
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 2, 8), torch.rand(5, 1, 1, 4)
    cos, sin = angles.cos(), angles.sin()

    def definition(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    with Ops() as ops:
        found = gradients(lambda x: rotate(x, cos, sin), x)
    assert "aten::cat" not in ops.names
    for one, other in zip(found, gradients(definition, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
