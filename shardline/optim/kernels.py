"""Triton kernels of the optimizer's step, limited only by memory bandwidth: sums of squares, and Adam.

Each has two forms: for one large tensor, and for many small ones in one launch, with their addresses in a table. LoRA
trains hundreds of small matrices, and launching a kernel takes longer than updating one of them.

Adam reads each number once and writes each once:

    weight, moments (float32)   gradient (float32 or bfloat16) x scale
      -> weight, moments, and the narrow copy of the weight, if there is one

`scale` is the clipping factor: clipping needs no pass of its own, and gradients keep their type until they are used.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
SMALL = 1 << 20  # elements of a tensor that shares its launch with others
SMALL_PARTS = 16  # partial sums of one such tensor
PARTS = 1056  # partial sums of one large tensor: eight for each multiprocessor of an H100 or H200


@triton.jit
def squares_kernel(x, sums, count, parts, BLOCK: tl.constexpr):
    """sums[p] = the float32 sum of squares of every parts-th block of x, starting with the p-th."""
    total = tl.zeros((BLOCK,), tl.float32)
    part = tl.program_id(0)
    for start in range(part.to(tl.int64) * BLOCK, count, parts * BLOCK):
        places = start + tl.arange(0, BLOCK)
        one = tl.load(x + places, mask=places < count, other=0).to(tl.float32)
        total += one * one
    tl.store(sums + part, tl.sum(total))


@triton.jit
def many_squares_kernel(table, sums, DTYPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """sums (tensors, PARTS): the sums of `squares_kernel` for each row (address, elements) of the table."""
    row, part = tl.program_id(0), tl.program_id(1)
    x = tl.multiple_of(tl.load(table + 2 * row).to(tl.pointer_type(DTYPE)), 16)
    count = tl.load(table + 2 * row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, count, PARTS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        one = tl.load(x + places, mask=places < count, other=0).to(tl.float32)
        total += one * one
    tl.store(sums + row * PARTS + part, tl.sum(total))


@triton.jit
def _adam_block(
    weight, gradient, first, second, narrow, places, here, lr, beta1, beta2, eps, decay, step_size, root, scale,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def adam_kernel(
    weight, gradient, first, second, narrow, count, lr, beta1, beta2, eps, decay, step_size, root, scale,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`step_size` is lr / (1 - beta1^t), `root` sqrt(1 - beta2^t)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _adam_block(
        weight, gradient, first, second, narrow, places, places < count,
        lr, beta1, beta2, eps, decay, step_size, root, scale, DECOUPLED, NARROW,
    )  # fmt: skip


@triton.jit
def many_adam_kernel(
    table, blocks, lr, beta1, beta2, eps, decay, step_size, root, scale,
    GRADIENT: tl.constexpr, DECOUPLED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`blocks` (programs, 2): the program's row of the table, and its block of that row's tensors.

    A row has the addresses of weight, gradient, moments and narrow copy, and the number of elements.
    """
    row = table + 6 * tl.load(blocks + 2 * tl.program_id(0))
    places = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    _adam_block(
        tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16),
        tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), 16),
        tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16),
        tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16),
        tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)), 16),
        places, places < tl.load(row + 5),
        lr, beta1, beta2, eps, decay, step_size, root, scale, DECOUPLED, NARROW,
    )  # fmt: skip


@triton.jit
def _decoded(codes, scales, TOP: tl.constexpr, STEP: tl.constexpr):
    """Decode as in int8_moments.py: (blocks, BLOCK) codes and (blocks, 1) scales -> float32."""
    code = codes.to(tl.float32)
    size = tl.where(code == 0, 0.0, tl.exp2((tl.abs(code) - TOP) * STEP)) * scales
    return tl.where(code < 0, -size, size)


@triton.jit
def _encoded(values, TOP: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr, SMALLEST: tl.constexpr):
    """Return unsigned codes in float32, and scales (blocks, 1)."""
    size = tl.abs(values)
    scale = tl.max(size, axis=1, keep_dims=True)
    scale = tl.where(scale < SMALLEST, 0.0, scale)
    share = size / tl.where(scale > 0, scale, 1.0) * (scale > 0)
    level = tl.floor(tl.log2(tl.where(share > 0, share, 1.0)) / STEP + TOP + 0.5)
    return tl.where(share > 0, tl.maximum(level, LEAST), 0.0), scale


@triton.jit
def int8_adam_kernel(
    weight, gradient, first, first_scales, second, second_scales, narrow, blocks,
    lr, beta1, beta2, eps, decay, step_size, root, scale,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    STEP1: tl.constexpr, STEP2: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """`adam_kernel` with 8-bit moments: `blocks` blocks of BLOCK numbers, with their scales in separate tensors."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    places = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    here, there = block < blocks, places < blocks * BLOCK
    w = tl.load(weight + places, mask=there, other=0.0)
    g = tl.load(gradient + places, mask=there, other=0.0).to(tl.float32) * scale
    m = _decoded(tl.load(first + places, mask=there, other=0), tl.load(first_scales + block, mask=here), 127, STEP1)
    v = _decoded(tl.load(second + places, mask=there, other=0), tl.load(second_scales + block, mask=here), 255, STEP2)
    if DECOUPLED:
        w -= lr * decay * w
    else:
        g += decay * w
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(weight + places, w, mask=there)
    level, of_block = _encoded(m, 127, STEP1, 0, SMALLEST)
    tl.store(first + places, tl.where(m < 0, -level, level).to(tl.int8), mask=there)
    tl.store(first_scales + block, of_block, mask=here)
    level, of_block = _encoded(v, 255, STEP2, 1, SMALLEST)
    tl.store(second + places, level.to(tl.uint8), mask=there)
    tl.store(second_scales + block, of_block, mask=here)
    if NARROW:
        tl.store(narrow + places, w.to(tl.bfloat16), mask=there)
