"""Triton kernels of the optimizer's step, at the speed of the memory: sums of squares, and Adam.

Adam reads each number once and writes each once:

    weight, moments (float32)   gradient (float32 or bfloat16) x scale
      -> weight, moments, and the narrow copy of the weight, if there is one

`scale` is the clipping factor: gradients need no pass of their own for it, and keep their type until they are used.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
PARTS = 1056  # sums of squares of one tensor: eight for each multiprocessor of an H100 or H200


@triton.jit
def squares_kernel(x, sums, count, parts, BLOCK: tl.constexpr):
    """sums[p] = the sum of squares, in float32, of every parts-th block of x from the p-th on."""
    total = tl.zeros((BLOCK,), tl.float32)
    part = tl.program_id(0)
    for start in range(part.to(tl.int64) * BLOCK, count, parts * BLOCK):
        places = start + tl.arange(0, BLOCK)
        one = tl.load(x + places, mask=places < count, other=0).to(tl.float32)
        total += one * one
    tl.store(sums + part, tl.sum(total))


@triton.jit
def adam_kernel(
    weight, gradient, first, second, narrow, count, lr, beta1, beta2, eps, decay, step_size, root, scale,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`step_size` is lr / (1 - beta1^t), `root` sqrt(1 - beta2^t)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = places < count
    w = tl.load(weight + places, mask=here)
    g = tl.load(gradient + places, mask=here).to(tl.float32) * scale
    m = tl.load(first + places, mask=here)
    v = tl.load(second + places, mask=here)
    if DECOUPLED:
        w -= lr * decay * w
    else:
        g += decay * w
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(weight + places, w, mask=here)
    tl.store(first + places, m, mask=here)
    tl.store(second + places, v, mask=here)
    if NARROW:
        tl.store(narrow + places, w.to(tl.bfloat16), mask=here)
