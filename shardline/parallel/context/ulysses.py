"""Heads for sequence: before attention every rank trades its tokens of all heads for all tokens of its heads.

    before   rank 0: tokens 1st half, heads 0..7      attention: all tokens, heads 0..3      after: as before
             rank 1: tokens 2nd half, heads 0..7                 all tokens, heads 4..7

Any kernel and any mask serves, since a rank sees whole sequences. Heads must divide; where there are fewer KV heads
than ranks, a KV head goes to every rank whose queries read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.attention import AttentionMask, attention

AXIS = "cp"


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """(B, S / cp, H, D): what this rank's queries see of the whole sequence."""
    ranks = collectives.axis_size(AXIS)
    if k.shape[2] < ranks:
        k, v = (tensor.repeat_interleave(ranks // k.shape[2], dim=2) for tensor in (k, v))
    q, k, v = (_to_heads(tensor, ranks) for tensor in (q, k, v))
    return _to_tokens(attention(q, k, v, mask._replace(shared=None)), ranks)


def _to_heads(x: Tensor, ranks: int) -> Tensor:
    """(B, S / n, H, D) -> (B, S, H / n, D)."""
    blocks = x.unflatten(2, (ranks, -1)).movedim(2, 0)  # (n, B, S / n, H / n, D): a block for each owner of heads
    return all_to_all(blocks, AXIS).movedim(0, 1).flatten(1, 2)


def _to_tokens(x: Tensor, ranks: int) -> Tensor:
    """(B, S, H / n, D) -> (B, S / n, H, D)."""
    blocks = x.unflatten(1, (ranks, -1)).movedim(1, 0)  # (n, B, S / n, H / n, D): a block for each owner of tokens
    return all_to_all(blocks, AXIS).movedim(0, 2).flatten(2, 3)


def all_to_all(x: Tensor, name: str) -> Tensor:
    """x (n, ...) has a block for every rank; the result the blocks they had for this one. Backward: the same."""
    out: Tensor = _all_to_all_op(x, name) if torch.compiler.is_compiling() else _AllToAll.apply(x, name)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return collectives.exchange_blocks(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.exchange_blocks(gradient, ctx.name), None


@torch.library.custom_op("shardline::all_to_all", mutates_args=())
def _all_to_all_op(x: Tensor, name: str) -> Tensor:
    return collectives.exchange_blocks(x, name)


@_all_to_all_op.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)


def _remember_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name = inputs[1]


_all_to_all_op.register_autograd(lambda ctx, g: (_all_to_all_op(g, ctx.name), None), setup_context=_remember_name)
