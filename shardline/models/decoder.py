"""The decoder: embedding, blocks, final norm, output layer.

A block's `forward` is eager and thin: it collects plain tensors and hands them to `block.function`, a pure function
that compilation and activation checkpointing may wrap. The blocks share one function, hence one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardline.config.architecture import Architecture
from shardline.models.attention import AttentionMask, KVCache, LayerCache, attention, make_masks, remember, windows
from shardline.models.feed_forward import feed_forward, linear
from shardline.models.fused import gate_block
from shardline.models.rope import rope_tables, rotate


class BlockSpec(NamedTuple):
    """The numbers a block's function needs beside its tensors; equal for all layers."""

    head_dim: int
    group: int  # query heads per KV head
    gate_block: int
    norm_eps: float


class BlockWeights(NamedTuple):
    attention_norm: Tensor
    wqkv: Tensor
    wqkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    wo: Tensor
    wo_bias: Tensor | None
    ffn_norm: Tensor
    w13: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_bias: Tensor | None


def block_function(
    x: Tensor,
    weights: BlockWeights,
    cos: Tensor,
    sin: Tensor,
    mask: AttentionMask,
    spec: BlockSpec,
    cache: LayerCache | None = None,
) -> Tensor:
    """One block over x (B, S, dim); weights of any type are cast to the type of x."""
    w = weights
    x = x + attention_part(rms_norm(x, w.attention_norm, spec.norm_eps), w, cos, sin, mask, spec, cache)
    normed = rms_norm(x, w.ffn_norm, spec.norm_eps)
    return x + feed_forward(normed, w.w13, w.w13_bias, w.w2, w.w2_bias, spec.gate_block)


def attention_part(
    x: Tensor,
    w: BlockWeights,
    cos: Tensor,
    sin: Tensor,
    mask: AttentionMask,
    spec: BlockSpec,
    cache: LayerCache | None,
) -> Tensor:
    """Project, normalise, rotate, attend, project back. Values stay a view of the fused product."""
    fused = linear(x, w.wqkv, w.wqkv_bias).unflatten(-1, (-1, spec.group + 2, spec.head_dim))
    q, k, v = fused.split((spec.group, 1, 1), dim=3)  # (B, S, KV, group, D), (B, S, KV, 1, D) twice
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, spec.norm_eps), rms_norm(k, w.k_norm, spec.norm_eps)
    q, k = rotate(q, cos, sin).flatten(2, 3), rotate(k, cos, sin).flatten(2, 3)
    v = v.squeeze(3)
    if cache is not None:
        k, v = remember(cache, k, v)
    return linear(attention(q, k, v, mask).flatten(2), w.wo, w.wo_bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


class Linear(nn.Module):
    """A weight (rows, columns) and perhaps a bias; memory only, `init_weights` or a checkpoint fills it."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The attention weights of a block; the arithmetic is `attention_part`."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        heads = arch.n_heads * arch.head_dim
        self.wqkv = Linear(heads + 2 * arch.n_kv_heads * arch.head_dim, arch.dim, arch.qkv_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.wo = Linear(arch.dim, heads, arch.out_bias)


class FeedForward(nn.Module):
    """The feed-forward weights of a block; the arithmetic is `feed_forward`."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.w13 = Linear(2 * arch.ffn_dim, arch.dim, arch.mlp_bias)
        self.w2 = Linear(arch.dim, arch.ffn_dim, arch.mlp_bias)


class Block(nn.Module):
    def __init__(self, arch: Architecture, window: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.attention = Attention(arch)
        self.ffn_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.feed_forward = FeedForward(arch)
        self.window = window
        self.spec = BlockSpec(arch.head_dim, arch.n_heads // arch.n_kv_heads, gate_block(arch), arch.norm_eps)
        self.function: Callable[..., Tensor] = block_function

    def weights(self) -> BlockWeights:
        a, f = self.attention, self.feed_forward
        return BlockWeights(
            attention_norm=self.attention_norm.weight,
            wqkv=a.wqkv.weight,
            wqkv_bias=a.wqkv.bias,
            q_norm=None if a.q_norm is None else a.q_norm.weight,
            k_norm=None if a.k_norm is None else a.k_norm.weight,
            wo=a.wo.weight,
            wo_bias=a.wo.bias,
            ffn_norm=self.ffn_norm.weight,
            w13=f.w13.weight,
            w13_bias=f.w13.bias,
            w2=f.w2.weight,
            w2_bias=f.w2.bias,
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, cache: LayerCache | None = None
    ) -> Tensor:
        if cache is not None:  # lengths grow with every token: not for a compiled function
            return block_function(x, self.weights(), cos, sin, mask, self.spec, cache)
        return self.function(x, self.weights(), cos, sin, mask, self.spec)


class Decoder(nn.Module):
    """Parameters are made on the default device, not initialised; `compute_dtype` None computes in their own type."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.compute_dtype: torch.dtype | None = None
        self.tok_embeddings = Embedding(arch.vocab_size, arch.dim)
        self.layers = nn.ModuleDict({str(i): Block(arch, window) for i, window in enumerate(windows(arch))})
        self.norm = RMSNorm(arch.dim, arch.norm_eps)
        self.output = None if arch.tie_word_embeddings else Linear(arch.vocab_size, arch.dim)
        self._tables: tuple[tuple[int, torch.device], tuple[Tensor, Tensor]] | None = None

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Tokens (B, S) to hidden states (B, S, dim) after the final norm.

        `positions` (S,) or (B, S) default to 0, 1, ...; `documents` (B, S) keep packed documents apart.
        """
        x = self.tok_embeddings(tokens)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        cos, sin = self._rope(tokens, positions, cache)
        masks = make_masks(self.arch, tokens, x.dtype, documents, cache)
        for index, block in enumerate(self.blocks()):
            x = block(x, cos, sin, masks[block.window], None if cache is None else cache.layer(index))
        if cache is not None:
            cache.used += tokens.shape[1]
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits (B, S, V)."""
        return linear(
            self.hidden(tokens, positions=positions, documents=documents, cache=cache), self.output_weight(), None
        )

    def blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def output_weight(self) -> Tensor:
        """(V, dim): the output layer's weight, the embedding's when they are tied."""
        return self.tok_embeddings.weight if self.output is None else self.output.weight

    def _rope(self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Tables that broadcast to (B, S, KV, group, D/2). Those of 0, 1, ... are kept for the next batch.

        They are no buffers: a model built on the meta device needs nothing recomputed after it gets its memory.
        """
        key = (tokens.shape[1], tokens.device)
        default = positions is None and cache is None
        if default and self._tables is not None and self._tables[0] == key:
            return self._tables[1]
        if positions is None:
            start = 0 if cache is None else cache.used
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        cos, sin = (table[..., None, None, :] for table in rope_tables(self.arch, positions))
        if default:
            self._tables = (key, (cos, sin))
        return cos, sin
