"""Tensor-parallel products in float8: rows are rounded before they are sent, which halves their bytes.

    all-gather        rows in float8, each with its factor        products of all ranks' rows
    reduce-scatter    sums of products, in bfloat16: partial sums cannot be rounded to 8 bits

Backward does the reverse: it gathers output gradients in float8, and sums row gradients in bfloat16. Weight gradients
in high precision (rowwise_with_gw_hp) need unrounded rows, which are sent as they are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.parallel.tensor.serial_and_ring import PLAIN, Arithmetic
from shardline.precision import float8
from shardline.precision.float8 import E4M3, MULTIPLE, Quantized, Recipe, Rows


class RoundedWeight(NamedTuple):
    """A rounded weight, and the type of the rows that it is multiplied with."""

    operand: Quantized
    of_rows: torch.dtype


class Float8Arithmetic(Arithmetic):
    """Received rows are bytes; other rows are rounded when they are multiplied."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype

    def like(self, x: Tensor, rows: int, depth: int) -> Tensor:
        if self.recipe.wide_weight_gradient:
            return x.new_empty(rows, depth, dtype=self.dtype)
        return x.new_empty(rows, depth + MULTIPLE, dtype=torch.uint8)

    def rows(self, x: Tensor, gradient: bool = False) -> Tensor:
        found = float8.rounded(x, self.recipe, gradient)
        return float8.to_bytes(found) if isinstance(found, Quantized) else found

    def _open(self, rows: Tensor, kind: torch.dtype) -> Rows:
        if rows.dtype == torch.uint8:
            return float8.from_bytes(rows, kind)
        return float8.rounded(rows, self.recipe, gradient=kind != E4M3)

    def right(self, weight: Tensor) -> RoundedWeight:
        return RoundedWeight(float8.for_rows(weight, self.recipe), E4M3)

    def right_back(self, weight: Tensor) -> RoundedWeight:
        return RoundedWeight(float8.for_gradients(weight, self.recipe), self.recipe.of_gradients)

    def multiply(self, rows: Tensor, right: RoundedWeight, out: Tensor | None = None) -> Tensor:
        return float8.product(self._open(rows, right.of_rows), right.operand, self.recipe, self.dtype, out)

    def add_product(self, total: Tensor, rows: Tensor, right: RoundedWeight) -> None:
        total += self.multiply(rows, right)

    def outer(self, gradients: Tensor, x: Tensor) -> Tensor:
        given = self._open(gradients, self.recipe.of_gradients)
        return float8.weight_gradient(given, self._open(x, E4M3), self.recipe, self.dtype)

    def add_outer(self, total: Tensor, gradients: Tensor, x: Tensor) -> None:
        total += self.outer(gradients, x)


EMULATED = " emulated"


def written(recipe: Recipe | None) -> str:
    """Return the string for a recipe that graph operations take; empty if products are not in float8."""
    return "" if recipe is None else recipe.name + (EMULATED if recipe.emulate else "")


@functools.cache
def arithmetic(low: str, dtype: torch.dtype) -> Arithmetic:
    if not low:
        return PLAIN
    return Float8Arithmetic(Recipe(low.removesuffix(EMULATED), low.endswith(EMULATED)), dtype)
