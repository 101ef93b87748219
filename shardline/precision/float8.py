"""Products in float8: operands are rounded to 8 bits just before they are multiplied, forward and backward.

    product           x (t, K)         times  weight (N, K)   -> (t, N)
    input gradient    gradient (t, N)  times  weight          -> (t, K)
    weight gradient   gradient         times  x               -> (N, K), a sum over the tokens

    tensorwise            one factor for all numbers of an operand; gradients have more exponent bits (e5m2)
    rowwise               a factor for each row of the left operand and each column of the right one
    rowwise_with_gw_hp    the same, but weight gradients are computed in the type of the activations

Factors are powers of two. Since float8 numbers have an exponent, such a factor does not change how a number is rounded,
unless the number is so small that it becomes subnormal. So ranks that see different rows or columns together, and
choose different factors, still compute the same results as one process. And numbers that were sent in float8 with one
factor can get another one without being rounded again.

With `emulate` the rounded numbers are multiplied in the type of the activations, on any device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.models.products.linear import gradient_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}
TINY = 1e-12  # so that rows of zeros also have a factor
EXPONENT = 0x7F800000  # the exponent bits of a float32
MULTIPLE = 16  # the kernels need sizes that are multiples of this


class Recipe(NamedTuple):
    """How operands are rounded: a recipe name of the config, and whether products are emulated."""

    name: str
    emulate: bool

    @property
    def by_row(self) -> bool:
        return self.name != "tensorwise"

    @property
    def wide_weight_gradient(self) -> bool:
        return self.name == "rowwise_with_gw_hp"

    @property
    def of_gradients(self) -> torch.dtype:
        return E4M3 if self.by_row else E5M2


def keeps_float8(recipe: Recipe | None) -> bool:
    """Whether a product by this recipe keeps its rows for backward in rounded form."""
    return recipe is not None and not recipe.wide_weight_gradient


class Quantized(NamedTuple):
    """Numbers in float8 (rows, depth), and the factors (rows, 1) or (1, 1) that scale them to their values."""

    data: Tensor
    factors: Tensor

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.data.to(dtype) * self.factors.to(dtype)


def quantize(x: Tensor, kind: torch.dtype = E4M3, by_row: bool = True) -> Quantized:
    """Round x (rows, depth), scaled so that the largest number of a row, or of all, fits the type."""
    largest = x.detach().abs().amax(1, keepdim=True) if by_row else x.detach().abs().amax().view(1, 1)
    scales = power_of_two_below(largest, kind)
    return Quantized((x.float() * scales).to(kind), scales.reciprocal())


def power_of_two_below(largest: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Return the power of two that scales `largest` to more than half of the type's maximum, but not above it."""
    scales = LARGEST[kind] / largest.float().clamp(min=TINY)
    return (scales.view(torch.int32) & EXPONENT).view(torch.float32)


def transposed(x: Quantized, recipe: Recipe) -> Quantized:
    """Transpose to (depth, rows): the factors of rows become factors of columns, or one for all."""
    if x.factors.numel() == 1:
        return Quantized(x.data.t().contiguous(), x.factors)
    if x.data.is_cuda:
        return Quantized(*_turn(x.data, x.factors))
    data, factors = quantize(x.wide(torch.float32).t(), x.data.dtype, recipe.by_row)
    return Quantized(data.contiguous(), factors)


@torch.library.custom_op(
    "shardline::float8_turn", mutates_args=(), schema="(Tensor data, Tensor factors) -> (Tensor, Tensor)"
)
def _turn(data: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `transposed` by kernels."""
    from shardline.precision.float8_kernels import COLUMNS, ROWS, TILES, largest_kernel, turn_kernel

    rows, depth = data.shape
    data, factors = data.contiguous(), factors.expand(rows, 1).contiguous()
    largest = torch.zeros(depth, device=data.device)
    turned, of_columns = data.new_empty(depth, rows), factors.new_empty(depth, 1)
    across, down = -(-depth // COLUMNS), -(-rows // ROWS)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    largest_kernel[(across, -(-down // TILES))](data, factors, largest, rows, depth, TILES=TILES, **tile)
    limits = LARGEST[data.dtype], TINY
    turn_kernel[(across, down)](data, factors, largest, turned, of_columns, rows, depth, *limits, **tile)
    return turned, of_columns


_turn.register_fake(lambda data, factors: (data.new_empty(data.shape[::-1]), factors.new_empty(data.shape[1], 1)))


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool, out: Tensor | None = None) -> Tensor:
    """Multiply a (n, K) with the transpose of b (m, K)."""
    if emulate:
        return torch.mm(a.wide(dtype), b.wide(dtype).t(), out=out)
    of_a, of_b = a.factors, b.factors.t()
    if of_a.numel() > 1 or of_b.numel() > 1:  # the kernels need the same kind of factors for both operands
        of_a, of_b = of_a.expand(a.data.shape[0], 1), of_b.expand(1, b.data.shape[0])
    given = (a.data, b.data.t(), of_a.contiguous(), of_b.contiguous())
    product: Tensor = torch._scaled_mm(*given, out_dtype=dtype, use_fast_accum=True)
    return product if out is None else out.copy_(product)


# ---- the three products ----------------------------------------------------------------------------------------------

Rows = Quantized | Tensor  # rounded already, or to be rounded when they are multiplied


def rounded(x: Tensor, recipe: Recipe, gradient: bool = False) -> Rows:
    """Return the rows x (t, depth) as backward needs them: unrounded if the recipe has wide weight gradients."""
    kind = recipe.of_gradients if gradient else E4M3
    return x if recipe.wide_weight_gradient else quantize(x, kind, recipe.by_row)


def _left(rows: Rows) -> Quantized:
    return rows if isinstance(rows, Quantized) else quantize(rows)


def for_rows(weight: Tensor, recipe: Recipe) -> Quantized:
    """Round a weight (N, K) that rows (t, K) are multiplied with."""
    return quantize(weight, E4M3, recipe.by_row)


def for_gradients(weight: Tensor, recipe: Recipe) -> Quantized:
    """Round the transpose of a weight (N, K), for gradients (t, N)."""
    data, factors = quantize(weight.t(), E4M3, recipe.by_row and not recipe.wide_weight_gradient)
    return Quantized(data.contiguous(), factors)


def product(rows: Rows, right: Quantized, recipe: Recipe, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    return multiply(_left(rows), right, dtype, recipe.emulate, out)


def weight_gradient(gradients: Rows, rows: Rows, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return the transpose of gradients (t, N) times rows (t, K)."""
    if isinstance(gradients, Quantized) and isinstance(rows, Quantized):
        return multiply(transposed(gradients, recipe), transposed(rows, recipe), dtype, recipe.emulate)
    assert isinstance(gradients, Tensor)
    assert isinstance(rows, Tensor)
    return gradients.t() @ rows


def linear(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Return x (..., K) times the transpose of weight (N, K), in the type of x."""
    out: Tensor = _Float8Linear.apply(x.flatten(0, -2), weight, *recipe)
    return out.unflatten(0, x.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, emulate: bool) -> Tensor:
        ctx.recipe = Recipe(name, emulate)
        rows = rounded(x, ctx.recipe)
        ctx.save_for_backward(weight, *(rows if isinstance(rows, Quantized) else [rows]))
        return product(rows, for_rows(weight.to(x.dtype), ctx.recipe), ctx.recipe, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept = ctx.saved_tensors
        recipe, dtype = ctx.recipe, gradient.dtype
        rows = kept[0] if recipe.wide_weight_gradient else Quantized(*kept)
        gradients = rounded(gradient, recipe, gradient=True)

        def of_weight() -> Tensor:
            return weight_gradient(gradients, rows, recipe, dtype).to(weight.dtype)

        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = product(gradients, for_gradients(weight.to(dtype), recipe), recipe, dtype) if needs_x else None
        if torch.compiler.is_compiling():
            return dx, of_weight() if needs_weight else None, None, None
        return dx, gradient_of(weight, needs_weight, of_weight), None, None


# ---- rows in bytes, for transfers ------------------------------------------------------------------------------------


def to_bytes(rows: Quantized) -> Tensor:
    """Return (t, depth + 16) uint8: each row followed by its factor, so that both are sent together."""
    factors = rows.factors.expand(rows.data.shape[0], MULTIPLE // rows.factors.element_size()).contiguous()
    return torch.cat([rows.data.view(torch.uint8), factors.view(torch.uint8)], dim=1)


def from_bytes(whole: Tensor, kind: torch.dtype) -> Quantized:
    depth = whole.shape[1] - MULTIPLE
    factors = whole[:, depth : depth + 4].contiguous().view(torch.float32)
    return Quantized(whole[:, :depth].view(kind), factors)
