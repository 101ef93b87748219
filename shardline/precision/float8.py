"""Rows in float8: each row has a scale of its own, so that its largest number is the largest of the type."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = torch.float8_e4m3fn
LARGEST = torch.finfo(ROWS).max


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(t, dim) -> the rows in float8, and the float32 scales (t, 1) that they must be multiplied with."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide / scales).to(ROWS), scales


def from_float8(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() * scales).to(dtype)
