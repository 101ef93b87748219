"""Products with weights stored in another type: values of torch's own cast, but no narrow copy is kept."""

import pytest
import torch
from torch.nn import functional as F

from shardline.models.products.linear import accumulate, linear, weight_queue, wide_linear


def leaves(dtype=torch.float32, bias=True, rows=(3, 5)):
    torch.manual_seed(0)
    x = torch.randn(*rows, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(6, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(3, 5), (7,)])
def test_values_and_gradients_are_those_of_a_cast(bias, rows):
    ours, theirs = leaves(bias=bias, rows=rows), leaves(bias=bias, rows=rows)
    out = linear(*ours)
    x, weight, b = theirs
    expected = F.linear(x, weight.bfloat16(), None if b is None else b.bfloat16())
    assert torch.equal(out, expected)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            assert one.grad.dtype == other.grad.dtype
            assert torch.equal(one.grad, other.grad)


def kept_bytes(function):
    """Bytes that autograd holds for the backward of `function`, parameters aside."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    return sum(kept.values()), out


def test_the_narrow_copy_of_a_weight_is_not_kept():
    x, weight, _ = leaves(bias=False)
    stored = x.numel() * 2 + weight.numel() * 4
    assert kept_bytes(lambda: linear(x, weight, None))[0] == stored
    assert kept_bytes(lambda: F.linear(x, weight.bfloat16()))[0] == x.numel() * 2 + weight.numel() * 2


def test_a_weight_of_the_same_type_takes_torchs_own_way():
    x, weight, _ = leaves(dtype=torch.bfloat16)
    assert "Linear" not in type(linear(x, weight, None).grad_fn).__name__


def test_weight_gradients_can_wait(monkeypatch):
    monkeypatch.setattr(weight_queue, "offered", True)
    x, weight, _ = leaves(dtype=torch.bfloat16, bias=False)
    out = linear(x, weight, None)
    with weight_queue.deferring():
        out.sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert len(weight_queue) == 1
    accumulate(weight_queue.take())
    assert len(weight_queue) == 0
    assert torch.equal(weight.grad, torch.ones(15, 6, dtype=torch.bfloat16).t() @ x.detach().flatten(0, -2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_results_of_bfloat16_operands_on_tensor_cores(dtype):
    torch.manual_seed(0)
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(48, 512, device="cuda").to(dtype).requires_grad_()
    given = torch.randn(300, 48, device="cuda")
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    wanted = exact[0] @ exact[1].t()
    found = wide_linear(x, weight)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()  # 2e-3 with weights rounded to bfloat16
    gradients = torch.autograd.grad(found, (x, weight), given)
    for one, other in zip(gradients, torch.autograd.grad(wanted, exact, given.double()), strict=True):
        rounding = 3e-3 if one.dtype == torch.bfloat16 else 1e-5
        assert (one - other).norm() <= rounding * other.norm()
    compiled = torch.compile(wide_linear, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), found)
