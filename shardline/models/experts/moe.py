"""Mixture of experts: a router sends each token to its `top_k` experts, whose outputs are added up.

    x (t, dim) -- router --> scores (t, E) -- the best k --> chosen (t, k), weights (t, k)
        |
        +- each token k times, sorted by expert -> (t k, dim)    | tokens of expert 0 | of expert 1 | ...
        |      `ExpertExchange`: where ranks share the experts, rows travel to the rank of their expert
        |  w13 -> silu(gate) * up * weight -> w2     one product per expert, as one kernel
        |      ... and back
        +- the k rows of each token, added up -> (t, dim)  (+ the shared expert, which every token uses)

No token is dropped and none is padded. The weights multiply the middle, which is narrower than the output: the output
of the experts is not kept for the backward pass. Sorting is a permutation, and so its gradient is the inverse one: no
atomic additions, the same sum in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.config.architecture import MixtureOfExperts
from shardline.models.experts.grouped import grouped_linear
from shardline.models.linear import linear

CLAMP, ALPHA = 7.0, 1.702  # of the clamped activation


class ExpertWeights(NamedTuple):
    """The router's and the experts' weights that this rank holds."""

    router: Tensor  # (E, dim)
    router_bias: Tensor | None  # (E,)
    balance: Tensor | None  # (E,) float32: added to the scores when experts are chosen, not in the weights
    w13: Tensor  # (experts here, 2, width, dim): gate and up
    w13_bias: Tensor | None  # (experts here, 2, width)
    w2: Tensor  # (experts here, dim, width)
    w2_bias: Tensor | None  # (experts here, dim)


class Dispatched(NamedTuple):
    """The rows that the experts of this rank compute, sorted by expert."""

    rows: Tensor  # (n, dim)
    weights: Tensor  # (n,) float32
    ends: Tensor  # (experts here,) int32: where the rows of each expert end


# Every expert is on this rank: rows need not travel, and a trip is only the tokens of each expert.


def stay(counts: Tensor) -> Any:
    return counts


def sort_here(x: Tensor, order: Tensor, inverse: Tensor, k: int, trip: Any) -> Tensor:
    rows: Tensor = _Spread.apply(x, order, inverse, k)
    return rows


def are_here(rows: Tensor, weights: Tensor, trip: Any) -> Dispatched:
    return Dispatched(rows, weights[:, 0], trip.cumsum(0).to(torch.int32))


def stayed(results: Tensor, trip: Any) -> Tensor:
    return results


def add_up_here(rows: Tensor, order: Tensor, inverse: Tensor, k: int, trip: Any) -> Tensor:
    out: Tensor = _AddUp.apply(rows, order, inverse, k)
    return out


def as_it_is(x: Tensor) -> Tensor:
    return x


class ExpertExchange(NamedTuple):
    """How tokens reach the experts: expert parallelism puts its collectives here.

    `gather` gives the tokens that this rank routes, `scatter` takes their results back to the residual stream. For each
    of `parts` of the tokens, `plan` turns the counts of their experts into a trip, `depart` and `arrive` bring rows to
    the ranks of their experts, `leave` and `collect` the results back. `add_up` sums over the ranks that route other
    tokens of the same sequences.
    """

    gather: Callable[[Tensor], Tensor] = as_it_is
    scatter: Callable[[Tensor], Tensor] = as_it_is
    plan: Callable[[Tensor], Any] = stay
    depart: Callable[[Tensor, Tensor, Tensor, int, Any], Tensor] = sort_here
    arrive: Callable[[Tensor, Tensor, Any], Dispatched] = are_here
    leave: Callable[[Tensor, Any], Tensor] = stayed
    collect: Callable[[Tensor, Tensor, Tensor, int, Any], Tensor] = add_up_here
    add_up: Callable[[Tensor], Tensor] = as_it_is
    parts: int = 1
    place: int = 0  # this rank routes the place-th part of the rows of a micro-batch
    share: float = 1.0  # where ranks share an expert, each adds this share of the output's bias and of the losses


class RouterRun(NamedTuple):
    """What a run, not its model, says to the routers. The size of the global batch makes means of their losses."""

    forced: bool = False  # every expert gets the same number of tokens
    sequences: int = 1  # of the global batch
    seq_len: int = 1


class Routing(NamedTuple):
    chosen: Tensor  # (t, k) experts
    weights: Tensor  # (t, k) float32
    counts: Tensor  # (E,) int64: tokens of each expert
    logits: Tensor  # (t, E) float32
    scores: Tensor  # (t, E) float32


def moe(
    x: Tensor,
    w: ExpertWeights,
    spec: MixtureOfExperts,
    exchange: ExpertExchange,
    shape: tuple[int, int],
    run: RouterRun,
    shared: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts over x (t, dim), rows of a micro-batch of `shape` (B, S), and this rank's tally of it.

    What the `shared` expert gives is added; it computes while rows travel.

    The tally is float32: the number of tokens that chose each expert, then the losses of the router that are on.
    """
    x = exchange.gather(x)
    routing = route(x, w, spec, run.forced)
    losses = router_losses(routing, spec, exchange, shape, run)
    weights = routing.weights
    if losses:
        weights = _Carry.apply(weights, torch.stack([spec.losses[name] * value for name, value in losses.items()]))
    tokens = (whole.chunk(exchange.parts) for whole in (x, routing.chosen, weights))
    under_way = [_depart(part, exchange, spec) for part in zip(*tokens, strict=True)]
    beside = None if shared is None else shared()
    returning = []
    for one in under_way:
        here = exchange.arrive(one.rows, one.weights, one.trip)
        returning.append(exchange.leave(experts(here, w, spec, exchange.share), one.trip))
    outs = [
        exchange.collect(rows, one.order, one.inverse, spec.top_k, one.trip)
        for rows, one in zip(returning, under_way, strict=True)
    ]
    out = exchange.scatter(outs[0] if len(outs) == 1 else torch.cat(outs))
    values = [losses[name].detach() if losses else x.new_zeros((), dtype=torch.float32) for name in spec.losses]
    tally = torch.cat([routing.counts * exchange.share, *(value[None] for value in values)])
    return (out if beside is None else out + beside), tally


class _UnderWay(NamedTuple):
    """Some tokens on the way to their experts."""

    rows: Tensor
    weights: Tensor
    order: Tensor
    inverse: Tensor
    trip: Any


def _depart(part: tuple[Tensor, Tensor, Tensor], exchange: ExpertExchange, spec: MixtureOfExperts) -> _UnderWay:
    """Sort tokens by their experts and send them."""
    x, chosen, weights = part
    order, inverse = sort_by_expert(chosen)
    trip = exchange.plan(count_tokens(chosen, spec))
    sorted_weights = exchange.depart(weights.reshape(-1, 1), order, inverse, 1, trip)
    return _UnderWay(exchange.depart(x, order, inverse, spec.top_k, trip), sorted_weights, order, inverse, trip)


def count_tokens(chosen: Tensor, spec: MixtureOfExperts) -> Tensor:
    """(E,) int64: how many of the choices (t, k) are each expert's."""
    return (chosen.reshape(-1, 1) == torch.arange(spec.n_experts, device=chosen.device)).sum(0)


def route(x: Tensor, w: ExpertWeights, spec: MixtureOfExperts, forced: bool = False) -> Routing:
    """Choose experts and their weights, in float32. With `forced` every expert gets the same number of tokens."""
    logits = linear(x.float(), w.router.float(), None if w.router_bias is None else w.router_bias.float())
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    if forced:
        turns = torch.arange(x.shape[0] * spec.top_k, device=x.device) % spec.n_experts
        chosen = turns.view(-1, spec.top_k)
    else:
        wanted = scores.detach() if w.balance is None else scores.detach() + w.balance
        chosen = _best_groups(wanted, spec).topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(chosen, weights * spec.scale, count_tokens(chosen, spec), logits, scores)


def router_losses(
    routing: Routing, spec: MixtureOfExperts, exchange: ExpertExchange, shape: tuple[int, int], run: RouterRun
) -> dict[str, Tensor]:
    """This rank's part, in one micro-batch, of the router's losses that are on; none outside of training.

    They are means over the sequences and tokens of the global batch: the parts of all ranks and micro-batches add up.
    """
    if not torch.is_grad_enabled():
        return {}
    losses = {}
    if "aux_loss" in spec.losses:
        losses["aux_loss"] = _sequence_loss(routing, spec, exchange, shape, run)
    if "z_loss" in spec.losses:
        losses["z_loss"] = routing.logits.logsumexp(-1).square().sum() / (run.sequences * run.seq_len)
    return {name: exchange.share * value for name, value in losses.items()}


def _sequence_loss(
    routing: Routing, spec: MixtureOfExperts, exchange: ExpertExchange, shape: tuple[int, int], run: RouterRun
) -> Tensor:
    """The mean over sequences of E / (k S) x the sum over experts of (tokens that chose it) x (its mean score).

    A token's scores are divided by their sum. It is 1 where all experts are used alike. The counts have no gradient,
    and the loss is linear in the scores: counts of whole sequences times this rank's scores give this rank's part.
    """
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter(-1, routing.chosen, 1.0)
    tokens = scores.shape[0]
    before = exchange.place * tokens
    rows = (0, 0, before, shape[0] * shape[1] - before - tokens)  # the rest of these sequences is on other ranks
    counts, sums = (F.pad(part, rows).unflatten(0, (shape[0], -1)).sum(1) for part in (chosen, scores))  # (B, E)
    factor = spec.n_experts / (spec.top_k * run.seq_len**2 * run.sequences)
    return factor * (exchange.add_up(counts) * sums).sum()


def _best_groups(scores: Tensor, spec: MixtureOfExperts) -> Tensor:
    """The scores with those of experts outside of the best groups at -inf."""
    if spec.n_groups == spec.top_groups:
        return scores
    groups = scores.unflatten(-1, (spec.n_groups, -1))  # (t, groups, experts of a group)
    best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(spec.top_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def sort_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts the choices (t, k), flattened, by expert, and the inverse order."""
    order = chosen.flatten().argsort(stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    return order, torch.empty_like(order).scatter(0, order, places)


def experts(sent: Dispatched, w: ExpertWeights, spec: MixtureOfExperts, bias_share: float = 1.0) -> Tensor:
    """The experts of this rank over their rows, times the rows' weights."""
    rows, weights = sent.rows, sent.weights[:, None]
    if spec.scale_input:
        rows, weights = rows * weights.to(rows.dtype), torch.ones_like(weights)
    product = grouped_linear(rows, w.w13.flatten(1, 2), sent.ends)
    own = None
    if w.w13_bias is not None:
        own = torch.searchsorted(sent.ends, torch.arange(sent.rows.shape[0], device=product.device), right=True)
        product = product + w.w13_bias.flatten(1, 2).to(product.dtype)[own]
    if product.is_cuda and spec.activation == "silu":
        middle = _swiglu(product, weights)
    else:
        gate, up = product.chunk(2, dim=-1)
        middle = (activated(gate, up, spec) * weights).to(product.dtype)
    out = grouped_linear(middle, w.w2, sent.ends)
    if w.w2_bias is not None:
        out = out + (w.w2_bias[own] * (bias_share * weights)).to(out.dtype)
    return out


def activated(gate: Tensor, up: Tensor, spec: MixtureOfExperts) -> Tensor:
    if spec.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate * ALPHA) * (up + 1)


@torch.library.custom_op("shardline::swiglu", mutates_args=(), schema="(Tensor product, Tensor weights) -> Tensor")
def _swiglu(product: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight in one kernel: (n, 2 width) and (n, 1) -> (n, width)."""
    from shardline.models.experts.row_kernels import swiglu_kernel

    width = product.shape[1] // 2
    out = product.new_empty(product.shape[0], width)
    if out.numel():
        swiglu_kernel[(out.shape[0],)](product, weights.contiguous(), out, width, BLOCK=_power_of_two(width))
    return out


@torch.library.custom_op(
    "shardline::swiglu_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor product, Tensor weights) -> (Tensor, Tensor)",
)
def _swiglu_gradient(gradient: Tensor, product: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    from shardline.models.experts.row_kernels import swiglu_gradient_kernel

    width = product.shape[1] // 2
    of_product, of_weights = torch.empty_like(product), torch.empty_like(weights, memory_format=torch.contiguous_format)
    if gradient.numel():
        inputs = (gradient.contiguous(), product, weights.contiguous(), of_product, of_weights)
        swiglu_gradient_kernel[(product.shape[0],)](*inputs, width, BLOCK=_power_of_two(width))
    return of_product, of_weights


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


_swiglu.register_fake(lambda product, weights: product.new_empty(product.shape[0], product.shape[1] // 2))
_swiglu_gradient.register_fake(lambda gradient, *inputs: tuple(torch.empty_like(one) for one in inputs))
_swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_gradient(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    """(t, dim) -> (t k, dim): each token k times, in the given order."""
    return x.index_select(0, order // k)


@torch.library.custom_op("shardline::add_up", mutates_args=(), schema="(Tensor rows, Tensor inverse, int k) -> Tensor")
def add_up(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    """(t k, dim) -> (t, dim): the sum of the k rows of each token."""
    if not rows.is_cuda:
        return rows.index_select(0, inverse).unflatten(0, (-1, k)).sum(1)
    from shardline.models.experts.row_kernels import BLOCK, add_up_kernel

    rows = rows.contiguous()
    out = rows.new_empty(inverse.shape[0] // k, rows.shape[1])
    add_up_kernel[(out.shape[0], -(-out.shape[1] // BLOCK))](rows, inverse, out, out.shape[1], K=k, BLOCK=BLOCK)
    return out


add_up.register_fake(lambda rows, inverse, k: rows.new_empty(inverse.shape[0] // k, rows.shape[1]))


class _Carry(torch.autograd.Function):
    """x itself, to whose gradient that of the losses (n,) is added: the loss of the run does not change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Tensor) -> Tensor:
        ctx.losses = losses.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(ctx.losses)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return spread(x, order, k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return add_up(gradient, inverse, ctx.k), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return add_up(rows, inverse, k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return spread(gradient, order, ctx.k), None, None, None
