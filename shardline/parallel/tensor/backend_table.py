"""The backend of each overlapped product, looked up by operation, direction and shape when it runs, never traced.

`choices` is the table of this process. `async_tp.prepare` fills it identically on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm.hidden_time import Alone
from shardline.comm.job import job
from shardline.parallel.tensor.float8_rows import arithmetic
from shardline.parallel.tensor.serial_and_ring import ROW, Needs, Ring, Serial


class Choice(NamedTuple):
    backend: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.backend if self.chunks == 1 else f"{self.backend} in {self.chunks} chunks"


class Product(NamedTuple):
    """A product for which a backend is chosen; `rows` counts all ranks' rows, `width` the rows of all its weights."""

    operation: str
    direction: str  # forward, backward
    rows: int
    depth: int
    width: int
    dtype: torch.dtype
    axis: str
    low: str = ""  # its float8 recipe (float8_rows.py)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + (f", float8 {self.low}" if self.low else "")
        return f"{self.operation} {self.direction} {self.rows} x {self.depth} x {self.width} {dtype}"


SERIAL = Choice("serial")
EVERYTHING = Needs()
backends: dict[str, Serial] = {"serial": Serial(), "ring": Ring()}


class Choices:
    """The choice for each product that was measured or forced. `visible` makes eager code call custom ops, too."""

    def __init__(self) -> None:
        self.chosen: dict[Product, Choice] = {}
        self.alone: dict[Product, Alone] = {}
        self.otherwise = SERIAL
        self.visible = False
        self.serial = False  # run every product serially for now, for a step to compare with
        self.unmeasured: set[Product] = set()  # products that ran without a choice; each is reported once
        self.reported: set[Product] = set()
        self.ran: set[tuple[Product, Choice]] | None = None  # what an observed step ran; None if no step is observed

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def find(self, product: Product) -> Choice:
        found = self.chosen.get(product)
        if found is None and product not in self.reported:
            self.reported.add(product)
            self.unmeasured.add(product)
        return found or self.otherwise

    @contextlib.contextmanager
    def forced(self, choice: Choice) -> Iterator[None]:
        """Run every product by `choice`, for measurements and comparisons."""
        before = self.chosen, self.otherwise
        self.chosen, self.otherwise = {}, choice
        try:
            yield
        finally:
            self.chosen, self.otherwise = before


choices = Choices()


@contextlib.contextmanager
def chosen_backend(
    operation: str,
    direction: str,
    rows: int,
    weights: Sequence[Tensor],
    axis: str,
    low: str,
    needs: Needs = EVERYTHING,
) -> Iterator[tuple[Serial, int]]:
    """Yield the backend and the number of chunks for a product; a sampled step times what runs inside."""
    product = product_of(operation, direction, rows, weights, axis, low)
    choice = SERIAL if choices.serial else choices.find(product)
    if choices.ran is not None:
        choices.ran.add((product, choice))
    alone = choices.alone.get(product)
    silent = not needs.x and operation != ROW  # only the input gradient would be sent, and nobody needs it
    if not job.clock.reads or alone is None or silent:
        timed: Any = contextlib.nullcontext()
    elif choice.backend == SERIAL.backend:
        timed = job.clock.expecting(alone.comm)
    else:
        timed = job.clock.around(axis, alone, needs.weights)
    with timed:
        yield backend(choice.backend, product), choice.chunks


def product_of(operation: str, direction: str, rows: int, weights: Sequence[Tensor], axis: str, low: str) -> Product:
    width, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return Product(operation, direction, rows, depth, width, weights[0].dtype, axis, low)


def backend(name: str, product: Product) -> Serial:
    """Return a backend with the arithmetic of the product."""
    return backends[name] if not product.low else type(backends[name])(arithmetic(product.low, product.dtype))
