"""Attention over a part of the keys, by kernels that return the log-sum-exp (lse) of the scores.

    out, lse = part(q, k, v, ...)                            softmax over these keys alone; lse is its weight
    merge_(out, lse, more, more_lse)                         softmax over both sets of keys
    out, lse = add_sink(out, lse, sink)                      one more score without a value, after all parts
    dq, dk, dv = part_backward(g, q, k, v, out, lse, ...)    with the merged `out` and `lse`; gradients of parts add up

Queries are (B, H, Q, D), keys and values (B, KV, K, D), lse (B, H, Q); values may be narrower than D. With a `cap`,
scores are capped (norms.py), which only the reference kernel (`math`) can do. A row that sees no key of a part has lse
-inf and output 0 there. attention.py calls the same kernels for whole sequences. Their ops are private to PyTorch and
used in this file alone. On a GPU each kernel is compared with the reference before its first use; if it is missing or
wrong, the next one is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.models.norms import cap_slope, capped

HALF = (torch.bfloat16, torch.float16)
CUDNN_TILE = 128  # tokens; the backward of a tile that is not full may read uninitialised memory and give NaN
MOST_SCORES = 2**26  # scores that the reference kernel keeps at a time
CLOSE = 3e-2  # relative error that a kernel may have against the reference; it may compute in half precision
Part = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
logger = logging.getLogger("shardline")
aten = torch.ops.aten


def part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    allowed: Tensor | None = None,
    kernel: str | None = None,
    cap: float | None = None,
) -> Part:
    """Output and lse under `allowed` (B or 1, 1, Q, K) of bool, or `causal`; with neither every query sees all keys."""
    out, lse = kernel_with(kernel or _kernel(q, k, v, allowed), cap).forward(q, k, v, causal, allowed)
    if allowed is None:
        return out, lse
    blind = ~allowed.any(dim=-1)  # (B or 1, 1, Q); kernels return undefined values for such a row
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
    kernel: str | None = None,
    cap: float | None = None,
) -> Gradients:
    """The contribution of these keys to the gradients of q, k and v; `out` and `lse` are those over all keys."""
    chosen = kernel_with(kernel or _kernel(q, k, v, allowed), cap)
    return chosen.backward(gradient, q, k, v, out, lse, causal, allowed)


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge another part into out (..., Q, D) and lse (..., Q), both float32 or wider. Rows without any key stay 0."""
    total = torch.logaddexp(lse, more_lse)
    finite = _finite(total)  # -inf - -inf would be NaN
    out.mul_((lse - finite).exp_().unsqueeze(-1))
    out.add_(more * (more_lse - finite).exp_().unsqueeze(-1))
    lse.copy_(total)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Part:
    """Add to the softmax one more key, whose score is `sink` (H,) and whose value is 0.

    Given the result, `part_backward` returns the gradients of q, k and v.
    """
    sink = sink.to(lse.dtype)[:, None]
    return (out * torch.sigmoid(lse - sink).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink)


def sink_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The gradient of `sink`; `out` (B, H, Q, D) and `lse` (B, H, Q) are those with it."""
    weight = (sink.to(lse.dtype)[:, None] - lse).exp()
    own = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    return -(weight * own).sum(dim=(0, 2)).to(sink.dtype)


# Choice of the kernel


def _kernel(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> str:
    deterministic = torch.are_deterministic_algorithms_enabled()
    full_tiles = fills_tiles(q.shape[2], k.shape[2])
    return fastest_kernel(q.device, q.dtype, q.shape[-1], allowed is not None, deterministic, full_tiles, v.shape[-1])


def fills_tiles(*lengths: int) -> bool:
    """Whether cuDNN's backward can be trusted with sequences of these lengths."""
    return all(length % CUDNN_TILE == 0 for length in lengths)


@functools.lru_cache
def fastest_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool = False,
    deterministic: bool = False,
    full_tiles: bool = True,
    v_dim: int | None = None,
) -> str:
    """cuDNN on Hopper and later, flash from Ampere on, memory-efficient for masks, float32 and old devices.

    Values are as wide as keys where `v_dim` is not given. cuDNN's backward sums in no fixed order; flash's order is
    fixed when PyTorch is set to be deterministic.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "math"
    names = ["efficient"]
    if dtype in HALF and head_dim % 8 == 0 and not masked:
        major = torch.cuda.get_device_capability(device)[0]
        names = (["flash"] if major >= 8 and head_dim <= 256 else []) + names
        taken = head_dim <= 128 or (head_dim, v_dim) == (192, 128)
        cudnn = major >= 9 and taken and full_tiles and not deterministic
        names = (["cudnn"] if cudnn else []) + names
    return next((name for name in names if _agrees(name, device, dtype, head_dim, masked, v_dim)), "math")


def _agrees(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool, v_dim: int | None = None
) -> bool:
    """Whether a kernel agrees with the reference kernel, forward and backward; a failure is logged."""
    source = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, tokens: int, width: int) -> Tensor:
        return torch.randn(1, tokens, heads, width, device=device, generator=source).to(dtype).transpose(1, 2)

    try:
        with torch.inference_mode(False), torch.no_grad():
            q, gradient = drawn(2, 128, head_dim), drawn(2, 128, v_dim or head_dim)
            k, v = drawn(1, 256, head_dim), drawn(1, 256, v_dim or head_dim)
            for causal, keys in ((False, 64),) if masked else ((False, 256), (True, 128)):
                allowed = torch.ones(1, 1, 128, keys, dtype=torch.bool, device=device).tril(-8) if masked else None
                case = (gradient, q, k[:, :, :keys], v[:, :, :keys], causal, allowed)
                worst = max(map(_distance, _both(name, *case), _both("math", *case)))
                if not worst < CLOSE:
                    raise RuntimeError(f"its relative error is {worst:.1e}")
        return True
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.warning("attention: the %s kernel cannot be used here, trying the next one (%s)", name, error)
        return False


def _both(name: str, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Any) -> list[Tensor]:
    """Output, lse and gradients of one kernel; rows that see no key are 0."""
    out, lse = part(q, k, v, causal, allowed, name)
    lse = _finite(lse)
    return [out, lse, *part_backward(gradient, q, k, v, out, lse, causal, allowed, name)]


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
    k, v = for_every_head(q, k), for_every_head(q, v)
    bias = _aligned_bias(q, k, allowed)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)[:2]
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, allowed: Tensor | None
) -> Gradients:
    heads = k.shape[1]
    k, v = for_every_head(q, k), for_every_head(q, v)
    bias = _aligned_bias(q, k, allowed)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # the kernel pads its rows to multiples of 32
    seed, offset = _no_dropout(q.device, torch.int64)
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # half precision gives wrong numbers in any other layout
    dq, dk, dv, _ = backward(g, q, k, v, bias, out, lse, seed, offset, 0.0, wanted, causal)
    return dq, _of_groups(dk, heads), _of_groups(dv, heads)


def _aligned_bias(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor | None:
    """The bias with rows that begin at multiples of 16 elements, as the kernel needs them."""
    bias = _bias(q, allowed)
    if bias is None:
        return None
    keys = k.shape[2]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(q.shape[0], q.shape[1], -1, -1)


def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The random state that the backward ops take; without dropout it is not read."""
    state = torch.zeros(2, dtype=torch.int64, device=device).view(dtype)
    return state, state[0]


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None, cap: float | None = None) -> Part:
    """The reference: attention as defined, one block of query rows at a time."""
    k, v = for_every_head(q, k), for_every_head(q, v)
    outs, sums = [], []
    for rows in _row_blocks(q, k):
        scores = _masked(capped(_scores(q, k, rows), cap), rows, causal, allowed)
        lse = scores.logsumexp(dim=-1)
        outs.append((scores - _finite(lse)[..., None]).exp_().to(v.dtype) @ v)
        sums.append(lse)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _math_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    allowed: Tensor | None,
    cap: float | None = None,
) -> Gradients:
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = for_every_head(q, k), for_every_head(q, v)
    wide = lse.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in _row_blocks(q, k):
        scores = capped(_scores(q, k, rows), cap)
        slope = None if cap is None else cap_slope(scores, cap)  # before the mask sets scores to -inf
        weights = (_masked(scores, rows, causal, allowed) - _finite(lse[:, :, rows])[..., None]).exp_()
        gradient = g[:, :, rows].to(wide)
        dv += weights.transpose(-2, -1) @ gradient
        own = (gradient * out[:, :, rows]).sum(dim=-1, keepdim=True)
        weights *= (gradient @ v.to(wide).transpose(-2, -1)).sub_(own).mul_(scale)
        if slope is not None:
            weights *= slope
        dq[:, :, rows] = (weights @ k.to(wide)).to(q.dtype)
        dk += weights.transpose(-2, -1) @ q[:, :, rows].to(wide)
    return dq, _of_groups(dk, heads), _of_groups(dv, heads)


def _scores(q: Tensor, k: Tensor, rows: slice) -> Tensor:
    """The scores of some query rows, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q[:, :, rows].to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5


def _masked(scores: Tensor, rows: slice, causal: bool, allowed: Tensor | None) -> Tensor:
    """Set the scores of these query rows to -inf in place for keys that a row does not see."""
    if causal:
        seen = torch.arange(rows.start, rows.stop, device=scores.device)[:, None] >= torch.arange(
            scores.shape[-1], device=scores.device
        )
        return scores.masked_fill_(~seen, float("-inf"))
    return scores if allowed is None else scores.masked_fill_(~allowed[:, :, rows], float("-inf"))


def _row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, min(first + rows, q.shape[2])) for first in range(0, q.shape[2], rows)]


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


def as_wide_as(q: Tensor, v: Tensor) -> Tensor:
    """Pad values with zeros to the width of q."""
    return v if v.shape[-1] == q.shape[-1] else F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def for_every_head(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values for each query head, from (B, KV, K, D) to (B, H, K, D)."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else k.repeat_interleave(group, dim=1)


def _of_groups(gradient: Tensor, heads: int) -> Tensor:
    """Sum the gradient of repeated keys or values over the query heads of each KV head."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(dim=2)


class Kernel(NamedTuple):
    forward: Callable[..., Part]  # (q, k, v, causal, allowed)
    backward: Callable[..., Gradients]  # (gradient, q, k, v, out, lse, causal, allowed)


def kernel_with(name: str, cap: float | None) -> Kernel:
    """The kernel called `name`; with a cap, the reference kernel, the only one that supports caps."""
    if cap is None:
        return KERNELS[name]
    return Kernel(functools.partial(_math, cap=cap), functools.partial(_math_backward, cap=cap))


def _of_one_width(kernel: Kernel) -> Kernel:
    """Wrap a kernel that needs values as wide as keys, so that it takes narrower ones."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> Part:
        out, lse = kernel.forward(q, k, as_wide_as(q, v), *mask)
        return out[..., : v.shape[-1]], lse

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Gradients:
        dq, dk, dv = kernel.backward(as_wide_as(q, g), q, k, as_wide_as(q, v), as_wide_as(q, out), *rest)
        return dq, dk, dv[..., : v.shape[-1]]

    return Kernel(forward, backward)


KERNELS = {
    "cpu": _of_one_width(Kernel(_cpu, _cpu_backward)),
    "flash": _of_one_width(Kernel(_flash, _flash_backward)),
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "math": Kernel(_math, _math_backward),
}
