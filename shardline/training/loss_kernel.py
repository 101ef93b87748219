"""The softmax of the loss as one Triton kernel, which reads each row of logits twice, the second time from the cache.

logits (C, V), target (C,)  ->  losses (C,), and scale * dlogits in place of the logits

With WEIGHTED, every row has a scale of its own. With CAPPED, the softmax is taken of cap * tanh(logits / cap).
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """cap * tanh(x / cap), written with the logistic function, since Triton has no tanh."""
    return cap * (2 * tl.sigmoid(2 * x / cap) - 1) if CAPPED else x


@triton.jit
def loss_kernel(
    logits,
    target,
    losses,
    scale,
    width,
    cap,
    GRADIENT: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row in float32. `rest` excludes the target's exponential: if its probability p is near 1,
    p - 1 = -rest / total keeps all its digits.
    """
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * width
    chosen = tl.load(target + row)
    wanted = capped(tl.load(here + chosen).to(tl.float32), cap, CAPPED)
    peak = wanted
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = capped(tl.load(here + columns, mask=columns < width, other=0).to(tl.float32), cap, CAPPED)
        x = tl.where(columns < width, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x))
        sums = sums * tl.exp(peak - higher) + tl.where(columns == chosen, 0.0, tl.exp(x - higher))
        peak = higher
    rest = tl.sum(sums)
    total = rest + tl.exp(wanted - peak)
    tl.store(losses + row, tl.log(total) - (wanted - peak))
    if GRADIENT:
        factor = tl.load(scale + row) if WEIGHTED else tl.load(scale)
        share = factor / total
        for back in range(0, width, BLOCK):  # backwards: what was read last is still in the cache
            columns = (tl.cdiv(width, BLOCK) - 1) * BLOCK - back + tl.arange(0, BLOCK)
            x = capped(tl.load(here + columns, mask=columns < width, other=0).to(tl.float32), cap, CAPPED)
            of_x = tl.where(columns == chosen, -rest * share, tl.exp(x - peak) * share)
            if CAPPED:
                of_x *= 1 - (x / cap) * (x / cap)
            tl.store(here + columns, of_x.to(logits.dtype.element_ty), mask=columns < width)
