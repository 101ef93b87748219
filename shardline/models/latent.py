"""Multi-head latent attention: the keys and values of all heads are products of one narrow vector per token.

    x (t, dim) -- wkv_a --> latent (t, kv_rank) -- kv_norm, wkv_b --> of each head: key (nope_dim), value (v_dim)
                        \\-> rotary key (t, rope_dim), shared by the heads
    x -- wq --> of each head: query (nope_dim + rope_dim)       or x -- wq_a, q_norm --> (t, q_rank) -- wq_b --> ...

Tensor-parallel ranks hold whole heads of `wq` or `wq_b`, and of `wkv_b`. The products before them are narrow: each rank
computes them for its own rows, and ranks all-gather the latent vectors instead of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.config.architecture import Architecture, LatentAttention
from shardline.models.adapted.low_rank import Weight
from shardline.models.feed_forward import Products
from shardline.models.norms import rms_norm
from shardline.models.products.linear import linear
from shardline.models.rope import rotate, softmax_factor

NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the epsilon of the others


class LatentSpec(NamedTuple):
    """The constants of latent attention, equal for all layers."""

    sizes: LatentAttention
    rope_pairs: str
    query_factor: float  # queries are multiplied by it, which scales the softmax for every kernel


class LatentWeights(NamedTuple):
    """The weights that this rank holds."""

    wq_a: Weight | None  # (q_rank, dim)
    q_norm: Tensor | None  # (q_rank,)
    wq: Weight  # wq or wq_b: (heads here x head_dim, dim or q_rank)
    wkv_a: Weight  # (kv_rank + rope_dim, dim)
    kv_norm: Tensor  # (kv_rank,)
    wkv_b: Weight  # (heads here x (nope_dim + v_dim), kv_rank)


def latent_spec(arch: Architecture) -> LatentSpec | None:
    return None if arch.latent is None else LatentSpec(arch.latent, arch.rope_pairs, softmax_factor(arch))


def latent_heads(
    x: Tensor, w: LatentWeights, cos: Tensor, sin: Tensor, spec: LatentSpec, products: Products, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """Queries, keys and values (B, S, heads here, ...) of all tokens, and the shape of the products' rows."""
    sizes, heads = spec.sizes, w.wq.shape[0] // spec.sizes.head_dim
    cos, sin = cos.squeeze(-2), sin.squeeze(-2)  # (S, 1, rope_dim / 2): keys have no groups of query heads
    queries = x
    if w.wq_a is not None and w.q_norm is not None:
        queries = rms_norm(linear(x, w.wq_a, None), w.q_norm, NORM_EPS)
    (product,) = products.column(queries, (w.wq,), (None,))
    still, turning = product.view(*shape, heads, -1).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
    q = torch.cat((still, rotate(turning, cos, sin, spec.rope_pairs)), dim=-1)

    latent, rotary = linear(x, w.wkv_a, None).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
    (kv,) = products.column(rms_norm(latent, w.kv_norm, NORM_EPS), (w.wkv_b,), (None,))
    still, v = kv.view(*shape, heads, -1).split((sizes.nope_dim, sizes.v_dim), dim=-1)
    shared = rotate(products.gather(rotary).view(*shape, 1, -1), cos, sin, spec.rope_pairs)
    k = torch.cat((still, shared.expand(-1, -1, heads, -1)), dim=-1)
    return q if spec.query_factor == 1.0 else q * spec.query_factor, k, v, product.shape[:-1]
