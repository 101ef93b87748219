"""Rows of experts: sorting tokens into rows, adding rows up, and the feed-forward part of all experts at once.

`expert_feed_forward` keeps only its input and the first product for the backward pass. The sorted rows are copies of
tokens that are kept anyway, and silu(gate) * up is one cheap pass over the product: backward recomputes both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.experts.grouped import multiply, row_gradient, weight_gradient
from shardline.models.products.linear import gradient_of
from shardline.models.products.swiglu import swiglu_gradient_op, swiglu_op


def power_of_two(width: int) -> int:
    """The smallest power of two that is not below `width`."""
    return 1 << (width - 1).bit_length()


def spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    """(t, dim) -> (t k, dim): each token k times, in the given order."""
    return x.index_select(0, order // k)


# For the backward pass of compiled blocks: torch's kernel copies rows a third faster than a compiled one.
_spread = torch.library.custom_op(
    "shardline::spread", spread, mutates_args=(), schema="(Tensor x, Tensor order, int k) -> Tensor"
)
_spread.register_fake(lambda x, order, k: x.new_empty(order.shape[0], x.shape[1]))


@torch.library.custom_op("shardline::add_up", mutates_args=(), schema="(Tensor rows, Tensor inverse, int k) -> Tensor")
def add_up(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    """(t k, dim) -> (t, dim): the sum of the k rows of each token; a place of -1 stands for an absent row."""
    if not rows.is_cuda:
        return F.pad(rows, (0, 0, 0, 1))[inverse].unflatten(0, (-1, k)).sum(1)
    from shardline.models.experts.row_kernels import BLOCK, add_up_kernel

    rows = rows.contiguous()
    out = rows.new_empty(inverse.shape[0] // k, rows.shape[1])
    if out.numel():
        add_up_kernel[(out.shape[0], -(-out.shape[1] // BLOCK))](rows, inverse, out, out.shape[1], K=k, BLOCK=BLOCK)
    return out


add_up.register_fake(lambda rows, inverse, k: rows.new_empty(inverse.shape[0] // k, rows.shape[1]))


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return spread(x, order, k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return add_up(gradient, inverse, ctx.k), None, None, None


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return add_up(rows, inverse, k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return spread(gradient, order, ctx.k), None, None, None


# ---- the feed-forward part -------------------------------------------------------------------------------------------


def expert_feed_forward(
    x: Tensor, sorting: tuple[Tensor, Tensor, int] | None, weights: Tensor, ends: Tensor, w13: Tensor, w2: Tensor
) -> Tensor:
    """w2 (silu(gate) * up * weight) for rows sorted by expert, whose weights are (n, 1).

    x are the rows (n, dim), or with `sorting` (order, inverse, k) the tokens that they are copies of. w13 is
    (experts, 2, width, dim), w2 (experts, dim, width).
    """
    order, inverse, k = sorting or (None, None, 0)
    out: Tensor = _feed_forward(x, order, inverse, k, weights, ends, w13, w2)[0]
    return out


@torch.library.custom_op(
    "shardline::expert_feed_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor? order, Tensor? inverse, int k, Tensor weights, Tensor ends, Tensor w13, Tensor w2)"
    " -> (Tensor, Tensor)",
)
def _feed_forward(
    x: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    k: int,
    weights: Tensor,
    ends: Tensor,
    w13: Tensor,
    w2: Tensor,
) -> tuple[Tensor, Tensor]:
    rows = x if order is None else spread(x, order, k)
    product = multiply(rows, w13.flatten(1, 2).to(x.dtype).transpose(1, 2), ends)
    return multiply(swiglu_op(product, weights, w2.shape[2]), w2.to(x.dtype).transpose(1, 2), ends), product


@_feed_forward.register_fake
def _(
    x: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    k: int,
    weights: Tensor,
    ends: Tensor,
    w13: Tensor,
    w2: Tensor,
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if order is None else order.shape[0]
    return x.new_empty(rows, w2.shape[1]), x.new_empty(rows, 2 * w13.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, order, inverse, ctx.k, *rest = inputs
    ctx.set_materialize_grads(False)  # the second output is only kept: it has no gradient
    ctx.save_for_backward(x, order, inverse, *rest, output[1])


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
    x, order, inverse, weights, ends, w13, w2, product = ctx.saved_tensors

    def of_w2() -> Tensor:
        return weight_gradient(gradient, middle, ends, w2.dtype)

    def of_w13() -> Tensor:
        rows = x if order is None else _spread(x, order, ctx.k)
        return weight_gradient(of_product, rows, ends, w13.dtype).view(w13.shape)

    *_, needs_w13, needs_w2 = ctx.needs_input_grad
    of_middle = row_gradient(gradient, w2, ends)
    of_product, of_weights, middle = swiglu_gradient_op(of_middle, product, weights, w2.shape[2])
    of_rows = row_gradient(of_product, w13.flatten(1, 2), ends)  # first, because it may have to be sent to other ranks
    d_w2 = gradient_of(w2, needs_w2, of_w2)
    d_w13 = gradient_of(w13, needs_w13, of_w13)
    of_x = of_rows if order is None else add_up(of_rows, inverse, ctx.k)
    return of_x, None, None, None, of_weights, None, d_w13, d_w2


_feed_forward.register_autograd(_backward, setup_context=_keep)
