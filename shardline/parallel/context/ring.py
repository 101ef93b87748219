"""Attention in which queries stay on their rank, and keys and values are sent to the queries.

    rank 0   own keys     keys of 3    keys of 1    keys of 2      each block is computed while the next one is on its
    rank 1   own keys     keys of 0    keys of 2    keys of 3      way, sent straight to each rank that needs it
    rank 2   ...                                                   (`comm.transfers`)

`ring` sends a rank only the slices that it needs, point to point, with two blocks in memory at a time; `allgather`
gathers all slices first. Either way, the softmax is merged from partial results (`models.partial_attention`).

Received blocks are not kept for backward: keys and values are sent again. A rank computes what its queries add to the
gradients of a block and sends that to the block's owner, which sums in float32.

Forward and backward are one custom op each, in eager and in compiled code: activation checkpointing by operation sees
attention as one operation, and a compiled graph keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.transfers import Exchange, Transfer, distances
from shardline.models.attention import AttentionMask, allowed_pairs
from shardline.models.partial_attention import add_sink, merge_, part, part_backward, sink_gradient
from shardline.parallel.context.slices import CAUSAL, MASKED, AttentionPlan, Call, Slices, causal_plan, make_plan

AXIS = "cp"


def shared_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None) -> Tensor:
    """Return (B, S / cp, H, D): the attention of this rank's queries over the whole sequence."""
    options = (mask.table, mask.documents, mask.cap, mask.window, mask.each, mask.kernel)
    out, _ = shared_attention_op(q, k, v, sink, *options)
    return out


class PairMask(NamedTuple):
    """Builds the mask of a pair of slices from positions and documents; scores may be capped."""

    documents: Tensor | None  # (B, S)
    window: int
    length: int  # tokens of a slice
    cap: float | None

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return (B or 1, 1, length, length) of bool for two slices, given by their numbers in the sequence."""
        places = torch.arange(self.length, device=device)
        first, second = (number * self.length + places for number in (queries, keys))
        return allowed_pairs(first, second, self.window, self.documents)


# Blocks: slices of keys and values in the form in which they are sent: (slices, keys and then values of a slice)


class Widths(NamedTuple):
    """The sizes of keys and values that the shape of a block does not show."""

    batch: int
    heads: int
    k: int
    v: int


def widths(k: Tensor, v: Tensor) -> Widths:
    return Widths(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def pack(k: Tensor, v: Tensor, each: int) -> Tensor:
    """Pack this rank's keys and values (B, T, KV, D) into a block in which every slice is contiguous."""
    return torch.cat([x.unflatten(1, (each, -1)).movedim(1, 0).flatten(1) for x in (k, v)], dim=1)


def together(block: Tensor, of: Widths) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, tokens, KV, D) of the slices of a block; copies if there are several slices."""
    parts = block.split([block.shape[1] * part // (of.k + of.v) for part in (of.k, of.v)], dim=1)
    k, v = (
        part.unflatten(1, (of.batch, -1, of.heads, width)).movedim(0, 1).flatten(1, 2)
        for part, width in zip(parts, (of.k, of.v), strict=True)
    )
    return k, v


class OwnQueries:
    """One rank's queries, and the blocks of keys and values that arrive one after the other."""

    def __init__(self, q: Tensor, of: Widths, plan: AttentionPlan, seen: PairMask) -> None:
        self.q, self.widths, self.plan, self.seen = q.transpose(1, 2), of, plan, seen  # (B, H, T, D)
        self.wide = torch.promote_types(q.dtype, torch.float32)

    def parts(
        self, calls: Sequence[Call], source: int, span: range, block: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor, tuple[bool, Tensor | None]]]:
        """Yield for each call the rows of the queries, the slices in the block, keys, values, and the kernel's mask."""
        length = self.plan.length
        for call in calls:
            rows = slice(call.queries.start * length, call.queries.stop * length)
            among = slice(call.keys.start - span.start, call.keys.stop - span.start)
            k, v = together(block[among], self.widths)
            yield rows, among, k.transpose(1, 2), v.transpose(1, 2), self._mask(call, source)

    def _mask(self, call: Call, source: int) -> tuple[bool, Tensor | None]:
        """Return (causal, allowed)."""
        if call.kind != MASKED:
            return call.kind == CAUSAL, None
        mine, theirs = self.plan.slices.of(self.plan.rank), self.plan.slices.of(source)
        return False, self.seen.allowed(mine[call.queries.start], theirs[call.keys.start], self.q.device)


class Attending(OwnQueries):
    """Attention of one rank's queries."""

    def __init__(self, q: Tensor, of: Widths, plan: AttentionPlan, seen: PairMask) -> None:
        super().__init__(q, of, plan, seen)
        self.out = torch.zeros(*self.q.shape[:3], of.v, dtype=self.wide, device=q.device)
        self.lse = torch.full(self.q.shape[:3], float("-inf"), dtype=self.wide, device=q.device)
        self.begun = False

    def add(self, source: int, span: range, block: Tensor) -> None:
        for rows, _, k, v, mask in self.parts(self.plan.calls[source], source, span, block):
            out, lse = part(self.q[:, :, rows], k, v, *mask, cap=self.seen.cap)
            if self.begun or out.shape[2] < self.q.shape[2]:
                merge_(self.out[:, :, rows], self.lse[:, :, rows], out, lse)
            else:  # nothing to merge with yet
                self.out.copy_(out)
                self.lse.copy_(lse)
            self.begun = True

    def result(self, dtype: torch.dtype, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return output (B, T, H, D) and lse (B, H, T); a sink is added last, once for all parts."""
        out, lse = (self.out, self.lse) if sink is None else add_sink(self.out, self.lse, sink)
        return out.transpose(1, 2).to(dtype).contiguous(), lse


class Differentiating(OwnQueries):
    """The backward of `Attending`: `add` returns what this rank's queries add to the gradients of a block."""

    def __init__(
        self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, of: Widths, plan: AttentionPlan, seen: PairMask
    ) -> None:
        super().__init__(q, of, plan, seen)
        self.gradient, self.out, self.lse = gradient.transpose(1, 2), out.transpose(1, 2), lse
        self.dq = torch.zeros(self.q.shape, dtype=self.wide, device=q.device)

    def add(self, source: int, span: range, block: Tensor, calls: Sequence[Call]) -> Tensor:
        added = torch.zeros(block.shape, dtype=self.wide, device=block.device)
        for rows, among, k, v, mask in self.parts(calls, source, span, block):
            kept = (self.gradient[:, :, rows], self.q[:, :, rows], k, v, self.out[:, :, rows], self.lse[:, :, rows])
            dq, dk, dv = part_backward(*kept, *mask, cap=self.seen.cap)
            self.dq[:, :, rows] += dq
            added[among] += pack(dk.transpose(1, 2), dv.transpose(1, 2), among.stop - among.start)
        return added


# Sending blocks


class BlockRing:
    """Receives the other ranks' blocks, one at a time, and sends gradients back to the owners of the blocks."""

    def __init__(self, block: Tensor, plan: AttentionPlan, backward: bool) -> None:
        self.block, self.plan = block, plan
        # With packed documents some ranks may have nothing to send.
        collectives.join_on_device(AXIS, block.device)
        self.exchange = Exchange(AXIS, "ring", block, plan.sent(backward) * block[0].nbytes)
        self.outgoing = self.exchange.staged(block)
        self.returning: list[tuple[range, Tensor, Transfer]] = []

    def blocks(self) -> Iterator[tuple[int, range | None, Tensor]]:
        """Yield (owner, which of its slices, the block), own block first; None for slices that are not needed."""
        started = map(self._start, distances(self.plan.slices.ranks))
        coming = next(started, None)
        yield self.plan.rank, range(self.plan.slices.each), self.block
        while coming is not None:
            source, span, block, transfer = coming
            coming = next(started, None)
            transfer.wait()
            yield source, span, block

    def _start(self, distance: int) -> tuple[int, range | None, Tensor, Transfer]:
        source = self._at(-distance)
        span, given = self.plan.wanted[source], self.plan.given[self._at(distance)]
        into = self._empty(span)
        out = None if given is None else self.outgoing[given.start : given.stop]
        transfer = self.exchange.swap(out, into, distance)
        return source, span, self.block if into is None else into, transfer

    def give_back(self, source: int, added: Tensor | None, own: Tensor) -> None:
        """Send the owner of a block what this rank adds to its gradients, and receive what another rank adds to `own`.

        Call this even if there is nothing to send: ranks must stay in step, or transfers would wait for each other in
        a cycle.
        """
        distance = (self.plan.rank - source) % self.plan.slices.ranks
        span = self.plan.given[self._at(distance)]
        into = self._empty(span)
        transfer = self.exchange.swap(None if added is None else added.to(self.block.dtype), into, -distance)
        self._add_up(own)  # add what arrived in the previous step while this transfer runs
        if span is not None and into is not None:
            self.returning.append((span, into, transfer))

    def finish(self, own: Tensor | None = None) -> None:
        if own is not None:
            self._add_up(own)
        self.exchange.finish()

    def _add_up(self, own: Tensor) -> None:
        for span, into, transfer in self.returning:
            transfer.wait()
            own[span.start : span.stop] += into
        self.returning.clear()

    def _at(self, distance: int) -> int:
        return (self.plan.rank + distance) % self.plan.slices.ranks

    def _empty(self, span: range | None) -> Tensor | None:
        return None if span is None else self.block.new_empty(len(span), *self.block.shape[1:])


def ring(attending: Attending, block: Tensor, plan: AttentionPlan) -> None:
    travelling = BlockRing(block, plan, backward=False)
    for source, span, arrived in travelling.blocks():
        if span is not None:
            attending.add(source, span, arrived)
    travelling.finish()


def ring_backward(differentiating: Differentiating, block: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute own keys first, while others' keys arrive, and last, while gradients are sent."""
    travelling = BlockRing(block, plan, backward=True)
    (first, last), blocks = plan.own_in_two(), travelling.blocks()
    _, whole, _ = next(blocks)
    assert whole is not None
    own = differentiating.add(plan.rank, whole, block, first)
    for source, span, arrived in blocks:
        added = None if span is None else differentiating.add(source, span, arrived, plan.calls[source])
        travelling.give_back(source, added, own)
    own += differentiating.add(plan.rank, whole, block, last)
    travelling.finish(own)
    return own


def _gathered(block: Tensor, plan: AttentionPlan) -> Tensor:
    return collectives.gather_rows(block, AXIS).unflatten(0, (plan.slices.ranks, -1))


def allgather(attending: Attending, block: Tensor, plan: AttentionPlan) -> None:
    blocks = _gathered(block, plan)
    for source in range(plan.slices.ranks):
        attending.add(source, range(plan.slices.each), blocks[source])


def allgather_backward(differentiating: Differentiating, block: Tensor, plan: AttentionPlan) -> Tensor:
    """Send each rank's summand of a block's gradients to the owner: summing on the way would round every time."""
    blocks = _gathered(block, plan)
    added = torch.empty_like(blocks)
    for source in range(plan.slices.ranks):
        added[source] = differentiating.add(source, range(plan.slices.each), blocks[source], plan.calls[source])
    return collectives.exchange_blocks(added, AXIS).sum(dim=0, dtype=differentiating.wide)


# ---- ops -------------------------------------------------------------------------------------------------------------


def _prepared(
    q: Tensor, table: Tensor | None, documents: Tensor | None, cap: float | None, window: int, each: int
) -> tuple[AttentionPlan, PairMask]:
    axis = collectives.axis(AXIS)
    slices, length = Slices(axis.size, each), q.shape[1] // each
    if table is None:
        plan = causal_plan(slices, axis.rank, length, window)
    else:
        plan = make_plan(table.tolist(), slices, axis.rank, length)
    return plan, PairMask(documents, window, length, cap)


MASK = "Tensor? table, Tensor? documents, float? cap, int window, int each"  # the arguments of `_prepared`
SCHEMA = f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {MASK}, str method) -> (Tensor, Tensor)"
GRADIENT = (
    f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {MASK}, str method) -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("shardline::shared_attention", mutates_args=(), schema=SCHEMA)
def shared_attention_op(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    *mask, method = options
    plan, seen = _prepared(q, *mask)
    attending = Attending(q, widths(k, v), plan, seen)
    (ring if method == "ring" else allgather)(attending, pack(k, v, plan.slices.each), plan)
    return attending.result(q.dtype, sink)


@shared_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    _announce(False, q, k, v, *options[-3:])
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@torch.library.custom_op("shardline::shared_attention_backward", mutates_args=(), schema=GRADIENT)
def _shared_attention_backward_op(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *mask, method = options
    plan, seen = _prepared(q, *mask)
    differentiating = Differentiating(gradient, q, out, lse, widths(k, v), plan, seen)
    travel = ring_backward if method == "ring" else allgather_backward
    own = travel(differentiating, pack(k, v, plan.slices.each), plan).to(k.dtype)
    dk, dv = together(own, widths(k, v))
    return differentiating.dq.transpose(1, 2).to(q.dtype).contiguous(), dk.contiguous(), dv.clone()


@_shared_attention_backward_op.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _announce(True, q, k, v, *rest[-3:])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _announce(backward: bool, q: Tensor, k: Tensor, v: Tensor, window: int, each: int, method: str) -> None:
    """Report to a dry run what the op would send: with fake tensors, nothing is sent."""
    if not isinstance(q.shape[1], int):
        return  # a compiler's symbol
    plan, _ = _prepared(q, None, None, None, window, each)
    block = k.nbytes + v.nbytes
    if method == "ring":
        job.traffic.planned(AXIS, "ring", plan.sent(backward) * block // each)
        return
    others = (plan.slices.ranks - 1) * block
    job.traffic.planned(AXIS, "all-gather", others)
    if backward:
        job.traffic.planned(AXIS, "all-to-all", others)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, table, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, table, documents, sink)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *kept, sink = ctx.saved_tensors
    gradients = _shared_attention_backward_op(gradient, *kept, *ctx.options)
    dsink = None
    if sink is not None:
        out, lse = kept[3:5]
        dsink = sink_gradient(gradient.transpose(1, 2), out.transpose(1, 2), lse, sink)
    return *gradients, dsink, None, None, None, None, None, None


shared_attention_op.register_autograd(_differentiate, setup_context=_keep)
