"""A batch: rows of tokens with their targets, on its way from the data to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

IGNORE = -100  # label of a token that is not a target


@dataclass
class Batch:
    """B rows of S tokens. `documents` numbers the documents within each row (block_causal only)."""

    tokens: torch.Tensor  # (B, S) int64
    labels: torch.Tensor  # (B, S) int64, IGNORE where there is no target
    documents: torch.Tensor | None  # (B, S) int32
    sample_ids: torch.Tensor  # (B,) int64, the global sample numbers, -1 for padding; (B / 2,) for pairs of rows
    noise: torch.Tensor | None = None  # (B, S) int64, keys of noise on the embeddings; the step sets them

    def to(self, device: torch.device) -> Batch:
        """Move all but `documents`: on the CPU their boundaries are found without waiting for the device.

        A copy from page-locked memory to a GPU does not wait for the step that runs there.
        """
        locked = self.pin_memory() if device.type == "cuda" and not self.tokens.is_pinned() else self
        moved = locked._each(lambda tensor: tensor.to(device, non_blocking=True))
        return Batch(moved.tokens, moved.labels, self.documents, moved.sample_ids)

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory; DataLoader pins objects of types it does not know by this method."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> Batch:
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.tokens), change(self.labels), documents, change(self.sample_ids))


Item = tuple[np.ndarray, np.ndarray]  # (B,) global sample numbers, -1 for padding; (B,) their first tokens
