"""Frozen weights in 4 or 8 bits: quantisation and dequantisation.

    nf4     16 values, which are quantiles of a normal distribution; every 64 numbers of a row share their largest
            magnitude as a factor. With double quantisation the factors have 8 bits too: their mean over the weight is
            subtracted, and every 256 share their largest magnitude as a scale (in the row order of the unfused weight)
    int8    whole numbers from -127 to 127; each row has a factor

The stored tensors have rows and columns like the weight: any cut of its rows, and of its columns between blocks, cuts
them in the same way. nf4 gives the same numbers as `bitsandbytes`, bit for bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, BLOCK_OF_FACTORS = 64, 256
# The values of NF4, as they were published with QLoRA.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TINY = 1e-38
OF_ROWS = ("offsets", "row_factors")  # tensors with one number per row


class QuantizedWeight(NamedTuple):
    """The stored tensors of a weight (N, K). `scales` and `offsets` belong to 8-bit factors, else they are None."""

    codes: Tensor  # nf4: (N, K / 2) uint8, the earlier number in the upper half; int8: (N, K) int8
    factors: Tensor | None = None  # nf4: (N, K / 64) uint8 or float32
    scales: Tensor | None = None  # (N, K / 64 / g) float32, each for g factors of a row
    offsets: Tensor | None = None  # (N,) float32
    row_factors: Tensor | None = None  # int8: (N,) float32


def sharing(columns: int, ranks: int = 1) -> int:
    """How many adjacent factors of a row always share a scale, wherever rows begin and `ranks` cut the columns."""
    return math.gcd(BLOCK_OF_FACTORS, columns // BLOCK // ranks)


def _dynamic_values() -> tuple[float, ...]:
    """256 numbers from -1 to 1 over seven orders of magnitude, with more digits for the larger ones."""
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2.0).tolist()
        means = torch.tensor(middles, dtype=torch.float32) * 10.0 ** (exponent - 6)
        found += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(found))


_TABLES = {"nf4": NF4, "dynamic": _dynamic_values()}
_kept: dict[tuple[str, torch.device], Tensor] = {}


def nf4_values(device: torch.device) -> Tensor:
    return _table("nf4", device)


def dynamic_values(device: torch.device) -> Tensor:
    return _table("dynamic", device)


def _table(name: str, device: torch.device) -> Tensor:
    """A table on a device, made once and kept, except in a dry run, where it has no values."""
    found = _kept.get((name, device))
    if found is None:
        found = torch.tensor(_TABLES[name], dtype=torch.float32, device=device)
        if type(found) is Tensor:
            _kept[name, device] = found
    return found


def quantize(weight: Tensor, kind: str, shared: int | None) -> QuantizedWeight:
    """Quantise a whole weight (N, K) to 4 or 8 bits.

    With double quantisation, `shared` factors of a row have one scale; None keeps factors in float32.
    """
    wide = weight.float()
    if kind == "int8":
        factors = wide.abs().amax(1).clamp(min=TINY) / 127
        return QuantizedWeight((wide / factors[:, None]).round().to(torch.int8), row_factors=factors)
    blocks = wide.view(-1, BLOCK)
    factors = blocks.abs().amax(1)
    nearest = _nearest(blocks * (1.0 / factors.clamp(min=TINY))[:, None], nf4_values(wide.device))
    pairs = nearest.view(weight.shape[0], -1, 2)
    codes, rows = pairs[..., 0] << 4 | pairs[..., 1], weight.shape[0]
    if shared is None:
        return QuantizedWeight(codes, factors.view(rows, -1))
    offset = factors.mean()
    rest = (factors - offset).flatten()
    whole = torch.nn.functional.pad(rest, (0, -len(rest) % BLOCK_OF_FACTORS)).view(-1, BLOCK_OF_FACTORS)
    scales = whole.abs().amax(1)
    found = _nearest(whole * (1.0 / scales.clamp(min=TINY))[:, None], dynamic_values(wide.device))
    spread = scales.repeat_interleave(BLOCK_OF_FACTORS)[: len(rest)].view(rows, -1)[:, ::shared]
    return QuantizedWeight(codes, found.flatten()[: len(rest)].view(rows, -1), spread, offset.expand(rows))


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """The indices of the nearest values; `values` are sorted."""
    borders = (values[:-1] + values[1:]) / 2
    return torch.bucketize(x.clamp(-1, 1).contiguous(), borders).to(torch.uint8)


def dequantize(stored: tuple[Tensor, ...], kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise some rows and columns of a `QuantizedWeight` to a weight (N, K)."""
    if kind == "int8":
        return (stored[0].float() * stored[1][:, None]).to(dtype)
    codes = stored[0]
    if codes.is_cuda:
        from shardline.models.adapted.quantized_kernels import dequantize_nf4

        return dequantize_nf4(stored, dtype)
    values, factors = nf4_values(codes.device), whole_factors(stored[1:])
    numbers = torch.stack([values[(codes >> 4).int()], values[(codes & 15).int()]], dim=-1)
    return (numbers.view(codes.shape[0], -1, BLOCK) * factors[..., None]).flatten(1).to(dtype)


def whole_factors(stored: tuple[Tensor, ...]) -> Tensor:
    """The factors (N, K / 64) in float32."""
    factors, *rest = stored
    if not rest:
        return factors
    scales, offsets = rest
    shared = dynamic_values(factors.device)[factors.int()].unflatten(1, (scales.shape[1], -1))
    return (shared * scales[..., None]).flatten(1) + offsets[:, None]
