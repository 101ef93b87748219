"""Norms of the residual stream, of what blocks add to it, and of queries and keys; soft caps.

    rms            x / sqrt(mean(x^2) + eps) * weight
    rms_plus_one   ... * (1 + weight), in float32 at least
    layer          (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias
    soft cap       cap * tanh(x / cap)

A norm has weights. A soft cap, of attention scores or logits, has none and leaves small numbers as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardline.config.architecture import Architecture
from shardline.models.dtensor import local


class NormSpec(NamedTuple):
    kind: str = "rms"
    eps: float = 1e-5
    over: str = "head"  # what a norm of queries and keys covers


class NormWeights(NamedTuple):
    weight: Tensor
    bias: Tensor | None = None


def norm_spec(arch: Architecture) -> NormSpec:
    return NormSpec(arch.norm_kind, arch.norm_eps, arch.qk_norm_over)


def norm(x: Tensor, weights: NormWeights | None, spec: NormSpec) -> Tensor:
    """The norm of each row of x; x itself where there are no weights, hence no norm."""
    if weights is None:
        return x
    weight, bias = weights
    if spec.kind == "rms":
        return rms_norm(x, weight, spec.eps)
    wide = torch.promote_types(x.dtype, torch.float32)  # in bfloat16, 1 + weight would have only 8 bits
    if spec.kind == "rms_plus_one":
        return F.rms_norm(x.to(wide), (x.shape[-1],), 1 + weight.to(wide), spec.eps).to(x.dtype)
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), None if bias is None else bias.to(x.dtype), spec.eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), eps)


def heads_norm(x: Tensor, weight: Tensor, spec: NormSpec, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm of queries or keys (B, S, KV, group, D).

    The weight has D numbers, or D for each of these heads, in their order. `mean` averages numbers over the ranks that
    share the heads; each rank has computed them from its own heads.
    """
    if spec.over == "head":
        return norm(x, NormWeights(weight), spec)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, factors = x.to(wide), weight.to(wide).view(x.shape[2:])
    if spec.kind == "rms_plus_one":
        factors = 1 + factors
    if spec.over == "width":
        squares = mean(rows.square().mean(dim=(2, 3, 4), keepdim=True))
        rows = rows * torch.rsqrt(squares + spec.eps)
    elif spec.kind == "layer":
        rows = F.layer_norm(rows, (rows.shape[-1],), None, None, spec.eps)
    else:
        rows = F.rms_norm(rows, (rows.shape[-1],), None, spec.eps)
    return (rows * factors).to(x.dtype)


class Norm(nn.Module):
    """The weights of a norm, uninitialised."""

    def __init__(self, width: int, spec: NormSpec, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.spec = spec

    def weights(self, part: Callable[[Tensor], Tensor]) -> NormWeights:
        return NormWeights(part(self.weight), None if self.bias is None else part(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weights(local), self.spec)


def stream_norm(arch: Architecture) -> Norm:
    """A norm as wide as the residual stream."""
    return Norm(arch.dim, norm_spec(arch), arch.norm_bias)


# Soft caps


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Cap x, in float32 at least; return x itself where there is no cap."""
    if cap is None:
        return x
    return (torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)) / cap) * cap).to(x.dtype)


def cap_slope(after: Tensor, cap: float) -> Tensor:
    """The derivative of `capped`, from its result."""
    return 1 - (after / cap).square()
