"""MXFP4, the format of gpt-oss's experts: 4-bit numbers in blocks of 32, which share a power of two.

    NAME_blocks   uint8 (experts, rows, columns / 32, 16)   two numbers in a byte, the one in the lower half first
    NAME_scales   uint8 (experts, rows, columns / 32)       the exponent of a block's factor, plus 127

A number has a sign, two bits of exponent and one of mantissa. Times a power of two it is exact in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise to (experts, rows, columns) in bfloat16, one expert at a time: the steps between need more memory."""
    pairs = torch.tensor([[_NUMBERS[byte % 16], _NUMBERS[byte // 16]] for byte in range(256)], dtype=torch.bfloat16)
    out = torch.empty(*blocks.shape[:2], 32 * blocks.shape[2], dtype=torch.bfloat16)
    for expert, (numbers, exponents) in enumerate(zip(blocks, scales, strict=True)):
        factors = torch.exp2(exponents.float() - 127).to(torch.bfloat16)
        out[expert] = (pairs[numbers.int()].flatten(-2) * factors[..., None]).flatten(-2)
    return out
