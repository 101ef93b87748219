"""Numbers that are too large for the type they are written in: noticed tensor by tensor, told once."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger("shardline")
MOST_NAMED = 3


class Converter:
    """Converts tensors that are written one after the other; float16, up to 65504, may turn large values into inf."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.overflowed: list[str] = []

    def __call__(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        self.seen.add(name)  # a large tensor may come in parts
        out = tensor.to(dtype)
        if dtype == torch.float16 and tensor.dtype != dtype and bool((out.isinf() & ~tensor.isinf()).any()):
            self.overflowed += [name] if name not in self.overflowed else []
        return out

    def warn(self) -> None:
        """After the last tensor."""
        if not self.overflowed:
            return
        names, more = ", ".join(self.overflowed[:MOST_NAMED]), len(self.overflowed) - MOST_NAMED
        logger.warning(
            "%d of %d tensors have values beyond float16's largest, 65504, which became inf: %s%s;"
            " bfloat16 and float32 hold them",
            len(self.overflowed),
            len(self.seen),
            names,
            f" and {more} more" if more > 0 else "",
        )
