"""Tensor-parallel products that overlap with their communication, forward and backward, eager and compiled.

    all_gather_linear(x (t, K), weights (N, K)..., axis)       products (n t, N)... of the rows of all ranks
    linear_reduce_scatter(x (n t, K), (weight (N, K),), axis)  this rank's rows (t, N) of the product summed over ranks
    linear_all_reduce(x, (weight,), axis)                      the sum on every rank
    copy_linear(x, weights, axis)                              plain products; backward sums the input's gradient

The backend of a product is looked up when the product runs (`backend_table`): a compiled graph holds only the
operation. Biases are added outside, as an ordinary addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.products.linear import weight_queue
from shardline.parallel.tensor.backend_table import choices, chosen_backend
from shardline.parallel.tensor.float8_rows import arithmetic, written
from shardline.parallel.tensor.serial_and_ring import (
    COLUMN,
    ROW,
    Needs,
    Tensors,
    input_gradient,
    products_of,
    weight_gradients,
)
from shardline.precision.float8 import Recipe


class Gradients(NamedTuple):
    """Gradients of x and of the weights, None where not needed, and gradients of the products for all rows.

    With the latter and the rows that forward kept, the gradients of the weights can be computed later.
    """

    x: Tensor | None
    weights: list[Tensor] | None
    products: Tensors


class Operation:
    """A product with a gradient: an autograd function in eager code, a custom op in compiled code.

    `forward(x, weights, axis, low)` returns the products and what backward needs of x: x itself or, with `gathers`, the
    rows of all ranks. With `scatters`, the products are those of this rank's rows. `backward(gradients, kept, weights,
    axis, low, needs)` returns the gradients; it is a separate op, so that a graph keeps it whole. A `local` backward
    sends nothing and consists of ordinary products. `low` is the float8 recipe as `float8_rows.written` encodes it.

    Eager code also runs the ops where activation checkpointing selects by operation and must see them
    (`choices.visible`).
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Tensor, Tensors, str, str], tuple[list[Tensor], Tensor]],
        backward: Callable[[Tensors, Tensor, Tensors, str, str, Needs], Gradients],
        gathers: bool = False,
        scatters: bool = False,
        local: bool = False,
    ) -> None:
        self.name, self.forward, self.backward = name, forward, backward
        self.gathers, self.scatters, self.local = gathers, scatters, local
        self.function = self._autograd_function()
        schema = "(Tensor x, Tensor[] weights, str axis, str low) -> Tensor[]"
        self.op = torch.library.custom_op(f"shardline::{name}", self._run, mutates_args=(), schema=schema)
        self.op.register_fake(self._shapes)
        self.op.register_autograd(self._differentiate_op, setup_context=self._keep)
        if not local:
            operands = "Tensor[] gradients, Tensor kept, Tensor[] weights"
            schema = f"({operands}, str axis, str low, bool x, bool w) -> Tensor[]"
            name = f"shardline::{name}_backward"
            self.backward_op = torch.library.custom_op(name, self._run_backward, mutates_args=(), schema=schema)
            self.backward_op.register_fake(self._backward_shapes)

    def __call__(self, x: Tensor, weights: Tensors, axis: str, recipe: Recipe | None = None) -> tuple[Tensor, ...]:
        prepared, low = [weight.to(x.dtype) for weight in weights], written(recipe)
        if collectives.axis_size(axis) == 1:
            return tuple(x @ weight.t() for weight in prepared)
        if torch.compiler.is_compiling() or choices.visible:
            return tuple(self.op(x, prepared, axis, low)[: len(prepared)])
        products: tuple[Tensor, ...] = self.function.apply(x, axis, low, *prepared)
        return products

    def _rows(self, x_rows: int, axis: str) -> int:
        """Return the number of rows of the products."""
        ranks = collectives.axis_size(axis)
        return x_rows * ranks if self.gathers else x_rows // ranks if self.scatters else x_rows

    # ---- eager -------------------------------------------------------------------------------------------------------

    def _autograd_function(self) -> Any:
        operation = self

        class ProductFunction(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, axis: str, low: str, *weights: Tensor) -> tuple[Tensor, ...]:
                products, kept = operation.forward(x, weights, axis, low)
                ctx.axis, ctx.low = axis, low
                ctx.save_for_backward(kept, *weights)
                return tuple(products)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
                kept, *weights = ctx.saved_tensors
                needs_x, _, _, *needed = ctx.needs_input_grad
                dx, dw = _differentiate(
                    operation.backward, gradients, kept, weights, ctx.axis, ctx.low, needs_x, needed
                )
                return dx, None, None, *dw

        ProductFunction.__name__ = self.name
        return ProductFunction

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, weights: list[Tensor], axis: str, low: str) -> list[Tensor]:
        products, kept = self.forward(x, weights, axis, low)
        return [*products, kept] if self.gathers else products

    def _shapes(self, x: Tensor, weights: list[Tensor], axis: str, low: str) -> list[Tensor]:
        rows = self._rows(x.shape[0], axis)
        products = [x.new_empty(rows, weight.shape[0]) for weight in weights]
        return [*products, arithmetic(low, x.dtype).like(x, rows, x.shape[1])] if self.gathers else products

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        x, weights, ctx.axis, ctx.low = inputs
        ctx.save_for_backward(output[-1] if self.gathers else x, *weights)

    def _differentiate_op(self, ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        rows = kept.shape[0] if self.gathers else self._rows(kept.shape[0], ctx.axis)
        given = [
            torch.zeros(rows, weight.shape[0], dtype=weight.dtype, device=kept.device) if gradient is None else gradient
            for gradient, weight in zip(gradients, weights, strict=False)  # the kept rows have no gradient
        ]
        needs_x, needed = ctx.needs_input_grad[:2]
        needed = list(needed) if isinstance(needed, (list, tuple)) else [needed] * len(weights)
        backward = self.backward if self.local else self._call_backward
        return *_differentiate(backward, given, kept, weights, ctx.axis, ctx.low, needs_x, needed), None, None

    def _call_backward(
        self, gradients: Tensors, kept: Tensor, weights: Tensors, axis: str, low: str, needs: Needs
    ) -> Gradients:
        found = list(self.backward_op(list(gradients), kept, list(weights), axis, low, needs.x, needs.weights))
        dx = found.pop(0) if needs.x else None
        dw = [found.pop(0) for _ in weights] if needs.weights else None
        return Gradients(dx, dw, found or gradients)

    def _run_backward(
        self, gradients: list[Tensor], kept: Tensor, weights: list[Tensor], axis: str, low: str, x: bool, w: bool
    ) -> list[Tensor]:
        found = self.backward(gradients, kept, weights, axis, low, Needs(x, w))
        dx = [found.x] if x and found.x is not None else []
        return [*dx, *((found.weights or []) if w else found.products if self.scatters else [])]

    def _backward_shapes(
        self, gradients: list[Tensor], kept: Tensor, weights: list[Tensor], axis: str, low: str, x: bool, w: bool
    ) -> list[Tensor]:
        rows = kept.shape[0] // collectives.axis_size(axis) if self.gathers else kept.shape[0]
        dx = [weights[0].new_empty(rows, weights[0].shape[1])] if x else []
        if w:
            return [*dx, *(weight.new_empty(weight.shape) for weight in weights)]
        like = arithmetic(low, weights[0].dtype).like
        return [*dx, *(like(weights[0], kept.shape[0], weight.shape[0]) for weight in weights if self.scatters)]


def _differentiate(
    backward: Callable[[Tensors, Tensor, Tensors, str, str, Needs], Gradients],
    gradients: Tensors,
    kept: Tensor,
    weights: Tensors,
    axis: str,
    low: str,
    needs_x: bool,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Return the gradients of x and the weights. A pipeline schedule may queue the latter, except in compiled code.

    If only some weights are trained, these are LoRA's small ones, and their gradients are computed after the rest.
    """
    trained = [number for number, one in enumerate(needed) if one]
    later = bool(trained) and not torch.compiler.is_compiling() and weight_queue.active
    whole = len(trained) == len(weights)
    dx, dw, of_products = backward(gradients, kept, weights, axis, low, Needs(needs_x, whole and not later))
    how = arithmetic(low, weights[0].dtype)

    def of_trained() -> list[Tensor]:
        return weight_gradients(how, [of_products[number] for number in trained], kept)

    if later:
        weight_queue.push([weights[number] for number in trained], of_trained)
    elif trained and not whole:
        some = dict(zip(trained, of_trained(), strict=True))
        return dx, [some.get(number) for number in range(len(weights))]
    return dx, [None] * len(weights) if dw is None else dw


# Forward and backward without autograd, on the chosen backend


def gather(x: Tensor, weights: Tensors, axis: str, low: str) -> tuple[list[Tensor], Tensor]:
    rows = x.shape[0] * collectives.axis_size(axis)
    with chosen_backend(COLUMN, "forward", rows, weights, axis, low) as (backend, chunks):
        return backend.gather_linear(x, weights, axis, chunks)


def gather_backward(gradients: Tensors, full: Tensor, weights: Tensors, axis: str, low: str, needs: Needs) -> Gradients:
    with chosen_backend(COLUMN, "backward", full.shape[0], weights, axis, low, needs) as (backend, chunks):
        dx, dw = backend.gather_linear_backward(_dense(gradients), full, weights, axis, chunks, needs)
    return Gradients(dx, dw, gradients)


def scatter(x: Tensor, weights: Tensors, axis: str, low: str) -> tuple[list[Tensor], Tensor]:
    with chosen_backend(ROW, "forward", x.shape[0], weights, axis, low) as (backend, chunks):
        return [backend.linear_scatter(x, weights[0], axis, chunks)], x


def scatter_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, low: str, needs: Needs) -> Gradients:
    with chosen_backend(ROW, "backward", x.shape[0], weights, axis, low, needs) as (backend, chunks):
        dx, dw, full = backend.linear_scatter_backward(gradients[0], x, weights[0], axis, chunks, needs)
    return Gradients(dx, None if dw is None else [dw], [full])


def sum_products(x: Tensor, weights: Tensors, axis: str, low: str) -> tuple[list[Tensor], Tensor]:
    with chosen_backend("linear_all_reduce", "forward", x.shape[0], weights, axis, low) as (backend, chunks):
        return [backend.linear_sum(x, weights[0], axis, chunks)], x


def sum_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, low: str, needs: Needs) -> Gradients:
    """Differentiate without communication: every rank has the whole gradient."""
    how = arithmetic(low, weights[0].dtype)
    dx = input_gradient(how, gradients, weights) if needs.x else None
    return Gradients(dx, weight_gradients(how, gradients, x) if needs.weights else None, gradients)


def copy(x: Tensor, weights: Tensors, axis: str, low: str) -> tuple[list[Tensor], Tensor]:
    return products_of(arithmetic(low, x.dtype), x, weights), x


def copy_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, low: str, needs: Needs) -> Gradients:
    with chosen_backend("copy_linear", "backward", x.shape[0], weights, axis, low, needs) as (backend, chunks):
        dx, dw = backend.linear_copy_backward(_dense(gradients), x, weights, axis, chunks, needs)
    return Gradients(dx, dw, gradients)


def _dense(gradients: Tensors) -> list[Tensor]:
    """Copy gradients with strides of 0, as sums and means expand them: products cannot read these quickly."""
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients]


all_gather_linear = Operation("all_gather_linear", gather, gather_backward, gathers=True)
linear_reduce_scatter = Operation("linear_reduce_scatter", scatter, scatter_backward, scatters=True)
linear_all_reduce = Operation("linear_all_reduce", sum_products, sum_backward, local=True)
copy_linear = Operation("copy_linear", copy, copy_backward)
