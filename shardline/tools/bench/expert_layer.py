"""A layer with experts for a benchmark: this rank's weights, tokens that choose given experts, and three variants.

    overlapped           as in training: rows are sent in parts while the shared expert and the other part are computed
    one after another    the same transfers of all tokens at once, each waited for immediately
    without transfers    each rank computes as many rows as would arrive, using copies of its own

The router is the identity on the first numbers of a token, which are large for the experts that it should choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.errors import UserError
from shardline.models.experts.moe import (
    Dispatched,
    ExpertExchange,
    ExpertWeights,
    RouterRun,
    Routing,
    SharedExpert,
    Travel,
    experts,
    moe,
    route,
)
from shardline.models.experts.rows import add_up
from shardline.models.feed_forward import FeedForwardWeights, Products, narrow, widen
from shardline.models.fused_weights import gate_block
from shardline.parallel.expert.all_to_all import AXIS

MOST = 0.9  # the largest share of all rows that one rank can get
UNLIKE = 0.5  # standard deviation of the logarithm of an expert's popularity on its rank
WANTED = 4.0  # added to a token's number for each chosen expert; the others are below 1


# ---- routings --------------------------------------------------------------------------------------------------------


def balanced_choices(tokens: int, spec: MixtureOfExperts, device: torch.device) -> Tensor:
    """Return choices (t, k) that go through the ranks in turn, and through each rank's experts in turn."""
    ranks, turns = collectives.axis_size(AXIS), torch.arange(tokens * spec.top_k, device=device)
    here = spec.n_experts // ranks
    return (turns % ranks * here + turns // ranks % here).view(-1, spec.top_k)


def skewed_choices(tokens: int, spec: MixtureOfExperts, device: torch.device, skew: float) -> Tensor:
    """Return random choices (t, k): rank 0 gets `skew` times the mean, if possible, and some experts are popular."""
    over, k = collectives.axis(AXIS), spec.top_k
    here = spec.n_experts // over.size
    drawn = torch.Generator().manual_seed(1 + over.rank)
    share = min(skew / over.size, MOST)
    of_first = (k * share + torch.rand(tokens, 1, generator=drawn)).floor()  # of a token's choices, those on rank 0
    of_first = of_first.clamp(k - min(k, spec.n_experts - here), min(k, here))
    popular = UNLIKE * torch.randn(spec.n_experts, generator=torch.Generator().manual_seed(0))  # the same on all ranks
    keys = popular - torch.empty(tokens, spec.n_experts).exponential_(generator=drawn).log()
    # The place of each expert among those of rank 0, or among all others, in a token's order of preference.
    places = [part.argsort(1, descending=True).argsort(1) for part in (keys[:, :here], keys[:, here:])]
    taken = torch.cat([places[0] < of_first, places[1] < k - of_first], dim=1)
    return taken.nonzero()[:, 1].view(-1, k).to(device)


# ---- the layer -------------------------------------------------------------------------------------------------------


class ExpertLayer:
    """Router, this rank's experts and the shared expert, with random weights."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        assert arch.moe is not None
        if arch.moe.n_experts > arch.dim:
            raise UserError(
                f"{arch.moe.n_experts} experts are too many for tokens of {arch.dim} numbers to choose among"
            )
        # The choices are fixed; expert groups, of which a token uses only some, would change them.
        self.spec = spec = arch.moe.model_copy(update={"n_groups": 1, "top_groups": 1})
        self.dim, self.dtype, self.device = arch.dim, dtype, device
        over = collectives.axis(AXIS)
        self.drawn = torch.Generator(device).manual_seed(over.rank)
        here, width, shared = spec.n_experts // over.size, spec.expert_dim, spec.shared_dim

        def matrix(*sizes: int) -> Tensor:
            return self.normal(*sizes).mul_(0.02).requires_grad_()

        def bias(*sizes: int) -> Tensor | None:
            return matrix(*sizes) if arch.mlp_bias else None

        router = torch.eye(spec.n_experts, arch.dim, dtype=dtype, device=device).requires_grad_()
        first = (matrix(here, 2, width, arch.dim), bias(here, 2, width))
        self.weights = ExpertWeights(router, None, None, *first, matrix(here, arch.dim, width), bias(here, arch.dim))
        self.shared = (
            FeedForwardWeights(matrix(2 * shared, arch.dim), bias(2 * shared), matrix(arch.dim, shared), bias(arch.dim))
            if shared
            else None
        )

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.drawn, dtype=self.dtype, device=self.device)

    def tokens(self, chosen: Tensor) -> Tensor:
        """Return tokens (t, dim) that choose these experts (t, k)."""
        x = self.normal(chosen.shape[0], self.dim)
        x[:, : self.spec.n_experts].uniform_(0, 1, generator=self.drawn)
        return x.scatter_add_(1, chosen, x.new_full(chosen.shape, WANTED)).requires_grad_()

    def routing(self, x: Tensor) -> Routing:
        with torch.no_grad():
            return route(x, self.weights, self.spec)

    def forward(self, x: Tensor, travel: Travel, with_shared: bool = True) -> Tensor:
        shared = None
        if self.shared is not None and with_shared:
            weights, block = self.shared, gate_block(self.spec.shared_dim)
            shared = SharedExpert(
                lambda: widen(x, weights, Products()), lambda product: narrow(product, weights, block, Products())
            )
        run = RouterRun(seq_len=x.shape[0])
        return moe(x, self.weights, self.spec, ExpertExchange(travel=travel), (1, x.shape[0]), run, shared)[0]

    def both_ways(self, forward: Callable[[Tensor, Travel], Tensor], x: Tensor, travel: Travel, grad: Tensor) -> None:
        """Run forward, compiled or not, and backward, with the gradients of the tokens and of every weight."""
        parts = (x, *self.weights, *(self.shared or ()))
        torch.autograd.grad(forward(x, travel), [part for part in parts if part is not None], grad)

    @torch.no_grad()
    def by_loop(self, x: Tensor) -> Tensor:
        """Return the output of the routed experts: a loop over this rank's, on all ranks' tokens, summed over ranks."""
        over, w, routing = collectives.axis(AXIS), self.weights, self.routing(x)
        given = (x.detach(), routing.chosen, routing.weights)
        tokens, chosen, weights = (collectives.gather_rows(one, AXIS) for one in given)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        here, held = w.w13.shape[0], {name: getattr(w, name) for name in ("w13", "w13_bias", "w2", "w2_bias")}
        for place in range(here):
            token, choice = (chosen == over.rank * here + place).nonzero(as_tuple=True)
            own: Any = {name: None if part is None else part[place : place + 1] for name, part in held.items()}
            ends = torch.tensor([len(token)], dtype=torch.int32, device=x.device)
            rows = experts(Dispatched(tokens[token], weights[token, choice], ends), w._replace(**own), self.spec)
            out.index_add_(0, token, rows.float())
        return collectives.sum_in_place(out, AXIS).chunk(over.size)[over.rank]


# ---- ways of rows ----------------------------------------------------------------------------------------------------


def one_after_another(travel: Travel) -> Travel:
    """Return the same transfers, of all tokens at once, each waited for immediately, in forward and backward."""

    def depart(*given: Any) -> Any:
        one = travel.depart(*given)
        return one, travel.arrive(one)

    def leave(results: Tensor, given: Any) -> Tensor:
        return travel.collect(travel.leave(results, given[0]), given[0])

    return Travel(depart, lambda given: given[1], leave, lambda out, given: out, parts=1)


class Stay:
    """A carrier that sends nothing: it copies as many of this rank's rows as would arrive."""

    def __init__(self, table: Tensor, sizes: Tensor) -> None:
        self.planned = table, sizes

    def plan(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.planned

    def send(self, rows: Tensor, side: Tensor | None, order: Tensor, k: int, table: Tensor, sizes: Tensor) -> object:
        arriving = int(sizes[:, job.axes[AXIS].rank].sum())
        order = order[torch.arange(arriving, device=order.device) % order.shape[0]]
        return [rows.index_select(0, order // k), *([] if side is None else [side.index_select(0, order)])]

    def landed(self, transfer: Any, table: Tensor, sizes: Tensor) -> list[Tensor]:
        arrived: list[Tensor] = transfer
        return arrived

    def send_back(self, rows: Tensor, side: Tensor | None, table: Tensor, sizes: Tensor) -> object:
        return [rows] if side is None else [rows, side]

    def gathered(self, transfer: Any, inverse: Tensor, k: int) -> list[Tensor]:
        rows, *side = (one if len(one) else one.new_zeros(1, *one.shape[1:]) for one in transfer)
        places = inverse % rows.shape[0]
        return [add_up(rows, places, k), *(one.index_select(0, places) for one in side)]
