"""Matrix products, and the feed-forward part with a fused gate-up weight or without a gate.

Letters: t rows of the residual stream, one per token: (B, S, dim) on one rank, (tokens / ranks, dim) where ranks share
the sequence. `Products` is the interface through which tensor parallelism adds its collectives to the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.adapted.low_rank import (
    Adapted,
    Weight,
    adapted_down,
    joined,
    low_rank_gradients,
    merged_weight,
    merges,
)
from shardline.models.products.cpu_product import multiply
from shardline.models.products.linear import gradient_of, linear, weight_gradient
from shardline.models.products.swiglu import swiglu, swiglu_gradient_op, swiglu_op

Weights = tuple[Weight, ...]
Biases = tuple[Tensor | None, ...]


def columns(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, ...]:
    """x times each weight; tensor-parallel ranks hold rows of the weights, hence columns of the result."""
    return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def all_here(x: Tensor) -> Tensor:
    return x


class Products(NamedTuple):
    """The two kinds of products in a block: from dim to heads or the intermediate width (`column`), and back (`row`).

    `gather` all-gathers rows that each rank has computed for its own tokens, for this rank's heads. `mean` averages
    over ranks the values that each has computed from its own heads. With `row_keeps_float8`, backward keeps the input
    of `row` in float8 and does not need the original.
    """

    column: Callable[[Tensor, Weights, Biases], tuple[Tensor, ...]] = columns
    row: Callable[[Tensor, Weight, Tensor | None], Tensor] = linear
    gather: Callable[[Tensor], Tensor] = all_here
    mean: Callable[[Tensor], Tensor] = all_here
    row_keeps_float8: bool = False


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_GRADIENTS: dict[str, Callable[..., Tensor]] = {  # (gradient, input, *, grad_input)
    "silu": torch.ops.aten.silu_backward.grad_input,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
}


class FeedForwardWeights(NamedTuple):
    w13: Weight  # only w1 where there is no gate
    w13_bias: Tensor | None
    w2: Weight
    w2_bias: Tensor | None


def feed_forward(
    x: Tensor, w: FeedForwardWeights, gate_block: int, products: Products, activation: str = "silu"
) -> Tensor:
    """down(silu(gate(x)) * up(x)), or another activation; where `gate_block` is 0, down(silu(up(x)))."""
    on_cpu = x.device.type == "cpu" and products.column is columns and gate_block > 0
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    adapted = w.w13 if isinstance(w.w13, Adapted) else None
    if on_cpu and eager and (adapted is None or (merges(x, adapted) and not adapted.has_magnitude)):
        a, b = (None, None) if adapted is None else joined(adapted, x.dtype)
        stored, kind = ((w.w13,), "") if adapted is None else (adapted.stored, adapted.kind)
        middle = _Gated.apply(x, w.w13_bias, a, b, gate_block, activation, kind, *stored)
        return products.row(middle, w.w2, w.w2_bias)
    return narrow(widen(x, w, products), w, gate_block, products, activation)


def widen(x: Tensor, w: FeedForwardWeights, products: Products) -> Tensor:
    """gate(x) and up(x) in one product."""
    (product,) = products.column(x, (w.w13,), (w.w13_bias,))
    return product


def narrow(
    product: Tensor, w: FeedForwardWeights, gate_block: int, products: Products, activation: str = "silu"
) -> Tensor:
    """down(silu(gate) * up); the rows of w13 alternate: `gate_block` of gate, `gate_block` of up."""
    function = ACTIVATIONS[activation]
    if not gate_block:
        return products.row(function(product), w.w2, w.w2_bias)
    if product.is_cuda and activation == "silu" and torch.is_grad_enabled():
        rows, shape = product.flatten(0, -2), product.shape[:-1]
        if products.row is linear and isinstance(w.w2, Adapted) and not w.w2.dropout:
            return adapted_down(rows, w.w2, w.w2_bias, gate_block).unflatten(0, shape)
        if products.row is linear and not isinstance(w.w2, Adapted):
            out: Tensor = _Down.apply(rows, w.w2, w.w2_bias, gate_block)
            return out.unflatten(0, shape)
        if products.row_keeps_float8:
            return products.row(swiglu(rows, None, gate_block).unflatten(0, shape), w.w2, w.w2_bias)
    gate, up = product.unflatten(-1, (-1, 2, gate_block)).unbind(-2)  # (t, F / block, block) each
    return products.row((function(gate) * up).flatten(-2), w.w2, w.w2_bias)


class _Down(torch.autograd.Function):
    """down(silu(gate) * up) of rows (n, 2 F) on a GPU; SwiGLU's gradient kernel recomputes silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        ctx.save_for_backward(product, weight)
        ctx.block = block
        narrow_bias = None if bias is None else bias.to(product.dtype)
        return F.linear(swiglu_op(product, None, block), weight.to(product.dtype), narrow_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        product, weight = ctx.saved_tensors
        of_product, _, middle = swiglu_gradient_op(gradient @ weight.to(gradient.dtype), product, None, ctx.block)

        def of_weight() -> Tensor:
            return (gradient.t() @ middle).to(weight.dtype)

        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        db = gradient.sum(0) if needs_bias else None
        if torch.compiler.is_compiling():
            return of_product, of_weight() if needs_weight else None, db, None
        return of_product, gradient_of(weight, needs_weight, of_weight), db, None


class _Gated(torch.autograd.Function):
    """silu(gate(x)) * up(x) on a CPU, where loops over blocks are slow: the weight's rows are first put in two halves.

    This copy is cheap beside the product. Backward recomputes silu(gate); `activation` may name another function. A
    and B may be trained beside a frozen weight, whose format is `kind`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        block: int,
        activation: str,
        kind: str,
        *stored: Tensor,
    ) -> Tensor:
        narrow_bias = None if bias is None else _halves(bias.to(x.dtype), block)
        product = multiply(x, _halves(merged_weight(stored, kind, a, b, x.dtype), block), narrow_bias)
        ctx.save_for_backward(x, product, a, b, *stored)
        ctx.block, ctx.activation, ctx.kind = block, activation, kind
        gate, up = product.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, product, a, b, *stored = ctx.saved_tensors
        gate, up = product.chunk(2, dim=-1)
        change = torch.empty_like(product)
        of_gate, of_up = change.chunk(2, dim=-1)
        torch.mul(gradient, ACTIVATIONS[ctx.activation](gate), out=of_up)
        _GRADIENTS[ctx.activation](gradient * up, gate, grad_input=of_gate)
        needs_x, needs_bias, needs_a, needs_b = ctx.needs_input_grad[:4]
        dx = None
        if needs_x:
            dx = multiply(change, _halves(merged_weight(stored, ctx.kind, a, b, x.dtype), ctx.block).t())
        compute = lambda: _blocks(weight_gradient(x, change, stored[0].dtype), ctx.block)  # noqa: E731
        db = _blocks(change.flatten(0, -2).sum(0), ctx.block) if needs_bias else None
        da = dmatrix = None
        if needs_a or needs_b:
            da, dmatrix = low_rank_gradients(change.flatten(0, -2), x.flatten(0, -2), a, _halves(b, ctx.block))
            dmatrix = _blocks(dmatrix, ctx.block)
        dw = gradient_of(stored[0], ctx.needs_input_grad[7], compute)
        return dx, db, da, dmatrix, None, None, None, dw, *(None for _ in stored[1:])


def _halves(rows: Tensor, block: int) -> Tensor:
    """Reorder alternating blocks: all rows of gate, then all rows of up."""
    return rows.unflatten(0, (-1, 2, block)).transpose(0, 1).flatten(0, 2)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """The inverse of `_halves`."""
    return rows.unflatten(0, (2, -1, block)).transpose(0, 1).flatten(0, 2)
