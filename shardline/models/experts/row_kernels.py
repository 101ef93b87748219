"""Triton kernels over rows of experts: every number is read once and written once, at the speed of the memory."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def add_up_kernel(rows, inverse, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of rows[inverse[t k + i]] over i < K, in float32, without places of -1; rows are `width` long."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(inverse + token * K + i).to(tl.int64)
        total += tl.load(rows + row * width + columns, mask=here & (row >= 0), other=0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def swiglu_kernel(product, weights, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) * up * weight for each row of `product`, which holds gate and then up, `width` of each."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    gate = tl.load(product + row * 2 * width + columns, mask=here, other=0).to(tl.float32)
    up = tl.load(product + row * 2 * width + width + columns, mask=here, other=0).to(tl.float32)
    middle = gate * tl.sigmoid(gate) * up * tl.load(weights + row)
    tl.store(out + row * width + columns, middle.to(out.dtype.element_ty), mask=here)


@triton.jit
def swiglu_gradient_kernel(gradient, product, weights, of_product, of_weights, out, width, BLOCK: tl.constexpr):
    """The gradients of `product` and of the weights from that of the result, and the result itself once more."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    gate = tl.load(product + row * 2 * width + columns, mask=here, other=0).to(tl.float32)
    up = tl.load(product + row * 2 * width + width + columns, mask=here, other=0).to(tl.float32)
    given = tl.load(gradient + row * width + columns, mask=here, other=0).to(tl.float32)
    bent = tl.sigmoid(gate)
    weight = tl.load(weights + row)
    middle = gate * bent * up
    tl.store(of_weights + row, tl.sum(given * middle))
    tl.store(out + row * width + columns, (middle * weight).to(out.dtype.element_ty), mask=here)
    given *= weight
    of_gate = given * up * bent * (1 + gate * (1 - bent))
    of_up = given * gate * bent
    kind = of_product.dtype.element_ty
    tl.store(of_product + row * 2 * width + columns, of_gate.to(kind), mask=here)
    tl.store(of_product + row * 2 * width + width + columns, of_up.to(kind), mask=here)
