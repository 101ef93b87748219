"""Chunked cross entropy on CUDA: the same numbers, no wait for the device, float32 sums, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.training.loss import IGNORE, chunked_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(tokens: int, dim: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, dim, device="cuda", requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device="cuda")
    labels[:, ::5] = IGNORE
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, cap: float | None = None) -> Tensor:
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return scale * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def relative(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("cap", [None, 6.0])
def test_the_same_numbers_without_a_wait(backend, dtype, tolerance, cap):
    hidden, weight, labels = make(260, 64, 1000)
    reference = plain(hidden, weight, labels, 0.1, cap)
    expected = torch.autograd.grad(reference, (hidden, weight))
    scale = torch.tensor(0.1, device="cuda")

    def ours() -> tuple[Tensor, ...]:
        options = {"chunk_tokens": 100, "backend": backend, "cap": cap}
        loss = chunked_cross_entropy(hidden.to(dtype), weight, labels, scale=scale, **options)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    ours()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, *gradients = ours()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(loss, reference.detach()) <= tolerance
    assert gradients[1].dtype == torch.float32
    assert all(relative(a, b) <= tolerance for a, b in zip(gradients, expected, strict=True))


def test_the_float32_weight_gradient_is_summed_in_float32_over_many_chunks():
    tokens = 8000
    hidden = torch.ones(1, tokens, 8, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(2, 8, device="cuda", requires_grad=True)
    labels = torch.zeros(1, tokens, device="cuda", dtype=torch.int64)
    chunked_cross_entropy(hidden, weight, labels, scale=1.0, chunk_tokens=8).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-tokens / 2] * 8, [tokens / 2] * 8]


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_peak_memory_is_below_the_whole_logits(backend):
    hidden, weight, labels = make(8192, 128, 32000)
    whole = 8192 * 32000 * 4

    def peak() -> int:
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = chunked_cross_entropy(hidden.bfloat16(), weight, labels, scale=1.0, chunk_tokens=512, backend=backend)
        loss.backward()
        return torch.cuda.max_memory_allocated() - before

    peak()
    assert peak() < whole / 5


def test_deterministic_algorithms_are_enough_for_equal_bits():
    hidden, weight, labels = make(300, 64, 1000)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, scale=1.0), (hidden, weight))
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
