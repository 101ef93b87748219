"""Matrix products with a collective before or after them: what each backend computes, without autograd.

Letters: n ranks, t rows of each, T = n t rows in all; weights are (N, K) and hold this rank's part.

    gather_linear    x (t, K), weights (N, K)...  ->  products (T, N)... and the gathered x (T, K)
    linear_scatter   x (T, K), weight (N, K)      ->  this rank's rows (t, N) of the product summed over ranks
    linear_sum       x (T, K), weight (N, K)      ->  the product summed over ranks (T, N), on every rank
    linear_copy      only its backward communicates: the sum of the input's gradients

Each backward takes the gradients of the results and gives those of x and the weights, None where not needed. That of
linear_scatter also gives the gathered gradient (T, N), from which the weight's can be computed later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.transfers import Scattering, arriving, pieces

Tensors = Sequence[Tensor]
COLUMN, ROW = "all_gather_linear", "linear_reduce_scatter"  # the operations of sequence parallelism
CHUNKS = (1, 2, 4, 8)


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool = True
    weights: bool = True


# Plain products


def multiply(x: Tensor, weights: Tensors) -> list[Tensor]:
    return [x @ weight.t() for weight in weights]


EVERY = slice(None)


def input_gradient(gradients: Tensors, weights: Tensors, rows: slice = EVERY, out: Tensor | None = None) -> Tensor:
    """Sum over the weights of gradient (rows, N) times weight (N, K), into `out` where it is given."""
    first = gradients[0][rows]
    total = first.new_empty(first.shape[0], weights[0].shape[1]) if out is None else out
    torch.mm(first, weights[0], out=total)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addmm_(gradient[rows], weight)
    return total


def weight_gradients(gradients: Tensors, x: Tensor) -> list[Tensor]:
    return [gradient.t() @ x for gradient in gradients]


class Serial:
    """The collective, then the product. The other backends are compared with it."""

    name = "serial"
    regions: tuple[str, ...] = ()  # regions of shared memory that it uses

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        """Numbers of chunks worth trying; empty where this backend has nothing of its own for an operation."""
        return (1,)

    def gather_linear(self, x: Tensor, weights: Tensors, axis: str, chunks: int) -> tuple[list[Tensor], Tensor]:
        full = collectives.gather_rows(x, axis)
        return multiply(full, weights), full

    def gather_linear_backward(
        self, gradients: Tensors, full: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = collectives.scatter_rows(input_gradient(gradients, weights), axis) if needs.x else None
        return dx, weight_gradients(gradients, full) if needs.weights else None

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return collectives.scatter_rows(x @ weight.t(), axis)

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        full = collectives.gather_rows(gradient, axis)
        return full @ weight if needs.x else None, full.t() @ x if needs.weights else None, full

    def linear_sum(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return collectives.sum_in_place(x @ weight.t(), axis)

    def linear_copy_backward(
        self, gradients: Tensors, x: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = collectives.sum_in_place(input_gradient(gradients, weights), axis) if needs.x else None
        return dx, weight_gradients(gradients, x) if needs.weights else None


class Ring(Serial):
    """Rows travel point to point while others are multiplied; weight gradients hide what the products cannot."""

    name = "ring"

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        return CHUNKS

    def gather_linear(self, x: Tensor, weights: Tensors, axis: str, chunks: int) -> tuple[list[Tensor], Tensor]:
        x, total = x.contiguous(), collectives.axis_size(axis) * x.shape[0]
        full = x.new_empty(total, x.shape[1])
        products = [x.new_empty(total, weight.shape[0]) for weight in weights]
        for rows in arriving(x, full, axis, chunks):
            for product, weight in zip(products, weights, strict=True):
                torch.mm(full[rows], weight.t(), out=product[rows])
        return products, full

    def gather_linear_backward(
        self, gradients: Tensors, full: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        if not needs.x:
            return None, weight_gradients(gradients, full) if needs.weights else None
        (total, width), like = full.shape, gradients[0]
        scattering = Scattering(
            lambda rows, out: input_gradient(gradients, weights, rows, out), total, width, like, axis, chunks
        )
        dw = weight_gradients(gradients, full) if needs.weights else None
        return scattering.result(), dw

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return Scattering(
            lambda rows, out: torch.mm(x[rows], weight.t(), out=out), x.shape[0], weight.shape[0], x, axis, chunks
        ).result()

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        gradient, t = gradient.contiguous(), gradient.shape[0]
        full = gradient.new_empty(x.shape[0], gradient.shape[1])
        dx = x.new_empty(x.shape) if needs.x else None
        dw: Tensor | None = None
        for rows in arriving(gradient, full, axis, chunks):
            if dx is not None:
                torch.mm(full[rows], weight, out=dx[rows])
            if needs.weights and rows.stop % t == 0:  # the rows of one rank are complete: a part of the weight gradient
                part = slice(rows.stop - t, rows.stop)
                if dw is None:
                    dw = full[part].t() @ x[part]
                else:
                    dw.addmm_(full[part].t(), x[part])
        return dx, dw, full

    def linear_sum(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0])
        for started in _start_sums(lambda rows: torch.mm(x[rows], weight.t(), out=out[rows]), out, axis, chunks):
            started.wait()
        return out

    def linear_copy_backward(
        self, gradients: Tensors, x: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = x.new_empty(x.shape) if needs.x else None
        sums = []
        if dx is not None:
            sums = _start_sums(lambda rows: input_gradient(gradients, weights, rows, dx[rows]), dx, axis, chunks)
        dw = weight_gradients(gradients, x) if needs.weights else None
        for started in sums:
            started.wait()
        return dx, dw


def _start_sums(compute: Callable[[slice], Any], out: Tensor, axis: str, chunks: int) -> list[collectives.Started]:
    """Fill `out` piece by piece with `compute`; each is summed over ranks while the next is computed."""
    started = []
    for rows in pieces(out.shape[0], chunks):
        compute(rows)
        started.append(collectives.start_sum(out[rows], axis))
    return started


class GatherScatter(Serial):
    """A base for backends of sequence parallelism that have one way to gather and one to scatter.

    `gather` gives the products of all ranks' rows, and these rows; `scatter` this rank's rows of the summed product.
    With `by_rows` weights are (N, K), otherwise (K, N).
    """

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        return (1,) if operation in (COLUMN, ROW) else ()

    def gather(self, x: Tensor, weights: Tensors, by_rows: bool, axis: str) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError

    def scatter(self, x: Tensor, weight: Tensor, by_rows: bool, axis: str, chunks: int) -> Tensor:
        raise NotImplementedError

    def gather_linear(self, x: Tensor, weights: Tensors, axis: str, chunks: int) -> tuple[list[Tensor], Tensor]:
        return self.gather(x, weights, True, axis)

    def gather_linear_backward(
        self, gradients: Tensors, full: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = self.scatter(*_joined(gradients, weights), False, axis, chunks) if needs.x else None
        return dx, _timed_weight_gradients(gradients, full) if needs.weights else None

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return self.scatter(x, weight, True, axis, chunks)

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        (dx,), full = self.gather(gradient, [weight], False, axis)
        return dx, _timed_weight_gradients([full], x)[0] if needs.weights else None, full


def _joined(gradients: Tensors, weights: Tensors) -> tuple[Tensor, Tensor]:
    """Gradients side by side and weights below each other: one product is the sum of their products."""
    if len(weights) == 1:
        return gradients[0], weights[0]
    return torch.cat(list(gradients), 1), torch.cat(list(weights))


def _timed_weight_gradients(gradients: Tensors, x: Tensor) -> list[Tensor]:
    """Weight gradients while nothing travels: their time shows the pace of a step."""
    with job.clock.weight_gradients():
        return weight_gradients(gradients, x)
