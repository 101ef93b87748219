"""NF4 dequantised on a GPU, in one pass that reads half a byte and writes a number."""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.models.adapted.quantized import BLOCK, dynamic_values, nf4_values

TILE = 1024  # bytes of codes of one program


@triton.jit
def _dequantize_kernel(
    codes,
    factors,
    scales,
    offsets,
    values,
    dynamic,
    out,
    total,
    width,  # bytes of a row of codes
    shared,  # factors that have one scale
    DOUBLE: tl.constexpr,
    HALF: tl.constexpr,  # bytes of a block
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = place < total
    code = tl.load(codes + place, mask=here, other=0).to(tl.int32)
    block = place // HALF
    if DOUBLE:
        row, group = place // width, (place % width) // (HALF * shared)
        number = tl.load(factors + block, mask=here, other=0).to(tl.int32)
        scale = tl.load(scales + row * (width // (HALF * shared)) + group, mask=here, other=0.0)
        factor = tl.load(dynamic + number) * scale + tl.load(offsets + row, mask=here, other=0.0)
    else:
        factor = tl.load(factors + block, mask=here, other=0.0)
    first = tl.load(values + (code >> 4)) * factor
    second = tl.load(values + (code & 15)) * factor
    kind = out.dtype.element_ty
    pair = tl.interleave(first.to(kind), second.to(kind))
    places = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    tl.store(out + places, pair, mask=places < 2 * total)


def dequantize_nf4(stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of codes (N, K / 2), factors and, with double quantisation, their scales and offsets."""
    codes, factors, *rest = (one.contiguous() for one in stored)
    scales, offsets = rest or (factors, factors)
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    if out.numel():
        shared = factors.shape[1] // scales.shape[1] if rest else 1
        tables = nf4_values(codes.device), dynamic_values(codes.device)
        _dequantize_kernel[(-(-codes.numel() // TILE),)](
            *(codes, factors, scales, offsets, *tables, out),
            *(codes.numel(), codes.shape[1], shared),
            DOUBLE=bool(rest),
            HALF=BLOCK // 2,
            TILE=TILE,
            enable_fp_fusion=False,  # the same numbers as on the CPU, bit for bit
        )
    return out
