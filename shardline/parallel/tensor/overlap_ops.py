"""The overlapped products as custom ops, each backward an op of its own: a graph keeps them whole.

`overlap` calls them in compiled functions, and in eager code where activation checkpointing chooses by operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.linear import weight_queue
from shardline.parallel.tensor.backend_table import (
    gather_linear,
    gather_linear_backward,
    linear_copy_backward,
    linear_scatter,
    linear_scatter_backward,
    linear_sum,
)
from shardline.parallel.tensor.serial_and_ring import Needs, multiply, weight_gradients


@torch.library.custom_op("shardline::all_gather_linear", mutates_args=())
def gather_linear_op(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    products, full = gather_linear(x, weights, axis)
    return [*products, full]


@gather_linear_op.register_fake
def _(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    rows = collectives.axis_size(axis) * x.shape[0]
    return [*(x.new_empty(rows, weight.shape[0]) for weight in weights), x.new_empty(rows, x.shape[1])]


@torch.library.custom_op("shardline::all_gather_linear_backward", mutates_args=())
def _gather_linear_backward_op(
    gradients: list[Tensor], full: Tensor, weights: list[Tensor], axis: str, x_needed: bool, weights_needed: bool
) -> list[Tensor]:
    dx, dw = gather_linear_backward(gradients, full, weights, axis, Needs(x_needed, weights_needed))
    return [*([dx] if dx is not None else []), *(dw or [])]


@_gather_linear_backward_op.register_fake
def _(
    gradients: list[Tensor], full: Tensor, weights: list[Tensor], axis: str, x_needed: bool, weights_needed: bool
) -> list[Tensor]:
    dx = [full.new_empty(full.shape[0] // collectives.axis_size(axis), full.shape[1])] if x_needed else []
    return [*dx, *(weight.new_empty(weight.shape) for weight in (weights if weights_needed else []))]


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, weights, ctx.axis = inputs
    ctx.save_for_backward(output[-1], *weights)


def _gather_linear_gradient(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    full, *weights = ctx.saved_tensors
    given = [
        torch.zeros(full.shape[0], weight.shape[0], dtype=full.dtype, device=full.device) if g is None else g
        for g, weight in zip(gradients, weights, strict=False)
    ]
    x_needed, weights_needed = ctx.needs_input_grad[0], any(_flat(ctx.needs_input_grad[1]))
    if weights_needed and _later():
        weights_needed = False
        weight_queue.push(weights, lambda: weight_gradients(given, full))
    found = _gather_linear_backward_op(given, full, weights, ctx.axis, x_needed, weights_needed)
    dx = found[0] if x_needed else None
    return dx, found[int(x_needed) :] if weights_needed else [None] * len(weights), None


def _later() -> bool:
    """Whether weight gradients wait; a compiled function has no say in that, and refuses schedules that ask for it."""
    return not torch.compiler.is_compiling() and weight_queue.active


def _flat(needed: Any) -> list[bool]:
    return list(needed) if isinstance(needed, (list, tuple)) else [bool(needed)]


gather_linear_op.register_autograd(_gather_linear_gradient, setup_context=_keep_gathered)


@torch.library.custom_op("shardline::linear_reduce_scatter", mutates_args=())
def linear_scatter_op(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return linear_scatter(x, weight, axis)


@linear_scatter_op.register_fake
def _(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] // collectives.axis_size(axis), weight.shape[0])


@torch.library.custom_op("shardline::linear_reduce_scatter_backward", mutates_args=())
def _linear_scatter_backward_op(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str, x_needed: bool, weight_needed: bool
) -> list[Tensor]:
    found = linear_scatter_backward(gradient, x, weight, axis, Needs(x_needed, weight_needed))
    kept = [part for part in found[:2] if part is not None]
    return kept if weight_needed else [*kept, found[2]]


@_linear_scatter_backward_op.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, axis: str, x_needed: bool, weight_needed: bool) -> list[Tensor]:
    kept = ((x, x_needed), (weight, weight_needed))
    full = [] if weight_needed else [x.new_empty(x.shape[0], weight.shape[0])]
    return [*(tensor.new_empty(tensor.shape) for tensor, needed in kept if needed), *full]


def _keep_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.axis = inputs
    ctx.save_for_backward(x, weight)


def _linear_scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    x_needed, weight_needed = ctx.needs_input_grad[:2]
    later = weight_needed and _later()
    weight_needed = weight_needed and not later
    found = list(_linear_scatter_backward_op(gradient, x, weight, ctx.axis, x_needed, weight_needed))
    if later:
        full = found[-1]
        weight_queue.push((weight,), lambda: [full.t() @ x])
    return found.pop(0) if x_needed else None, found.pop(0) if weight_needed else None, None


linear_scatter_op.register_autograd(_linear_scatter_gradient, setup_context=_keep_both)


@torch.library.custom_op("shardline::linear_all_reduce", mutates_args=())
def linear_sum_op(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return linear_sum(x, weight, axis)


@linear_sum_op.register_fake
def _(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_sum_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    x_needed, weight_needed = ctx.needs_input_grad[:2]
    if weight_needed and _later():
        weight_needed = False
        weight_queue.push((weight,), lambda: [gradient.t() @ x])
    return gradient @ weight if x_needed else None, gradient.t() @ x if weight_needed else None, None


linear_sum_op.register_autograd(_linear_sum_gradient, setup_context=_keep_both)


@torch.library.custom_op("shardline::copy_linear", mutates_args=())
def linear_copy_op(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    return multiply(x, weights)


@linear_copy_op.register_fake
def _(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@torch.library.custom_op("shardline::copy_linear_backward", mutates_args=())
def _linear_copy_backward_op(
    gradients: list[Tensor], x: Tensor, weights: list[Tensor], axis: str, x_needed: bool, weights_needed: bool
) -> list[Tensor]:
    dx, dw = linear_copy_backward(gradients, x, weights, axis, Needs(x_needed, weights_needed))
    return [*([dx] if dx is not None else []), *(dw or [])]


@_linear_copy_backward_op.register_fake
def _(
    gradients: list[Tensor], x: Tensor, weights: list[Tensor], axis: str, x_needed: bool, weights_needed: bool
) -> list[Tensor]:
    dx = [x.new_empty(x.shape)] if x_needed else []
    return [*dx, *(weight.new_empty(weight.shape) for weight in (weights if weights_needed else []))]


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, ctx.axis = inputs
    ctx.save_for_backward(x, *weights)


def _linear_copy_gradient(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    x_needed, weights_needed = ctx.needs_input_grad[0], any(_flat(ctx.needs_input_grad[1]))
    if weights_needed and _later():
        weights_needed = False
        weight_queue.push(weights, lambda: weight_gradients(gradients, x))
    found = _linear_copy_backward_op(list(gradients), x, weights, ctx.axis, x_needed, weights_needed)
    dx = found[0] if x_needed else None
    return dx, found[int(x_needed) :] if weights_needed else [None] * len(weights), None


linear_copy_op.register_autograd(_linear_copy_gradient, setup_context=_keep_all)
