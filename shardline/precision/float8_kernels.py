"""Triton kernels that transpose float8 rows: the factors of rows become factors of columns.

    data (rows, depth), factors (rows, 1)  ->  data (depth, rows), factors (depth, 1)

Numbers are read twice: to find the largest of each column, and to write the result. The compiler's kernel, with one
program for a few columns and all rows, leaves most of a GPU idle.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

ROWS, COLUMNS = 128, 64  # of one tile
TILES = 8  # vertically adjacent tiles in which one program finds the largest numbers


@triton.jit
def largest_kernel(
    data, factors, largest, rows, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """largest[c] = the largest of |data[r, c]| * factors[r] so far; it starts at zero."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(TILES):
        places = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        here = (places < rows)[:, None] & (columns < depth)[None, :]
        x = tl.load(data + places.to(tl.int64)[:, None] * depth + columns[None, :], mask=here, other=0.0).to(tl.float32)
        x *= tl.load(factors + places, mask=places < rows, other=0)[:, None]
        found = tl.maximum(found, tl.max(tl.abs(x), axis=0))
    tl.atomic_max(largest + columns, found, mask=columns < depth)


@triton.jit
def turn_kernel(
    data, factors, largest, out, out_factors, rows, depth, limit, tiny, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[c, r] represents data[r, c] * factors[r], with a power-of-two factor for each row of out."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = (places < rows)[:, None] & (columns < depth)[None, :]
    most = tl.maximum(tl.load(largest + columns, mask=columns < depth, other=1), tiny)
    bits = (limit / most).to(tl.int32, bitcast=True) & 0x7F800000  # the exponent alone
    scale = bits.to(tl.float32, bitcast=True)
    if tl.program_id(1) == 0:
        tl.store(out_factors + columns, 1 / scale, mask=columns < depth)
    x = tl.load(data + places.to(tl.int64)[:, None] * depth + columns[None, :], mask=here, other=0.0).to(tl.float32)
    x *= tl.load(factors + places, mask=places < rows, other=0)[:, None] * scale[None, :]
    turned = tl.trans(x.to(out.dtype.element_ty))
    tl.store(out + columns.to(tl.int64)[:, None] * rows + places[None, :], turned, mask=tl.trans(here))
