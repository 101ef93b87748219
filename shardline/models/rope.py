"""Rotary position embedding: inverse frequencies for every scaling, tables of cosines and sines, the rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardline.config.architecture import Architecture, RopeScaling


def inverse_frequencies(arch: Architecture, length: int | None = None) -> tuple[Tensor, float]:
    """Frequencies (D/2,) in float32 on the CPU, and the factor by which cosines and sines are multiplied.

    `length` is that of the whole sequence, on which dynamic and longrope scaling depend; None means within the original
    length. The default device is ignored: a model built under `torch.device("meta")` still needs real numbers here.
    """
    plain = _powers(arch).reciprocal()
    scaling = arch.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.type in _BY_LENGTH:
        return _BY_LENGTH[scaling.type](arch, scaling, length or 0)
    return _SCALINGS[scaling.type](arch, scaling, plain)


def depends_on_length(arch: Architecture) -> bool:
    """Whether frequencies depend on how long a sequence is."""
    return arch.rope_scaling is not None and arch.rope_scaling.type in _BY_LENGTH


def rope_tables(arch: Architecture, positions: Tensor, length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., S, D/2) in float32 of `positions` (..., S) in sequences of `length` tokens.

    With packed documents, `length` (..., S) is that of each token's document. Where the length matters and is None,
    sequences end at the last position.
    """
    if isinstance(length, Tensor) and depends_on_length(arch):
        known, which = length.unique(return_inverse=True)
        found = [inverse_frequencies(arch, one) for one in known.tolist()]
        frequencies = torch.stack([of_length for of_length, _ in found])[which.cpu()]
        return _tables(frequencies, found[0][1], positions)
    if not isinstance(length, int):
        length = int(positions.max()) + 1 if depends_on_length(arch) else None
    return _tables(*inverse_frequencies(arch, length), positions)


def window_rope_tables(arch: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of layers with a window, where these have a base of their own."""
    return _tables(_powers(arch, arch.window_rope_theta).reciprocal(), 1.0, positions)


def _tables(frequencies: Tensor, factor: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.unsqueeze(-1).float() * frequencies.to(positions.device)
    return angles.cos() * factor, angles.sin() * factor


def rope_changes(arch: Architecture, before: int, after: int) -> bool:
    """Whether sequences of these two lengths have different frequencies."""
    if not depends_on_length(arch):
        return False
    return not torch.equal(inverse_frequencies(arch, before)[0], inverse_frequencies(arch, after)[0])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "halves") -> Tensor:
    """Rotate (B, S, ..., D) by tables that broadcast to it with D/2 at the end; narrower ones turn its first part only.

    Dimension i pairs with i + D/2 (`halves`), or 2i with 2i + 1 (`neighbors`). Computed in float32 whatever the type of
    x: compiled, the cast costs nothing, and large positions stay exact.
    """
    if (width := 2 * cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin, pairs), x[..., width:]), dim=-1)
    if pairs == "halves":
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            rotated: Tensor = _Rotated.apply(x, cos, sin)
            return rotated
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


class _Rotated(torch.autograd.Function):
    """The rotation of halves on a CPU, written straight into the result instead of into parts to concatenate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sense: int) -> Tensor:
    """x rotated by the tables' angles, or back (`sense` -1)."""
    out = x.new_empty(x.shape)
    (first, second), (left, right) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-sense)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=sense)
    return out


def softmax_factor(arch: Architecture) -> float:
    """The factor of the softmax's scale: with latent attention, the square of yarn's scale of all dimensions.

    Families without latent attention have no such factor, whatever their config says.
    """
    scaling = arch.rope_scaling
    if arch.latent is None or scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _powers(arch: Architecture, theta: float | None = None) -> Tensor:
    exponents = torch.arange(0, arch.rope_dim, 2, dtype=torch.int64, device="cpu").float() / arch.rope_dim
    return torch.as_tensor((theta or arch.rope_theta) ** exponents)


def _linear(arch: Architecture, scaling: RopeScaling, plain: Tensor) -> tuple[Tensor, float]:
    return plain / scaling.factor, 1.0


def _llama3(arch: Architecture, scaling: RopeScaling, plain: Tensor) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones are kept, those between are blended."""
    original = scaling.original_max_position_embeddings or arch.max_seq_len
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / scaling.factor, plain)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(arch: Architecture, scaling: RopeScaling, plain: Tensor) -> tuple[Tensor, float]:
    """A ramp over the dimensions from kept (fast) to stretched (slow) frequencies; cos and sin grow by the factor."""
    original = scaling.original_max_position_embeddings or arch.max_seq_len
    low = _dimension_of(scaling.beta_fast, arch, original)
    high = _dimension_of(scaling.beta_slow, arch, original)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, arch.rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(arch.rope_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    stretched = 1.0 / (scaling.factor * _powers(arch))
    return stretched * (1 - keep) + plain * keep, _yarn_attention_factor(scaling)


def _dimension_of(rotations: float, arch: Architecture, original: int) -> float:
    """The dimension that turns `rotations` times within the original context."""
    return arch.rope_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(arch.rope_theta))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _dynamic(arch: Architecture, scaling: RopeScaling, length: int) -> tuple[Tensor, float]:
    """Beyond `max_seq_len` the base grows with the length."""
    stretch = scaling.factor * max(length, arch.max_seq_len) / arch.max_seq_len - (scaling.factor - 1)
    return _powers(arch, arch.rope_theta * stretch ** (arch.rope_dim / (arch.rope_dim - 2))).reciprocal(), 1.0


def _longrope(arch: Architecture, scaling: RopeScaling, length: int) -> tuple[Tensor, float]:
    """Each frequency has a divisor, and another one in sequences beyond the original length."""
    original = scaling.original_max_position_embeddings
    assert original is not None
    divisors = scaling.long_factor if length > original else scaling.short_factor
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0 if scaling.factor <= 1 else math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    return (torch.tensor(divisors, dtype=torch.float32, device="cpu") * _powers(arch)).reciprocal(), factor


_BY_LENGTH: dict[str, Callable[[Architecture, RopeScaling, int], tuple[Tensor, float]]] = {
    "dynamic": _dynamic,
    "longrope": _longrope,
}
_SCALINGS: dict[str, Callable[[Architecture, RopeScaling, Tensor], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def query_factors(arch: Architecture, positions: Tensor) -> Tensor | None:
    """Factors (float32, (..., S), or None) of queries at `positions` (..., S) in layers without rotary positions."""
    if not arch.query_scale or arch.rope_layers is None:
        return None
    steps = torch.floor((positions.float() + 1) / arch.query_scale_step)
    return torch.log1p(steps) * arch.query_scale + 1
