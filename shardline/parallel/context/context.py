"""Context parallelism: `cp` ranks share each sequence.

    tokens of a sequence      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        2 x cp slices (headtail)
    cp rank                     0   1   2   3   3   2   1   0

A batch is cut once, before the model: each rank embeds, normalises, multiplies and scores its own tokens, at their
positions in the sequence. Only attention needs other tokens: keys and values are sent (`ring`), or heads are exchanged
for tokens (`ulysses`). Parameters are sharded over dp_shard x cp, so their gradients are summed over the ranks of a
sequence as they are over the ranks of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import ConfigError
from shardline.models.attention import AttentionMask, chunked_documents, make_masks, windows
from shardline.models.partial_attention import fastest_kernel
from shardline.parallel.context.ring import shared_attention
from shardline.parallel.context.slices import CAUSAL, FULL, MASKED, SKIP, Slices, causal_table
from shardline.parallel.context.ulysses import ulysses_attention
from shardline.parallel.tensor.tensor import batch_shapes, nearest_lengths

Batch = TypeVar("Batch", bound=Any)


@dataclass(frozen=True)
class ContextParallel:
    """This rank's part of every sequence; `method` is ring, allgather or ulysses."""

    slices: Slices
    rank: int
    method: str

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions (length / cp,) of this rank's tokens in sequences of `length` tokens."""
        return self.own(torch.arange(length, device=device)[None])[0]

    def cut(self, batch: Batch) -> Batch:
        """Return this rank's tokens and labels of a batch; documents stay whole, as attention reaches other ranks."""
        noise = None if batch.noise is None else self.own(batch.noise)
        return replace(batch, tokens=self.own(batch.tokens), labels=self.own(batch.labels), noise=noise)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's part (B, S / cp) of rows (B, S)."""
        if x.shape[1] % self.slices.total:
            raise ValueError(f"{x.shape[1]} tokens cannot be cut into {self.slices.total} slices")
        parts = x.chunk(self.slices.total, dim=1)
        return torch.cat([parts[i] for i in self.slices.of(self.rank)], dim=1)

    def masks(
        self, arch: Architecture, tokens: Tensor, dtype: torch.dtype, documents: Tensor | None
    ) -> dict[int, AttentionMask]:
        """Return the mask of each window size, for this rank's `tokens` (B, S / cp) and all `documents` (B, S)."""
        length = tokens.shape[1] * self.slices.ranks
        if self.method == "ulysses":
            whole = tokens[:, :1].expand(-1, length)  # masks use only its shape
            masks = make_masks(arch, whole, dtype, documents)
            return {window: mask._replace(shared=ulysses_attention) for window, mask in masks.items()}
        if arch.attn_mask_type == "causal":
            documents = None
        return {window: self._mask(arch, window, length, documents, tokens.device) for window in set(windows(arch))}

    def _mask(
        self, arch: Architecture, window: int, length: int, documents: Tensor | None, device: torch.device
    ) -> AttentionMask:
        window = 0 if window >= length else window
        if arch.window_kind == "chunked" and window:
            window, documents = 0, chunked_documents(length, window, documents)
        mask = AttentionMask(self.method, window, cap=arch.score_cap, shared=shared_attention, each=self.slices.each)
        if documents is None:
            return mask
        table = document_table(documents, self.slices.total, window)
        return mask._replace(table=table, documents=documents.to(device, non_blocking=True))


def document_table(documents: Tensor, count: int, window: int) -> Tensor:
    """Return what `count` slices of rows with packed `documents` (B, S) see of each other, in any row of the batch."""
    length = documents.shape[1] // count
    table = torch.tensor(causal_table(count, length, window), dtype=torch.int8)
    parts = documents.cpu().unflatten(1, (count, length))
    low, high = parts.amin(dim=2), parts.amax(dim=2)  # (B, slices)
    meet = ((low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])).any(dim=0)
    single = low == high
    same = (single[:, :, None] & single[:, None, :] & (low[:, :, None] == low[:, None, :])).all(dim=0)
    table[~meet] = SKIP
    table[meet & ~same & ((table == CAUSAL) | (table == FULL))] = MASKED
    return table


# From the config


def context_plan(config: Config, ranks: int, rank: int) -> ContextParallel:
    section = config.parallelism
    method = {"alltoall": "ring"}.get(section.context_parallel_rotate_method, section.context_parallel_rotate_method)
    # With ulysses, every rank has all tokens of its heads: the work is equal however the sequence is cut.
    balanced = section.context_parallel_load_balancer == "headtail" and method != "ulysses"
    return ContextParallel(Slices(ranks, 2 if balanced else 1), rank, method)


def check_context_parallel(plan: ContextParallel, config: Config, arch: Architecture, tp: int) -> None:
    """Raise for lengths and heads that cannot be divided; the message names values that can."""
    shared_by = tp if config.parallelism.enable_sequence_parallel else 1
    for name, _, length in batch_shapes(config):
        _check_length(f"{name}.seq_len", length, plan.slices, shared_by)
    if plan.method == "ulysses":
        _check_heads(plan.slices.ranks, arch, tp)
    elif arch.attn_backend in ("flex", "varlen"):
        raise ConfigError(
            f"model.overrides.attn_backend = {arch.attn_backend!r}: with context parallelism by ring or allgather,"
            " attention is merged from partial results, which this kernel cannot compute; set it to 'auto', or"
            ' set parallelism.context_parallel_rotate_method = "ulysses"'
        )


def _check_length(key: str, length: int, slices: Slices, tp: int) -> None:
    step = slices.total * tp
    if length % step == 0:
        return
    near = " and ".join(map(str, nearest_lengths(length, 1, step)))
    factors = [str(slices.each)] if slices.each > 1 else []
    factors += [f"context_parallel_degree {slices.ranks}"] + ([f"tensor_parallel_degree {tp}"] if tp > 1 else [])
    product = f"{' x '.join(factors)} = {step}" if len(factors) > 1 else factors[0]
    raise ConfigError(f"{key} = {length} is not a multiple of {product}; nearest lengths: {near}")


def _check_heads(ranks: int, arch: Architecture, tp: int) -> None:
    heads, kv_heads = arch.n_heads // tp, max(arch.n_kv_heads // tp, 1)
    many, few = max(kv_heads, ranks), min(kv_heads, ranks)
    if heads % ranks == 0 and many % few == 0:
        return
    each = f" of each of {tp} tensor-parallel ranks" if tp > 1 else ""
    good = [d for d in range(1, heads + 1) if heads % d == 0 and max(kv_heads, d) % min(kv_heads, d) == 0]
    raise ConfigError(
        f'parallelism.context_parallel_rotate_method = "ulysses": {heads} heads and {kv_heads} KV heads{each} cannot be'
        f" shared by {ranks} context-parallel ranks; degrees that fit: {', '.join(map(str, good))}"
        ' (or set it to "ring")'
    )


def describe(plan: ContextParallel, length: int) -> str:
    each = f"{length // plan.slices.total:,}"
    cut = f"2 slices of {each} tokens" if plan.slices.each == 2 else f"{each} tokens in one piece"
    how = {
        "ring": "keys and values passed point to point",
        "allgather": "keys and values gathered",
        "ulysses": "heads exchanged for tokens",
    }
    return f"context parallel over {plan.slices.ranks} ranks, {cut} each, {how[plan.method]}"


def attention_words(
    config: Config, arch: Architecture, device: torch.device, dtype: torch.dtype, otherwise: str
) -> str:
    """Return the name of the attention kernel for the log; `otherwise` is the kernel for whole sequences."""
    section = config.parallelism
    if section.context_parallel_degree == 1 or section.context_parallel_rotate_method == "ulysses":
        return otherwise
    masked = arch.attn_mask_type == "block_causal" or any(windows(arch))
    kinds = (False, True) if masked else (False,)
    fixed = config.debug.deterministic
    if arch.score_cap is not None:
        return "math, in parts"
    names = [fastest_kernel(device, dtype, arch.head_dim, kind, fixed, v_dim=arch.v_dim) for kind in kinds]
    return f"{' and '.join(dict.fromkeys(names))}, in parts"


def slices_line(plan: ContextParallel, length: int) -> str:
    """Return the log line about the slices of each rank."""
    ranks = range(plan.slices.ranks)
    shown = [*ranks] if len(ranks) <= 8 else [*ranks[:3], ranks[-1]]
    words = [f"cp {rank} has {' and '.join(map(str, plan.slices.of(rank)))}" for rank in shown]
    if len(shown) < len(ranks):
        words.insert(-1, "...")
    total = plan.slices.total
    return f"context of {length:,} tokens in {total} slices of {length // total:,}: {', '.join(words)}"
