"""Products and SwiGLU on the fused gate-up weight.

Letters: t rows of the residual stream, one per token: (B, S, dim) on one rank, (tokens / ranks, dim) where ranks share
the sequence. `Products` is the interface through which tensor parallelism adds its collectives to the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from shardline.models.linear import linear

Weights = tuple[Tensor, ...]
Biases = tuple[Tensor | None, ...]


def columns(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, ...]:
    """x times each weight; tensor-parallel ranks hold rows of the weights, hence columns of the result."""
    return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def all_here(x: Tensor) -> Tensor:
    return x


class Products(NamedTuple):
    """The two kinds of products in a block: into heads or the wide middle (`column`), and back to dim (`row`).

    `gather` gives all rows of what each rank has computed for its own, to be used by this rank's heads.
    """

    column: Callable[[Tensor, Weights, Biases], tuple[Tensor, ...]] = columns
    row: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    gather: Callable[[Tensor], Tensor] = all_here


class FeedForwardWeights(NamedTuple):
    w13: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_bias: Tensor | None


def feed_forward(x: Tensor, w: FeedForwardWeights, gate_block: int, products: Products) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    return narrow(widen(x, w, products), w, gate_block, products)


def widen(x: Tensor, w: FeedForwardWeights, products: Products) -> Tensor:
    """gate(x) and up(x) in one."""
    (product,) = products.column(x, (w.w13,), (w.w13_bias,))
    return product


def narrow(product: Tensor, w: FeedForwardWeights, gate_block: int, products: Products) -> Tensor:
    """down(silu(gate) * up); the rows of w13 alternate: `gate_block` of gate, `gate_block` of up."""
    gate, up = product.unflatten(-1, (-1, 2, gate_block)).unbind(-2)  # (t, F / block, block) each
    return products.row((F.silu(gate) * up).flatten(-2), w.w2, w.w2_bias)
