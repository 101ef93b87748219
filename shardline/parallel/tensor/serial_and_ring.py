"""Matrix products with a collective before or after them: the interface of all backends, serial and ring; no autograd.

Letters: n ranks with t rows each, T = n t rows in all; weights are (N, K) and hold this rank's part.

    gather_linear    x (t, K), weights (N, K)...  ->  products (T, N)... and the gathered x (T, K)
    linear_scatter   x (T, K), weight (N, K)      ->  this rank's rows (t, N) of the product summed over ranks
    linear_sum       x (T, K), weight (N, K)      ->  the product summed over ranks (T, N), on every rank
    linear_copy      only its backward communicates: it sums the input's gradients

Each backward takes the gradients of the results and returns those of x and the weights, None where not needed. The
backward of linear_scatter also returns the gathered gradient (T, N), from which the weight gradient can be computed
later.
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


class Arithmetic:
    """How rows are multiplied: here in their own type. Float8Arithmetic has the same methods.

    `rows` returns rows in the form in which they are sent. The other methods take rows in either form.
    """

    def like(self, x: Tensor, rows: int, depth: int) -> Tensor:
        """Return an empty tensor for `rows` rows in the form in which they are sent; x has their type."""
        return x.new_empty(rows, depth)

    def rows(self, x: Tensor, gradient: bool = False) -> Tensor:
        return x

    def right(self, weight: Tensor) -> Any:
        """Return what rows (t, K) are multiplied with, from a weight (N, K)."""
        return weight.t()

    def right_back(self, weight: Tensor) -> Any:
        """Return what gradients (t, N) are multiplied with."""
        return weight

    def multiply(self, rows: Tensor, right: Any, out: Tensor | None = None) -> Tensor:
        return torch.mm(rows, right, out=out)

    def add_product(self, total: Tensor, rows: Tensor, right: Any) -> None:
        total.addmm_(rows, right)

    def outer(self, gradients: Tensor, x: Tensor) -> Tensor:
        """Return the gradient (N, K) of a weight, from gradients (t, N) and rows (t, K)."""
        return gradients.t() @ x

    def add_outer(self, total: Tensor, gradients: Tensor, x: Tensor) -> None:
        total.addmm_(gradients.t(), x)


PLAIN = Arithmetic()


def products_of(arithmetic: Arithmetic, x: Tensor, weights: Tensors) -> list[Tensor]:
    return [arithmetic.multiply(x, arithmetic.right(weight)) for weight in weights]


def weight_gradients(arithmetic: Arithmetic, gradients: Tensors, x: Tensor) -> list[Tensor]:
    return [arithmetic.outer(gradient, x) for gradient in gradients]


def input_gradient(arithmetic: Arithmetic, gradients: Tensors, weights: Tensors) -> Tensor:
    """Return the sum over the weights of gradient (T, N) times weight (N, K)."""
    given = [arithmetic.rows(gradient, gradient=True) for gradient in gradients]
    total = arithmetic.multiply(given[0], arithmetic.right_back(weights[0]))
    for gradient, weight in zip(given[1:], weights[1:], strict=True):
        arithmetic.add_product(total, gradient, arithmetic.right_back(weight))
    return total


def _input_gradients(
    arithmetic: Arithmetic, gradients: Tensors, weights: Tensors
) -> tuple[list[Tensor], Callable[[slice, Tensor], Tensor]]:
    """Return the gradients as rows, and a function that computes some rows of the input's gradient into a tensor."""
    given = [arithmetic.rows(gradient, gradient=True) for gradient in gradients]
    rights = [arithmetic.right_back(weight) for weight in weights]

    def compute(rows: slice, out: Tensor) -> Tensor:
        arithmetic.multiply(given[0][rows], rights[0], out)
        for gradient, right in zip(given[1:], rights[1:], strict=True):
            arithmetic.add_product(out, gradient[rows], right)
        return out

    return given, compute


class Serial:
    """Runs the collective, then the product. The other backends are compared with it."""

    name = "serial"
    regions: tuple[str, ...] = ()  # regions of shared memory that it uses

    def __init__(self, arithmetic: Arithmetic = PLAIN) -> None:
        self.arithmetic = arithmetic

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        """Return the numbers of chunks worth trying; empty if this backend does not implement the operation."""
        return (1,)

    def gather_linear(self, x: Tensor, weights: Tensors, axis: str, chunks: int) -> tuple[list[Tensor], Tensor]:
        full = collectives.gather_rows(self.arithmetic.rows(x), axis)
        return products_of(self.arithmetic, full, weights), full

    def gather_linear_backward(
        self, gradients: Tensors, full: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = collectives.scatter_rows(input_gradient(self.arithmetic, gradients, weights), axis) if needs.x else None
        return dx, weight_gradients(self.arithmetic, gradients, full) if needs.weights else None

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return collectives.scatter_rows(self.arithmetic.multiply(x, self.arithmetic.right(weight)), axis)

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        arithmetic = self.arithmetic
        full = collectives.gather_rows(arithmetic.rows(gradient, gradient=True), axis)
        dx = arithmetic.multiply(full, arithmetic.right_back(weight)) if needs.x else None
        return dx, arithmetic.outer(full, x) if needs.weights else None, full

    def linear_sum(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return collectives.sum_in_place(self.arithmetic.multiply(x, self.arithmetic.right(weight)), axis)

    def linear_copy_backward(
        self, gradients: Tensors, x: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = collectives.sum_in_place(input_gradient(self.arithmetic, gradients, weights), axis) if needs.x else None
        return dx, weight_gradients(self.arithmetic, gradients, x) if needs.weights else None


class Ring(Serial):
    """Sends rows point to point while others are multiplied; weight gradients hide the transfers that remain."""

    name = "ring"

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        return CHUNKS

    def gather_linear(self, x: Tensor, weights: Tensors, axis: str, chunks: int) -> tuple[list[Tensor], Tensor]:
        arithmetic, total = self.arithmetic, collectives.axis_size(axis) * x.shape[0]
        sent = arithmetic.rows(x).contiguous()
        full = sent.new_empty(total, sent.shape[1])
        products = [x.new_empty(total, weight.shape[0]) for weight in weights]
        rights = [arithmetic.right(weight) for weight in weights]
        for rows in arriving(sent, full, axis, chunks):
            for product, right in zip(products, rights, strict=True):
                arithmetic.multiply(full[rows], right, product[rows])
        return products, full

    def gather_linear_backward(
        self, gradients: Tensors, full: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        if not needs.x:
            return None, weight_gradients(self.arithmetic, gradients, full) if needs.weights else None
        given, compute = _input_gradients(self.arithmetic, gradients, weights)
        total, width = full.shape[0], weights[0].shape[1]
        scattering = Scattering(compute, total, width, gradients[0], axis, chunks)
        dw = weight_gradients(self.arithmetic, given, full) if needs.weights else None
        return scattering.result(), dw

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        sent, right = self.arithmetic.rows(x), self.arithmetic.right(weight)
        multiply = self.arithmetic.multiply
        return Scattering(
            lambda rows, out: multiply(sent[rows], right, out), x.shape[0], weight.shape[0], x, axis, chunks
        ).result()

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        arithmetic, t = self.arithmetic, gradient.shape[0]
        sent = arithmetic.rows(gradient, gradient=True).contiguous()
        full = sent.new_empty(x.shape[0], sent.shape[1])
        dx = x.new_empty(x.shape) if needs.x else None
        dw: Tensor | None = None
        right, kept = arithmetic.right_back(weight), arithmetic.rows(x)
        for rows in arriving(sent, full, axis, chunks):
            if dx is not None:
                arithmetic.multiply(full[rows], right, dx[rows])
            if needs.weights and rows.stop % t == 0:  # the rows of one rank are complete: a part of the weight gradient
                part = slice(rows.stop - t, rows.stop)
                if dw is None:
                    dw = arithmetic.outer(full[part], kept[part])
                else:
                    arithmetic.add_outer(dw, full[part], kept[part])
        return dx, dw, full

    def linear_sum(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        out, sent, right = (
            x.new_empty(x.shape[0], weight.shape[0]),
            self.arithmetic.rows(x),
            self.arithmetic.right(weight),
        )
        compute = self.arithmetic.multiply
        for started in _start_sums(lambda rows: compute(sent[rows], right, out[rows]), out, axis, chunks):
            started.wait()
        return out

    def linear_copy_backward(
        self, gradients: Tensors, x: Tensor, weights: Tensors, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = x.new_empty(x.shape) if needs.x else None
        sums: list[collectives.Started] = []
        if dx is not None:
            gradients, compute = _input_gradients(self.arithmetic, gradients, weights)
            sums = _start_sums(lambda rows: compute(rows, dx[rows]), dx, axis, chunks)
        dw = weight_gradients(self.arithmetic, gradients, x) if needs.weights else None
        for started in sums:
            started.wait()
        return dx, dw


def _start_sums(compute: Callable[[slice], Any], out: Tensor, axis: str, chunks: int) -> list[collectives.Started]:
    """Fill `out` piece by piece with `compute`; each piece is summed over ranks while the next is computed."""
    started = []
    for rows in pieces(out.shape[0], chunks):
        compute(rows)
        started.append(collectives.start_sum(out[rows], axis))
    return started


class GatherScatter(Serial):
    """A base class for backends of sequence parallelism that have one way to gather and one to scatter.

    `gather` returns the products of all ranks' rows, and these rows; `scatter` returns this rank's rows of the summed
    product. With `by_rows`, weights are (N, K), otherwise (K, N).
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
        return dx, self._weight_gradients(gradients, full) if needs.weights else None

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return self.scatter(x, weight, True, axis, chunks)

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        (dx,), full = self.gather(gradient, [weight], False, axis)
        return dx, self._weight_gradients([full], x)[0] if needs.weights else None, full

    def _weight_gradients(self, gradients: Tensors, x: Tensor) -> list[Tensor]:
        """Compute weight gradients while nothing is sent: their time shows how fast the GPU computes in this step."""
        with job.clock.weight_gradients():
            return weight_gradients(self.arithmetic, gradients, x)


def _joined(gradients: Tensors, weights: Tensors) -> tuple[Tensor, Tensor]:
    """Concatenate gradients by columns and weights by rows, so that one product is the sum of their products."""
    if len(weights) == 1:
        return gradients[0], weights[0]
    return torch.cat(list(gradients), 1), torch.cat(list(weights))
