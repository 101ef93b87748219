"""The validation loop: the mean loss per target token over the validation set, computed once in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.data.loader import Loader
from shardline.models.decoder import Decoder
from shardline.parallel.data.fsdp import free_gathered
from shardline.run.device import read
from shardline.training.loss import Head, count_targets
from shardline.training.pipelined_step import Pipelined


@torch.no_grad()
def validation_loss(
    model: Decoder,
    head: Head,
    loader: Loader,
    steps: int,
    mesh: Mesh,
    pipelined: Pipelined | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Sum of token losses over number of targets, over `steps` batches (-1: all of them) of every data rank.

    None where `stop`, asked between batches, says so; it must say the same on every rank.
    """
    was_training = model.training
    model.eval()
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=loader.device), False
    batches = iter(loader.epoch(None if steps < 0 else steps))
    # With stages, as many batches at a time as there are ranks: each computes one while the others have the rest.
    while not stopped and (some := list(itertools.islice(batches, mesh.layout.pp))):
        some = [batch if model.context is None else model.context.cut(batch) for batch in some]
        if pipelined is not None:
            sums[0] += pipelined.losses(some) * head.share
        for batch in some:
            if pipelined is None:
                hidden = model.hidden(batch.tokens, documents=batch.documents)
                sums[0] += head.loss(model, hidden, batch.labels, 1.0) * head.share
            sums[1] += count_targets(batch.labels) / (mesh.layout.tp * mesh.layout.pp)
        stopped = stop()
    free_gathered(model)
    model.train(was_training)
    if stopped:
        return None
    if mesh.world_size > 1:
        collectives.sum_in_place(sums, "world")
    total, targets = read(sums)
    return total / max(targets, 1.0)
