"""Tensor-parallel products whose communication hides inside them, forward and backward, in eager code and compiled.

    all_gather_linear(x (t, K), weights (N, K)..., axis)    products (n t, N)... of the rows of all ranks
    linear_reduce_scatter(x (n t, K), weight (N, K), axis)  this rank's rows (t, N) of the product summed over ranks
    linear_all_reduce(x, weight, axis)                      the sum on every rank
    copy_linear(x, weights, axis)                           plain products; backward sums the input's gradient

How each is carried out is looked up when it runs (`choices`): a compiled graph holds the operation alone. In a compiled
function, and where activation checkpointing chooses by operation, they are custom ops (`overlap_ops`); elsewhere plain
autograd functions, which cost less.

Biases are added outside, where they are an ordinary addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.linear import weight_queue
from shardline.parallel.tensor.backend_table import (
    choices,
    gather_linear,
    gather_linear_backward,
    linear_copy_backward,
    linear_scatter,
    linear_scatter_backward,
    linear_sum,
)
from shardline.parallel.tensor.overlap_ops import gather_linear_op, linear_copy_op, linear_scatter_op, linear_sum_op
from shardline.parallel.tensor.serial_and_ring import Needs, multiply, weight_gradients


def _prepared(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.to(x.dtype) for weight in weights]


def _alone(axis: str) -> bool:
    return collectives.axis_size(axis) == 1


def _as_ops() -> bool:
    return choices.visible or torch.compiler.is_compiling()


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[Tensor, ...]:
    prepared = _prepared(x, weights)
    if _alone(axis):
        return tuple(multiply(x, prepared))
    if _as_ops():
        return tuple(gather_linear_op(x, prepared, axis)[:-1])
    products: tuple[Tensor, ...] = _GatherLinear.apply(x, axis, *prepared)
    return products


def linear_reduce_scatter(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    (prepared,) = _prepared(x, (weight,))
    if _alone(axis):
        return x @ prepared.t()
    out: Tensor = linear_scatter_op(x, prepared, axis) if _as_ops() else _LinearScatter.apply(x, prepared, axis)
    return out


def linear_all_reduce(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    (prepared,) = _prepared(x, (weight,))
    if _alone(axis):
        return x @ prepared.t()
    out: Tensor = linear_sum_op(x, prepared, axis) if _as_ops() else _LinearSum.apply(x, prepared, axis)
    return out


def copy_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[Tensor, ...]:
    prepared = _prepared(x, weights)
    if _alone(axis):
        return tuple(multiply(x, prepared))
    if _as_ops():
        return tuple(linear_copy_op(x, prepared, axis))
    products: tuple[Tensor, ...] = _LinearCopy.apply(x, axis, *prepared)
    return products


# Eager: autograd functions


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, *weights: Tensor) -> tuple[Tensor, ...]:
        products, full = gather_linear(x, weights, axis)
        ctx.axis = axis
        ctx.save_for_backward(full, *weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        full, *weights = ctx.saved_tensors
        needs = Needs(ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]))
        later = needs.weights and weight_queue.active
        dx, dw = gather_linear_backward(gradients, full, weights, ctx.axis, Needs(needs.x, needs.weights and not later))
        if later:
            weight_queue.push(weights, lambda: weight_gradients(gradients, full))
        return dx, None, *(dw if dw is not None else [None] * len(weights))


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x, weight)
        return linear_scatter(x, weight, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:2])
        later = needs.weights and weight_queue.active
        needs = Needs(needs.x, needs.weights and not later)
        dx, dw, full = linear_scatter_backward(gradient, x, weight, ctx.axis, needs)
        if later:
            weight_queue.push((weight,), lambda: [full.t() @ x])
        return dx, dw, None


class _LinearSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_sum(x, weight, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Every rank has the whole gradient: nothing travels."""
        x, weight = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:2])
        dw = None
        if needs.weights and weight_queue.active:
            weight_queue.push((weight,), lambda: [gradient.t() @ x])
        elif needs.weights:
            dw = gradient.t() @ x
        return gradient @ weight if needs.x else None, dw, None


class _LinearCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x, *weights)
        return tuple(multiply(x, weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs = Needs(ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]))
        later = needs.weights and weight_queue.active
        dx, dw = linear_copy_backward(gradients, x, weights, ctx.axis, Needs(needs.x, needs.weights and not later))
        if later:
            weight_queue.push(weights, lambda: weight_gradients(gradients, x))
        return dx, None, *(dw if dw is not None else [None] * len(weights))
