"""Narrow copies of weights, kept between steps: bfloat16 for the products, float32 for the optimizer.

Without them a weight is cast wherever it is used, in forward and again in backward. A copy costs 2 bytes per parameter,
which the gradient saves again: it stays in bfloat16, in which the product computes it. A copy is renewed when torch has
changed the weight since (by its version); the optimizer's kernel writes both and leaves the version alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "shardline_narrow"  # attribute of a parameter


class _Copy:
    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self.tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self.version = -1


def keep_narrow(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Keep a copy of the parameter in `dtype`, which is also the type of its gradients."""
    setattr(parameter, _NAME, _Copy(parameter, dtype))
    parameter.grad_dtype = dtype


def narrow_copy(parameter: Tensor) -> Tensor | None:
    """The copy of a parameter, without renewing it; None where none is kept."""
    copy: _Copy | None = getattr(parameter, _NAME, None)
    return None if copy is None else copy.tensor


def narrowed(parameter: Tensor) -> Tensor:
    """The parameter's narrow copy, whose gradient goes to the parameter; itself where no copy is kept."""
    copy = _renewed(parameter)
    if copy is None:
        return parameter
    out: Tensor = _Narrowed.apply(parameter, copy.tensor)
    return out


def renew_copies(parameters: Iterable[Tensor]) -> None:
    """Renew the copies of parameters that torch has changed since."""
    for parameter in parameters:
        _renewed(parameter)


def _renewed(parameter: Tensor) -> _Copy | None:
    copy: _Copy | None = getattr(parameter, _NAME, None)
    if copy is not None and copy.version != parameter._version:
        with torch.no_grad():
            copy.tensor.copy_(parameter)
        copy.version = parameter._version
    return copy


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
