"""Tensor-parallel products whose communication hides inside them, forward and backward, in eager code and compiled.

    all_gather_linear(x (t, K), weights (N, K)..., axis)       products (n t, N)... of the rows of all ranks
    linear_reduce_scatter(x (n t, K), (weight (N, K),), axis)  this rank's rows (t, N) of the product summed over ranks
    linear_all_reduce(x, (weight,), axis)                      the sum on every rank
    copy_linear(x, weights, axis)                              plain products; backward sums the input's gradient

The backend that carries out a product is looked up when it runs (`backend_table`): a compiled graph holds the operation
alone. Biases are added outside, where they are an ordinary addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.linear import weight_queue
from shardline.parallel.tensor.backend_table import choices, chosen_backend
from shardline.parallel.tensor.serial_and_ring import COLUMN, ROW, Needs, Tensors, multiply, weight_gradients


class Gradients(NamedTuple):
    """Gradients of x and of the weights, None where not needed; and those of the products for all rows.

    From the latter, and from what forward kept, the gradients of the weights can be computed later.
    """

    x: Tensor | None
    weights: list[Tensor] | None
    products: Tensors


class Operation:
    """A product with a gradient, written once: in eager code an autograd function, in a compiled one a custom op.

    `forward(x, weights, axis)` gives the products and what backward needs of x: x itself or, with `gathers`, the rows
    of all ranks. With `scatters` the products are those of this rank's rows. `backward(gradients, kept, weights, axis,
    needs)` gives the gradients; it is an op of its own, so that a graph keeps it whole. A `local` backward sends
    nothing and is made of ordinary products.

    Ops also run in eager code where activation checkpointing selects by operation and must see them
    (`choices.visible`).
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Tensor, Tensors, str], tuple[list[Tensor], Tensor]],
        backward: Callable[[Tensors, Tensor, Tensors, str, Needs], Gradients],
        gathers: bool = False,
        scatters: bool = False,
        local: bool = False,
    ) -> None:
        self.name, self.forward, self.backward = name, forward, backward
        self.gathers, self.scatters, self.local = gathers, scatters, local
        self.function = self._autograd_function()
        schema = "(Tensor x, Tensor[] weights, str axis) -> Tensor[]"
        self.op = torch.library.custom_op(f"shardline::{name}", self._run, mutates_args=(), schema=schema)
        self.op.register_fake(self._shapes)
        self.op.register_autograd(self._differentiate_op, setup_context=self._keep)
        if not local:
            schema = "(Tensor[] gradients, Tensor kept, Tensor[] weights, str axis, bool x, bool w) -> Tensor[]"
            name = f"shardline::{name}_backward"
            self.backward_op = torch.library.custom_op(name, self._run_backward, mutates_args=(), schema=schema)
            self.backward_op.register_fake(self._backward_shapes)

    def __call__(self, x: Tensor, weights: Tensors, axis: str) -> tuple[Tensor, ...]:
        prepared = [weight.to(x.dtype) for weight in weights]
        if collectives.axis_size(axis) == 1:
            return tuple(multiply(x, prepared))
        if torch.compiler.is_compiling() or choices.visible:
            return tuple(self.op(x, prepared, axis)[: len(prepared)])
        products: tuple[Tensor, ...] = self.function.apply(x, axis, *prepared)
        return products

    def _rows(self, x_rows: int, axis: str) -> int:
        """Rows of the products."""
        ranks = collectives.axis_size(axis)
        return x_rows * ranks if self.gathers else x_rows // ranks if self.scatters else x_rows

    # ---- eager -------------------------------------------------------------------------------------------------------

    def _autograd_function(self) -> Any:
        operation = self

        class ProductFunction(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, axis: str, *weights: Tensor) -> tuple[Tensor, ...]:
                products, kept = operation.forward(x, weights, axis)
                ctx.axis = axis
                ctx.save_for_backward(kept, *weights)
                return tuple(products)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
                kept, *weights = ctx.saved_tensors
                needs = Needs(ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]))
                dx, dw = _differentiate(operation.backward, gradients, kept, weights, ctx.axis, needs)
                return dx, None, *dw

        ProductFunction.__name__ = self.name
        return ProductFunction

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
        products, kept = self.forward(x, weights, axis)
        return [*products, kept] if self.gathers else products

    def _shapes(self, x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
        rows = self._rows(x.shape[0], axis)
        widths = [*(weight.shape[0] for weight in weights), *([x.shape[1]] if self.gathers else [])]
        return [x.new_empty(rows, width) for width in widths]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        x, weights, ctx.axis = inputs
        ctx.save_for_backward(output[-1] if self.gathers else x, *weights)

    def _differentiate_op(self, ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        rows = kept.shape[0] if self.gathers else self._rows(kept.shape[0], ctx.axis)
        given = [
            torch.zeros(rows, weight.shape[0], dtype=kept.dtype, device=kept.device) if gradient is None else gradient
            for gradient, weight in zip(gradients, weights, strict=False)  # the kept rows have none
        ]
        needed = ctx.needs_input_grad[1]
        needs = Needs(ctx.needs_input_grad[0], any(needed) if isinstance(needed, (list, tuple)) else needed)
        backward = self.backward if self.local else self._call_backward
        return *_differentiate(backward, given, kept, weights, ctx.axis, needs), None

    def _call_backward(self, gradients: Tensors, kept: Tensor, weights: Tensors, axis: str, needs: Needs) -> Gradients:
        found = list(self.backward_op(list(gradients), kept, list(weights), axis, needs.x, needs.weights))
        dx = found.pop(0) if needs.x else None
        dw = [found.pop(0) for _ in weights] if needs.weights else None
        return Gradients(dx, dw, found or gradients)

    def _run_backward(
        self, gradients: list[Tensor], kept: Tensor, weights: list[Tensor], axis: str, x: bool, w: bool
    ) -> list[Tensor]:
        found = self.backward(gradients, kept, weights, axis, Needs(x, w))
        dx = [found.x] if x and found.x is not None else []
        return [*dx, *((found.weights or []) if w else found.products if self.scatters else [])]

    def _backward_shapes(
        self, gradients: list[Tensor], kept: Tensor, weights: list[Tensor], axis: str, x: bool, w: bool
    ) -> list[Tensor]:
        rows = kept.shape[0] // collectives.axis_size(axis) if self.gathers else kept.shape[0]
        dx = [kept.new_empty(rows, kept.shape[1])] if x else []
        if w:
            return [*dx, *(weight.new_empty(weight.shape) for weight in weights)]
        return [*dx, *(kept.new_empty(kept.shape[0], weight.shape[0]) for weight in weights if self.scatters)]


def _differentiate(
    backward: Callable[[Tensors, Tensor, Tensors, str, Needs], Gradients],
    gradients: Tensors,
    kept: Tensor,
    weights: Tensors,
    axis: str,
    needs: Needs,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of x and the weights. A pipeline schedule may queue the latter, which a compiled function cannot."""
    later = needs.weights and not torch.compiler.is_compiling() and weight_queue.active
    dx, dw, of_products = backward(gradients, kept, weights, axis, Needs(needs.x, needs.weights and not later))
    if later:
        weight_queue.push(weights, lambda: weight_gradients(of_products, kept))
    return dx, [None] * len(weights) if dw is None else dw


# What runs, without autograd, by the backend that was chosen


def gather(x: Tensor, weights: Tensors, axis: str) -> tuple[list[Tensor], Tensor]:
    rows = x.shape[0] * collectives.axis_size(axis)
    with chosen_backend(COLUMN, "forward", rows, weights, axis) as (backend, chunks):
        return backend.gather_linear(x, weights, axis, chunks)


def gather_backward(gradients: Tensors, full: Tensor, weights: Tensors, axis: str, needs: Needs) -> Gradients:
    with chosen_backend(COLUMN, "backward", full.shape[0], weights, axis, needs) as (backend, chunks):
        dx, dw = backend.gather_linear_backward(_dense(gradients), full, weights, axis, chunks, needs)
    return Gradients(dx, dw, gradients)


def scatter(x: Tensor, weights: Tensors, axis: str) -> tuple[list[Tensor], Tensor]:
    with chosen_backend(ROW, "forward", x.shape[0], weights, axis) as (backend, chunks):
        return [backend.linear_scatter(x, weights[0], axis, chunks)], x


def scatter_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, needs: Needs) -> Gradients:
    with chosen_backend(ROW, "backward", x.shape[0], weights, axis, needs) as (backend, chunks):
        dx, dw, full = backend.linear_scatter_backward(gradients[0], x, weights[0], axis, chunks, needs)
    return Gradients(dx, None if dw is None else [dw], [full])


def sum_products(x: Tensor, weights: Tensors, axis: str) -> tuple[list[Tensor], Tensor]:
    with chosen_backend("linear_all_reduce", "forward", x.shape[0], weights, axis) as (backend, chunks):
        return [backend.linear_sum(x, weights[0], axis, chunks)], x


def sum_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, needs: Needs) -> Gradients:
    """Every rank has the whole gradient: nothing is sent."""
    dx = gradients[0] @ weights[0] if needs.x else None
    return Gradients(dx, weight_gradients(gradients, x) if needs.weights else None, gradients)


def copy(x: Tensor, weights: Tensors, axis: str) -> tuple[list[Tensor], Tensor]:
    return multiply(x, weights), x


def copy_backward(gradients: Tensors, x: Tensor, weights: Tensors, axis: str, needs: Needs) -> Gradients:
    with chosen_backend("copy_linear", "backward", x.shape[0], weights, axis, needs) as (backend, chunks):
        dx, dw = backend.linear_copy_backward(_dense(gradients), x, weights, axis, chunks, needs)
    return Gradients(dx, dw, gradients)


def _dense(gradients: Tensors) -> list[Tensor]:
    """Gradients of sums and means come expanded, with strides of 0, which products cannot read quickly."""
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients]


all_gather_linear = Operation("all_gather_linear", gather, gather_backward, gathers=True)
linear_reduce_scatter = Operation("linear_reduce_scatter", scatter, scatter_backward, scatters=True)
linear_all_reduce = Operation("linear_all_reduce", sum_products, sum_backward, local=True)
copy_linear = Operation("copy_linear", copy, copy_backward)
