"""Products and SwiGLU on the fused gate-up weight.

Letters: t rows of the residual stream, one per token: (B, S, dim) on one rank, (tokens / ranks, dim) where ranks share
the sequence. `Products` is the interface through which tensor parallelism adds its collectives to the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.cpu_product import multiply
from shardline.models.linear import gradient_of, linear, weight_gradient

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
    on_cpu = x.device.type == "cpu" and products.column is columns
    if on_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return products.row(_Gated.apply(x, w.w13, w.w13_bias, gate_block), w.w2, w.w2_bias)
    return narrow(widen(x, w, products), w, gate_block, products)


def widen(x: Tensor, w: FeedForwardWeights, products: Products) -> Tensor:
    """gate(x) and up(x) in one."""
    (product,) = products.column(x, (w.w13,), (w.w13_bias,))
    return product


def narrow(product: Tensor, w: FeedForwardWeights, gate_block: int, products: Products) -> Tensor:
    """down(silu(gate) * up); the rows of w13 alternate: `gate_block` of gate, `gate_block` of up."""
    gate, up = product.unflatten(-1, (-1, 2, gate_block)).unbind(-2)  # (t, F / block, block) each
    return products.row((F.silu(gate) * up).flatten(-2), w.w2, w.w2_bias)


class _Gated(torch.autograd.Function):
    """silu(gate(x)) * up(x) on a CPU, whose loops are slow over blocks: the weight's rows are put in two halves first.

    That copy is small beside the product. Backward computes silu(gate) again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        narrow_bias = None if bias is None else _halves(bias.to(x.dtype), block)
        product = multiply(x, _halves(weight.to(x.dtype), block), narrow_bias)
        ctx.save_for_backward(x, weight, product)
        ctx.block = block
        gate, up = product.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, product = ctx.saved_tensors
        gate, up = product.chunk(2, dim=-1)
        change = torch.empty_like(product)
        of_gate, of_up = change.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = multiply(change, _halves(weight.to(x.dtype), ctx.block).t()) if needs_x else None
        compute = lambda: _blocks(weight_gradient(x, change, weight.dtype), ctx.block)  # noqa: E731
        db = _blocks(change.flatten(0, -2).sum(0), ctx.block) if needs_bias else None
        return dx, gradient_of(weight, needs_weight, compute), db, None


def _halves(rows: Tensor, block: int) -> Tensor:
    """All rows of gate, then all of up, from blocks that alternate."""
    return rows.unflatten(0, (-1, 2, block)).transpose(0, 1).flatten(0, 2)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """The inverse of `_halves`."""
    return rows.unflatten(0, (2, -1, block)).transpose(0, 1).flatten(0, 2)
