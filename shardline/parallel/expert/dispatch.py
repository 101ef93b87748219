"""Rows travel to the ranks of their experts and back: two all-to-alls whose sizes depend on the routing.

    this rank's rows, sorted by expert      | 0 | 1 | 2 | 3 |       experts 0 and 1 are on rank 0, 2 and 3 on rank 1
      counts exchanged first                (how many rows each rank has for each expert of each other)
    arrived, by source rank                 rank 0: | 0 1 | 0 1 |
      sorted by expert                      rank 0: | 0 0 | 1 1 |

Each transfer is two operations: the one that makes the rows to be sent also starts sending them, the one that needs
what arrives waits for it. What stands between the two, here the shared expert or another part of the tokens, runs while
rows travel:

    forward    spread + start | shared expert | land, sort | experts | leave + start | next part | land back | add up
    backward   spread + start | next part | land, sort | experts | leave + start | shared expert | land back | add up

For autograd and the compiler all of these are pure functions: `land` gives the same where nothing was started before.
The sizes are read on the host once per layer and part, for all its transfers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.observe import Observed, Started, described, runs_on_host
from shardline.comm.spans import now
from shardline.comm.watchdog import pass_over
from shardline.models.experts.moe import Dispatched
from shardline.models.experts.rows import add_up, spread

pass_over(__file__)
AXIS = "ep"


class Trip(NamedTuple):
    """How many rows go where; `counts` (2, ranks, experts of a rank): sent to and received from each rank."""

    counts: Tensor
    on_host: Tensor  # (2, ranks) in host memory: rows sent to and received from each rank
    early: bool  # start a transfer as soon as its rows are there

    @property
    def ends(self) -> Tensor:
        return self.counts[1].sum(0).cumsum(0).to(torch.int32)


def plan_trip(counts: Tensor, early: bool) -> Trip:
    """Exchange the counts (experts,) of this rank's rows."""
    sent = counts.view(collectives.axis(AXIS).size, -1)
    both = torch.stack([sent, collectives.all_to_all(sent, AXIS)])
    return Trip(both, both.sum(2).cpu(), early)


def depart(x: Tensor, order: Tensor, inverse: Tensor, k: int, trip: Trip) -> Tensor:
    """Each token k times, sorted by expert, on the way to the ranks of the experts."""
    out: Tensor = _depart(x, order, inverse, k, trip.on_host, trip.early)
    return out


def arrive(rows: Tensor, weights: Tensor, trip: Trip) -> Dispatched:
    """What has arrived for the experts of this rank."""
    sorted_rows = _sort(_land(rows, trip.on_host), trip.counts, trip.on_host, trip.early)
    theirs = _sort(_land(weights, trip.on_host), trip.counts, trip.on_host, trip.early)
    return Dispatched(sorted_rows, theirs[:, 0], trip.ends)


def leave(results: Tensor, trip: Trip) -> Tensor:
    """The results by source rank, on the way back."""
    out: Tensor = _leave(results, trip.counts, trip.on_host, trip.early)
    return out


def collect(rows: Tensor, order: Tensor, inverse: Tensor, k: int, trip: Trip) -> Tensor:
    """The sum of the k results of each token, which come back from the experts."""
    returned = _land_back(rows, trip.on_host, order.shape[0])
    out: Tensor = _add_up(returned, order, inverse, k, trip.on_host, trip.early)
    return out


# ---- transfers -------------------------------------------------------------------------------------------------------


class _OnTheWay(NamedTuple):
    started: Started
    sent: Tensor  # kept: its address is the key, and memory must not be used again while it is read
    arrives: Tensor


def _start(x: Tensor, on_host: Tensor, back: bool) -> None:
    """Begin to send x, whose rows are sorted by destination; `back` to where rows of `on_host` came from."""
    job.rows_under_way[_address(x)] = _transfer(x, on_host, back)


def _landed(x: Tensor, on_host: Tensor, back: bool) -> Tensor:
    """What arrives when all ranks send their x."""
    x = x.contiguous()
    transfer = job.rows_under_way.pop(_address(x), None) or _transfer(x, on_host, back)
    transfer.started.wait()
    return transfer.arrives


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()  # that of a tensor without elements is 0


def _transfer(x: Tensor, on_host: Tensor, back: bool) -> _OnTheWay:
    over = job.axes[AXIS]
    sent, received = on_host.flip(0).tolist() if back else on_host.tolist()
    out = x.new_empty(sum(received), *x.shape[1:])
    size = (sum(sent) - sent[over.rank]) * x.element_size() * x.shape[1:].numel()
    on_cpu = runs_on_host(over.group, x.device)
    call = Observed(AXIS, "all_to_all", described("all_to_all", AXIS, x), size, on_cpu, background=True)
    start = now()
    work = dist.all_to_all_single(out, x, received, sent, group=over.group, async_op=True)
    assert work is not None
    return _OnTheWay(Started(start, work, call), x, out)


def _by_expert(received: Tensor, total: int) -> Tensor:
    """The order that sorts rows (source rank, expert) by (expert, source rank); received is (ranks, experts)."""
    lengths = received.t().flatten()
    starts = (received.flatten().cumsum(0) - received.flatten()).view_as(received).t().flatten()
    shifts = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(total, device=received.device)
    return places + torch.repeat_interleave(shifts, lengths, output_size=total)


# ---- operations: each is given its gradient below --------------------------------------------------------------------


def _op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"shardline::expert_{name}", mutates_args=(), schema=schema)


@_op("depart", "(Tensor x, Tensor order, Tensor inverse, int k, Tensor on_host, bool early) -> Tensor")
def _depart(x: Tensor, order: Tensor, inverse: Tensor, k: int, on_host: Tensor, early: bool) -> Tensor:
    rows = spread(x, order, k)
    if early:
        _start(rows, on_host, back=False)
    return rows


@_op("land", "(Tensor rows, Tensor on_host) -> Tensor")
def _land(rows: Tensor, on_host: Tensor) -> Tensor:
    return _landed(rows, on_host, back=False)


@_op("land_again", "(Tensor rows, Tensor on_host, SymInt arrive) -> Tensor")
def _land_again(rows: Tensor, on_host: Tensor, arrive: int) -> Tensor:
    """`land` where it is known how many rows arrive: as many as before."""
    return _landed(rows, on_host, back=False)


@_op("sort", "(Tensor arrived, Tensor counts, Tensor on_host, bool early) -> Tensor")
def _sort(arrived: Tensor, counts: Tensor, on_host: Tensor, early: bool) -> Tensor:
    return arrived.index_select(0, _by_expert(counts[1], arrived.shape[0]))


@_op("leave", "(Tensor results, Tensor counts, Tensor on_host, bool early) -> Tensor")
def _leave(results: Tensor, counts: Tensor, on_host: Tensor, early: bool) -> Tensor:
    by_source = results.new_empty(max(1, results.shape[0]), results.shape[1])[: results.shape[0]]  # with an address
    by_source.index_copy_(0, _by_expert(counts[1], results.shape[0]), results)
    if early:
        _start(by_source, on_host, back=True)
    return by_source


@_op("land_back", "(Tensor rows, Tensor on_host, SymInt arrive) -> Tensor")
def _land_back(rows: Tensor, on_host: Tensor, arrive: int) -> Tensor:
    return _landed(rows, on_host, back=True)


@_op("add_up", "(Tensor rows, Tensor order, Tensor inverse, int k, Tensor on_host, bool early) -> Tensor")
def _add_up(rows: Tensor, order: Tensor, inverse: Tensor, k: int, on_host: Tensor, early: bool) -> Tensor:
    return add_up(rows, inverse, k)


_depart.register_fake(lambda x, order, *rest: x.new_empty(order.shape[0], x.shape[1]))
_land_again.register_fake(lambda rows, on_host, arrive: _planned(rows, arrive))
_sort.register_fake(lambda arrived, *rest: torch.empty_like(arrived))
_leave.register_fake(lambda results, *rest: torch.empty_like(results, memory_format=torch.contiguous_format))
_land_back.register_fake(lambda rows, on_host, arrive: _planned(rows, arrive))
_add_up.register_fake(lambda rows, order, inverse, k, *rest: rows.new_empty(order.shape[0] // k, rows.shape[1]))


@_land.register_fake
def _(rows: Tensor, on_host: Tensor) -> Tensor:
    if job.traffic.plans:  # as many rows from every rank as to it
        return _planned(rows, rows.shape[0])
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size(), rows.shape[1])


def _planned(x: Tensor, rows: int) -> Tensor:
    """The rows that arrive, without values; a dry run learns what is sent for them."""
    out = x.new_empty(rows, x.shape[1])
    if job.traffic.plans:
        ranks = job.axes[AXIS].size
        job.traffic.planned(AXIS, "all-to-all", (ranks - 1) / ranks * out.nbytes)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the arguments but the first, whose rows are counted."""
    ctx.save_for_backward(*(one for one in inputs[1:] if isinstance(one, Tensor)))
    ctx.numbers = [one for one in inputs[1:] if not isinstance(one, Tensor)]
    ctx.rows = inputs[0].shape[0]


def _depart_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    order, inverse, on_host = ctx.saved_tensors
    return _add_up(gradient, order, inverse, ctx.numbers[0], on_host, False), None, None, None, None, None


def _add_up_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    order, inverse, on_host = ctx.saved_tensors
    return _depart(gradient, order, inverse, ctx.numbers[0], on_host, ctx.numbers[1]), None, None, None, None, None


def _land_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _land_back(gradient, *ctx.saved_tensors, ctx.rows), None


def _land_back_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _land_again(gradient, *ctx.saved_tensors, ctx.rows), None, None


def _sort_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _leave(gradient, *ctx.saved_tensors, ctx.numbers[0]), None, None, None


def _leave_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return _sort(gradient, *ctx.saved_tensors, False), None, None, None


_depart.register_autograd(_depart_gradient, setup_context=_keep)
_add_up.register_autograd(_add_up_gradient, setup_context=_keep)
_land.register_autograd(_land_gradient, setup_context=_keep)
_land_back.register_autograd(_land_back_gradient, setup_context=_keep)
_sort.register_autograd(_sort_gradient, setup_context=_keep)
_leave.register_autograd(_leave_gradient, setup_context=_keep)
