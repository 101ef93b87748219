"""SwiGLU between two products, of dense feed-forward parts and of experts: silu(gate) * up.

A row of the first product holds `run` numbers of gate, then `run` of up, and so on. The gradient's pass recomputes the
result along the way, so backward needs only the first product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 2048  # columns per program where a row may be split


@torch.library.custom_op(
    "shardline::swiglu", mutates_args=(), schema="(Tensor product, Tensor? weights, int run) -> Tensor"
)
def swiglu_op(product: Tensor, weights: Tensor | None, run: int) -> Tensor:
    """silu(gate) * up (* weight): (n, 2 width) and (n, 1) -> (n, width)."""
    if not product.is_cuda:
        gate, up = _halves(_wide(product), run)
        middle = (F.silu(gate) * up).flatten(1)
        return (middle if weights is None else middle * weights).to(product.dtype)
    from shardline.models.experts.row_kernels import swiglu_kernel

    out = product.new_empty(product.shape[0], product.shape[1] // 2)
    if out.numel():
        grid, options = _programs(out, weights, run)
        given = product if weights is None else weights.contiguous()
        swiglu_kernel[grid](product.contiguous(), given, out, out.shape[1], **options)
    return out


@torch.library.custom_op(
    "shardline::swiglu_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor product, Tensor? weights, int run) -> (Tensor, Tensor, Tensor)",
)
def swiglu_gradient_op(
    gradient: Tensor, product: Tensor, weights: Tensor | None, run: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the product and of the weights (empty where there are none), and the result itself."""
    if not product.is_cuda:
        return _gradient_by_torch(gradient, product, weights, run)
    from shardline.models.experts.row_kernels import swiglu_gradient_kernel

    product = product.contiguous()
    of_product, of_weights = torch.empty_like(product), _of_weights(product, weights)
    out = product.new_empty(gradient.shape)
    if out.numel():
        grid, options = _programs(out, weights, run)
        given = (gradient.contiguous(), product, product if weights is None else weights.contiguous())
        swiglu_gradient_kernel[grid](*given, of_product, of_weights, out, out.shape[1], **options)
    return of_product, of_weights, out


def _programs(out: Tensor, weights: Tensor | None, run: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a kernel and its constants."""
    rows, width = out.shape
    whole = 1 << (width - 1).bit_length()  # a power of two
    block = whole if weights is not None else min(BLOCK, whole)
    return (rows, -(-width // block)), {"RUN": run, "WEIGHTED": weights is not None, "BLOCK": block}


def _gradient_by_torch(
    gradient: Tensor, product: Tensor, weights: Tensor | None, run: int
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _halves(_wide(product), run)
    given, bent = _wide(gradient).unflatten(1, (-1, run)), gate.sigmoid()
    middle, of_weights = gate * bent * up, _of_weights(product, weights)
    if weights is not None:
        of_weights = (given * middle).flatten(1).sum(1, keepdim=True).to(weights.dtype)
        given, middle = given * weights[:, :, None], middle * weights[:, :, None]
    of_gate, of_up = given * up * bent * (1 + gate * (1 - bent)), given * gate * bent
    of_product = torch.stack([of_gate, of_up], dim=2).flatten(1)
    return of_product.to(product.dtype), of_weights, middle.flatten(1).to(product.dtype)


def _halves(product: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Gate and up, (n, width / run, run) each."""
    gate, up = product.unflatten(1, (-1, 2, run)).unbind(2)
    return gate, up


def _of_weights(product: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return product.new_empty(0)
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


swiglu_op.register_fake(lambda product, weights, run: product.new_empty(product.shape[0], product.shape[1] // 2))
swiglu_gradient_op.register_fake(
    lambda gradient, product, weights, run: (
        torch.empty_like(product),
        _of_weights(product, weights),
        product.new_empty(gradient.shape),
    )
)


def swiglu(product: Tensor, weights: Tensor | None, run: int) -> Tensor:
    """silu(gate) * up (* weight), with a gradient."""
    out: Tensor = _SwiGLU.apply(product, weights, run)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, weights: Tensor | None, run: int) -> Tensor:
        ctx.save_for_backward(product, weights)
        ctx.run = run
        return swiglu_op(product, weights, run)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        product, weights = ctx.saved_tensors
        of_product, of_weights, _ = swiglu_gradient_op(gradient, product, weights, ctx.run)
        return of_product, None if weights is None else of_weights, None
