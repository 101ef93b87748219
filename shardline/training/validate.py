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
    device = model.tok_embeddings.weight.device
    total, targets = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in loader.epoch(None if steps < 0 else steps):
        hidden = model.hidden(batch.tokens, documents=batch.documents)
        loss = chunked_cross_entropy(hidden, model.output_weight(), batch.labels, scale=1.0, chunk_tokens=chunk_tokens)
        total += loss
        targets += count_targets(batch.labels)
    model.train(was_training)
    return float(total / targets.clamp(min=1))
