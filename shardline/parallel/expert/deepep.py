"""Sends tokens by DeepEP, whose kernels send a token once to each rank that has one of its chosen experts.

    rank 0: tokens (t, dim)       | s | t |         s chose experts 0 and 2, t chose 2 and 3; 2 and 3 are on rank 1
      dispatch                    (s stays, and goes to rank 1; t goes there once, with both of its choices)
    rank 1: received (n, dim)     | s | t |         choices of experts on other ranks are -1
      sorted by expert            | s t | t |       rows (m, dim) for experts 2 and 3
      added up                    | s | t |         one row for each token
      combine                     (rank 0 adds up the rows of s, its own and the one that returns)

The four operations are those of dispatch.py: `put` and `gather` are each other's gradient, and so are `land` and `put
back`, because DeepEP's combine is the gradient of its dispatch and vice versa.

A `Journey` holds what a dispatch leaves on the host for the way back and for gradients, mainly DeepEP's handle. To
autograd and to the compiler it is a tensor of one element whose address identifies it; it lives as long as that
tensor's memory.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardline.comm.job import job
from shardline.comm.observe import Observed, described, labelled
from shardline.comm.symmetric_memory import agreed_reason
from shardline.comm.watchdog import pass_over
from shardline.errors import ConfigError
from shardline.models.experts.moe import Dispatched, Travel, count_tokens
from shardline.models.experts.rows import add_up, spread
from shardline.parallel.expert.all_to_all import AXIS

pass_over(__file__)
PACKAGE = "deep_ep"
NEIGHBOURS = 8  # ranks of a machine; with more ranks, tokens go over the network
MULTIPLE, MULTIPLE_FAR = 32, 512  # tokens are multiples of this many bytes: within a machine, over the network


@dataclass
class Journey:
    """One dispatch of tokens, sent and received; sizes are numbers of tokens."""

    handle: Any
    k: int
    rows: int  # of the received tokens, for all experts on this rank
    sent: int  # to other ranks
    came: int  # from other ranks
    order: Tensor = field(init=False)  # (rows,) of the received tokens' choices (n k), sorted by expert
    inverse: Tensor = field(init=False)  # (n k,) -1 for experts on other ranks


class DeepEP:
    """A buffer of DeepEP, and the journeys whose tensors are alive."""

    def __init__(self, buffer: Any, index: torch.dtype) -> None:
        self.buffer, self.index = buffer, index
        self.journeys: dict[int, tuple[StorageWeakRef, Journey]] = {}

    def keep(self, journey: Journey, device: torch.device) -> Tensor:
        """Return the tensor that stands for a journey, and drop the journeys whose tensors are gone."""
        self.journeys = {address: kept for address, kept in self.journeys.items() if not kept[0].expired()}
        name = torch.zeros(1, dtype=torch.int64, device=device)
        self.journeys[name.data_ptr()] = StorageWeakRef(name.untyped_storage()), journey
        return name

    def journey(self, name: Tensor) -> Journey:
        return self.journeys[name.data_ptr()][1]


class TokensUnderWay(NamedTuple):
    """Some tokens on the way to their experts and back."""

    ticket: Tensor
    journey: Tensor
    tokens: int
    k: int
    experts: int
    width: int
    dtype: torch.dtype


def depart(x: Tensor, chosen: Tensor, weights: Tensor, n_experts: int) -> TokensUnderWay:
    """Send tokens (t, dim) to their chosen experts (t, k), with their weights."""
    ticket, journey = _put(x, weights, chosen, n_experts)
    tokens, k = chosen.shape
    return TokensUnderWay(ticket, journey, tokens, k, n_experts, x.shape[1], x.dtype)


def arrive(one: TokensUnderWay) -> Dispatched:
    """Wait for the rows for this rank's experts."""
    rows, weights, ends = _land(one.ticket, one.journey, one.tokens * one.k, one.experts, one.width, one.dtype)
    return Dispatched(rows, weights[:, 0], ends)


def leave(results: Tensor, one: TokensUnderWay) -> Tensor:
    """Send results back, summed for each received token."""
    ticket: Tensor = _put_back(results, None, one.journey)
    return ticket


def collect(ticket: Tensor, one: TokensUnderWay) -> Tensor:
    """Wait for the results to return; return the sum of each token's results."""
    out: Tensor = _gather(ticket, one.journey, one.tokens, one.k, one.experts, one.width, one.dtype, False)[0]
    return out


TRAVEL = Travel(depart, arrive, leave, collect, parts=2)


# ---- at the start of a run -------------------------------------------------------------------------------------------


def start(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Set up DeepEP for tokens of this width, or raise ConfigError on every rank. All ranks call it together.

    To test it, DeepEP sends some tokens of the run's type there and back.
    """

    def find() -> None:
        importlib.import_module(PACKAGE)

    def make() -> None:
        job.carrier = _made(width * dtype.itemsize, device)

    for attempt in (find, make, lambda: _try_out(width, dtype, device)):  # one by one, as each needs all ranks
        reason = agreed_reason(attempt)
        if reason is not None:
            raise ConfigError(
                "parallelism.expert_parallel_comm_backend: 'deepep' cannot be used here"
                f" ({reason}); 'standard' sends tokens without it"
            )


def _made(size: int, device: torch.device) -> DeepEP:
    """Make DeepEP's buffer for tokens of `size` bytes, over the expert-parallel axis."""
    package, over = importlib.import_module(PACKAGE), job.axes[AXIS]
    is_near = over.size <= NEIGHBOURS
    multiple = MULTIPLE if is_near else MULTIPLE_FAR
    if size % multiple:
        raise RuntimeError(f"a token has {size} bytes; over {over.size} ranks, DeepEP needs multiples of {multiple}")
    configs = package.Buffer.get_dispatch_config(over.size), package.Buffer.get_combine_config(over.size)
    near = max(one.get_nvl_buffer_size_hint(size, over.size) for one in configs)
    far = 0 if is_near else max(one.get_rdma_buffer_size_hint(size, over.size) for one in configs)
    buffer = package.Buffer(over.group, near, far)
    place = buffer.get_local_buffer_tensor(torch.uint8).device
    if place.type != device.type:
        raise RuntimeError(f"it sends from {place.type}, but this run is on {device.type}")
    return DeepEP(buffer, getattr(package, "topk_idx_t", torch.int64))


@torch.no_grad()
def _try_out(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Send each token to an expert on one rank and to one on the next rank, and check that it comes back doubled."""
    ranks = job.axes[AXIS].size
    places = torch.arange(ranks, device=device)
    chosen = torch.stack([places, (places + 1) % ranks], dim=1)
    x = (places + 1.0)[:, None].expand(ranks, width).to(dtype)
    with job.traffic.uncounted():
        one = depart(x, chosen, torch.ones(ranks, 2, device=device), ranks)
        if not torch.equal(collect(leave(arrive(one).rows, one), one), 2 * x):
            raise RuntimeError("tokens do not come back as they were sent")


# ---- operations (gradients are registered below) ---------------------------------------------------------------------


def _op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"shardline::deepep_{name}", mutates_args=(), schema=schema)


def _carrier() -> DeepEP:
    carrier: DeepEP = job.carrier
    return carrier


def _issued(what: str, x: Tensor) -> Observed:
    return Observed(AXIS, what, described(what, AXIS, x), None, on_host=not x.is_cuda, background=True)


def _ticket(call: Observed, event: Any, arrives: list[Tensor | None], device: torch.device) -> Tensor:
    ticket = torch.zeros(1, device=device)
    job.rows_under_way[ticket.data_ptr()] = (ticket, call, event, arrives)
    return ticket


def _arrived(ticket: Tensor) -> list[Any]:
    _, call, event, arrives = job.rows_under_way.pop(ticket.data_ptr())
    with call:
        event.current_stream_wait()
    return list(arrives)


@_op("put", "(Tensor x, Tensor weights, Tensor chosen, int experts) -> (Tensor, Tensor)")
def _put(x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    carrier, here = _carrier(), job.axes[AXIS].rank
    x, chosen = x.contiguous(), chosen.to(carrier.index).contiguous()
    to_ranks, to_machines, to_experts, whereto, _ = carrier.buffer.get_dispatch_layout(chosen, experts)
    call = _issued("dispatch", x)
    with call, labelled(AXIS, "dispatch"):  # the host waits until it knows how many tokens arrive
        *arrives, counts, handle, event = carrier.buffer.dispatch(
            x,
            topk_idx=chosen,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_machines,
            is_token_in_rank=whereto,
            num_tokens_per_expert=to_experts,
            async_finish=True,
        )
    sent = to_ranks.tolist()  # computed before the dispatch: no further wait
    came, stay, k = arrives[0].shape[0], sent[here], chosen.shape[1]
    journey = carrier.keep(Journey(handle, k, sum(counts), sum(sent) - stay, came - stay), x.device)
    job.traffic.add(AXIS, (sum(sent) - stay) * (x.shape[1] * x.itemsize + k * (chosen.itemsize + 4)))
    return _ticket(call, event, arrives, x.device), journey


@_op("put_again", "(Tensor x, Tensor journey, int k, int experts) -> Tensor")
def _put_again(x: Tensor, journey: Tensor, k: int, experts: int) -> Tensor:
    """`put` other numbers for the same tokens, without weights."""
    x, one = x.contiguous(), _carrier().journey(journey)
    call = _issued("dispatch", x)
    with call, labelled(AXIS, "dispatch"):
        came, *_, event = _carrier().buffer.dispatch(x, handle=one.handle, async_finish=True)
    job.traffic.add(AXIS, one.sent * x.shape[1] * x.itemsize)
    return _ticket(call, event, [came], x.device)


@_op(
    "land",
    "(Tensor ticket, Tensor journey, SymInt sent, int experts, SymInt width, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
)
def _land(
    ticket: Tensor, journey: Tensor, sent: int, experts: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, their weights, and where each expert's rows end; this rank has `sent` choices."""
    x, chosen, weights = _arrived(ticket)
    one = _carrier().journey(journey)
    one.order = chosen.flatten().argsort(stable=True)[chosen.numel() - one.rows :]  # -1 comes first
    places = torch.arange(one.rows, device=x.device)
    one.inverse = torch.full_like(chosen, -1, dtype=torch.int64).flatten().scatter(0, one.order, places)
    ends = count_tokens(chosen, experts // job.axes[AXIS].size).cumsum(0).to(torch.int32)
    return spread(x, one.order, one.k), weights.reshape(-1, 1).index_select(0, one.order), ends


@_op("land_again", "(Tensor ticket, Tensor journey, SymInt rows, SymInt width, ScalarType dtype) -> Tensor")
def _land_again(ticket: Tensor, journey: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`land` without weights; the number of rows is known, as it is the same as before."""
    (x,), one = _arrived(ticket), _carrier().journey(journey)
    return spread(x, one.order, one.k)


@_op("put_back", "(Tensor rows, Tensor? weights, Tensor journey) -> Tensor")
def _put_back(rows: Tensor, weights: Tensor | None, journey: Tensor) -> Tensor:
    one = _carrier().journey(journey)
    x, side = add_up(rows, one.inverse, one.k), None
    if weights is not None:
        flat = weights.new_zeros(one.inverse.shape[0]).index_copy(0, one.order, weights[:, 0])
        side = flat.view(-1, one.k)
    call = _issued("combine", x)
    with call, labelled(AXIS, "combine"):
        *arrives, event = _carrier().buffer.combine(x, one.handle, topk_weights=side, async_finish=True)
    job.traffic.add(AXIS, one.came * (x.shape[1] * x.itemsize + (0 if side is None else 4 * one.k)))
    return _ticket(call, event, arrives, rows.device)


@_op(
    "gather",
    "(Tensor ticket, Tensor journey, SymInt tokens, int k, int experts, SymInt width, ScalarType dtype, bool weighted)"
    " -> (Tensor, Tensor)",
)
def _gather(
    ticket: Tensor, journey: Tensor, tokens: int, k: int, experts: int, width: int, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of each token's rows, and with `weighted` the numbers beside them."""
    out, side = _arrived(ticket)
    return out, side if weighted else out.new_empty(0, k, dtype=torch.float32)


# ---- fake implementations --------------------------------------------------------------------------------------------


@_put.register_fake
def _(x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    k = chosen.shape[1]
    _planned(x.shape[0], k, experts, x.shape[1] * x.itemsize + k * (chosen.itemsize + 4))
    return x.new_empty(1, dtype=torch.float32), x.new_empty(1, dtype=torch.int64)


@_put_again.register_fake
def _(x: Tensor, journey: Tensor, k: int, experts: int) -> Tensor:
    _planned(x.shape[0], k, experts, x.shape[1] * x.itemsize)
    return x.new_empty(1, dtype=torch.float32)


@_land.register_fake
def _(
    ticket: Tensor, journey: Tensor, sent: int, experts: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = sent if job.traffic.plans else torch.library.get_ctx().new_dynamic_size()  # a dry run assumes even routing
    ends = ticket.new_empty(experts // job.axes[AXIS].size, dtype=torch.int32)
    return ticket.new_empty(rows, width, dtype=dtype), ticket.new_empty(rows, 1), ends


_land_again.register_fake(lambda ticket, journey, rows, width, dtype: ticket.new_empty(rows, width, dtype=dtype))
_put_back.register_fake(lambda rows, weights, journey: rows.new_empty(1, dtype=torch.float32))


@_gather.register_fake
def _(
    ticket: Tensor, journey: Tensor, tokens: int, k: int, experts: int, width: int, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor]:
    _planned(tokens, k, experts, width * dtype.itemsize + (4 * k if weighted else 0))
    return ticket.new_empty(tokens, width, dtype=dtype), ticket.new_empty(tokens if weighted else 0, k)


def _planned(tokens: int, k: int, experts: int, size: int) -> None:
    """Tell a dry run that tokens of `size` bytes are sent to as many other ranks as k random experts are on."""
    if job.traffic.plans:
        ranks = job.axes[AXIS].size
        missed = math.comb(experts - experts // ranks, k) / math.comb(experts, k)
        job.traffic.planned(AXIS, "all-to-all", (ranks - 1) * (1 - missed) * tokens * size)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _keep_put(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, chosen, experts = inputs
    ctx.save_for_backward(output[1])
    ctx.sizes = (*chosen.shape, experts, x.shape[1], x.dtype)


def _put_gradient(ctx: Any, ticket: Tensor, _: None) -> tuple[Any, ...]:
    return *_gather(ticket, *ctx.saved_tensors, *ctx.sizes, True), None, None


def _keep_land(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1])


def _land_gradient(ctx: Any, of_rows: Tensor, of_weights: Tensor, _: None) -> tuple[Any, ...]:
    return _put_back(of_rows, of_weights, *ctx.saved_tensors), *[None] * 5


def _keep_put_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, journey = inputs
    ctx.save_for_backward(journey)
    ctx.sizes = (*rows.shape, rows.dtype)


def _put_back_gradient(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
    return _land_again(ticket, *ctx.saved_tensors, *ctx.sizes), None, None


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, journey, _, *ctx.sizes = inputs[:5]
    ctx.save_for_backward(journey)


def _gather_gradient(ctx: Any, of_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    return _put_again(of_out, *ctx.saved_tensors, *ctx.sizes), *[None] * 7


_put.register_autograd(_put_gradient, setup_context=_keep_put)
_land.register_autograd(_land_gradient, setup_context=_keep_land)
_put_back.register_autograd(_put_back_gradient, setup_context=_keep_put_back)
_gather.register_autograd(_gather_gradient, setup_context=_keep_gather)
