"""Sends rows by all-to-alls of the process group. The host must know their sizes: it reads them once per trip."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.observe import Observed, Started, described, runs_on_host
from shardline.comm.spans import now
from shardline.comm.watchdog import pass_over
from shardline.models.experts.rows import add_up, spread

pass_over(__file__)
AXIS = "ep"
ROUTES = 4  # lines of a table after the counts, for routes that a carrier computes


class _Transfer(NamedTuple):
    started: Started
    sent: Tensor  # kept, as its memory must not be reused while it is read
    arrives: Tensor
    device: torch.device


class AllToAll:
    """Rows sorted by expert are also sorted by destination; received rows are ordered by source and sorted again."""

    def plan(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        over = collectives.axis(AXIS)
        table = counts.new_empty(over.size + ROUTES, counts.shape[0])
        of_ranks = table[: over.size]
        collectives.gather_into(of_ranks.view(-1), counts, AXIS)
        return table, of_ranks.view(over.size, over.size, -1).sum(2).cpu()

    def send(self, rows: Tensor, side: Tensor | None, order: Tensor, k: int, table: Tensor, sizes: Tensor) -> object:
        sorted_side = [] if side is None else [side.index_select(0, order)]
        return [_start(one, sizes, back=False) for one in (spread(rows, order, k), *sorted_side)]

    def landed(self, transfer: object, table: Tensor, sizes: Tensor) -> list[Tensor]:
        arrived = _finished(transfer)
        by_expert = _by_expert(received(table), arrived[0].shape[0])
        return [one.index_select(0, by_expert) for one in arrived]

    def send_back(self, rows: Tensor, side: Tensor | None, table: Tensor, sizes: Tensor) -> object:
        by_expert = _by_expert(received(table), rows.shape[0])
        whole = [rows] if side is None else [rows, side]
        by_source = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in whole]
        for one, source in zip(by_source, whole, strict=True):
            one.index_copy_(0, by_expert, source)
        return [_start(one, sizes, back=True) for one in by_source]

    def gathered(self, transfer: object, inverse: Tensor, k: int) -> list[Tensor]:
        rows, *side = _finished(transfer)
        return [add_up(rows, inverse, k), *(one.index_select(0, inverse) for one in side)]


def _start(x: Tensor, sizes: Tensor, back: bool) -> _Transfer:
    """Begin to send x, whose rows are sorted by destination; with `back`, to the sources of this trip's rows."""
    over = job.axes[AXIS]
    sent, received = sizes[over.rank].tolist(), sizes[:, over.rank].tolist()
    if back:
        sent, received = received, sent
    size = (sum(sent) - sent[over.rank]) * x.element_size() * x.shape[1:].numel()
    on_host = runs_on_host(over.group, x.device)
    call = Observed(AXIS, "all_to_all", described("all_to_all", AXIS, x), size, on_host, background=True)
    source = x.cpu() if on_host else x  # gloo's all-to-all does not accept GPU tensors
    arrives = source.new_empty(sum(received), *x.shape[1:])
    start, span = now(), None if on_host else job.row_clock.begin()
    work = dist.all_to_all_single(arrives, source, received, sent, group=over.group, async_op=True)
    assert work is not None
    job.row_clock.until_done(span, work)
    return _Transfer(Started(start, work, call), source, arrives, x.device)


def _finished(transfers: object) -> list[Tensor]:
    assert isinstance(transfers, list)
    for one in transfers:
        with job.row_clock.waiting():
            one.started.wait()
    return [one.arrives.to(one.device) for one in transfers]


def received(table: Tensor) -> Tensor:
    """Return (ranks, experts of this rank): the number of rows that each rank has for each expert."""
    over = job.axes[AXIS]
    return table[: over.size].view(over.size, over.size, -1)[:, over.rank]


def _by_expert(received: Tensor, total: int) -> Tensor:
    """Return the order that sorts rows (source rank, expert) by (expert, source rank); received is (ranks, experts)."""
    lengths = received.t().flatten()
    starts = (received.flatten().cumsum(0) - received.flatten()).view_as(received).t().flatten()
    shifts = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(total, device=received.device)
    return places + torch.repeat_interleave(shifts, lengths, output_size=total)
