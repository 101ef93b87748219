"""Mixture of experts: a router sends each token to its `top_k` experts, whose outputs are added up.

    x (t, dim) -- router --> scores (t, E) -- the best k --> chosen (t, k), weights (t, k)
        |
        +- each token k times, sorted by expert -> (t k, dim)    | tokens of expert 0 | of expert 1 | ...
        |      `ExpertExchange`: where ranks share the experts, rows travel to the rank of their expert
        |  w13 -> silu(gate) * up * weight -> w2     one product per expert, as one kernel
        |      ... and back
        +- the k rows of each token, added up -> (t, dim)  (+ the shared expert, which every token uses)

No token is dropped and none is padded. The weights multiply silu(gate) * up, which is narrower than the output, so the
experts' output is not kept for the backward pass. Sorting is a permutation, and its gradient is the inverse one: no
atomic additions, and the same sum in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.config.architecture import MixtureOfExperts
from shardline.models.adapted.low_rank import Adapted, Weight, dropped
from shardline.models.experts.grouped import grouped_linear
from shardline.models.experts.rows import AddUp, Spread, expert_feed_forward
from shardline.models.products.linear import wide_linear

CLAMP, ALPHA = 7.0, 1.702  # of the clamped activation


class ExpertWeights(NamedTuple):
    """The router's and the experts' weights that this rank holds."""

    router: Tensor  # (E, dim)
    router_bias: Tensor | None  # (E,)
    balance: Tensor | None  # (E,) float32: added to the scores when experts are chosen, not in the weights
    w13: Weight  # (experts here, 2, width, dim): gate and up
    w13_bias: Tensor | None  # (experts here, 2, width)
    w2: Weight  # (experts here, dim, width)
    w2_bias: Tensor | None  # (experts here, dim)


class Dispatched(NamedTuple):
    """The rows that the experts of this rank compute, sorted by expert."""

    rows: Tensor  # (n, dim)
    weights: Tensor  # (n,) float32
    ends: Tensor  # (experts here,) int32: where the rows of each expert end


def as_it_is(x: Tensor) -> Tensor:
    return x


class Travel(NamedTuple):
    """How rows reach experts on other ranks.

    For each of `parts` of the tokens, `depart` sends them, with their weights, to the experts that they chose out of a
    number of experts. `arrive` returns the rows received for the experts here, `leave` sends their results back, and
    `collect` adds up the results of each token.
    """

    depart: Callable[[Tensor, Tensor, Tensor, int], Any]
    arrive: Callable[[Any], Dispatched]
    leave: Callable[[Tensor, Any], Tensor]
    collect: Callable[[Tensor, Any], Tensor]
    parts: int


class SharedExpert(NamedTuple):
    """The expert that every token uses, in two halves: `finish` takes what `begin` returns."""

    begin: Callable[[], Tensor]
    finish: Callable[[Tensor], Tensor]


class ExpertExchange(NamedTuple):
    """How tokens reach the experts: expert parallelism puts its collectives here.

    `gather` returns the tokens that this rank routes, `scatter` returns their results to the residual stream. `travel`
    is None where every expert is on this rank. `add_up` sums over the ranks that route other tokens of the same
    sequences.
    """

    gather: Callable[[Tensor], Tensor] = as_it_is
    scatter: Callable[[Tensor], Tensor] = as_it_is
    travel: Travel | None = None
    add_up: Callable[[Tensor], Tensor] = as_it_is
    place: int = 0  # this rank routes the place-th part of the rows of a micro-batch
    share: float = 1.0  # where ranks share an expert, each adds this share of the output's bias and of the losses


class ExpertProducts(NamedTuple):
    """The experts' operations: the whole feed-forward part where it is two products with SwiGLU, and one product."""

    feed_forward: Callable[..., Tensor] = expert_feed_forward
    linear: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_linear


WIDE_PRODUCTS = ExpertProducts()


class RouterRun(NamedTuple):
    """Router settings of the run rather than the model. The global batch size turns their losses into means."""

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
    shared: SharedExpert | None = None,
    products: ExpertProducts = WIDE_PRODUCTS,
) -> tuple[Tensor, Tensor]:
    """Apply the experts to x (t, dim), rows of a micro-batch of `shape` (B, S); also return this rank's tally.

    The output of the `shared` expert is added; it computes while rows travel.

    The tally is float32: the number of tokens that chose each expert, then the losses of the router that are on.
    """
    x = exchange.gather(x)
    routing = route(x, w, spec, run.forced)
    losses = router_losses(routing, spec, exchange, shape, run)
    weights = routing.weights
    if losses:
        weights = _Carry.apply(weights, torch.stack([spec.losses[name] * value for name, value in losses.items()]))
    if exchange.travel is None:
        out = _compute_here(x, routing, weights, w, spec, exchange.share, products)
        beside = None if shared is None else shared.finish(shared.begin())
    else:
        there = (exchange.travel, w, spec, exchange.share, shared, products)
        out, beside = _compute_there((x, routing.chosen, weights), *there)
    out = exchange.scatter(out)
    values = [losses[name].detach() if losses else x.new_zeros((), dtype=torch.float32) for name in spec.losses]
    tally = torch.cat([routing.counts * exchange.share, *(value[None] for value in values)])
    return (out if beside is None else out + beside), tally


def _compute_here(
    x: Tensor,
    routing: Routing,
    weights: Tensor,
    w: ExpertWeights,
    spec: MixtureOfExperts,
    share: float,
    products: ExpertProducts,
) -> Tensor:
    """Apply experts that are all on this rank: sort the tokens, compute, and add up the results."""
    order, inverse = sort_by_expert(routing.chosen)
    ends = routing.counts.cumsum(0).to(torch.int32)
    sorted_weights = Spread.apply(weights.reshape(-1, 1), order, inverse, 1)
    if _is_plain(w, spec):
        rows = products.feed_forward(x, (order, inverse, spec.top_k), sorted_weights, ends, w.w13, w.w2)
    else:
        here = Dispatched(Spread.apply(x, order, inverse, spec.top_k), sorted_weights[:, 0], ends)
        rows = experts(here, w, spec, share, products)
    out: Tensor = AddUp.apply(rows, order, inverse, spec.top_k)
    return out


def _compute_there(
    tokens: tuple[Tensor, Tensor, Tensor],
    travel: Travel,
    w: ExpertWeights,
    spec: MixtureOfExperts,
    share: float,
    shared: SharedExpert | None,
    products: ExpertProducts,
) -> tuple[Tensor, Tensor | None]:
    """Apply experts of other ranks: tokens, the experts they chose and their weights travel in parts.

    Meanwhile the shared expert computes: its first half while tokens travel, its second half while results do. In
    backward it is the other way round.
    """
    parts = zip(*(whole.chunk(travel.parts) for whole in tokens), strict=True)
    under_way = [travel.depart(x, chosen, weights, spec.n_experts) for x, chosen, weights in parts]
    half = None if shared is None else shared.begin()
    returning = [travel.leave(experts(travel.arrive(one), w, spec, share, products), one) for one in under_way]
    beside = None if shared is None or half is None else shared.finish(half)
    outs = [travel.collect(results, one) for results, one in zip(returning, under_way, strict=True)]
    return outs[0] if len(outs) == 1 else torch.cat(outs), beside


def count_tokens(chosen: Tensor, n_experts: int) -> Tensor:
    """How many of the choices (t, k) fall on each expert: (E,) int64."""
    return (chosen.reshape(-1, 1) == torch.arange(n_experts, device=chosen.device)).sum(0)


def route(x: Tensor, w: ExpertWeights, spec: MixtureOfExperts, forced: bool = False) -> Routing:
    """Choose experts and their weights, in float32. With `forced` every expert gets the same number of tokens."""
    logits = wide_linear(x, w.router)
    if w.router_bias is not None:
        logits = logits + w.router_bias.float()
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
    return Routing(chosen, weights * spec.scale, count_tokens(chosen, spec.n_experts), logits, scores)


def router_losses(
    routing: Routing, spec: MixtureOfExperts, exchange: ExpertExchange, shape: tuple[int, int], run: RouterRun
) -> dict[str, Tensor]:
    """This rank's part of the enabled router losses in one micro-batch; none outside training.

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

    A token's scores are divided by their sum. The loss is 1 where all experts are used equally. Counts have no gradient
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
    """Set the scores of experts outside the best groups to -inf."""
    if spec.n_groups == spec.top_groups:
        return scores
    groups = scores.unflatten(-1, (spec.n_groups, -1))  # (t, groups, experts of a group)
    best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(spec.top_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def sort_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts the choices (t, k), flattened, by expert, and the inverse order."""
    order = chosen.flatten().to(torch.int16).argsort(stable=True)  # short keys: fewer passes of the sort
    places = torch.arange(order.shape[0], device=order.device)
    return order, torch.empty_like(order).scatter(0, order, places)


def _is_plain(w: ExpertWeights, spec: MixtureOfExperts) -> bool:
    """Whether the experts are two products with SwiGLU between them, which one operation computes."""
    adapted = isinstance(w.w13, Adapted) or isinstance(w.w2, Adapted)
    no_bias = w.w13_bias is None and w.w2_bias is None
    return spec.activation == "silu" and not spec.scale_input and no_bias and not adapted


def experts(
    sent: Dispatched,
    w: ExpertWeights,
    spec: MixtureOfExperts,
    bias_share: float = 1.0,
    products: ExpertProducts = WIDE_PRODUCTS,
) -> Tensor:
    """Apply this rank's experts to their rows; the results are multiplied by the rows' weights."""
    rows, weights, ends = sent.rows, sent.weights[:, None], sent.ends
    if _is_plain(w, spec):
        return products.feed_forward(rows, None, weights, ends, w.w13, w.w2)
    if spec.scale_input:
        rows, weights = rows * weights.to(rows.dtype), torch.ones_like(weights)
    product = _product(products, rows, w.w13, ends)
    own = None
    if w.w13_bias is not None:
        own = torch.searchsorted(ends, torch.arange(rows.shape[0], device=product.device), right=True)
        product = product + w.w13_bias.flatten(1, 2).to(product.dtype)[own]
    gate, up = product.chunk(2, dim=-1)
    out = _product(products, (activated(gate, up, spec) * weights).to(product.dtype), w.w2, ends)
    if w.w2_bias is not None:
        out = out + (w.w2_bias[own] * (bias_share * weights)).to(out.dtype)
    return out


def _product(products: ExpertProducts, rows: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """Rows times the matrices of their experts, (E, ..., in), plus the low-rank term of experts with LoRA."""
    if not isinstance(weight, Adapted):
        return products.linear(rows, weight.flatten(1, -2), ends)
    product = products.linear(rows, weight.weight.flatten(1, -2), ends)
    (part,) = weight.parts
    assert part is not None
    other = dropped(rows, weight)
    low = grouped_linear(rows if other is None else other, part.a, ends)
    return product + grouped_linear(low, part.b.flatten(1, -2) * part.scale, ends)


def activated(gate: Tensor, up: Tensor, spec: MixtureOfExperts) -> Tensor:
    if spec.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate * ALPHA) * (up + 1)


class _Carry(torch.autograd.Function):
    """x itself; backward also computes the gradients of the losses (n,), without adding them to the run's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Tensor) -> Tensor:
        ctx.losses = losses.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(ctx.losses)
