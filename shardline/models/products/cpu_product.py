"""Float32 products on a CPU, by oneDNN where torch's default, MKL, leaves half of the CPU unused.

MKL has its best kernels for Intel's CPUs. On an AMD EPYC with AVX-512, one core multiplies (2048, 128) by (128, 768) at
103 GFLOP/s with MKL and at 236 with oneDNN. The op is private to torch; without it, torch's default is used.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def served(x: Tensor) -> bool:
    """Whether oneDNN's product is the faster one for x."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and onednn() is not None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), both possibly views; for use inside autograd functions."""
    return onednn()(x, weight, bias, "none", [], "") if served(x) else F.linear(x, weight, bias)


def multiply_add(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """`other` plus x (n, in) times weight (out, in), in one pass. Tensors without memory need torch's own op."""
    if type(x) not in (Tensor, nn.Parameter) or not served(x):
        return torch.addmm(other, x, weight.t())
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, None, "add")
    return out


@functools.cache
def onednn() -> Any:
    """The op, which has no gradient of its own; None where it is missing or MKL is as fast."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available() or _made_by_intel():
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def _made_by_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
