"""Triton kernels over rows, mostly of experts: every number is read once and written once, at the speed of memory."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def add_up_kernel(rows, inverse, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of rows[inverse[t k + i]] over i < K, in float32, skipping places of -1; rows are `width` long."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(inverse + token * K + i).to(tl.int64)
        total += tl.load(rows + row * width + columns, mask=here & (row >= 0), other=0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def swiglu_kernel(
    product, weights, out, width, RUN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out = silu(gate) * up, times the row's weight if there is one, for BLOCK columns of a row.

    A row of `product` holds RUN numbers of gate, then RUN of up, and so on, `width` of each.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    places = row * 2 * width + columns + columns // RUN * RUN
    gate = tl.load(product + places, mask=here, other=0).to(tl.float32)
    up = tl.load(product + places + RUN, mask=here, other=0).to(tl.float32)
    middle = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        middle *= tl.load(weights + row)
    tl.store(out + row * width + columns, middle.to(out.dtype.element_ty), mask=here)


@triton.jit
def swiglu_gradient_kernel(
    gradient, product, weights, of_product, of_weights, out, width,
    RUN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of `product` and of the weights from that of the result, and the result itself recomputed.

    With weights, one program handles a whole row, because the gradient of the row's weight is a sum over it.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    places = row * 2 * width + columns + columns // RUN * RUN
    gate = tl.load(product + places, mask=here, other=0).to(tl.float32)
    up = tl.load(product + places + RUN, mask=here, other=0).to(tl.float32)
    given = tl.load(gradient + row * width + columns, mask=here, other=0).to(tl.float32)
    bent = tl.sigmoid(gate)
    middle = gate * bent * up
    if WEIGHTED:
        weight = tl.load(weights + row)
        tl.store(of_weights + row, tl.sum(given * middle))
        middle *= weight
        given *= weight
    tl.store(out + row * width + columns, middle.to(out.dtype.element_ty), mask=here)
    of_gate = given * up * bent * (1 + gate * (1 - bent))
    of_up = given * gate * bent
    kind = of_product.dtype.element_ty
    tl.store(of_product + places, of_gate.to(kind), mask=here)
    tl.store(of_product + places + RUN, of_up.to(kind), mask=here)
