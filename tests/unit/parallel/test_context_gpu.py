"""Attention in parts on CUDA: which kernels serve, and that ranks together compute what one computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.partial_attention import _agrees, fastest_kernel
from shardline.parallel.context.context import ContextParallel, document_table
from shardline.parallel.context.ring import Attending, Differentiating, PairMask, pack, together, widths
from shardline.parallel.context.slices import AttentionPlan, Slices, causal_plan, make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 1024, 8, 2, 128


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        ("flash", torch.bfloat16, False),
        ("cudnn", torch.bfloat16, False),
        ("efficient", torch.bfloat16, False),
        ("efficient", torch.bfloat16, True),
        ("efficient", torch.float32, False),
        ("efficient", torch.float32, True),
    ],
)
def test_kernels_prove_themselves(kernel: str, dtype: torch.dtype, masked: bool) -> None:
    """On Hopper all of them do; elsewhere the next one would serve, and this says which one does not."""
    assert _agrees(kernel, CUDA, dtype, DIM, masked)


def test_the_fastest_kernel_is_chosen() -> None:
    hopper = torch.cuda.get_device_capability()[0] >= 9
    assert fastest_kernel(CUDA, torch.bfloat16, DIM, False) == ("cudnn" if hopper else "flash")
    assert fastest_kernel(CUDA, torch.bfloat16, DIM, False, True) == "flash"
    assert fastest_kernel(CUDA, torch.bfloat16, DIM, True) == "efficient"
    assert fastest_kernel(CUDA, torch.float32, DIM, False) == "efficient"


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_kernels_take_values_narrower_than_keys(kernel: str) -> None:
    """The widths of DeepSeek's heads."""
    assert _agrees(kernel, CUDA, torch.bfloat16, 192, False, 128)


def documents_of(batch: int) -> Tensor:
    first = torch.zeros(batch, LENGTH, dtype=torch.int32)
    first[:, ::300] = 1
    first[0, 7] = 1
    return first.cumsum(1).to(torch.int32)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("window", "packed"), [(0, False), (200, False), (0, True), (200, True)])
def test_ranks_together_compute_what_one_computes(window: int, packed: bool, dtype: torch.dtype, bound: float) -> None:
    source = torch.Generator(CUDA).manual_seed(0)
    shapes = ((2, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    q, k, v, gradient = (torch.randn(*shape, device=CUDA, generator=source).to(dtype) for shape in shapes)
    documents = documents_of(2) if packed else None
    expected = whole(q, k, v, gradient, window, documents)
    slices, length = Slices(RANKS, 2), LENGTH // (2 * RANKS)
    where = [ContextParallel(slices, rank, "ring").positions(LENGTH, CUDA) for rank in range(RANKS)]
    blocks = [pack(k[:, places], v[:, places], 2) for places in where]
    found = [torch.zeros_like(x, dtype=torch.float32) for x in expected]
    added = torch.zeros(RANKS, *blocks[0].shape, device=CUDA)
    seen = PairMask(None if documents is None else documents.to(CUDA), window, length, cap=None)
    for rank, places in enumerate(where):
        plan = plan_of(slices, rank, length, window, documents)
        attending = Attending(q[:, places], widths(k, v), plan, seen)
        for other in range(RANKS):
            attending.add(other, range(2), blocks[other])
        out, lse = attending.result(dtype)
        differentiating = Differentiating(gradient[:, places], q[:, places], out, lse, widths(k, v), plan, seen)
        for other in range(RANKS):
            added[other] += differentiating.add(other, range(2), blocks[other], plan.calls[other])
        found[0][:, places] = out.float()
        found[1][:, places] = differentiating.dq.transpose(1, 2)
    for rank, places in enumerate(where):
        found[2][:, places], found[3][:, places] = together(added[rank], widths(k, v))
    for name, mine, right in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((mine - right).norm() / right.norm())
        assert error < bound, f"{name} is {error:.1e} off"


def plan_of(slices: Slices, rank: int, length: int, window: int, documents: Tensor | None) -> AttentionPlan:
    if documents is None:
        return causal_plan(slices, rank, length, window)
    return make_plan(document_table(documents, slices.total, window).tolist(), slices, rank, length)


def whole(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, window: int, documents: Tensor | None
) -> tuple[Tensor, ...]:
    """Output and gradients in float32, by PyTorch over the whole sequence."""
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    places = torch.arange(LENGTH, device=CUDA)
    seen = places[:, None] >= places[None, :]
    if window:
        seen = seen & (places[:, None] - places[None, :] < window)
    seen = seen[None, None]
    if documents is not None:
        numbers = documents.to(CUDA)
        seen = seen & (numbers[:, :, None] == numbers[:, None, :])[:, None]
    group = HEADS // KV_HEADS
    heads = (leaves[0], leaves[1].repeat_interleave(group, 2), leaves[2].repeat_interleave(group, 2))
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads), attn_mask=seen).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.float())
