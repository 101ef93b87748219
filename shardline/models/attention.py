"""Attention over whole sequences. The kernel is chosen once per batch, outside the blocks, and is part of the mask.

Letters: B batch, S sequence, H query heads, KV key and value heads, D head_dim. Queries are (B, S, H, D), keys and
values (B, S, KV, D); query head h reads KV head h // (H / KV). Values, and so the result, may be narrower than D.

Each CUDA kernel is called through its own op (partial_attention.py), so the choice is part of the traced code: a cached
compiled graph can never be one of another kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.partial_attention import (
    CUDNN_TILE,
    HALF,
    KERNELS,
    add_sink,
    as_wide_as,
    fastest_kernel,
    fills_tiles,
    for_every_head,
    kernel_with,
    sink_gradient,
)
from shardline.storage.compiler_cache import separate_caches

SMALLEST_FLEX_HEAD = 16


class AttentionMask(NamedTuple):
    """What a query may see, in the form its kernel takes. `window` counts the query itself; 0 means no window."""

    kernel: str  # cpu, cudnn, flash, efficient, math, sdpa, varlen, flex; with `shared`, how ranks exchange keys
    window: int = 0
    allowed: Tensor | None = None  # sdpa, math: (B or 1, 1, S, S) of bool; None means causal
    boundaries: Tensor | None = None  # varlen: (documents + 1,) of int32, first token of each document in (B * S)
    block_mask: Any = None  # flex
    score_mod: Callable[..., Tensor] | None = None  # flex: the cap
    factors: Tensor | None = None  # multiply each query's scores: float32, broadcast to (B, S, H, D)
    cap: float | None = None  # math: the cap of scores
    shared: Callable[..., Tensor] | None = None  # ranks share the sequence: (q, k, v, mask, sink) -> this rank's out
    each: int = 1  # shared: slices per rank
    table: Tensor | None = None  # shared: (slices, slices), what each slice sees of every other; None means causal
    documents: Tensor | None = None  # shared: (B, S) of the whole sequence


class LayerCache(NamedTuple):
    """Keys (B, length, KV, D) and values of one layer, filled up to `start`."""

    k: Tensor
    v: Tensor
    start: int


class KVCache:
    """Keys and values of all layers for generation; `used` tokens are filled."""

    def __init__(self, arch: Architecture, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (arch.n_layers, batch, length, arch.n_kv_heads)
        self.k = torch.zeros(*shape, arch.head_dim, device=device, dtype=dtype)
        self.v = torch.zeros(*shape, arch.v_dim, device=device, dtype=dtype)
        self.used = 0

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self.k[index], self.v[index], self.used)


def remember(cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append this call's keys and values to the cache; return all of them so far."""
    end = cache.start + k.shape[1]
    cache.k[:, cache.start : end] = k
    cache.v[:, cache.start : end] = v
    return cache.k[:, :end], cache.v[:, :end]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None = None) -> Tensor:
    """Attention over (B, S, H, D). The result has the memory layout of q and, except for the values' width, its shape.

    `sink` (H,) takes part in the softmax of each head as the score of a key whose value is 0.
    """
    if mask.factors is not None:
        q = (q * mask.factors).to(q.dtype)
    if mask.shared is not None:
        return mask.shared(q, k, v, mask, sink)
    if mask.kernel == "varlen":
        return _varlen_kernel(q, k, v, mask)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # views: (B, H, S, D)
    if mask.kernel == "flex":
        return _flex_kernel(q, k, v, mask, sink).transpose(1, 2)
    if sink is None and mask.cap is None:
        return _KERNELS[mask.kernel](q, k, v, mask).transpose(1, 2)
    out: Tensor = _InOnePart.apply(q, k, v, sink, mask.allowed, mask.kernel, mask.cap)
    return out.transpose(1, 2)


# Masks: one per window size, built once per batch


def windows(arch: Architecture) -> list[int]:
    """The window of each layer; 0 where a layer sees everything before it."""
    chosen = range(arch.n_layers) if arch.sliding_window_layers is None else arch.sliding_window_layers
    return [arch.sliding_window or 0 if layer in chosen else 0 for layer in range(arch.n_layers)]


def make_masks(
    arch: Architecture,
    tokens: Tensor,
    dtype: torch.dtype,
    documents: Tensor | None = None,
    cache: KVCache | None = None,
) -> dict[int, AttentionMask]:
    """The mask of every window size in use, for `tokens` (B, S) that will be computed in `dtype`.

    `documents` (B, S) numbers each token's document and is used only with `attn_mask_type = block_causal`. It may stay
    on the CPU: then the varlen kernel's boundaries are found without waiting for the device.
    """
    if arch.attn_mask_type == "causal":
        documents = None
    if cache is not None:
        if documents is not None:
            raise ValueError("documents cannot be given with a KV cache, which holds one document per row")
        return {window: _cached_mask(arch, tokens, dtype, window, cache) for window in set(windows(arch))}
    return {window: make_mask(arch, tokens, dtype, window, documents) for window in set(windows(arch))}


def make_mask(
    arch: Architecture,
    tokens: Tensor,
    dtype: torch.dtype,
    window: int = 0,
    documents: Tensor | None = None,
    kernel: str | None = None,
) -> AttentionMask:
    """One mask; `kernel` forces a kernel, for tests and benchmarks that compare kernels."""
    length, device = tokens.shape[1], tokens.device
    window = 0 if window >= length else window
    if arch.window_kind == "chunked" and window:
        window, documents = 0, chunked_documents(length, window, documents)
    plain = window == 0 and documents is None
    kernel = kernel or choose_kernel(arch, device, dtype, plain, length)
    if kernel == "varlen":
        load_varlen()
        return AttentionMask(kernel, window, boundaries=_boundaries(tokens, documents))
    if kernel == "flex":
        score_mod = None if arch.score_cap is None else _capping(arch.score_cap)
        block_mask = _block_mask(tokens, window, documents)
        return AttentionMask(kernel, window, block_mask=block_mask, score_mod=score_mod)
    if plain:
        return AttentionMask(kernel, cap=arch.score_cap)
    if kernel not in ("sdpa", "cpu", "efficient", "math"):
        raise ValueError(f"the {kernel} kernel supports neither documents nor a window")
    places = torch.arange(length, device=device)
    return AttentionMask(kernel, window, allowed=allowed_pairs(places, places, window, documents), cap=arch.score_cap)


def check_attention(arch: Architecture, device: torch.device, dtype: torch.dtype, length: int = CUDNN_TILE) -> str:
    """The kernel that a run will use, for its log; raises the UserError that its first batch would raise."""
    masked = arch.attn_mask_type == "block_causal" or any(windows(arch))
    return choose_kernel(arch, device, dtype, plain=not masked, length=length)


def _cached_mask(arch: Architecture, tokens: Tensor, dtype: torch.dtype, window: int, cache: KVCache) -> AttentionMask:
    """The mask of new tokens, which see each other causally and everything in the cache."""
    end, documents = cache.used + tokens.shape[1], None
    window = 0 if window >= end else window
    plain = cache.used == 0 and not window
    kernel = fastest_kernel(tokens.device, dtype, arch.head_dim, masked=not plain) if arch.sinks else "sdpa"
    kernel = kernel if arch.score_cap is None else "math"
    if plain:
        return AttentionMask(kernel, cap=arch.score_cap)
    if arch.window_kind == "chunked" and window:
        window, documents = 0, chunked_documents(end, window, None)
    places = torch.arange(end, device=tokens.device)
    allowed = allowed_pairs(places[cache.used :], places, window, documents)
    return AttentionMask(kernel, window, allowed=allowed, cap=arch.score_cap)


def chunked_documents(length: int, chunk: int, documents: Tensor | None) -> Tensor:
    """Document numbers (B or 1, length) that also change at each multiple of `chunk`, so that masks separate chunks."""
    chunks = torch.arange(length, device="cpu" if documents is None else documents.device)[None] // chunk
    return chunks if documents is None else documents * (length // chunk + 1) + chunks


def document_positions(documents: Tensor) -> Tensor:
    """The position (B, S) of each token in its document, counted from 0."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.zeros_like(places)
    begins[:, 1:] = places[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return places - begins.cummax(dim=1).values


def document_lengths(documents: Tensor) -> Tensor:
    """The length (B, S) of the document that each token belongs to."""
    positions = document_positions(documents)
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[:, :-1] = documents[:, 1:] != documents[:, :-1]
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    last = torch.where(ends, places, documents.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return positions.gather(1, last) + 1


def allowed_pairs(queries: Tensor, keys: Tensor, window: int, documents: Tensor | None) -> Tensor:
    """A mask (1 or B, 1, queries, keys), True where a query may see a key; both are given by their positions."""
    distance = queries[:, None] - keys[None, :]
    allowed = distance >= 0
    if window:
        allowed = allowed & (distance < window)
    if documents is None:
        return allowed[None, None]
    documents = documents.to(allowed.device)
    return (allowed & (documents[:, queries, None] == documents[:, None, keys]))[:, None]


def _boundaries(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Cumulative document lengths over the flattened batch: 0, ..., B * S."""
    batch, length = tokens.shape
    if documents is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=tokens.device)
    documents = documents.expand(batch, -1)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=batch * length)
    found = starts.to(tokens.device, torch.int32, non_blocking=True)
    torch._dynamo.maybe_mark_dynamic(found, 0)  # the length changes with every batch; one compiled graph serves all
    return found


def _block_mask(tokens: Tensor, window: int, documents: Tensor | None) -> Any:
    batch, length = tokens.shape
    rows = None if documents is None or len(documents) == 1 else batch
    if documents is not None:
        documents = documents.to(tokens.device).expand(batch, -1)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[b, query] == documents[b, key])
        return seen

    build = _compiled(create_block_mask) if tokens.is_cuda else create_block_mask
    return build(visible, rows, None, length, length, device=tokens.device)


# Choice of the kernel


def choose_kernel(
    arch: Architecture, device: torch.device, dtype: torch.dtype, plain: bool, length: int = CUDNN_TILE
) -> str:
    """The kernel for this device, type and sequence length; `plain` means causal, without documents or window."""
    backend = arch.attn_backend
    deterministic = torch.are_deterministic_algorithms_enabled()
    otherwise = "sdpa"
    if arch.sinks:  # PyTorch's function does not return the log-sum-exp
        otherwise = fastest_kernel(device, dtype, arch.head_dim, not plain, deterministic, fills_tiles(length))
    if arch.score_cap is not None:
        otherwise, plain = "math", False  # kernels for plain masks have no cap either
    if device.type != "cuda":
        if backend in ("flex", "varlen"):
            raise UserError(
                f"model.overrides.attn_backend = {backend!r} needs a CUDA device, but this run is on {device.type}; "
                "'auto' and 'sdpa' give the same results here (--model.overrides.attn_backend=auto)"
            )
        return otherwise
    if backend == "varlen":
        reason = _no_varlen(arch, dtype, device)
        if reason:
            raise UserError(
                f"model.overrides.attn_backend = 'varlen' cannot be used: {reason}; "
                "use 'flex' (--model.overrides.attn_backend=flex)"
            )
        return "varlen"
    if backend == "flex" and arch.head_dim < SMALLEST_FLEX_HEAD:
        raise UserError(
            f"model.overrides.attn_backend = 'flex' needs head_dim of at least {SMALLEST_FLEX_HEAD}, not"
            f" {arch.head_dim}; 'sdpa' supports any size (--model.overrides.attn_backend=sdpa)"
        )
    if backend == "flex" or (backend == "auto" and not plain):
        if backend == "auto" and not _no_varlen(arch, dtype, device):
            return "varlen"
        return "flex" if arch.head_dim >= SMALLEST_FLEX_HEAD else otherwise
    if plain:
        tiles = fills_tiles(length)
        fastest = fastest_kernel(device, dtype, arch.head_dim, False, deterministic, tiles, arch.v_dim)
        return otherwise if fastest == "math" else fastest
    return otherwise


def _no_varlen(arch: Architecture, dtype: torch.dtype, device: torch.device) -> str:
    """The reason why the varlen kernel cannot be used; empty when it can."""
    head_dim = arch.head_dim
    if arch.sinks:
        return "it has no gradient for attention sinks"
    if arch.score_cap is not None:
        return "it has no score_cap"
    if dtype not in HALF:
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256:
        return f"head_dim must be a multiple of 8 up to 256, not {head_dim}"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs a device of compute capability 8.0 or later"
    return "" if load_varlen() else "this PyTorch has no torch.nn.attention.varlen with window_size"


# The kernels: all take (B, H, S, D) except varlen


def _part_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Call a kernel of partial_attention.py with all keys as one part."""
    return KERNELS[mask.kernel].forward(q, k, v, mask.allowed is None, mask.allowed)[0]


def _sdpa_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """PyTorch's own choice. On CUDA it would use its slowest kernel for grouped heads, so KV heads are repeated."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda:
        k, v = for_every_head(q, k), for_every_head(q, v)
        grouped = False
    causal = mask.allowed is None
    width = v.shape[-1]
    v = v if q.is_cuda else as_wide_as(q, v)  # on a CPU, another width would materialise all S x S scores
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.allowed, is_causal=causal, enable_gqa=grouped)
    return out[..., :width]


def _flex_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None = None) -> Tensor:
    """FlexAttention, compiled with its block or else alone: uncompiled, it would materialise all S x S scores."""
    options: dict[str, Any] = {"block_mask": mask.block_mask, "score_mod": mask.score_mod}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    alone = q.is_cuda and not torch.compiler.is_compiling()
    flex: Any = _compiled(flex_attention) if alone else flex_attention
    if sink is None:
        return flex(q, k, v, **options)
    out, more = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))  # this lse has a gradient
    return add_sink(out, more.lse, sink)[0]


@functools.lru_cache
def _capping(cap: float) -> Callable[..., Tensor]:
    """The cap of scores as FlexAttention takes it: one function per cap, so that its compiled graph is reused."""

    def capping(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capping


class _InOnePart(torch.autograd.Function):
    """Attention with sinks or capped scores, by a kernel of partial_attention.py with all keys as one part.

    The kernels take no gradient of the log-sum-exp. They need none: once `out` and `lse` include the sink, their
    backward is that of the softmax with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        allowed: Tensor | None,
        kernel: str,
        cap: float | None,
    ) -> Tensor:
        out, lse = kernel_with(kernel, cap).forward(q, k, v, allowed is None, allowed)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, out, lse, sink, allowed)
        ctx.kernel, ctx.cap = kernel, cap
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink, allowed = ctx.saved_tensors
        kept = (gradient, q, k, v, out, lse)
        dq, dk, dv = kernel_with(ctx.kernel, ctx.cap).backward(*kept, allowed is None, allowed)
        of_sink = None if sink is None else sink_gradient(gradient, out, lse, sink)
        return dq, dk, dv, of_sink, None, None, None


def _varlen_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attention over packed documents as (B * S, H, D). The kernel's window does not count the query itself."""
    assert _varlen is not None, "load_varlen() comes first"
    length = q.shape[1]
    out = _varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, as_wide_as(q, v))),
        mask.boundaries,
        mask.boundaries,
        length,
        length,
        window_size=(mask.window - 1 if mask.window else -1, 0),
    )
    return out.unflatten(0, q.shape[:2])[..., : v.shape[-1]]


_KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]] = {
    "sdpa": _sdpa_kernel,
    "flex": _flex_kernel,
    **dict.fromkeys(KERNELS, _part_kernel),
}

_varlen: Callable[..., Any] | None = None


def load_varlen() -> bool:
    """Import the varlen kernel on first use (it takes a second). Return False if this PyTorch has none with windows."""
    global _varlen
    if _varlen is None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return False
        options = inspect.signature(varlen_attn).parameters
        if "window_size" not in options:
            return False
        _varlen = functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in options else varlen_attn
    return True


@functools.lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    separate_caches()
    return torch.compile(function)
