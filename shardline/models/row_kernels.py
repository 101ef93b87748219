"""A Triton kernel that adds up the k rows of each token: each row is read once, at the speed of the memory."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def add_up_kernel(rows, inverse, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of rows[inverse[t k + i]] over i < K, in float32; rows are `width` long."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(inverse + token * K + i).to(tl.int64)
        total += tl.load(rows + row * width + columns, mask=here, other=0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=here)
