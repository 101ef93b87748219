"""The validation loop: the mean loss per target token over the validation set, computed once in order."""

from __future__ import annotations

import torch

from shardline.data.loader import Loader
from shardline.models.decoder import Decoder
from shardline.parallel import comm
from shardline.parallel.data import free_gathered
from shardline.parallel.mesh import Mesh
from shardline.training.device import read
from shardline.training.head import Head
from shardline.training.loss import count_targets


@torch.no_grad()
def validation_loss(model: Decoder, head: Head, loader: Loader, steps: int, mesh: Mesh) -> float:
    """Sum of token losses over number of targets, over `steps` batches (-1: all of them) of every data rank."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=loader.device)
    for batch in loader.epoch(None if steps < 0 else steps):
        batch = batch if model.context is None else model.context.cut(batch)
        hidden = model.hidden(batch.tokens, documents=batch.documents)
        sums[0] += head.loss(model, hidden, batch.labels, 1.0) * head.share
        sums[1] += count_targets(batch.labels) / mesh.layout.tp
    if mesh.world_size > 1:
        comm.sum_in_place(sums, "world")
    free_gathered(model)
    model.train(was_training)
    total, targets = read(sums)
    return total / max(targets, 1.0)
