"""Grouped products in float8: each row times the matrix of its expert.

Each row and each row of the matrices has its own factor, in forward and for the gradients of rows. Gradients of the
matrices are computed in the type of the activations: they are sums over the tokens of an expert, and the kernels would
need a multiple of 16 tokens for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.models.experts.grouped import multiply, weight_gradient
from shardline.models.experts.moe import ExpertProducts
from shardline.models.experts.rows import Spread
from shardline.models.products.linear import gradient_of
from shardline.models.products.swiglu import swiglu
from shardline.precision.float8 import Quantized, Recipe, quantize

_NAME = "shardline::float8_grouped_linear"


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = _linear(rows, weight, ends, False)
    return out


def emulated_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = _linear(rows, weight, ends, True)
    return out


def expert_products(recipe: Recipe | None) -> ExpertProducts:
    """Return the products of a block's experts."""
    if recipe is None:
        return ExpertProducts()
    return ExpertProducts(
        *((_emulated_feed_forward, emulated_linear) if recipe.emulate else (_feed_forward, grouped_linear))
    )


def _through(
    linear: Any,
    x: Tensor,
    sorting: tuple[Tensor, Tensor, int] | None,
    weights: Tensor,
    ends: Tensor,
    w13: Tensor,
    w2: Tensor,
) -> Tensor:
    """Compute `expert_feed_forward` of models/experts/rows.py with the given products."""
    rows = x if sorting is None else Spread.apply(x, *sorting)
    product = linear(rows, w13.flatten(1, 2), ends)
    out: Tensor = linear(swiglu(product, weights, w2.shape[2]), w2, ends)
    return out


def _feed_forward(*given: Any) -> Tensor:
    return _through(grouped_linear, *given)


def _emulated_feed_forward(*given: Any) -> Tensor:
    return _through(emulated_linear, *given)


# ---- operations ------------------------------------------------------------------------------------------------------


def _product(rows: Tensor, matrices: Tensor, ends: Tensor, emulate: bool) -> Tensor:
    """Multiply rows (n, K) with the transposes of the matrices (E, N, K)."""
    left, (data, factors) = quantize(rows), quantize(matrices.flatten(0, 1))
    if emulate:
        wide = Quantized(data, factors).wide(rows.dtype).view(matrices.shape)
        return multiply(left.wide(rows.dtype), wide.transpose(1, 2), ends)
    right = data.contiguous().view(matrices.shape).transpose(1, 2)
    of_right = factors.view(matrices.shape[:2])
    options: dict[str, Any] = {"offs": ends, "out_dtype": rows.dtype, "use_fast_accum": True}
    product: Tensor = torch._scaled_grouped_mm(left.data, right, left.factors[:, 0], of_right, **options)
    return product


@torch.library.custom_op(
    _NAME, mutates_args=(), schema="(Tensor rows, Tensor weight, Tensor ends, bool emulate) -> Tensor"
)
def _linear(rows: Tensor, weight: Tensor, ends: Tensor, emulate: bool) -> Tensor:
    return _product(rows, weight.to(rows.dtype), ends, emulate)


@torch.library.custom_op(
    f"{_NAME}_backward_rows",
    mutates_args=(),
    schema="(Tensor gradient, Tensor weight, Tensor ends, bool emulate) -> Tensor",
)
def _row_gradient(gradient: Tensor, weight: Tensor, ends: Tensor, emulate: bool) -> Tensor:
    return _product(gradient.contiguous(), weight.to(gradient.dtype).transpose(1, 2), ends, emulate)


_linear.register_fake(lambda rows, weight, ends, emulate: rows.new_empty(rows.shape[0], weight.shape[1]))
_row_gradient.register_fake(
    lambda gradient, weight, ends, emulate: gradient.new_empty(gradient.shape[0], weight.shape[2])
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *kept, ctx.emulate = inputs
    ctx.save_for_backward(*kept)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = _row_gradient(gradient, weight, ends, ctx.emulate) if ctx.needs_input_grad[0] else None
    needed = ctx.needs_input_grad[1]
    of_weight = gradient_of(weight, needed, lambda: weight_gradient(gradient, rows, ends, weight.dtype))
    return of_rows, of_weight, None, None


_linear.register_autograd(_backward, setup_context=_keep)
