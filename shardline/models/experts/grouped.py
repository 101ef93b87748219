"""Products of many experts at once: rows sorted by expert times the matrix of their expert.

    rows   | expert 0 | expert 1 | expert 2 |        ends = (where expert 0 ends, where 1 ends, ...)
              x w[0]     x w[1]     x w[2]

On a GPU in bfloat16 it is one kernel (`F.grouped_mm`); elsewhere a loop over the experts. An expert may have no rows.
Forward and backward each cast weights to the type of the rows: no narrow copy is kept in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.products.linear import gradient_of

_NAME = "shardline::grouped"


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows (n, in) times weight (E, out, in) of each row's expert; ends (E,) int32, the last is n."""
    out: Tensor = _linear(rows, weight, ends)
    return out


@torch.library.custom_op(
    f"{_NAME}_linear", mutates_args=(), schema="(Tensor rows, Tensor weight, Tensor ends) -> Tensor"
)
def _linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return multiply(rows, weight.to(rows.dtype).transpose(1, 2), ends)


@_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op(
    f"{_NAME}_linear_backward_rows", mutates_args=(), schema="(Tensor gradient, Tensor weight, Tensor ends) -> Tensor"
)
def row_gradient(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return multiply(gradient.contiguous(), weight.to(gradient.dtype), ends)


@row_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[2])


@torch.library.custom_op(
    f"{_NAME}_linear_backward_weight",
    mutates_args=(),
    schema="(Tensor gradient, Tensor rows, Tensor ends, ScalarType dtype) -> Tensor",
)
def weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    gradient = gradient.contiguous()
    if _has_kernel(gradient):
        return F.grouped_mm(gradient.t(), rows, offs=ends).to(dtype)
    out = gradient.new_empty(len(ends), gradient.shape[1], rows.shape[1])
    for expert, (start, stop) in enumerate(_spans(ends)):
        torch.mm(gradient[start:stop].t(), rows[start:stop], out=out[expert])
    return out.to(dtype)


@weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(len(ends), gradient.shape[1], rows.shape[1], dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    d_rows = row_gradient(gradient, weight, ends) if ctx.needs_input_grad[0] else None
    needed = ctx.needs_input_grad[1]
    return d_rows, gradient_of(weight, needed, lambda: weight_gradient(gradient, rows, ends, weight.dtype)), None


_linear.register_autograd(_backward, setup_context=_keep)


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows (n, a) times matrices (E, a, b)."""
    if _has_kernel(rows):
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for expert, (start, stop) in enumerate(_spans(ends)):
        torch.mm(rows[start:stop], matrices[expert], out=out[start:stop])
    return out


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))
