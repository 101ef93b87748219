"""Products with weights that are stored in another type than they compute in, and deferred weight gradients.

The narrow copy of a weight is made where it is used, in forward and in backward, and not kept in between: at the end of
forward, when memory is short, there would be a copy of every weight. (One GPU alone keeps copies: narrow.py.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

# Where the gradients of some weights go (None: not needed), and the function that computes them
Waiting = tuple[list[GradientEdge | None], Callable[[], Sequence[Tensor]]]


class WeightQueue:
    """Deferred weight gradients: a schedule runs backward for the inputs first and computes these later.

    Inside `deferring()` the backward of a product gives only the input gradient and queues that of the weight.
    """

    def __init__(self) -> None:
        self.active = False
        self.offered = False  # the backward of products that run now may be deferred
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
        """Remove and return all that waits; `accumulate` computes it."""
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in) times weight (out, in) in the type of x, whatever the type of the weight."""
    narrow_bias = None if bias is None else bias.to(x.dtype)
    plain = weight.dtype == x.dtype and not weight_queue.offered
    if plain or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype), narrow_bias)
    out: Tensor = _Linear.apply(x, weight, narrow_bias)
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), eps)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        dw = gradient_of(weight, ctx.needs_input_grad[1], lambda: _weight_gradient(x, gradient, weight.dtype))
        return dx, dw, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(dtype)
