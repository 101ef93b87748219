"""SwiGLU on the fused gate-up weight."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in) times weight (out, in) in the type of x, whatever type the weight is stored in."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def feed_forward(
    x: Tensor, w13: Tensor, w13_bias: Tensor | None, w2: Tensor, w2_bias: Tensor | None, gate_block: int
) -> Tensor:
    """down(silu(gate(x)) * up(x)); the rows of w13 alternate: `gate_block` of gate, `gate_block` of up."""
    both = linear(x, w13, w13_bias).unflatten(-1, (-1, 2, gate_block))  # (B, S, F / block, 2, block)
    gate, up = both.unbind(-2)
    return linear((F.silu(gate) * up).flatten(-2), w2, w2_bias)
