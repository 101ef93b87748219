"""Sends rows to the ranks of their experts and back; the numbers of rows depend on the routing.

    this rank's rows, sorted by expert      | 0 | 1 | 2 | 3 |       experts 0 and 1 are on rank 0, 2 and 3 on rank 1
      counts are exchanged first            (how many rows each rank has for each expert)
    arrived, sorted by expert               rank 0: | 0 0 | 1 1 |   for each expert, the rows of rank 0 come first

Each transfer has two operations: one starts sending rows, the other waits for the rows that arrive. The work between
the two, here the shared expert or another part of the tokens, runs while rows are under way:

    forward    put | shared expert | land | experts | put back | next part | gather
    backward   put | next part | land | experts | put back | shared expert | gather

`put` and `gather` are each other's gradient, and so are `land` and `put back`. The first operation of a transfer passes
a ticket to the second, forward and backward: a tensor of one element whose address identifies the transfer. So all four
are functions of tensors to autograd and to the compiler. Activation checkpointing never reruns one of them alone.

A `Carrier` sends the rows: all_to_all.py, or symmetric.py between the memories of GPUs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardline.comm.job import job
from shardline.models.experts.moe import Dispatched, count_tokens, sort_by_expert
from shardline.parallel.expert.all_to_all import AXIS, ROUTES, received
from shardline.precision.float8 import E4M3, Quantized, quantize


class Carrier(Protocol):
    """Sends rows over the expert-parallel axis.

    Rows may have a `side`: a few float32 numbers for each row, in the order of the choices (t k, c). `table` has a line
    for each rank, with the number of its rows for each expert, and `ROUTES` more lines. `sizes` (ranks, ranks), on the
    host, has the number of rows that each rank sends to each other; it may be filled only while rows are under way.
    """

    def plan(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return table and sizes, from the counts (experts,) of this rank's rows."""

    def send(self, rows: Tensor, side: Tensor | None, order: Tensor, k: int, table: Tensor, sizes: Tensor) -> object:
        """Start to send rows (t, ...), each k times, in the given order, which sorts them by expert."""

    def landed(self, transfer: object, table: Tensor, sizes: Tensor) -> list[Tensor]:
        """Wait for the rows for this rank's experts; return them sorted by expert, and their side."""

    def send_back(self, rows: Tensor, side: Tensor | None, table: Tensor, sizes: Tensor) -> object:
        """Start to send rows, in the order in which `landed` returned them, back to their sources."""

    def gathered(self, transfer: object, inverse: Tensor, k: int) -> list[Tensor]:
        """Wait for the rows to return; return the sum of each token's k rows, and their side in choice order."""


class UnderWay(NamedTuple):
    """Some tokens on the way to their experts and back."""

    ticket: Tensor
    order: Tensor
    inverse: Tensor
    table: Tensor
    sizes: Tensor
    k: int
    width: int
    dtype: torch.dtype
    narrow: bool


def depart(x: Tensor, chosen: Tensor, weights: Tensor, n_experts: int, narrow: bool) -> UnderWay:
    """Send tokens (t, dim) to their chosen experts (t, k), with their weights; in float8 if `narrow`."""
    order, inverse = sort_by_expert(chosen)
    table, sizes = _plan(count_tokens(chosen, n_experts))
    k = chosen.shape[1]
    ticket = _put(x, weights.reshape(-1, 1), order, inverse, table, sizes, k, narrow)
    return UnderWay(ticket, order, inverse, table, sizes, k, x.shape[1], x.dtype, narrow)


def arrive(one: UnderWay) -> Dispatched:
    """Wait for the rows for this rank's experts."""
    given = (one.table, one.sizes, one.order.shape[0], one.width, one.dtype, one.narrow)
    rows, weights, ends = _land(one.ticket, *given)
    return Dispatched(rows, weights[:, 0], ends)


def leave(results: Tensor, one: UnderWay) -> Tensor:
    """Send results back."""
    ticket: Tensor = _put_back(results, None, one.table, one.sizes)
    return ticket


def collect(ticket: Tensor, one: UnderWay) -> Tensor:
    """Wait for the results to return; return the sum of each token's k results."""
    given = (one.order, one.inverse, one.table, one.sizes, one.k, one.width, one.dtype, False)
    out: Tensor = _gather(ticket, *given)[0]
    return out


def _carrier() -> Carrier:
    carrier: Carrier = job.carrier
    return carrier


def _ticket(transfer: object, device: torch.device) -> Tensor:
    ticket = torch.empty(1, device=device)
    job.rows_under_way[ticket.data_ptr()] = (ticket, transfer)
    return ticket


def _transfer(ticket: Tensor) -> object:
    return job.rows_under_way.pop(ticket.data_ptr())[1]


# ---- operations (gradients are registered below) ---------------------------------------------------------------------


def _op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"shardline::expert_{name}", mutates_args=(), schema=schema)


@_op("plan", "(Tensor counts) -> (Tensor, Tensor)")
def _plan(counts: Tensor) -> tuple[Tensor, Tensor]:
    return _carrier().plan(counts)


@_op(
    "put",
    "(Tensor x, Tensor? weights, Tensor order, Tensor inverse, Tensor table, Tensor sizes, int k, bool narrow)"
    " -> Tensor",
)
def _put(
    x: Tensor,
    weights: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    table: Tensor,
    sizes: Tensor,
    k: int,
    narrow: bool,
) -> Tensor:
    rows, side = x.contiguous(), weights
    if narrow:
        assert weights is not None
        data, factors = quantize(x)
        rows, side = data.view(torch.uint8), torch.cat([weights, factors.repeat_interleave(k, 0)], dim=1)
    return _ticket(_carrier().send(rows, side, order, k, table, sizes), x.device)


@_op(
    "land",
    "(Tensor ticket, Tensor table, Tensor sizes, SymInt sent, SymInt width, ScalarType dtype, bool narrow)"
    " -> (Tensor, Tensor, Tensor)",
)
def _land(
    ticket: Tensor, table: Tensor, sizes: Tensor, sent: int, width: int, dtype: torch.dtype, narrow: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, their weights, and where each expert's rows end; this rank has sent `sent` rows."""
    rows, weights = _carrier().landed(_transfer(ticket), table, sizes)
    if narrow:
        rows, weights = Quantized(rows.view(E4M3), weights[:, 1:]).wide(dtype), weights[:, :1].clone()
    return rows, weights, received(table).sum(0).cumsum(0).to(torch.int32)


@_op("land_again", "(Tensor ticket, Tensor table, Tensor sizes, SymInt rows, SymInt width, ScalarType dtype) -> Tensor")
def _land_again(ticket: Tensor, table: Tensor, sizes: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`land` without weights; the number of rows is known, as it is the same as before."""
    return _carrier().landed(_transfer(ticket), table, sizes)[0]


@_op("put_back", "(Tensor rows, Tensor? weights, Tensor table, Tensor sizes) -> Tensor")
def _put_back(rows: Tensor, weights: Tensor | None, table: Tensor, sizes: Tensor) -> Tensor:
    side = None if weights is None else weights.contiguous()
    return _ticket(_carrier().send_back(rows.contiguous(), side, table, sizes), rows.device)


@_op(
    "gather",
    "(Tensor ticket, Tensor order, Tensor inverse, Tensor table, Tensor sizes, int k, SymInt width, ScalarType dtype,"
    " bool weighted) -> (Tensor, Tensor)",
)
def _gather(
    ticket: Tensor,
    order: Tensor,
    inverse: Tensor,
    table: Tensor,
    sizes: Tensor,
    k: int,
    width: int,
    dtype: torch.dtype,
    weighted: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum of each token's rows, and with `weighted` the numbers beside them."""
    out, *side = _carrier().gathered(_transfer(ticket), inverse, k)
    return out, side[0] if weighted else out.new_empty(0, 1, dtype=torch.float32)


# ---- fake implementations --------------------------------------------------------------------------------------------


@_plan.register_fake
def _(counts: Tensor) -> tuple[Tensor, Tensor]:
    ranks = job.axes[AXIS].size
    if job.traffic.plans:
        job.traffic.planned(AXIS, "all-gather", (ranks - 1) * counts.nbytes)
    return counts.new_empty(ranks + ROUTES, counts.shape[0]), counts.new_empty(ranks, ranks, device="cpu")


_put.register_fake(lambda x, *rest: x.new_empty(1, dtype=torch.float32))
_put_back.register_fake(lambda rows, *rest: rows.new_empty(1, dtype=torch.float32))


@_land.register_fake
def _(
    ticket: Tensor, table: Tensor, sizes: Tensor, sent: int, width: int, dtype: torch.dtype, narrow: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = sent if job.traffic.plans else torch.library.get_ctx().new_dynamic_size()  # a dry run assumes even routing
    _planned(sent, width * (1 if narrow else dtype.itemsize) + (8 if narrow else 4))
    ends = table.new_empty(table.shape[1] // job.axes[AXIS].size, dtype=torch.int32)
    return ticket.new_empty(rows, width, dtype=dtype), ticket.new_empty(rows, 1), ends


@_land_again.register_fake
def _(ticket: Tensor, table: Tensor, sizes: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    _planned(rows, width * dtype.itemsize)
    return ticket.new_empty(rows, width, dtype=dtype)


@_gather.register_fake
def _(
    ticket: Tensor,
    order: Tensor,
    inverse: Tensor,
    table: Tensor,
    sizes: Tensor,
    k: int,
    width: int,
    dtype: torch.dtype,
    weighted: bool,
) -> tuple[Tensor, Tensor]:
    _planned(order.shape[0], width * dtype.itemsize + (4 if weighted else 0))
    out = ticket.new_empty(order.shape[0] // k, width, dtype=dtype)
    return out, ticket.new_empty(order.shape[0] if weighted else 0, 1)


def _planned(rows: int, size: int) -> None:
    """Tell a dry run that rows of `size` bytes each are sent."""
    if job.traffic.plans:
        ranks = job.axes[AXIS].size
        job.traffic.planned(AXIS, "all-to-all", (ranks - 1) / ranks * rows * size)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _keep_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, order, inverse, table, sizes, ctx.k, _ = inputs
    ctx.save_for_backward(order, inverse, table, sizes)
    ctx.width, ctx.dtype, ctx.weighted = x.shape[1], x.dtype, weights is not None


def _put_gradient(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
    of_x, of_weights = _gather(ticket, *ctx.saved_tensors, ctx.k, ctx.width, ctx.dtype, ctx.weighted)
    return of_x, of_weights if ctx.weighted else None, *[None] * 6


def _keep_land(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _land_gradient(ctx: Any, of_rows: Tensor, of_weights: Tensor, _: None) -> tuple[Any, ...]:
    return _put_back(of_rows, of_weights, *ctx.saved_tensors), *[None] * 6


def _keep_put_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, table, sizes = inputs
    ctx.save_for_backward(table, sizes)
    ctx.shape, ctx.dtype = rows.shape, rows.dtype


def _put_back_gradient(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
    return _land_again(ticket, *ctx.saved_tensors, *ctx.shape, ctx.dtype), None, None, None


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, order, inverse, table, sizes, ctx.k, *_ = inputs
    ctx.save_for_backward(order, inverse, table, sizes)


def _gather_gradient(ctx: Any, of_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    order, inverse, table, sizes = ctx.saved_tensors
    return _put(of_out, None, order, inverse, table, sizes, ctx.k, False), *[None] * 8


_put.register_autograd(_put_gradient, setup_context=_keep_put)
_land.register_autograd(_land_gradient, setup_context=_keep_land)
_put_back.register_autograd(_put_back_gradient, setup_context=_keep_put_back)
_gather.register_autograd(_gather_gradient, setup_context=_keep_gather)
