"""How overlapped products are carried out: looked up by operation, direction and shape when they run, never traced.

`choices` is the one table of a process; `async_tensor.prepare` fills it, the same on every rank. What follows it runs
each operation, forward and backward, as the table says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.hidden_time import Alone
from shardline.comm.job import job
from shardline.parallel.tensor.serial_and_ring import COLUMN, ROW, Needs, Ring, Serial


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
EVERYTHING = Needs()
backends: dict[str, Any] = {"serial": Serial(), "ring": Ring()}


class Choices:
    """One for each product that was measured or forced; `visible` has eager code call custom ops, too."""

    def __init__(self) -> None:
        self.chosen: dict[Product, Choice] = {}
        self.alone: dict[Product, Alone] = {}
        self.otherwise = SERIAL
        self.visible = False
        self.unmeasured: set[Product] = set()  # ran, but nothing was chosen for it; each is told once
        self.told: set[Product] = set()

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def find(self, product: Product) -> Choice:
        found = self.chosen.get(product)
        if found is None:
            if product not in self.told:
                self.told.add(product)
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


# What runs, as chosen


@contextlib.contextmanager
def _running(
    operation: str, direction: str, rows: int, weights: Sequence[Tensor], axis: str, needs: Needs = EVERYTHING
) -> Iterator[tuple[Any, int]]:
    """The backend and the chunks for a product; a sampled step times what runs inside."""
    product = product_of(operation, direction, rows, weights, axis)
    choice = choices.find(product)
    alone = choices.alone.get(product)
    silent = not needs.x and operation != ROW  # only the gradient of the input would be sent
    if job.clock.axis is None or alone is None or silent:
        timed: Any = contextlib.nullcontext()
    elif choice.backend == SERIAL.backend:
        timed = job.clock.expecting(alone.comm)
    else:
        timed = job.clock.around(axis, alone, needs.weights)
    with timed:
        yield backends[choice.backend], choice.chunks


def product_of(operation: str, direction: str, rows: int, weights: Sequence[Tensor], axis: str) -> Product:
    width, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return Product(operation, direction, rows, depth, width, weights[0].dtype, axis)


def gather_linear(x: Tensor, weights: Sequence[Tensor], axis: str) -> tuple[list[Tensor], Tensor]:
    rows = x.shape[0] * collectives.axis_size(axis)
    with _running(COLUMN, "forward", rows, weights, axis) as (backend, chunks):
        found: tuple[list[Tensor], Tensor] = backend.gather_linear(x, weights, axis, chunks)
    return found


def gather_linear_backward(
    gradients: Sequence[Tensor], full: Tensor, weights: Sequence[Tensor], axis: str, needs: Needs
) -> tuple[Tensor | None, list[Tensor] | None]:
    found: tuple[Tensor | None, list[Tensor] | None]
    with _running(COLUMN, "backward", full.shape[0], weights, axis, needs) as (backend, chunks):
        found = backend.gather_linear_backward(_dense(gradients), full, weights, axis, chunks, needs)
    return found


def linear_scatter(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    with _running(ROW, "forward", x.shape[0], (weight,), axis) as (backend, chunks):
        out: Tensor = backend.linear_scatter(x, weight, axis, chunks)
    return out


def linear_scatter_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    found: tuple[Tensor | None, Tensor | None, Tensor]
    with _running(ROW, "backward", x.shape[0], (weight,), axis, needs) as (backend, chunks):
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
    with _running("copy_linear", "backward", x.shape[0], weights, axis, needs) as (backend, chunks):
        found = backend.linear_copy_backward(_dense(gradients), x, weights, axis, chunks, needs)
    return found


def _dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of sums and means come expanded, with strides of 0, which products cannot read quickly."""
    return [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients]
