"""Attention over ranks that share sequences as custom ops, one forward and one backward, in eager code and compiled.

Activation checkpointing by operation sees attention, not its parts; a compiled graph keeps it whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.models.attention import AttentionMask
from shardline.parallel.context.ring import (
    AXIS,
    Attending,
    Differentiating,
    PairMask,
    allgather,
    allgather_backward,
    pack,
    ring,
    ring_backward,
    together,
)
from shardline.parallel.context.slices import AttentionPlan, Slices, causal_plan, make_plan


def shared_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """(B, S / cp, H, D): what this rank's queries see of the whole sequence."""
    out, _ = shared_attention_op(q, k, v, mask.table, mask.documents, mask.window, mask.each, mask.kernel)
    return out


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
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    window: int,
    each: int,
    method: str,
) -> tuple[Tensor, Tensor]:
    _announce(q, k, window, each, method, backward=False)
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
def _(
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
    _announce(q, k, window, each, method, backward=True)
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


def _announce(q: Tensor, k: Tensor, window: int, each: int, method: str, backward: bool) -> None:
    """What the op would send: without values (a dry run, a compiler) nothing is sent, and a dry run wants to know."""
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
