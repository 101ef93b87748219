"""Gradient norm and clipping.

The norm is the root of a sum of squares. With several ranks each rank's squared sums are divided by how often a
gradient is replicated and all-reduced between `squared_sums` and the root; nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, a 0-d float32 tensor; does not wait for the device."""
    return squared_sums([parameter.grad for parameter in parameters if parameter.grad is not None]).sum().sqrt()


def squared_sums(gradients: list[Tensor]) -> Tensor:
    """(number of gradients,) float32: the sum of squares of each, whatever the gradients' dtype."""
    if not gradients:
        return torch.zeros(0)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.stack([norm.to(gradients[0].device) for norm in norms]).square()


def clip_(parameters: Iterable[nn.Parameter], norm: Tensor | float, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most max_norm; `max_norm` 0 or less, or inf, leaves them alone.

    With a norm that is already a number the pass over the gradients is left out when there is nothing to do.
    """
    if max_norm <= 0 or math.isinf(max_norm):
        return
    if isinstance(norm, float):
        if norm + 1e-6 <= max_norm:
            return
        norm = torch.tensor(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient holds an inf or nan; waits for the device, so only after a bad norm."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not gradients:
        return []
    device = next(iter(gradients.values())).device
    finite = torch.stack([torch.isfinite(gradient).all().to(device) for gradient in gradients.values()])
    return [name for name, good in zip(gradients, finite.tolist(), strict=True) if not good]
