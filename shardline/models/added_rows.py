"""Extend weights to a larger vocabulary than the one in their files: each new row is the mean of the stored rows.

Nothing is known about a new token yet. Its logit is then the mean of all logits, so the loss of a trained model does
not jump, as it would with random rows.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.models.huggingface.config import architecture_from_hf
from shardline.models.huggingface.files import read_hf
from shardline.storage.safetensors import LazyTensors

log = logging.getLogger("shardline")
BY_TOKEN = ("tok_embeddings.weight", "output.weight")
BLOCK = 4096  # rows summed at a time


def read_hf_enlarged(folder: Path, arch: Architecture) -> LazyTensors:
    """The weights of a Hugging Face folder, with the rows that its vocabulary lacks compared with `arch`."""
    stored = architecture_from_hf(folder).vocab_size if (folder / "config.json").is_file() else 0
    if not 0 < stored < arch.vocab_size:
        return read_hf(folder, arch)
    rows = arch.vocab_size - stored
    log.info("%d rows for added tokens, each the mean of the %d rows in %s", rows, stored, folder)
    return AddedRows(read_hf(folder, arch.model_copy(update={"vocab_size": stored})), stored, rows)


class AddedRows(LazyTensors):
    """The tensors of `inner`, with `rows` more rows in those that have one row per token."""

    def __init__(self, inner: LazyTensors, stored: int, rows: int) -> None:
        self.inner, self.stored, self.rows = inner, stored, rows
        self._rows = dict.fromkeys(inner)
        self._means: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, (slice(None),))

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        if name not in BY_TOKEN:
            return self.inner.part(name, place)
        start, stop, _ = place[0].indices(self.stored + self.rows)
        old = self.inner.part(name, (slice(min(start, self.stored), min(stop, self.stored)), *place[1:]))
        count = max(stop, self.stored) - max(start, self.stored)
        new = self._mean(name)[(slice(None), *place[1:])].to(old.dtype).expand(count, -1)
        return torch.cat([old, new]) if count else old

    def _mean(self, name: str) -> Tensor:
        """The mean of the stored rows (1, dim), summed in float64 whatever their type."""
        if name not in self._means:
            blocks = range(0, self.stored, BLOCK)
            parts = (self.inner.part(name, (slice(at, min(at + BLOCK, self.stored)),)) for at in blocks)
            total = torch.stack([part.double().sum(0) for part in parts]).sum(0)
            self._means[name] = (total / self.stored).float()[None]
        return self._means[name]
