"""Exchanges gradients in 8 bits, or only the largest; each rank adds what was left out to its next gradients.

    int8   rank 0   gradient + error -> codes of part 0 | part 1    all-to-all    sum of part 0 -> codes   all-gather
           rank 1   gradient + error -> codes of part 0 | part 1   ------------>  sum of part 1 -> codes  ----------->

    topk   each rank   the k largest of (gradient + error), and their positions   all-gather, added in rank order

A rank sends a quarter of float32's bytes and a scale for every 256 elements (int8), or (n - 1) times 8 bytes for each
of the k elements (topk). The rank that rounds a sum keeps the rounding error. The errors take as much memory as the
gradients in float32 and are saved in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.parallel.data.compression import GradientExchange, flatten, unflatten

BLOCK = 256  # elements that share a scale
SMALLEST = torch.finfo(torch.float32).tiny


class FeedbackExchange(GradientExchange):
    """Keeps in `error`, one vector for the bucket, what it left out of the sums."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str) -> None:
        super().__init__(shapes, dtype, axis)
        self.elements = sum(math.prod(shape) for shape in shapes)
        self.error: Tensor | None = None

    def memories(self, device: torch.device) -> list[Tensor]:
        """Return the error of every gradient, in its shape; loading a checkpoint fills these tensors."""
        return unflatten(self._kept(device)[: self.elements], self.shapes)

    def _kept(self, device: torch.device) -> Tensor:
        if self.error is None:
            self.error = torch.zeros(self._length(), device=device)
        return self.error

    def _length(self) -> int:
        return self.elements

    def _due(self, gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """Add the gradients to the error of earlier ones, in place, and return the sum."""
        error = self._kept(device)
        error[: self.elements] += flatten(gradients, self.shapes, torch.float32, device)
        return error

    def _result(self, flat: Tensor) -> list[Tensor]:
        return unflatten(flat[: self.elements].to(self.dtype), self.shapes)


class Int8Exchange(FeedbackExchange):
    """Sums each part of the bucket on one rank, from 8-bit codes, and all-gathers the sums as 8-bit codes."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str) -> None:
        super().__init__(shapes, dtype, axis)
        self.ranks, self.rank = collectives.axis(axis).size, collectives.axis(axis).rank
        self.part = math.ceil(self.elements / self.ranks / BLOCK) * BLOCK
        self.summed = False

    def _length(self) -> int:
        return self.ranks * self.part

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        due = self._due(gradients, device)
        message = to_codes(due.view(self.ranks, self.part))
        due.sub_(from_codes(message).view(-1)).nan_to_num_(0.0, 0.0, 0.0)  # a nonfinite error would stay forever
        received = torch.empty_like(message)
        self._sending, self.summed = (received, collectives.start_exchange(received, message, self.axis)), False

    def advance(self) -> None:
        """Sum this rank's part, and start to all-gather the sums of all parts."""
        if self.summed or self._sending is None:
            return
        total = from_codes(self._received()).sum(0, keepdim=True)
        message = to_codes(total)
        own = self._kept(total.device).view(self.ranks, self.part)[self.rank]
        own.add_(total[0] - from_codes(message)[0]).nan_to_num_(0.0, 0.0, 0.0)
        gathered = message.new_empty(self.ranks, message.shape[1])
        self._sending, self.summed = (gathered, collectives.start_gather(gathered, message, self.axis)), True

    def finish(self) -> list[Tensor]:
        self.advance()
        return self._result(from_codes(self._received()).view(-1))


class TopKExchange(FeedbackExchange):
    """Sends the largest elements of the bucket, as values and positions."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str, fraction: float) -> None:
        super().__init__(shapes, dtype, axis)
        self.ranks = collectives.axis(axis).size
        self.sent = min(self.elements, max(1, math.ceil(fraction * self.elements)))
        self.positions = torch.int32 if self.elements < 2**31 else torch.int64

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        due = self._due(gradients, device)
        chosen = due.abs().topk(self.sent, sorted=False).indices  # NaN counts as the largest value
        values = due[chosen]
        due[chosen] = 0.0
        due.nan_to_num_(0.0, 0.0, 0.0)
        message = torch.cat([values.view(torch.uint8), chosen.to(self.positions).view(torch.uint8)]).unsqueeze(0)
        received = message.new_empty(self.ranks, message.shape[1])
        self._sending = received, collectives.start_gather(received, message, self.axis)

    def finish(self) -> list[Tensor]:
        received = self._received()
        total = torch.zeros(self.elements, device=received.device)
        for message in received:
            values, positions = message.split([4 * self.sent, len(message) - 4 * self.sent])
            total.index_add_(0, positions.view(self.positions), values.view(torch.float32))
        return self._result(total)


def to_codes(x: Tensor) -> Tensor:
    """(n, elements) -> (n, bytes): a code for every element, then the scale of every block.

    A nonfinite element makes the scale, and with it the whole block, nonfinite.
    """
    blocks = x.reshape(len(x), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).clamp_min(SMALLEST)
    codes = (blocks / scales.unsqueeze(-1)).round_().to(torch.int8)
    return torch.cat([codes.view(len(x), -1).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def from_codes(message: Tensor) -> Tensor:
    """(n, bytes) -> (n, elements)"""
    blocks = message.shape[1] // (BLOCK + 4)
    codes, scales = message.split([blocks * BLOCK, blocks * 4], dim=1)
    scales = scales.contiguous().view(torch.float32)
    return (codes.view(torch.int8).reshape(len(message), blocks, BLOCK) * scales.unsqueeze(-1)).view(len(message), -1)
