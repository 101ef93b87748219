"""Products with weights that are stored in another type than they compute in, and weight gradients that may wait.

The narrow copy of a weight is made where it is used, forward and backward, and never kept in between: the copies of a
whole model would be held at the end of forward, when memory is short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

# Where the gradients of some weights go (None: not wanted), and what computes them
Waiting = tuple[list[GradientEdge | None], Callable[[], Sequence[Tensor]]]


class WeightQueue:
    """Weight gradients that wait: a schedule may run backward for the inputs first, take them and compute them later.

    Inside `deferring()` the products' backward gives gradients of inputs alone and keeps what the weights' need.
    """

    def __init__(self) -> None:
        self.active = False
        self.offered = False  # products of a forward that come now will be asked to wait
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
        """Around forward and backward whose products may be asked to wait."""
        before, self.offered = self.offered, True
        try:
            yield
        finally:
            self.offered = before

    def push(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        # Edges, not tensors: what activation checkpointing gives back is a copy, which forgets where it came from.
        edges = [get_gradient_edge(weight) if weight.requires_grad else None for weight in weights]
        self._waiting.append((edges, compute))

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> list[Waiting]:
        """All that waits, for whoever computes it later with `accumulate`."""
        taken, self._waiting = self._waiting, []
        return taken


def accumulate(waiting: list[Waiting]) -> None:
    """Compute weight gradients and add them to what the weights have; each is freed before the next is computed."""
    while waiting:
        edges, compute = waiting.pop(0)
        wanted = [(edge, value) for edge, value in zip(edges, compute(), strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in wanted], [value for _, value in wanted])


weight_queue = WeightQueue()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in) times weight (out, in) in the type of x, whatever type the weight is stored in."""
    narrow_bias = None if bias is None else bias.to(x.dtype)
    plain = weight.dtype == x.dtype and not weight_queue.offered
    if plain or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype), narrow_bias)
    out: Tensor = _Linear.apply(x, weight, narrow_bias)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1] and weight_queue.active:
            weight_queue.push((weight,), lambda: [_weight_gradient(x, gradient, weight.dtype)])
        elif ctx.needs_input_grad[1]:
            dw = _weight_gradient(x, gradient, weight.dtype)
        return dx, dw, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(dtype)
