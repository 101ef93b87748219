"""Rows travel to the ranks of their experts and back: two all-to-alls whose sizes depend on the routing.

    this rank's rows, sorted by expert      | 0 | 1 | 2 | 3 |       experts 0 and 1 are on rank 0, 2 and 3 on rank 1
      counts exchanged first                (how many rows each rank has for each expert of each other)
    received, by source rank                rank 0: | 0 1 | 0 1 |
      sorted by expert                      rank 0: | 0 0 | 1 1 |

`send` and `bring_back` are each other's gradient. The sizes are read on the host once per layer, for all transfers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.observe import Blocking
from shardline.models.moe import Dispatched

AXIS = "ep"


class Trip(NamedTuple):
    """How many rows go where; `counts` (2, ranks, experts of a rank): sent to and received from each rank."""

    counts: Tensor
    on_host: Tensor  # the same in host memory
    rows: int  # that this rank sends


def dispatch(rows: Tensor, weights: Tensor, counts: Tensor) -> Dispatched:
    """Send rows (n, dim), sorted by expert, and their weights to the ranks of the experts."""
    sent = counts.view(collectives.axis(AXIS).size, -1)
    received = collectives.all_to_all(sent, AXIS)
    both = torch.stack([sent, received])
    trip = Trip(both, both.cpu(), rows.shape[0])
    ends = received.sum(0).cumsum(0).to(torch.int32)
    here = send(rows, trip.counts, trip.on_host)
    return Dispatched(here, send(weights[:, None], trip.counts, trip.on_host)[:, 0], ends, trip)


def combine(rows: Tensor, trip: Trip) -> Tensor:
    """The results of the rows that this rank sent, in their order."""
    return bring_back(rows, *trip)


def send(x: Tensor, counts: Tensor, on_host: Tensor) -> Tensor:
    out: Tensor = _send(x, counts, on_host)
    return out


def bring_back(x: Tensor, counts: Tensor, on_host: Tensor, rows: int) -> Tensor:
    out: Tensor = _bring_back(x, counts, on_host, rows)
    return out


@torch.library.custom_op(
    "shardline::expert_send", mutates_args=(), schema="(Tensor x, Tensor counts, Tensor on_host) -> Tensor"
)
def _send(x: Tensor, counts: Tensor, on_host: Tensor) -> Tensor:
    arrived = _all_to_all(x, on_host.sum(2).tolist())
    return arrived.index_select(0, _by_expert(counts[1], arrived.shape[0]))


@_send.register_fake
def _(x: Tensor, counts: Tensor, on_host: Tensor) -> Tensor:
    if job.traffic.plans:  # as many rows from every rank as to it
        return _planned(x, x.shape[0])
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


@torch.library.custom_op(
    "shardline::expert_bring_back",
    mutates_args=(),
    schema="(Tensor x, Tensor counts, Tensor on_host, SymInt rows) -> Tensor",
)
def _bring_back(x: Tensor, counts: Tensor, on_host: Tensor, rows: int) -> Tensor:
    by_source = torch.empty_like(x, memory_format=torch.contiguous_format)
    by_source.index_copy_(0, _by_expert(counts[1], x.shape[0]), x)
    return _all_to_all(by_source, on_host.sum(2).flip(0).tolist())


@_bring_back.register_fake
def _(x: Tensor, counts: Tensor, on_host: Tensor, rows: int) -> Tensor:
    return _planned(x, rows)


@torch.library.custom_op(
    "shardline::expert_send_again",
    mutates_args=(),
    schema="(Tensor x, Tensor counts, Tensor on_host, SymInt rows) -> Tensor",
)
def _send_again(x: Tensor, counts: Tensor, on_host: Tensor, rows: int) -> Tensor:
    """`_send` where the number of rows that arrive is known: it has been sent before."""
    arrived = _all_to_all(x.contiguous(), on_host.sum(2).tolist())
    return arrived.index_select(0, _by_expert(counts[1], rows))


_send_again.register_fake(lambda x, counts, on_host, rows: _planned(x, rows))


def _planned(x: Tensor, rows: int) -> Tensor:
    """The rows that arrive, without values; a dry run learns what is sent for them."""
    out = x.new_empty(rows, x.shape[1])
    if job.traffic.plans:
        ranks = job.axes[AXIS].size
        job.traffic.planned(AXIS, "all-to-all", (ranks - 1) / ranks * out.nbytes)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.rows = inputs[0].shape[0]


def _send_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    counts, on_host = ctx.saved_tensors
    return bring_back(gradient, counts, on_host, ctx.rows), None, None


def _bring_back_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _send_again(gradient, *ctx.saved_tensors, ctx.rows), None, None, None


_send.register_autograd(_send_backward, setup_context=_keep)
_bring_back.register_autograd(_bring_back_backward, setup_context=_keep)


def _by_expert(received: Tensor, total: int) -> Tensor:
    """The order that sorts rows (source rank, expert) by (expert, source rank); received is (ranks, experts)."""
    lengths = received.t().flatten()
    starts = (received.flatten().cumsum(0) - received.flatten()).view_as(received).t().flatten()
    shifts = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(total, device=received.device)
    return places + torch.repeat_interleave(shifts, lengths, output_size=total)


def _all_to_all(x: Tensor, rows: list[list[int]]) -> Tensor:
    """Send rows[0][r] rows to each rank r and receive rows[1][r] from it."""
    over, (sent, received) = job.axes[AXIS], rows
    out = x.new_empty(sum(received), *x.shape[1:])
    others = sum(sent) - sent[over.rank]
    with Blocking(over, "all_to_all", x, others * x.element_size() * (x.numel() // max(1, x.shape[0]))):
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=over.group)
    return out
