"""Moments in 8 bits, with one float32 scale for each block of a row: 2 bytes per parameter and a thirty-second more.

    value = sign x scale x 2^(-(top - code) x step)      code 0: the value 0      scale: the largest of the block

The codes are powers, so that every value has the same relative precision, down to 2^-OCTAVES of the largest in its
block; the steps of a second moment are 6.8 %, of a first moment 9.2 %. A second moment that is smaller still takes
the smallest code: it never becomes 0, where a step would be divided by eps alone.

    row of a parameter (last dimension)  |  block 0: 256 elements  |  block 1: 256  |  block 2: the rest  |

Values are rounded to the nearest code where one step's decay reaches another: with beta2 0.95 and beta1 0.9, moments
follow their gradients so. Second moments with beta2 = 0.999 would stand still within their block: then both are rounded
at random, which keeps the mean right and adds noise.

Blocks lie within rows. Whatever cuts rows apart (FSDP, experts, most of tensor parallelism) leaves them as they are. A
cut through rows (tensor parallel wo and w2) leaves them, too, where its width is a multiple of 256, as it is in most
models; elsewhere blocks are as long as the largest power of two that divides that width.

A value that was coded and decoded has the same code and scale again: the largest of a block is exact. So a checkpoint
is decoded when it is read, and coded again in the blocks of the layout that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.dtensor import local

BLOCK = 256
SMALLEST = 1e-30  # a scale below is 0: its values are far below eps, and products with it would lose digits
TOPS = {torch.int8: 127, torch.uint8: 255}  # first moments have a sign
OCTAVES = {torch.int8: 16, torch.uint8: 24}
SCALES = "_scale"  # ending of the name of a moment's scales


class Coded(NamedTuple):
    """Rows of a moment: codes (rows, columns) and scales (rows, blocks), views of what an optimizer keeps."""

    codes: Tensor
    scales: Tensor
    block: int

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    def values(self) -> Tensor:
        """(rows, columns) float32."""
        return decode(self.codes, spread(self.scales, self.block, self.codes.shape[-1]))

    def keep(self, values: Tensor, random: Tensor | None = None) -> None:
        codes, scales = encode(values.view(self.codes.shape), self.codes.dtype, self.block, random)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def spread(scales: Tensor, block: int, columns: int, first: int = 0) -> Tensor:
    """Scales (..., blocks) -> (..., columns): of each of so many columns from `first` on, the scale of its block."""
    return scales.index_select(-1, torch.arange(first, first + columns, device=scales.device) // block)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and the scale of each, (..., columns) -> float32."""
    top, step = TOPS[codes.dtype], code_step(codes.dtype)
    values = codes.abs().float() if codes.dtype == torch.int8 else codes.float()
    values = torch.where(values > 0, torch.exp2((values - top) * step), values)
    if codes.dtype == torch.int8:
        values *= codes.sign()
    return values * scales


def encode(values: Tensor, dtype: torch.dtype, block: int, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, columns) float32 -> codes (rows, columns), scales (rows, blocks).

    `random` (rows, columns) from 0 to below 1 rounds up or down with the probabilities that make the mean right;
    without it to the nearest code.
    """
    top, step, (rows, columns) = TOPS[dtype], code_step(dtype), values.shape
    blocks = F.pad(values, (0, -columns % block)).view(rows, -1, block)
    scales = blocks.abs().amax(2)
    scales = torch.where(scales < SMALLEST, 0.0, scales)
    shares = (values.abs() / spread(scales, block, columns)).nan_to_num_(0.0, 0.0, 0.0)  # 0 where the scale is 0
    levels = shares.log2().div_(step).add_(top).clamp_(min=0 if dtype == torch.int8 else 1)
    if random is None:
        levels.round_()
    else:
        below = levels.floor()
        levels = below + (torch.exp2((levels - below) * step) - 1 > random * (2**step - 1))
    levels = torch.where(shares > 0, levels, 0.0)
    return (levels * values.sign() if dtype == torch.int8 else levels).to(dtype), scales


def code_step(dtype: torch.dtype) -> float:
    return OCTAVES[dtype] / (TOPS[dtype] - 1)


def codes_follow(beta1: float, beta2: float) -> bool:
    """Whether moments that decay by these reach another code in one step when they are rounded to the nearest."""
    return beta1 < 2 ** (-code_step(torch.int8) / 2) and beta2 < 2 ** (-code_step(torch.uint8) / 2)


def stored_block(columns: int, blocks: int) -> int:
    """The length of a block where rows of so many columns have so many of them."""
    lengths = (BLOCK >> halvings for halvings in range(BLOCK.bit_length()))
    return next(length for length in lengths if -(-columns // length) == blocks)


def block_of(width: int, columns: int) -> int:
    """Elements of a block where a shard has `width` of the columns: 256, or a smaller power of two that divides it."""
    return BLOCK if width == columns else math.gcd(BLOCK, width)


def int8_bytes(shard: Sequence[int], columns: int) -> int:
    """The bytes of a moment: codes and scales of the shard of a parameter with so many columns."""
    blocks = -(-shard[-1] // block_of(shard[-1], columns))
    return math.prod(shard) + torch.float32.itemsize * math.prod(shard[:-1]) * blocks


def int8_moment(parameter: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of zeros; both are sharded as the parameter is, the scales with fewer columns."""
    codes = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    shard = local(parameter)
    block = block_of(shard.shape[-1], parameter.shape[-1])
    shape = (*parameter.shape[:-1], -(-parameter.shape[-1] // block))
    held = torch.zeros(*shard.shape[:-1], -(-shard.shape[-1] // block), device=shard.device)
    if not hasattr(parameter, "placements"):
        return codes, held
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    scales = DTensor.from_local(
        held, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return codes, scales.to(shard.device)  # from_local moves what CPU offload keeps on the host
