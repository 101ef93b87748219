"""Chunked cross entropy against torch's, its memory, and what it must not touch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.comm.fake import fake_tensors
from shardline.training import loss as loss_module
from shardline.training.loss import (
    IGNORE,
    choose_chunk_tokens,
    chunked_cross_entropy,
    chunked_losses,
    count_targets,
    run_backward,
)


def make(batch: int, sequence: int, dim: int, vocabulary: int, ignored: float = 0.2, seed: int = 0, **options):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, sequence, dim, generator=random).to(**options).requires_grad_()
    weight = (torch.randn(vocabulary, dim, generator=random) / dim**0.5).to(**options).requires_grad_()  # logits near 1
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=random)
    labels[torch.rand(batch, sequence, generator=random) < ignored] = IGNORE
    return hidden, weight, labels.to(hidden.device)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, cap: float | None = None) -> Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return scale * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def relative(value: Tensor, expected: Tensor, floor: float = 1e-12) -> float:
    return ((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=floor)).item()


def assert_same(hidden: Tensor, weight: Tensor, labels: Tensor, tolerance: float, **options) -> None:
    """Against torch in float64, relative to the whole or, where tokens cancel out, to what was added up.

    The gradient of the weight is a sum over tokens: the shares of n tokens that do not cancel out have a norm of about
    sqrt(n) times one share. The gradient of a hidden state is the share of its own token.
    """
    scale, targets = 1 / 37, max(1, int(count_targets(labels)))
    ours = chunked_cross_entropy(hidden, weight, labels, scale=scale, **options)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    reference = plain(*exact, labels, scale, options.get("cap"))
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    assert relative(ours.detach(), reference.detach(), scale) <= tolerance
    gradients = torch.autograd.grad(ours, (hidden, weight))
    floors = scale, scale * targets**0.5
    for gradient, expected, floor in zip(gradients, torch.autograd.grad(reference, exact), floors, strict=True):
        assert gradient.dtype == torch.float32
        assert relative(gradient, expected, floor) <= tolerance


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    sequence=st.integers(1, 40),
    dim=st.integers(1, 24),
    vocabulary=st.integers(2, 60),
    chunk=st.integers(0, 130),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 1000),
)
@example(batch=3, sequence=37, dim=1, vocabulary=2, chunk=0, ignored=0.0, seed=130)  # the shares nearly cancel out
def test_equals_torch_in_float32(batch, sequence, dim, vocabulary, chunk, ignored, seed):
    assert_same(*make(batch, sequence, dim, vocabulary, ignored, seed), 1e-6, chunk_tokens=chunk)


@pytest.mark.parametrize("chunk", [0, 1, 7, 33, 66, 100])
def test_any_chunk_size_and_slice_size(chunk, monkeypatch):
    monkeypatch.setitem(loss_module.SLICE_BYTES, "cpu", 4 * 50 * 5)  # 5 rows a slice
    assert_same(*make(2, 33, 16, 50), 1e-6, chunk_tokens=chunk)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_logits_may_have_a_soft_cap(backend, chunk):
    hidden, weight, labels = make(2, 33, 16, 50)
    assert_same(hidden, weight, labels, 1e-6, chunk_tokens=chunk, backend=backend, cap=0.8)
    free, capped = (chunked_cross_entropy(hidden, weight, labels, scale=1.0, cap=cap) for cap in (None, 0.8))
    assert relative(free.detach(), capped.detach()) > 1e-2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_targets_may_count_differently(backend, monkeypatch):
    monkeypatch.setitem(loss_module.SLICE_BYTES, "cpu", 1024)  # several slices of a chunk
    hidden, weight, labels = make(4, 30, 8, 50)
    weights = torch.tensor([1.0, -0.5, 0.0, 3.0])[:, None].expand(labels.shape)
    options = {"chunk_tokens": 50, "backend": backend}
    ours = chunked_cross_entropy(hidden, weight, labels, scale=0.3, weights=weights, **options)
    logits = (hidden @ weight.T).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
    expected = 0.3 * (losses * weights.flatten()).sum()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    both = (torch.autograd.grad(one, (hidden, weight)) for one in (ours, expected))
    for found, wanted in zip(*both, strict=True):
        assert relative(found, wanted) < 1e-5
    with torch.no_grad():
        ours = chunked_cross_entropy(hidden, weight, labels, scale=0.3, weights=weights, **options)
        assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    flat = (hidden.flatten(0, 1), weight, labels.flatten())
    assert relative(chunked_losses(*flat, **options), losses.detach()) < 1e-6


def test_scale_may_be_a_tensor_and_an_incoming_gradient_counts():
    hidden, weight, labels = make(2, 9, 8, 20)
    expected = torch.autograd.grad(6 * plain(hidden, weight, labels, 0.25), (hidden, weight))
    ours = 6 * chunked_cross_entropy(hidden, weight, labels, scale=torch.tensor(0.25), chunk_tokens=5)
    for gradient, reference in zip(torch.autograd.grad(ours, (hidden, weight)), expected, strict=True):
        assert relative(gradient, reference) < 1e-6


def test_gradcheck_in_float64():
    hidden, weight, labels = make(2, 5, 4, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, labels, scale=0.3, chunk_tokens=4), (hidden, weight)
    )


def test_a_kept_graph_gives_the_same_gradients_twice():
    hidden, weight, labels = make(1, 6, 4, 9)
    loss = chunked_cross_entropy(hidden, weight, labels, scale=0.5)
    first = torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_everything_ignored_gives_zero_and_no_nan():
    hidden, weight, labels = make(2, 8, 4, 10)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), scale=1.0, chunk_tokens=5)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_what_stands_in_an_ignored_row_does_not_matter():
    hidden, weight, labels = make(1, 8, 4, 10, ignored=0)
    labels[0, 3] = IGNORE
    clean = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, scale=1.0), (hidden, weight))
    with torch.no_grad():
        hidden[0, 3] = float("nan")
    dirty = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, scale=1.0), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_costs_no_product(frozen):
    hidden, weight, labels = make(2, 8, 4, 10)
    expected = dict(
        zip(
            ("hidden", "weight"), torch.autograd.grad(plain(hidden, weight, labels, 1.0), (hidden, weight)), strict=True
        )
    )
    tensors = {"hidden": hidden, "weight": weight}
    tensors[frozen].requires_grad_(False)
    with Operations() as seen:
        chunked_cross_entropy(hidden, weight, labels, scale=1.0).backward()
    assert tensors[frozen].grad is None
    other = "hidden" if frozen == "weight" else "weight"
    assert relative(tensors[other].grad, expected[other]) < 1e-6
    assert seen.products == 2


def test_backward_copies_no_gradient():
    hidden, weight, labels = make(2, 8, 4, 10)
    loss = chunked_cross_entropy(hidden, weight, labels, scale=1.0)
    with Operations() as seen:
        loss.backward()
    assert not [name for name in seen.names if "clone" in name or "copy" in name or name == "aten.mul.Tensor"]
    assert weight.grad is not None
    assert seen.names.count("aten.mul_.Tensor") == 2


def test_the_scale_is_not_rounded_to_bfloat16():
    """A scale of 1/385 rounds by 0.14 % in bfloat16, which would be a common factor of all gradients."""
    targets = 385
    hidden, weight, labels = make(1, targets, 64, 96)
    gradients = []
    for scale in (1.0, 1 / targets):
        half = hidden.detach().bfloat16().requires_grad_()
        chunked_cross_entropy(half, weight, labels, scale=scale).backward()
        gradients.append(half.grad.double() / scale)
    ratio = (gradients[0] * gradients[1]).sum() / gradients[0].square().sum()
    assert ratio.item() == pytest.approx(1.0, abs=6e-4)


def test_a_bfloat16_weight_gradient_does_not_depend_on_the_chunks():
    hidden, weight, labels = make(1, 2048, 16, 32)
    half = weight.detach().bfloat16()
    gradients = []
    for chunk in (128, 2048):
        head = half.clone().requires_grad_()
        chunked_cross_entropy(hidden.detach().bfloat16(), head, labels, scale=1.0, chunk_tokens=chunk).backward()
        assert head.grad.dtype == torch.bfloat16
        gradients.append(head.grad.float())
    assert relative(gradients[0], gradients[1]) < 3e-3  # one rounding each; a bfloat16 sum of 16 chunks gives 8e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_logits_are_computed(mode):
    hidden, weight, labels = make(2, 8, 4, 10)
    with mode(), Operations() as seen:
        loss = chunked_cross_entropy(hidden, weight, labels, scale=0.5, chunk_tokens=8)
    assert relative(loss, plain(hidden, weight, labels, 0.5).detach()) < 1e-6
    assert not loss.requires_grad
    assert seen.products == 2  # one product per chunk


def test_large_logits_stay_finite_and_a_sure_model_keeps_its_small_gradient():
    hidden = torch.tensor([[[1.0]]], requires_grad=True)
    weight = torch.tensor([[300.0], [0.0], [-300.0]], requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([[2]]), scale=1.0)
    assert loss.item() == pytest.approx(600.0)
    # p of the target is 1 - 1e-4, which bfloat16 rounds to 1: p - 1 must not vanish
    near = torch.tensor([[9.2], [0.0]]).bfloat16().requires_grad_()
    chunked_cross_entropy(hidden.detach().bfloat16(), near, torch.tensor([[0]]), scale=1.0).backward()
    assert near.grad is not None
    assert near.grad[0].item() == pytest.approx(-1e-4, rel=0.05)


def test_bfloat16_is_near_float32_and_a_float32_weight_gets_a_float32_gradient():
    hidden, weight, labels = make(2, 24, 16, 40)
    reference = plain(hidden, weight, labels, 0.1)
    expected = torch.autograd.grad(reference, (hidden, weight))
    ours = chunked_cross_entropy(hidden.bfloat16(), weight, labels, scale=0.1, chunk_tokens=10)
    gradients = torch.autograd.grad(ours, (hidden, weight))
    assert ours.dtype == torch.float32
    assert relative(ours.detach(), reference.detach()) < 0.01
    assert gradients[1].dtype == torch.float32
    assert all(relative(a, b) < 0.02 for a, b in zip(gradients, expected, strict=True))


def test_the_float32_weight_gradient_is_summed_in_float32_over_many_chunks():
    # each token adds about 1e-3 of the sum: a bfloat16 sum would stop growing
    tokens = 2000
    hidden = torch.ones(1, tokens, 1).bfloat16()
    weight = torch.zeros(2, 1, requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.zeros(1, tokens).long(), scale=1.0, chunk_tokens=1).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-tokens / 2, tokens / 2]


class Operations(TorchDispatchMode):
    """Names of the operations that ran, and the size of the largest float32 storage that came out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    @property
    def products(self) -> int:
        return sum(name.startswith(("aten.mm", "aten.addmm", "mkldnn._linear_pointwise")) for name in self.names)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_float32_logits_never_exist(dtype):
    batch, sequence, dim, vocabulary = 2, 64, 4, 512
    hidden, weight, labels = make(batch, sequence, dim, vocabulary)
    whole = batch * sequence * vocabulary

    def largest(function, **options) -> int:
        with Operations() as seen:
            function(hidden.to(dtype), weight, labels, scale=1.0, **options).backward()
        return seen.largest

    assert largest(chunked_cross_entropy, chunk_tokens=16) <= whole // 8
    assert largest(plain) >= whole  # the same look at the plain way sees them


def test_chunk_size_follows_the_vocabulary():
    def choose(tokens: int, vocabulary: int) -> int:
        return choose_chunk_tokens(torch.empty(tokens, 1), vocabulary)

    limit = loss_module.CHUNK_BYTES["cpu"]
    assert choose(16384, 128256) == 128
    assert choose(100, 256) == 128
    for tokens, vocabulary in [(16384, 2048), (5000, 32000), (4100, 8000)]:
        size = choose(tokens, vocabulary)
        assert size % 128 == 0
        assert size * vocabulary * 4 <= limit + 128 * vocabulary * 4
        chunks = -(-tokens // size)
        assert chunks * size - tokens < 128 * chunks  # no nearly empty last chunk


def test_count_targets():
    assert count_targets(torch.tensor([[1, IGNORE], [0, 3]])).item() == 3


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, labels = make(1, 6, 4, 9)
    with pytest.raises(ValueError, match="5 labels for 6 tokens"):
        chunked_cross_entropy(hidden, weight, labels[:, :5], scale=1.0)
    with pytest.raises(ValueError, match="no tokens"):
        chunked_cross_entropy(hidden[:, :0], weight, labels[:, :0], scale=1.0)


def test_compiled_form_equals_the_eager_one():
    hidden, weight, labels = make(2, 33, 16, 50)
    assert_same(hidden, weight, labels, 1e-6, chunk_tokens=20, backend="aot_eager")
    torch._dynamo.reset()


def test_backward_of_a_loss_does_not_multiply_its_gradients_by_one():
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.products += function in (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul.Tensor)
            return function(*arguments, **(options or {}))

    found = []
    for backward in (run_backward, Tensor.backward):
        hidden, weight, labels = make(2, 8, 16, 50)
        loss = chunked_cross_entropy(hidden, weight, labels, scale=0.1)
        with Count() as count:
            backward(loss)
        found.append((count.products, hidden.grad, weight.grad))
    assert [products for products, *_ in found] == [0, 2]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


def test_a_dry_run_leaves_nothing_behind_that_a_later_backward_uses():
    for place in (fake_tensors(), nullcontext()):
        with place:
            hidden, weight, labels = make(2, 8, 16, 50)
            run_backward(chunked_cross_entropy(hidden, weight, labels, scale=0.1))
    assert all(type(tensor.grad) is Tensor for tensor in (hidden, weight))
