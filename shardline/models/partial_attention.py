"""Attention over a part of the keys, and putting parts together: kernels that return the log-sum-exp of the scores.

    out, lse = part(q, k, v, ...)                  softmax over these keys alone; lse says how much that softmax weighs
    merge_(out, lse, more, more_lse)               softmax over both sets of keys
    dq, dk, dv = part_backward(g, q, k, v, out, lse, ...)    of a part, given the merged `out` and `lse`: parts add up

Queries are (B, H, Q, D), keys and values (B, KV, K, D), lse (B, H, Q). A row that sees no key of a part has lse -inf
and an output of 0 there. The ops are private to PyTorch and used here (and in attention.py) alone; on a GPU each is
compared with the definition before its first use, and where it is missing or wrong the next one serves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.attention import fills_tiles

HALF = (torch.bfloat16, torch.float16)
MOST_SCORES = 2**26  # numbers that the definition keeps at a time
CLOSE = 3e-2  # of a kernel that computes in half precision, relative to the definition
Part = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
logger = logging.getLogger("shardline")
aten = torch.ops.aten


def part(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, allowed: Tensor | None = None) -> Part:
    """`allowed` (B or 1, 1, Q, K) of bool, or `causal`, or neither: every query sees every key."""
    out, lse = _KERNELS[_kernel(q, k, allowed)][0](q, k, v, causal, allowed)
    if allowed is None:
        return out, lse
    blind = ~allowed.any(dim=-1)  # (B or 1, 1, Q); kernels give such a row whatever they like
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, float("-inf"))


def part_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    allowed: Tensor | None = None,
) -> Gradients:
    """What these keys add to the gradients of q, k and v; `out` and `lse` are those over all keys."""
    backward = _KERNELS[_kernel(q, k, allowed)][1]
    return backward(gradient, q, k, v, out, lse, causal, allowed)


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Put another part into out (..., Q, D) and lse (..., Q), both wide. Rows that have seen nothing yet stay 0."""
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == float("-inf"), 0.0)  # -inf - -inf is no number
    out.mul_((lse - finite).exp_().unsqueeze(-1))
    out.add_(more * (more_lse - finite).exp_().unsqueeze(-1))
    lse.copy_(total)


def _kernel(q: Tensor, k: Tensor, allowed: Tensor | None) -> str:
    deterministic = torch.are_deterministic_algorithms_enabled()
    full_tiles = fills_tiles(q.shape[2], k.shape[2])
    return choose_part_kernel(q.device, q.dtype, q.shape[-1], allowed is not None, deterministic, full_tiles)


@functools.lru_cache
def choose_part_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool,
    deterministic: bool = False,
    full_tiles: bool = True,
) -> str:
    """As for whole sequences: cuDNN on Hopper and later, flash from Ampere on; efficient takes masks and float32."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "math"
    names = ["efficient"]
    if dtype in HALF and head_dim % 8 == 0 and not masked:
        major = torch.cuda.get_device_capability(device)[0]
        names = (["flash"] if major >= 8 and head_dim <= 256 else []) + names
        cudnn = major >= 9 and head_dim <= 128 and full_tiles and not deterministic
        names = (["cudnn"] if cudnn else []) + names
    return next((name for name in names if _right(name, device, dtype, head_dim, masked)), "math")


def _right(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> bool:
    """Whether a kernel gives what the definition gives, forward and backward; if not, a line says so."""
    source = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, tokens, heads, head_dim, device=device, generator=source).to(dtype).transpose(1, 2)

    try:
        with torch.inference_mode(False), torch.no_grad():
            q, k, v, gradient = drawn(2, 128), drawn(1, 256), drawn(1, 256), drawn(2, 128)
            for causal, keys in ((False, 64),) if masked else ((False, 256), (True, 128)):
                cut = (q, k[:, :, :keys], v[:, :, :keys])
                allowed = torch.ones(1, 1, 128, keys, dtype=torch.bool, device=device).tril(-8) if masked else None
                worst = max(
                    _distance(a, b)
                    for a, b in zip(
                        _both(name, gradient, *cut, causal, allowed),
                        _both("math", gradient, *cut, causal, allowed),
                        strict=True,
                    )
                )
                if not worst < CLOSE:
                    raise RuntimeError(f"it is {worst:.1e} off")
        return True
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.warning("attention in parts: the %s kernel does not run here, the next one is used (%s)", name, error)
        return False


def _both(name: str, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Any) -> list[Tensor]:
    """Output, lse and gradients, with rows that see nothing left out."""
    forward, backward = _KERNELS[name]
    out, lse = forward(q, k, v, causal, allowed)
    if allowed is not None:
        blind = ~allowed.any(dim=-1)
        out, lse = out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, 0)
    return [out, lse, *backward(gradient, q, k, v, out, lse, causal, allowed)]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


# The kernels


def _bias(q: Tensor, allowed: Tensor | None) -> Tensor | None:
    """0 where a query sees a key, -inf elsewhere, in the type of q."""
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, float("-inf"))


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None) -> Part:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_bias(q, allowed))
    return out, lse


def _cpu_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: Gradients = backward(g, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(q, allowed))
    return found


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None) -> Part:
    out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out, lse


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    seed, offset = _no_dropout(q.device, torch.uint64)
    lengths = (None, None, q.shape[2], k.shape[2])
    backward = aten._scaled_dot_product_flash_attention_backward
    found: Gradients = backward(g, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, offset)
    return found


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None) -> Part:
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse.reshape(q.shape[:3])  # (B, H, Q, 1)


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    seed, offset = _no_dropout(q.device, torch.int64)
    lengths = (None, None, q.shape[2], k.shape[2])
    kept = (out, lse.contiguous().unsqueeze(-1), seed, offset, None)
    backward = aten._scaled_dot_product_cudnn_attention_backward
    found: Gradients = backward(g, q, k, v, *kept, *lengths, 0.0, causal)
    return found


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None) -> Part:
    k, v = _for_every_head(q, k), _for_every_head(q, v)
    bias = _aligned_bias(q, k, allowed)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[:2]
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    heads = k.shape[1]
    k, v = _for_every_head(q, k), _for_every_head(q, v)
    bias = _aligned_bias(q, k, allowed)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # the kernel's own rows come in 32s
    seed, offset = _no_dropout(q.device, torch.int64)
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # in any other order in memory half precision reads astray
    dq, dk, dv, _ = backward(g, q, k, v, bias, out, lse, seed, offset, 0.0, wanted, causal)
    return dq, _of_groups(dk, heads), _of_groups(dv, heads)


def _aligned_bias(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor | None:
    """A row of the bias begins at a multiple of 16 elements."""
    bias = _bias(q, allowed)
    if bias is None:
        return None
    keys = k.shape[2]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(q.shape[0], q.shape[1], -1, -1)


def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state of a random generator that nobody asks."""
    state = torch.zeros(2, dtype=torch.int64, device=device).view(dtype)
    return state, state[0]


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None) -> Part:
    """The definition, some rows of queries at a time."""
    k, v = _for_every_head(q, k), _for_every_head(q, v)
    outs, sums = [], []
    for rows in _row_blocks(q, k):
        scores = _scores(q, k, rows, causal, allowed)
        lse = scores.logsumexp(dim=-1)
        outs.append((scores - _finite(lse)[..., None]).exp_().to(v.dtype) @ v)
        sums.append(lse)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _math_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = _for_every_head(q, k), _for_every_head(q, v)
    wide = lse.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in _row_blocks(q, k):
        weights = (_scores(q, k, rows, causal, allowed) - _finite(lse[:, :, rows])[..., None]).exp_()
        gradient = g[:, :, rows].to(wide)
        dv += weights.transpose(-2, -1) @ gradient
        own = (gradient * out[:, :, rows]).sum(dim=-1, keepdim=True)
        weights *= (gradient @ v.to(wide).transpose(-2, -1)).sub_(own).mul_(scale)
        dq[:, :, rows] = (weights @ k.to(wide)).to(q.dtype)
        dk += weights.transpose(-2, -1) @ q[:, :, rows].to(wide)
    return dq, _of_groups(dk, heads), _of_groups(dv, heads)


def _scores(q: Tensor, k: Tensor, rows: slice, causal: bool, allowed: Tensor | None) -> Tensor:
    """Of some rows, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q[:, :, rows].to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        places = torch.arange(q.shape[2], device=q.device)
        allowed = (places[:, None] >= torch.arange(k.shape[2], device=q.device))[None, None]
    return scores if allowed is None else scores.masked_fill_(~allowed[:, :, rows], float("-inf"))


def _row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, min(first + rows, q.shape[2])) for first in range(0, q.shape[2], rows)]


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _for_every_head(q: Tensor, k: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else k.repeat_interleave(group, dim=1)


def _of_groups(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of the heads that were repeated."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(dim=2)


_KERNELS: dict[str, tuple[Callable[..., Part], Callable[..., Gradients]]] = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "cudnn": (_cudnn, _cudnn_backward),
    "efficient": (_efficient, _efficient_backward),
    "math": (_math, _math_backward),
}
