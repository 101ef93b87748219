"""The validation loop: the mean loss per target token over the validation set, computed once in order."""

from __future__ import annotations

import torch

from shardline.data.loader import Loader
from shardline.models.decoder import Decoder
from shardline.training.loss import chunked_cross_entropy, count_targets


@torch.no_grad()
def validation_loss(model: Decoder, loader: Loader, steps: int, chunk_tokens: int) -> float:
    """Sum of token losses over number of targets, over `steps` batches (-1: all of them)."""
    was_training = model.training
    model.eval()
    total, targets = 0.0, 0
    for batch in loader.epoch(None if steps < 0 else steps):
        hidden = model.hidden(batch.tokens, documents=batch.documents)
        loss = chunked_cross_entropy(hidden, model.output_weight(), batch.labels, scale=1.0, chunk_tokens=chunk_tokens)
        total += float(loss)
        targets += int(count_targets(batch.labels))
    model.train(was_training)
    return total / max(targets, 1)
