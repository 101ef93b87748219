"""Products with a frozen weight and low-rank matrices that are trained beside it (LoRA, DoRA).

    y = x W^T + scale (x A^T) B^T        W (N, K) frozen, A (r, K) and B (N, r) trained

A fused weight has matrices for each of its projections. All A that read x are stacked, so that x is read once. The rows
of B are in the order of the fused weight, with zeros in the columns of the other projections:

    wqkv, rows by KV head   | q q k v | q q k v |      A = | Aq |    B = | Bq  0  0 |  rows of q, of the first KV head
                                                           | Ak |        |  0 Bk  0 |         k
                                                           | Av |        |  0  0 Bv |         v ...

The low-rank term is written first and the large product is added to it, which saves a pass over y. Backward returns
gradients of x, A and B, but none of W. It keeps x, which the block keeps anyway, and x A^T, which is r / K as large.

On a CPU in float32, W + scale B A is computed first where that is less work than the low-rank term of all rows: one
product in forward, and one for the gradient of x. Only x is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardline.models.adapted.quantized import dequantize
from shardline.models.products.cpu_product import multiply, multiply_add
from shardline.models.products.swiglu import swiglu_gradient_op, swiglu_op


class Projection(NamedTuple):
    """One of the projections in a weight: its rows per group of a fused weight, and the scale of B A."""

    name: str
    rows: int
    scale: float


class LowRankSpec(NamedTuple):
    """How the matrices of a weight are used."""

    dropout: float
    projections: tuple[Projection, ...]


class LowRank(nn.Module):
    """The trained matrices of one projection, uninitialised; those of experts have a leading expert dimension.

    a is (rank, columns), b (rows, rank), magnitude (rows,) with DoRA.
    """

    def __init__(self, shape: tuple[int, ...], rank: int, magnitude: bool) -> None:
        super().__init__()
        *rows, columns = shape
        experts = rows[:1] if len(shape) > 2 else []
        self.a = nn.Parameter(torch.empty(*experts, rank, columns))
        self.b = nn.Parameter(torch.empty(*rows, rank))
        self.magnitude = nn.Parameter(torch.empty(*rows)) if magnitude else None


class LowRankPart(NamedTuple):
    """This rank's shard of a `LowRank`, as plain tensors."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float


class Adapted(NamedTuple):
    """A frozen weight and what is trained beside it; a block's function takes it in place of a weight."""

    stored: tuple[Tensor, ...]  # the weight, or the tensors of a quantised one
    kind: str  # of quantisation; "" for none
    parts: tuple[LowRankPart | None, ...]  # in the order of `runs`, None for projections without matrices
    runs: tuple[int, ...]
    dropout: float

    @property
    def shape(self) -> torch.Size:
        return self.stored[0].shape  # rows are those of the weight, whatever its kind

    @property
    def weight(self) -> Tensor:
        """The frozen weight in its stored type, or dequantised."""
        return self.stored[0] if not self.kind else dequantize(self.stored, self.kind)

    @property
    def has_magnitude(self) -> bool:
        return any(part is not None and part.magnitude is not None for part in self.parts)


Weight = Tensor | Adapted


def plain_weight(weight: Weight) -> Tensor:
    return weight.weight if isinstance(weight, Adapted) else weight


def adapt(
    stored: tuple[Tensor, ...],
    kind: str,
    modules: nn.ModuleDict | None,
    spec: LowRankSpec,
    part: Callable[[Tensor], Tensor],
) -> Adapted:
    """A weight with what is trained beside it; `part` returns this rank's shard of a parameter."""
    found: list[LowRankPart | None] = []
    for name, _, scale in spec.projections:
        if modules is None or name not in modules:
            found.append(None)
            continue
        of = modules[name]
        assert isinstance(of, LowRank)
        magnitude = None if of.magnitude is None else part(of.magnitude)
        found.append(LowRankPart(part(of.a), part(of.b), magnitude, scale))
    return Adapted(stored, kind, tuple(found), tuple(one.rows for one in spec.projections), spec.dropout)


def some_groups(w: Adapted, first: int, count: int) -> Adapted:
    """The rows of `count` groups of a fused weight, beginning with the group `first`."""
    group = sum(w.runs)
    stored = tuple(one[first * group : (first + count) * group] for one in w.stored)
    parts: list[LowRankPart | None] = []
    for part, run in zip(w.parts, w.runs, strict=True):
        rows = slice(first * run, (first + count) * run)
        if part is not None:
            magnitude = None if part.magnitude is None else part.magnitude[rows]
            part = part._replace(b=part.b[rows], magnitude=magnitude)
        parts.append(part)
    return w._replace(stored=stored, parts=tuple(parts))


def joined(w: Adapted, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A (R, K) of all projections, and B (N, R) times their scales; None where there are none."""
    present = [part for part in w.parts if part is not None]
    if not present:
        return None, None
    a = present[0].a if len(present) == 1 else torch.cat([part.a for part in present])
    b = present[0].b * present[0].scale if len(w.parts) == 1 else _block_rows(w, present)
    return a.to(dtype), b.to(dtype)


def _block_rows(w: Adapted, present: list[LowRankPart]) -> Tensor:
    width, alike = sum(part.b.shape[-1] for part in present), len({part.scale for part in present}) == 1
    groups = w.shape[0] // sum(w.runs)
    blocks, place = [], 0
    for part, run in zip(w.parts, w.runs, strict=True):
        if part is None:
            blocks.append(present[0].b.new_zeros(groups, run, width))
        else:
            rows, rank = part.b.unflatten(0, (groups, run)), part.b.shape[-1]
            blocks.append(F.pad(rows if alike else rows * part.scale, (place, width - place - rank)))
            place += rank
    whole = torch.cat(blocks, dim=1).flatten(0, 1)
    return whole * present[0].scale if alike else whole


def dropped(x: Tensor, w: Adapted) -> Tensor | None:
    """The input of A in training with dropout; None where A reads x itself."""
    return F.dropout(x, w.dropout) if w.dropout and torch.is_grad_enabled() else None


def adapted_linear(x: Tensor, w: Adapted, bias: Tensor | None) -> Tensor:
    """x (..., K) times the adapted weight (N, K), plus a bias."""
    if w.has_magnitude:
        product = without_magnitude(x, w, None) * factors(w, squared_norms(w)).to(x.dtype)
        return product if bias is None else product + bias.to(x.dtype)
    return without_magnitude(x, w, bias)


def without_magnitude(x: Tensor, w: Adapted, bias: Tensor | None) -> Tensor:
    a, b = joined(w, x.dtype)
    narrow_bias = None if bias is None else bias.to(x.dtype)
    rows = x.flatten(0, -2)
    out: Tensor
    if merges(x, w):
        out = _Merged.apply(rows, a, b, narrow_bias, w.kind, *w.stored)
    else:
        other = None if a is None else dropped(rows, w)
        out = _linear(rows, list(w.stored), w.kind, a, b, narrow_bias, other)[0]
    return out.unflatten(0, x.shape[:-1])


def add_low_rank(product: Tensor, x: Tensor, w: Adapted) -> Tensor:
    """Add the low-rank term to the product of x (t, K) with the frozen weight, which was computed elsewhere."""
    a, b = joined(w, x.dtype)
    if a is None or b is None:
        return product
    other = dropped(x, w)
    low = (x if other is None else other) @ a.t()
    return torch.addmm(product.flatten(0, -2), low.flatten(0, -2), b.t()).view_as(product)


def operands(x: Tensor, w: Weight) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is that of x (t, K) and the adapted weight (N, K), for a loss with its own product.

        [ x | x A^T ] [ W | scale B ]^T      (t, K + R) times (N, K + R), with R padded to a multiple of 8

    B keeps its own precision: in bfloat16, the sum W + scale B A has no bits for updates far smaller than W.
    """
    if not isinstance(w, Adapted):
        return x, w
    a, b = joined(w, x.dtype)
    weight = w.weight.to(x.dtype)
    if a is None or b is None:
        return x, weight
    padding = (0, -len(a) % 8)
    return torch.cat([x, F.pad(x @ a.t(), padding)], dim=1), torch.cat([weight, F.pad(b, padding)], dim=1)


# ---- DoRA ------------------------------------------------------------------------------------------------------------


def squared_norms(w: Adapted) -> Tensor:
    """The squared norm (N,), float32, of each row of W + scale B A over this rank's columns; without a gradient.

    |W|^2 + 2 <W, BA> + |BA|^2, where neither the sum nor B A is ever computed.
    """
    with torch.no_grad():
        weight = w.weight
        a, b = joined(w, torch.float32)
        whole = weight.float().square().sum(1)
        if a is None or b is None:
            return whole
        cross = (weight.to(a.dtype) @ a.t() * b).sum(1)
        return whole + 2 * cross + (b @ (a @ a.t()) * b).sum(1)


def factors(w: Adapted, squares: Tensor) -> Tensor:
    """The magnitude of each row over its norm, (N,) float32; 1 for rows of projections without a magnitude."""
    groups = w.shape[0] // sum(w.runs)
    blocks: list[Tensor] = []
    norms = squares.sqrt().unflatten(0, (groups, -1)).split(w.runs, dim=1)
    for part, norm, run in zip(w.parts, norms, w.runs, strict=True):
        if part is None or part.magnitude is None:
            blocks.append(torch.ones_like(norm))
        else:
            blocks.append(part.magnitude.float().unflatten(0, (groups, run)) / norm)
    return torch.cat(blocks, dim=1).flatten()


# ---- on a CPU --------------------------------------------------------------------------------------------------------


def merges(x: Tensor, w: Adapted) -> bool:
    """Whether to compute W + scale B A (N, K) for a product with x (..., K): if x has N K / (N + K) rows or more."""
    eager = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
    drops = w.dropout and torch.is_grad_enabled()
    if not eager or drops or all(part is None for part in w.parts):
        return False
    rows, columns = w.shape[0], x.shape[-1]
    return x.numel() // columns * (rows + columns) >= rows * columns


def merged_weight(
    stored: Sequence[Tensor], kind: str, a: Tensor | None, b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """W + B A; W where there are no matrices."""
    weight = _wide(list(stored), kind, dtype)
    return weight if a is None or b is None else multiply_add(b, a.t(), weight)


def low_rank_gradients(gradient: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of A and B, from the product's gradient (t, N) and x (t, K)."""
    of_low, low = multiply(gradient, b.t()), multiply(x, a)
    return multiply(of_low.t(), x.t()), multiply(low.t(), gradient.t()).t()


class _Merged(torch.autograd.Function):
    """The product with W + B A, which backward computes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, kind: str, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b, *stored)
        ctx.kind = kind
        return multiply(x, merged_weight(stored, kind, a, b, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, a, b, *stored = ctx.saved_tensors
        for_x, for_a, for_b, for_bias = ctx.needs_input_grad[:4]
        gradient = gradient.contiguous()
        of_x = multiply(gradient, merged_weight(stored, ctx.kind, a, b, x.dtype).t()) if for_x else None
        of_a, of_b = low_rank_gradients(gradient, x, a, b) if for_a or for_b else (None, None)
        return of_x, of_a, of_b, gradient.sum(0) if for_bias else None, None, *(None for _ in stored)


# ---- the operation ---------------------------------------------------------------------------------------------------

_NAME = "shardline::adapted_linear"
_OPERANDS = "Tensor[] stored, str kind, Tensor? a, Tensor? b"


def _wide(stored: list[Tensor], kind: str, dtype: torch.dtype) -> Tensor:
    return stored[0].to(dtype) if not kind else dequantize(tuple(stored), kind, dtype)


@torch.library.custom_op(
    _NAME, mutates_args=(), schema=f"(Tensor x, {_OPERANDS}, Tensor? bias, Tensor? dropped) -> (Tensor, Tensor)"
)
def _linear(
    x: Tensor,
    stored: list[Tensor],
    kind: str,
    a: Tensor | None,
    b: Tensor | None,
    bias: Tensor | None,
    dropped: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The product (t, N), and x A^T (t, R), which backward needs."""
    weight = _wide(stored, kind, x.dtype)
    if a is None or b is None:
        return multiply(x, weight, bias), x.new_empty(0)
    low = multiply(x if dropped is None else dropped, a)
    if not x.is_cuda:
        return multiply(x, weight, bias).addmm_(low, b.t()), low
    out = low @ b.t() if bias is None else torch.addmm(bias, low, b.t())
    return out.addmm_(x, weight.t()), low


@_linear.register_fake
def _(
    x: Tensor,
    stored: list[Tensor],
    kind: str,
    a: Tensor | None,
    b: Tensor | None,
    bias: Tensor | None,
    dropped: Tensor | None,
) -> tuple[Tensor, Tensor]:
    low = x.new_empty(0) if a is None else x.new_empty(x.shape[0], a.shape[0])
    return x.new_empty(x.shape[0], stored[0].shape[0]), low


@torch.library.custom_op(
    f"{_NAME}_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_OPERANDS}, int columns, bool apart, bool for_x) -> (Tensor, Tensor)",
)
def _linear_backward(
    gradient: Tensor,
    stored: list[Tensor],
    kind: str,
    a: Tensor | None,
    b: Tensor | None,
    columns: int,
    apart: bool,
    for_x: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x (t, columns) and of x A^T (t, R); each is empty where it is not needed.

    If the input of A was `apart` from x (dropout), the gradient of x does not include that of x A^T.
    """
    of_x, of_low = gradient.new_empty(0), gradient.new_empty(0)
    if a is not None and b is not None:
        of_low = multiply(gradient, b.t())
    if not for_x:
        return of_x, of_low
    weight = _wide(stored, kind, gradient.dtype)
    if a is None or apart:
        return multiply(gradient, weight.t()), of_low
    if gradient.is_cuda:
        return (of_low @ a).addmm_(gradient, weight), of_low
    return multiply(gradient, weight.t()).addmm_(of_low, a), of_low


@_linear_backward.register_fake
def _(
    gradient: Tensor,
    stored: list[Tensor],
    kind: str,
    a: Tensor | None,
    b: Tensor | None,
    columns: int,
    apart: bool,
    for_x: bool,
) -> tuple[Tensor, Tensor]:
    rows = gradient.shape[0]
    of_x = gradient.new_empty(rows, columns) if for_x else gradient.new_empty(0)
    return of_x, gradient.new_empty(0) if a is None else gradient.new_empty(rows, a.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, stored, ctx.kind, a, b, _, other = inputs
    ctx.set_materialize_grads(False)
    ctx.apart, ctx.columns = other is not None, x.shape[1]
    read = x if other is None else other
    ctx.save_for_backward(None if a is None else read, output[1], a, b, *stored)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    read, low, a, b, *stored = ctx.saved_tensors
    for_x, _, _, for_a, for_b, for_bias, for_other = ctx.needs_input_grad
    gradient = gradient.contiguous()
    of_x, of_low = _linear_backward(gradient, stored, ctx.kind, a, b, ctx.columns, ctx.apart, for_x)
    of_a, of_b = (of_low.t() @ read, gradient.t() @ low) if for_a or for_b else (None, None)
    of_other = of_low @ a if ctx.apart and for_other else None
    of_bias = gradient.sum(0) if for_bias else None
    return of_x if for_x else None, [None] * len(stored), None, of_a, of_b, of_bias, of_other


_linear.register_autograd(_backward, setup_context=_keep)


def adapted_down(product: Tensor, w: Adapted, bias: Tensor | None, block: int) -> Tensor:
    """silu(gate) * up of a product (t, 2 F), times the adapted weight; backward recomputes silu(gate) * up.

    Without dropout.
    """
    a, b = joined(w, product.dtype)
    magnitude = w.has_magnitude
    narrow_bias = None if bias is None or magnitude else bias.to(product.dtype)
    out: Tensor = _AdaptedDown.apply(product, a, b, narrow_bias, block, w.kind, *w.stored)
    if not magnitude:
        return out
    out = out * factors(w, squared_norms(w)).to(out.dtype)
    return out if bias is None else out + bias.to(out.dtype)


class _AdaptedDown(torch.autograd.Function):
    """SwiGLU's result, which A's gradient needs, is not kept from forward: its gradient kernel recomputes it."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        block: int,
        kind: str,
        *stored: Tensor,
    ) -> Tensor:
        out, low = _linear(swiglu_op(product, None, block), list(stored), kind, a, b, bias, None)
        ctx.save_for_backward(product, low, a, b, *stored)
        ctx.block, ctx.kind = block, kind
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        product, low, a, b, *stored = ctx.saved_tensors
        gradient, columns = gradient.contiguous(), product.shape[1] // 2
        of_middle, of_low = _linear_backward(gradient, stored, ctx.kind, a, b, columns, False, True)
        of_product, _, middle = swiglu_gradient_op(of_middle, product, None, ctx.block)
        of_a, of_b = (None, None) if a is None else (of_low.t() @ middle, gradient.t() @ low)
        of_bias = gradient.sum(0) if ctx.needs_input_grad[3] else None
        return of_product, of_a, of_b, of_bias, None, None, *(None for _ in stored)


def initial_bound(columns: int) -> float:
    """The bound of A's initial values, uniform between -bound and bound as in `peft`."""
    return 1 / math.sqrt(columns)
