"""Attention of queries that stay where they are over keys and values that travel.

    rank 0   own keys     keys of 3    keys of 1    keys of 2      each block is computed while the next one is on its
    rank 1   own keys     keys of 0    keys of 2    keys of 3      way, sent straight to each rank that needs it
    rank 2   ...                                                   (`comm.transfers`)

`ring` sends a rank only the slices that it will use, point to point, with two blocks in memory at a time; `allgather`
gathers all of them first. Either way the softmax is put together from the parts (`models.partial_attention`).

Backward does not keep what came from others: keys and values travel again. A rank computes what its queries add to the
gradients of a block and sends it back to the block's owner, which adds up in float32.

Forward and backward are one custom op each, in eager code and compiled: activation checkpointing by operation sees
attention, not its parts, and a compiled graph keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.transfers import Exchange, Transfer, distances
from shardline.models.attention import AttentionMask
from shardline.models.partial_attention import merge_, part, part_backward
from shardline.parallel.context.slices import (
    CAUSAL,
    MASKED,
    AttentionPlan,
    Call,
    SliceRange,
    Slices,
    causal_plan,
    make_plan,
)

AXIS = "cp"


def shared_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """(B, S / cp, H, D): what this rank's queries see of the whole sequence."""
    out, _ = shared_attention_op(q, k, v, mask.table, mask.documents, mask.window, mask.each, mask.kernel)
    return out


class PairMask(NamedTuple):
    """Builds the mask of a pair of slices from positions and documents."""

    documents: Tensor | None  # (B, S)
    window: int
    length: int  # tokens of a slice

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """(B or 1, 1, length, length) of bool for two slices, by their numbers in the sequence."""
        places = torch.arange(self.length, device=device)
        distance = (queries - keys) * self.length + places[:, None] - places[None, :]
        allowed = distance >= 0
        if self.window:
            allowed = allowed & (distance < self.window)
        if self.documents is None:
            return allowed[None, None]
        parts = self.documents.unflatten(1, (-1, self.length))
        same = parts[:, queries, :, None] == parts[:, keys, None, :]
        return (allowed & same)[:, None]


# Blocks: slices of keys and values as they travel, (slices, 2, B, length, KV, D)


def pack(k: Tensor, v: Tensor, each: int) -> Tensor:
    """This rank's keys and values (B, T, KV, D) as a block: any of its slices is one piece of memory."""
    return torch.stack((k, v)).unflatten(2, (each, -1)).movedim(2, 0).contiguous()


def together(block: Tensor) -> Tensor:
    """Keys and values (2, B, tokens, KV, D) of the slices of a block; a copy where they are several."""
    return block.movedim(0, 2).flatten(2, 3)


class Attending:
    """Attention of one rank's queries over blocks that arrive one after the other."""

    def __init__(self, q: Tensor, plan: AttentionPlan, seen: PairMask) -> None:
        self.q, self.plan, self.seen = q.transpose(1, 2), plan, seen  # (B, H, T, D)
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros(self.q.shape, dtype=self.wide, device=q.device)
        self.lse = torch.full(self.q.shape[:3], float("-inf"), dtype=self.wide, device=q.device)
        self.begun = False

    def add(self, source: int, span: SliceRange, block: Tensor) -> None:
        for call in self.plan.calls[source]:
            rows = _rows(call.queries, self.plan.length)
            k, v = _keys(call, span, block)
            out, lse = part(self.q[:, :, rows], k, v, *_mask(call, source, self.plan, self.seen, self.q.device))
            if self.begun or call.queries.size < self.plan.slices.each:
                merge_(self.out[:, :, rows], self.lse[:, :, rows], out, lse)
            else:  # nothing to merge with yet
                self.out.copy_(out)
                self.lse.copy_(lse)
            self.begun = True

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B, T, H, D) and (B, H, T)."""
        return self.out.transpose(1, 2).to(dtype).contiguous(), self.lse


class Differentiating:
    """The backward of `Attending`: `add` returns what this rank's queries add to the gradients of a block."""

    def __init__(
        self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, plan: AttentionPlan, seen: PairMask
    ) -> None:
        self.gradient, self.q, self.out = (tensor.transpose(1, 2) for tensor in (gradient, q, out))
        self.lse, self.plan, self.seen = lse, plan, seen
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros(self.q.shape, dtype=self.wide, device=q.device)

    def add(self, source: int, span: SliceRange, block: Tensor, calls: tuple[Call, ...]) -> Tensor:
        added = torch.zeros(block.shape, dtype=self.wide, device=block.device)
        for call in calls:
            rows = _rows(call.queries, self.plan.length)
            k, v = _keys(call, span, block)
            mask = _mask(call, source, self.plan, self.seen, self.q.device)
            kept = (self.gradient[:, :, rows], self.q[:, :, rows], k, v, self.out[:, :, rows], self.lse[:, :, rows])
            dq, dk, dv = part_backward(*kept, *mask)
            self.dq[:, :, rows] += dq
            added[_among(call.keys, span)] += pack(dk.transpose(1, 2), dv.transpose(1, 2), call.keys.size)
        return added


def _rows(span: SliceRange, length: int) -> slice:
    return slice(span.first * length, span.end * length)


def _among(keys: SliceRange, span: SliceRange) -> slice:
    return slice(keys.first - span.first, keys.end - span.first)


def _keys(call: Call, span: SliceRange, block: Tensor) -> tuple[Tensor, Tensor]:
    k, v = together(block[_among(call.keys, span)]).transpose(2, 3).unbind(0)
    return k, v


def _mask(
    call: Call, source: int, plan: AttentionPlan, seen: PairMask, device: torch.device
) -> tuple[bool, Tensor | None]:
    """(causal, allowed) for a kernel."""
    if call.kind != MASKED:
        return call.kind == CAUSAL, None
    queries, keys = plan.slices.of(plan.rank)[call.queries.first], plan.slices.of(source)[call.keys.first]
    return False, seen.allowed(queries, keys, device)


# How blocks travel


class BlockRing:
    """Brings the blocks of the other ranks, one at a time, and sends gradients back to the owners of the blocks."""

    def __init__(self, block: Tensor, plan: AttentionPlan, backward: bool) -> None:
        self.block, self.plan = block, plan
        # With packed documents some ranks may have nothing to send.
        collectives.join_on_device(AXIS, block.device)
        slices = plan.sent + (plan.received if backward else 0)
        self.exchange = Exchange(AXIS, "ring", block, slices * block[0].numel() * block.element_size())
        self.outgoing = self.exchange.staged(block)
        self.steps = distances(plan.slices.ranks)
        self.returning: list[tuple[SliceRange, Tensor, Transfer]] = []

    def blocks(self) -> Iterator[tuple[int, SliceRange | None, Tensor]]:
        """(owner, which of its slices, the block), own ones first; None in place of slices that are not needed."""
        coming = self._start(0)
        yield self.plan.rank, SliceRange(0, self.plan.slices.each), self.block
        for step in range(len(self.steps)):
            source, span, block, transfer = coming
            if step + 1 < len(self.steps):
                coming = self._start(step + 1)
            transfer.wait()
            yield source, span, block

    def _start(self, step: int) -> tuple[int, SliceRange | None, Tensor, Transfer]:
        plan, distance = self.plan, self.steps[step]
        to, source = self._at(distance), self._at(-distance)
        span = plan.wanted[source]
        into = self._empty(span)
        transfer = self.exchange.swap(self._cut(plan.given[to]), into, distance)
        return source, span, self.block if into is None else into, transfer

    def give_back(self, source: int, added: Tensor | None, own: Tensor) -> None:
        """Send the owner of a block what this rank adds to its gradients, and receive what another rank adds to `own`.

        It is called also where there is nothing to send: ranks keep in step, or transfers would wait for each other in
        a circle.
        """
        distance = (self.plan.rank - source) % self.plan.slices.ranks
        span = self.plan.given[self._at(distance)]
        into = self._empty(span)
        transfer = self.exchange.swap(None if added is None else added.to(self.block.dtype), into, -distance)
        self._add_up(own)  # what arrived in the step before, while this one travels
        if span is not None and into is not None:
            self.returning.append((span, into, transfer))

    def finish(self, own: Tensor | None = None) -> None:
        if own is not None:
            self._add_up(own)
        self.exchange.finish()

    def _add_up(self, own: Tensor) -> None:
        for span, into, transfer in self.returning:
            transfer.wait()
            own[span.first : span.end] += into
        self.returning.clear()

    def _at(self, distance: int) -> int:
        return (self.plan.rank + distance) % self.plan.slices.ranks

    def _cut(self, span: SliceRange | None) -> Tensor | None:
        return None if span is None else self.outgoing[span.first : span.end]

    def _empty(self, span: SliceRange | None) -> Tensor | None:
        return None if span is None else self.block.new_empty(span.size, *self.block.shape[1:])


def ring(attending: Attending, block: Tensor, plan: AttentionPlan) -> None:
    travelling = BlockRing(block, plan, backward=False)
    for source, span, arrived in travelling.blocks():
        if span is not None:
            attending.add(source, span, arrived)
    travelling.finish()


def ring_backward(differentiating: Differentiating, block: Tensor, plan: AttentionPlan) -> Tensor:
    """Own keys are computed first, while others' keys travel, and last, while gradients travel."""
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
        attending.add(source, SliceRange(0, plan.slices.each), blocks[source])


def allgather_backward(differentiating: Differentiating, block: Tensor, plan: AttentionPlan) -> Tensor:
    """Each rank's summand of a block's gradients goes to the owner: a sum on the way would round every time."""
    blocks = _gathered(block, plan)
    added = torch.empty_like(blocks)
    for source in range(plan.slices.ranks):
        added[source] = differentiating.add(source, SliceRange(0, plan.slices.each), blocks[source], plan.calls[source])
    return collectives.exchange_blocks(added, AXIS).sum(dim=0, dtype=differentiating.wide)


# ---- ops -------------------------------------------------------------------------------------------------------------


def _prepared(
    q: Tensor, table: Tensor | None, documents: Tensor | None, window: int, each: int
) -> tuple[AttentionPlan, PairMask]:
    axis = collectives.axis(AXIS)
    slices, length = Slices(axis.size, each), q.shape[1] // each
    if table is None:
        plan = causal_plan(slices, axis.rank, length, window)
    else:
        plan = make_plan(table.tolist(), slices, axis.rank, length)
    return plan, PairMask(documents, window, length)


@torch.library.custom_op("shardline::shared_attention", mutates_args=())
def shared_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    window: int,
    each: int,
    method: str,
) -> tuple[Tensor, Tensor]:
    plan, seen = _prepared(q, table, documents, window, each)
    attending = Attending(q, plan, seen)
    (ring if method == "ring" else allgather)(attending, pack(k, v, each), plan)
    return attending.result(q.dtype)


@shared_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Any, documents: Any, *options: Any) -> tuple[Tensor, Tensor]:
    _announce(False, q, k, *options)
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@torch.library.custom_op("shardline::shared_attention_backward", mutates_args=())
def _shared_attention_backward_op(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    window: int,
    each: int,
    method: str,
) -> tuple[Tensor, Tensor]:
    plan, seen = _prepared(q, table, documents, window, each)
    differentiating = Differentiating(gradient, q, out, lse, plan, seen)
    travel = ring_backward if method == "ring" else allgather_backward
    own = travel(differentiating, pack(k, v, each), plan).to(k.dtype)
    return differentiating.dq.transpose(1, 2).to(q.dtype).contiguous(), together(own).contiguous()


@_shared_attention_backward_op.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _announce(True, q, k, *rest[-3:])
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


def _announce(backward: bool, q: Tensor, k: Tensor, window: int, each: int, method: str) -> None:
    """Report to a dry run what the op would send: without values nothing is sent."""
    if not isinstance(q.shape[1], int):
        return  # a compiler's symbol
    plan, _ = _prepared(q, None, None, window, each)
    block = 2 * k.numel() * k.element_size()
    if method == "ring":
        slices = plan.sent + (plan.received if backward else 0)
        job.traffic.planned(AXIS, "ring", slices * block // each)
        return
    others = (plan.slices.ranks - 1) * block
    job.traffic.planned(AXIS, "all-gather", others)
    if backward:
        job.traffic.planned(AXIS, "all-to-all", others)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, table, documents)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    dq, dkv = _shared_attention_backward_op(gradient, *ctx.saved_tensors, *ctx.options)
    return dq, *dkv.unbind(0), None, None, None, None, None


shared_attention_op.register_autograd(_differentiate, setup_context=_keep)
