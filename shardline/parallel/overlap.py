"""Tensor-parallel products whose communication hides inside them, forward and backward, in eager code and compiled.

    all_gather_linear(x (t, K), weights (N, K)..., axis)    products (n t, N)... of the rows of all ranks
    linear_reduce_scatter(x (n t, K), weight (N, K), axis)  this rank's rows (t, N) of the product summed over ranks
    linear_all_reduce(x, weight, axis)                      the sum on every rank
    copy_linear(x, weights, axis)                           plain products; backward sums the input's gradient

How each is carried out, `Choice(backend, chunks)`, is looked up by operation, direction and shape when it runs
(`choices`), never traced: a compiled graph holds the operation alone. In a compiled function, and where activation
checkpointing chooses by operation, they are custom ops; elsewhere plain autograd functions, which cost less.

Biases are added outside, where they are an ordinary addition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.parallel import comm
from shardline.parallel.hidden import clock
from shardline.parallel.products import Needs, Ring, Serial, multiply, weight_gradients


class Choice(NamedTuple):
    backend: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.backend if self.chunks == 1 else f"{self.backend} in {self.chunks} chunks"


class Product(NamedTuple):
    """What a choice is made for: rows are those of all ranks, `width` the sum over weights of their rows."""

    operation: str
    direction: str  # forward, backward
    rows: int
    depth: int
    width: int
    dtype: torch.dtype
    axis: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} {self.direction} {self.rows} x {self.depth} x {self.width} {dtype}"


SERIAL = Choice("serial")
backends: dict[str, Any] = {"serial": Serial(), "ring": Ring()}


class Choices:
    """One for each product that was measured or forced; `visible` has eager code call custom ops, too."""

    def __init__(self) -> None:
        self.chosen: dict[Product, Choice] = {}
        self.alone: dict[Product, tuple[float, float]] = {}  # seconds of its matrix products, of its communication
        self.otherwise = SERIAL
        self.visible = False
        self.unmeasured: set[Product] = set()  # ran, but nothing was chosen for it

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def find(self, product: Product) -> Choice:
        found = self.chosen.get(product)
        if found is None:
            self.unmeasured.add(product)
            return self.otherwise
        return found

    @contextlib.contextmanager
    def forced(self, choice: Choice) -> Iterator[None]:
        """Every product as `choice` says: for measurements and comparisons."""
        before = self.chosen, self.otherwise
        self.chosen, self.otherwise = {}, choice
        try:
            yield
        finally:
            self.chosen, self.otherwise = before


choices = Choices()


class WeightQueue:
    """Weight gradients that wait: a schedule may run backward for the inputs first and drain them later.

    Inside `deferring()` the products' backward gives gradients of inputs alone and keeps what the weights' need.
    """

    def __init__(self) -> None:
        self.active = False
        self._waiting: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def push(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        self._waiting.append((weights, compute))

    def __len__(self) -> int:
        return len(self._waiting)

    def drain(self, most: int | None = None) -> int:
        """Compute what waits, oldest first and `most` at most, and accumulate it; how many were drained."""
        ready = self._waiting[:most]
        del self._waiting[: len(ready)]
        for weights, compute in ready:
            torch.autograd.backward(list(weights), list(compute()))
        return len(ready)


weight_queue = WeightQueue()


def _prepared(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.to(x.dtype) for weight in weights]


def _alone(axis: str) -> bool:
    return comm.axis_size(axis) == 1


def _as_ops() -> bool:
    return choices.visible or torch.compiler.is_compiling()


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[Tensor, ...]:
    prepared = _prepared(x, weights)
    if _alone(axis):
        return tuple(multiply(x, prepared))
    if _as_ops():
        return tuple(_gather_linear_op(x, prepared, axis)[:-1])
    products: tuple[Tensor, ...] = _GatherLinear.apply(x, axis, *prepared)
    return products


def linear_reduce_scatter(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    (prepared,) = _prepared(x, (weight,))
    if _alone(axis):
        return x @ prepared.t()
    out: Tensor = _linear_scatter_op(x, prepared, axis) if _as_ops() else _LinearScatter.apply(x, prepared, axis)
    return out


def linear_all_reduce(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    (prepared,) = _prepared(x, (weight,))
    if _alone(axis):
        return x @ prepared.t()
    out: Tensor = _linear_sum_op(x, prepared, axis) if _as_ops() else _LinearSum.apply(x, prepared, axis)
    return out


def copy_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[Tensor, ...]:
    prepared = _prepared(x, weights)
    if _alone(axis):
        return tuple(multiply(x, prepared))
    if _as_ops():
        return tuple(_linear_copy_op(x, prepared, axis))
    products: tuple[Tensor, ...] = _LinearCopy.apply(x, axis, *prepared)
    return products


# What runs, as chosen


@contextlib.contextmanager
def _running(
    operation: str, direction: str, rows: int, weights: Sequence[Tensor], axis: str
) -> Iterator[tuple[Any, int]]:
    """The backend and the chunks for a product; a sampled step times what runs inside."""
    product = product_of(operation, direction, rows, weights, axis)
    choice = choices.find(product)
    if clock.axis is None:
        yield backends[choice.backend], choice.chunks
        return
    with clock.around(axis, *choices.alone.get(product, (0.0, None))):
        yield backends[choice.backend], choice.chunks


def product_of(operation: str, direction: str, rows: int, weights: Sequence[Tensor], axis: str) -> Product:
    width, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return Product(operation, direction, rows, depth, width, weights[0].dtype, axis)


def gather_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[list[Tensor], Tensor]:
    rows = x.shape[0] * comm.axis_size(axis)
    with _running("all_gather_linear", "forward", rows, weights, axis) as (backend, chunks):
        found: tuple[list[Tensor], Tensor] = backend.gather_linear(x, weights, axis, chunks)
    return found


def gather_linear_backward(
    gradients: Sequence[Tensor], full: Tensor, weights: Sequence[Tensor], axis: str, needs: Needs
) -> tuple[Tensor | None, list[Tensor] | None]:
    found: tuple[Tensor | None, list[Tensor] | None]
    with _running("all_gather_linear", "backward", full.shape[0], weights, axis) as (backend, chunks):
        found = backend.gather_linear_backward(_dense(gradients), full, weights, axis, chunks, needs)
    return found


def linear_scatter(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    with _running("linear_reduce_scatter", "forward", x.shape[0], (weight,), axis) as (backend, chunks):
        out: Tensor = backend.linear_scatter(x, weight, axis, chunks)
    return out


def linear_scatter_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    found: tuple[Tensor | None, Tensor | None, Tensor]
    with _running("linear_reduce_scatter", "backward", x.shape[0], (weight,), axis) as (backend, chunks):
        found = backend.linear_scatter_backward(gradient, x, weight, axis, chunks, needs)
    return found


def linear_sum(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    with _running("linear_all_reduce", "forward", x.shape[0], (weight,), axis) as (backend, chunks):
        out: Tensor = backend.linear_sum(x, weight, axis, chunks)
    return out


def linear_copy_backward(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], axis: str, needs: Needs
) -> tuple[Tensor | None, list[Tensor] | None]:
    found: tuple[Tensor | None, list[Tensor] | None]
    with _running("copy_linear", "backward", x.shape[0], weights, axis) as (backend, chunks):
        found = backend.linear_copy_backward(_dense(gradients), x, weights, axis, chunks, needs)
    return found


def _dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of sums and means come expanded, with strides of 0, which products cannot read quickly."""
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients]


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


# Compiled: custom ops, each backward an op of its own


@torch.library.custom_op("shardline::all_gather_linear", mutates_args=())
def _gather_linear_op(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    products, full = gather_linear(x, weights, axis)
    return [*products, full]


@_gather_linear_op.register_fake
def _(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    rows = comm.axis_size(axis) * x.shape[0]
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
    dx = [full.new_empty(full.shape[0] // comm.axis_size(axis), full.shape[1])] if x_needed else []
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
    found = _gather_linear_backward_op(given, full, weights, ctx.axis, x_needed, weights_needed)
    dx = found[0] if x_needed else None
    return dx, found[int(x_needed) :] if weights_needed else [None] * len(weights), None


def _flat(needed: Any) -> list[bool]:
    return list(needed) if isinstance(needed, (list, tuple)) else [bool(needed)]


_gather_linear_op.register_autograd(_gather_linear_gradient, setup_context=_keep_gathered)


@torch.library.custom_op("shardline::linear_reduce_scatter", mutates_args=())
def _linear_scatter_op(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return linear_scatter(x, weight, axis)


@_linear_scatter_op.register_fake
def _(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] // comm.axis_size(axis), weight.shape[0])


@torch.library.custom_op("shardline::linear_reduce_scatter_backward", mutates_args=())
def _linear_scatter_backward_op(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str, x_needed: bool, weight_needed: bool
) -> list[Tensor]:
    found = linear_scatter_backward(gradient, x, weight, axis, Needs(x_needed, weight_needed))
    return [part for part in found[:2] if part is not None]


@_linear_scatter_backward_op.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, axis: str, x_needed: bool, weight_needed: bool) -> list[Tensor]:
    kept = ((x, x_needed), (weight, weight_needed))
    return [tensor.new_empty(tensor.shape) for tensor, needed in kept if needed]


def _keep_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.axis = inputs
    ctx.save_for_backward(x, weight)


def _linear_scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    x_needed, weight_needed = ctx.needs_input_grad[:2]
    found = list(_linear_scatter_backward_op(gradient, x, weight, ctx.axis, x_needed, weight_needed))
    return found.pop(0) if x_needed else None, found.pop(0) if weight_needed else None, None


_linear_scatter_op.register_autograd(_linear_scatter_gradient, setup_context=_keep_both)


@torch.library.custom_op("shardline::linear_all_reduce", mutates_args=())
def _linear_sum_op(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return linear_sum(x, weight, axis)


@_linear_sum_op.register_fake
def _(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_sum_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    x_needed, weight_needed = ctx.needs_input_grad[:2]
    return gradient @ weight if x_needed else None, gradient.t() @ x if weight_needed else None, None


_linear_sum_op.register_autograd(_linear_sum_gradient, setup_context=_keep_both)


@torch.library.custom_op("shardline::copy_linear", mutates_args=())
def _linear_copy_op(x: Tensor, weights: list[Tensor], axis: str) -> list[Tensor]:
    return multiply(x, weights)


@_linear_copy_op.register_fake
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
    found = _linear_copy_backward_op(list(gradients), x, weights, ctx.axis, x_needed, weights_needed)
    dx = found[0] if x_needed else None
    return dx, found[int(x_needed) :] if weights_needed else [None] * len(weights), None


_linear_copy_op.register_autograd(_linear_copy_gradient, setup_context=_keep_all)
