"""Ulysses attention: before attention, every rank exchanges its tokens of all heads for all tokens of its heads.

    before   rank 0: tokens 1st half, heads 0..7      attention: all tokens, heads 0..3      after: as before
             rank 1: tokens 2nd half, heads 0..7                 all tokens, heads 4..7

Any kernel and any mask can be used, since a rank sees whole sequences. The number of ranks must divide the heads; if
there are fewer KV heads than ranks, a KV head goes to every rank whose queries read it.
"""

from __future__ import annotations

from torch import Tensor

from shardline.comm import collectives
from shardline.models.attention import AttentionMask, attention

AXIS = "cp"


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None) -> Tensor:
    """Return (B, S / cp, H, D): the attention of this rank's queries over the whole sequence."""
    axis = collectives.axis(AXIS)
    ranks = axis.size
    if k.shape[2] < ranks:
        k, v = (tensor.repeat_interleave(ranks // k.shape[2], dim=2) for tensor in (k, v))
    q, k, v = (_to_heads(tensor, ranks) for tensor in (q, k, v))
    own = None if sink is None else sink.chunk(ranks)[axis.rank]
    whole = mask._replace(shared=None, factors=None)  # queries are already scaled
    return _to_tokens(attention(q, k, v, whole, own), ranks)


def _to_heads(x: Tensor, ranks: int) -> Tensor:
    """(B, S / n, H, D) -> (B, S, H / n, D)."""
    blocks = x.unflatten(2, (ranks, -1)).movedim(2, 0)  # (n, B, S / n, H / n, D): a block for each owner of heads
    return collectives.all_to_all(blocks, AXIS).movedim(0, 1).flatten(1, 2)


def _to_tokens(x: Tensor, ranks: int) -> Tensor:
    """(B, S, H / n, D) -> (B, S / n, H, D)."""
    blocks = x.unflatten(1, (ranks, -1)).movedim(1, 0)  # (n, B, S / n, H / n, D): a block for each owner of tokens
    return collectives.all_to_all(blocks, AXIS).movedim(0, 2).flatten(2, 3)
