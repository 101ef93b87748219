"""Moments in 8 bits, with one float32 scale for each block of a row: 2 1/32 bytes per parameter for both.

    value = sign x scale x 2^(-(top - code) x step)      code 0: the value 0      scale: the largest of the block

The codes are powers, so that every value has the same relative precision, down to 2^-OCTAVES of the largest in its
block; the steps of a second moment are 6.8 %, of a first moment 9.2 %. A smaller second moment still takes the smallest
code: it never becomes 0, since its step would then be divided by eps alone.

    row of a parameter (last dimension)  |  block 0: 256 elements  |  block 1: 256  |  block 2: the rest  |

Values are rounded to the nearest code if one step's decay reaches another code: with beta2 0.95 and beta1 0.9, moments
follow their gradients. Second moments with beta2 = 0.999 would be stuck at their code, so both moments are then rounded
stochastically, which keeps the mean right and adds noise.

Blocks lie within rows. Sharding by rows (FSDP, experts, most of tensor parallelism) does not change them. Sharding by
columns (tensor-parallel wo and w2) does not either if the shard's width is a multiple of 256, as it is in most models;
otherwise blocks are as long as the largest power of two that divides that width.

A value that was coded and decoded gets the same code and scale again, since the largest of a block is exact. So a
checkpoint is decoded when it is read, and coded again in the blocks of the layout that reads it.
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
SMALLEST = 1e-30  # smaller scales become 0: their values are far below eps, and products with them would lose digits
TOPS = {torch.int8: 127, torch.uint8: 255}  # first moments have a sign
OCTAVES = {torch.int8: 16, torch.uint8: 24}
SCALES = "_scale"  # suffix of the name of a moment's scales


class Coded(NamedTuple):
    """Rows of a moment: codes (rows, columns) and scales (rows, blocks), views of an optimizer's state."""

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
    """Scales (..., blocks) -> (..., columns): the scale of the block of each column from `first` on."""
    return scales.index_select(-1, torch.arange(first, first + columns, device=scales.device) // block)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and the scale of each code, (..., columns) -> float32."""
    top, step = TOPS[codes.dtype], code_step(codes.dtype)
    values = codes.abs().float() if codes.dtype == torch.int8 else codes.float()
    values = torch.where(values > 0, torch.exp2((values - top) * step), values)
    if codes.dtype == torch.int8:
        values *= codes.sign()
    return values * scales


def encode(values: Tensor, dtype: torch.dtype, block: int, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, columns) float32 -> codes (rows, columns), scales (rows, blocks).

    With `random` (rows, columns) in [0, 1), values are rounded up or down with the probabilities that make the mean
    right; without it, to the nearest code.
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
    """Whether moments with these betas reach another code in one step when they are rounded to the nearest."""
    return beta1 < 2 ** (-code_step(torch.int8) / 2) and beta2 < 2 ** (-code_step(torch.uint8) / 2)


def stored_block(columns: int, blocks: int) -> int:
    """The length of a block if rows of `columns` columns have `blocks` blocks."""
    lengths = (BLOCK >> halvings for halvings in range(BLOCK.bit_length()))
    return next(length for length in lengths if -(-columns // length) == blocks)


def block_of(width: int, columns: int) -> int:
    """Elements of a block if a shard has `width` of the columns: 256, or a smaller power of two that divides it."""
    return BLOCK if width == columns else math.gcd(BLOCK, width)


def int8_bytes(shard: Sequence[int], columns: int) -> int:
    """The bytes of a moment's codes and scales for a shard of a parameter with `columns` columns."""
    blocks = -(-shard[-1] // block_of(shard[-1], columns))
    return math.prod(shard) + torch.float32.itemsize * math.prod(shard[:-1]) * blocks


def int8_moment(parameter: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of zeros, both sharded like the parameter; the scales have fewer columns."""
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
    return codes, scales.to(shard.device)  # from_local moves tensors that CPU offload keeps on the host
