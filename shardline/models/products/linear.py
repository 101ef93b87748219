"""Products with weights that are stored in another type than the compute type, and deferred weight gradients.

A weight is cast where it is used, in forward and again in backward. Its narrow copy is not kept in between: at the end
of forward, when memory is short, there would be a copy of every weight. (A run on one GPU keeps copies: narrow.py.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from shardline.models.adapted.low_rank import Adapted, Weight, adapted_linear
from shardline.models.products.cpu_product import multiply, served

# Where the gradients of some weights go (None: not needed), and the function that computes them
Waiting = tuple[list[GradientEdge | None], Callable[[], Sequence[Tensor]]]


class WeightQueue:
    """Deferred weight gradients: a schedule runs backward for the inputs first and computes these later.

    Inside `deferring()` the backward of a product returns only the input gradient and queues that of the weight.
    """

    def __init__(self) -> None:
        self.active = False
        self.offered = False  # whether products that run now may defer their weight gradients
        self._waiting: list[Waiting] = []

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextlib.contextmanager
    def offering(self) -> Iterator[None]:
        """Mark a forward and backward whose weight gradients may be deferred."""
        before, self.offered = self.offered, True
        try:
            yield
        finally:
            self.offered = before

    def push(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        # Edges, not tensors: activation checkpointing gives copies, which do not lead back to their parameters.
        edges = [get_gradient_edge(weight) if weight.requires_grad else None for weight in weights]
        self._waiting.append((edges, compute))

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> list[Waiting]:
        """Remove and return all that are queued; `accumulate` computes them."""
        taken, self._waiting = self._waiting, []
        return taken


def accumulate(waiting: list[Waiting]) -> None:
    """Compute weight gradients and add them to those of the weights; each is freed before the next is computed."""
    while waiting:
        edges, compute = waiting.pop(0)
        wanted = [(edge, value) for edge, value in zip(edges, compute(), strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in wanted], [value for _, value in wanted])


weight_queue = WeightQueue()


def gradient_of(weight: Tensor, needed: bool, compute: Callable[[], Tensor]) -> Tensor | None:
    """The gradient of a weight for a backward pass, or None where it is not needed or is queued for later."""
    if not needed:
        return None
    if weight_queue.active:
        weight_queue.push((weight,), lambda: [compute()])
        return None
    return compute()


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x (..., in) times weight (out, in) in the type of x, whatever the type of the weight."""
    if isinstance(weight, Adapted):
        return adapted_linear(x, weight, bias)
    narrow_bias = None if bias is None else bias.to(x.dtype)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype), narrow_bias)
    if weight.dtype == x.dtype and not weight_queue.offered and not served(x):
        return F.linear(x, weight, narrow_bias)
    out: Tensor = _Linear.apply(x, weight, narrow_bias)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = multiply(gradient, weight.to(gradient.dtype).t()) if ctx.needs_input_grad[0] else None
        dw = gradient_of(weight, ctx.needs_input_grad[1], lambda: weight_gradient(x, gradient, weight.dtype))
        return dx, dw, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def weight_gradient(x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's gradient (out, in) in a product with x (..., in) whose result has this gradient (..., out)."""
    return multiply(gradient.flatten(0, -2).t(), x.flatten(0, -2).t()).to(dtype)


# ---- float32 results of bfloat16 operands ----------------------------------------------------------------------------


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (t, in) times weight (out, in), in float32 at least.

    On a GPU the product of a bfloat16 x is a sum of bfloat16 products on the tensor cores, which add in float32.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        out: Tensor = _wide_linear(x, weight)
        return out
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide), None)


def _in_parts(wide: Tensor) -> list[Tensor]:
    """Two bfloat16 tensors whose sum equals `wide` to 16 bits; one if `wide` is bfloat16 itself."""
    narrow = wide.to(torch.bfloat16)
    return [narrow] if wide.dtype == torch.bfloat16 else [narrow, (wide - narrow).to(torch.bfloat16)]


@torch.library.custom_op("shardline::wide_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    parts = _in_parts(weight)
    product = torch.mm(x, torch.cat(parts).t(), out_dtype=torch.float32)
    return product if len(parts) == 1 else product.unflatten(1, (2, -1)).sum(1)


@torch.library.custom_op(
    "shardline::wide_linear_backward_x", mutates_args=(), schema="(Tensor gradient, Tensor weight) -> Tensor"
)
def _wide_linear_backward_x(gradient: Tensor, weight: Tensor) -> Tensor:
    narrow = weight.to(torch.bfloat16)
    return torch.mm(torch.cat(_in_parts(gradient), dim=1), torch.cat([narrow, narrow]))


@torch.library.custom_op(
    "shardline::wide_linear_backward_weight",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, ScalarType dtype) -> Tensor",
)
def _wide_linear_backward_weight(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    product = torch.mm(torch.cat(_in_parts(gradient), dim=1).t(), x, out_dtype=torch.float32)
    return product.unflatten(0, (2, -1)).sum(0).to(dtype)


_wide_linear.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32))
_wide_linear_backward_x.register_fake(
    lambda gradient, weight: gradient.new_empty(gradient.shape[0], weight.shape[1], dtype=torch.bfloat16)
)
_wide_linear_backward_weight.register_fake(
    lambda gradient, x, dtype: gradient.new_empty(gradient.shape[1], x.shape[1], dtype=dtype)
)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad
    of_x = _wide_linear_backward_x(gradient, weight) if needs_x else None
    of_weight = lambda: _wide_linear_backward_weight(gradient, x, weight.dtype)  # noqa: E731
    return of_x, gradient_of(weight, needs_weight, of_weight)


_wide_linear.register_autograd(_backward, setup_context=_keep)
