"""Forward and backward passes of a model whose layers are all on this rank, for next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.models.decoder import Decoder
from shardline.parallel.data.ddp import Replicas
from shardline.parallel.data.fsdp import set_gradient_sync
from shardline.training.loss import Head, count_targets, run_backward


class WholeModel:
    """The passes of a model whose layers are all on this rank, sharded or not, one micro-batch after another."""

    pipeline = None
    batches_at_once = 1  # during validation
    names: tuple[str, ...] = ("loss",)  # of the numbers that a pass returns
    on_two_stages: frozenset[nn.Parameter] = frozenset()

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, head: Head) -> None:
        self.section, self.model, self.head = config.parallelism, model, head
        self.replicas = Replicas(model, config) if mesh.has_plain_replicas else None

    @property
    def share(self) -> float:
        """The fraction of this rank's numbers that counts in their sum over all ranks."""
        return self.head.share

    def count(self, batch: Batch) -> Tensor:
        """The number of this rank's targets, over which the loss is a mean."""
        return count_targets(batch.labels)

    def forward_backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        """This rank's part of the loss; with the `last` batch of a step, gradients are summed over data ranks."""
        set_gradient_sync(self.model, self.section, last)
        if self.replicas is not None:
            self.replicas.expect(last, every_micro_batch=self.section.accumulation_sync == "micro_batch")
        loss, numbers = self._loss(batch, scale)
        run_backward(loss)
        return numbers

    def finish(self) -> None:
        """After the last batch of a step: wait until the replicas' gradients are summed."""
        if self.replicas is not None:
            self.replicas.finish()

    def sum_tied(self) -> None:
        """Do nothing: autograd has already added up the gradients of both uses of a tied embedding."""

    def losses(self, batches: Sequence[Batch]) -> Tensor:
        """Sum the numbers of some batches, without a backward pass."""
        return torch.stack([self._loss(batch, 1.0)[1] for batch in batches]).sum(0)

    def logits_at(self, batch: Batch, places: Sequence[int]) -> Tensor:
        """(B, V): this rank's part of the logits after one token of each row, as `Head.logits_at` returns it."""
        return self.head.logits_at(self.model, self.model.hidden(batch.tokens, documents=batch.documents), places)

    def _loss(self, batch: Batch, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the loss for backward, and the numbers to report."""
        hidden = self.model.hidden(batch.tokens, documents=batch.documents, noise=batch.noise)
        loss = self.head.loss(self.model, hidden, batch.labels, scale)
        return loss, loss.detach()[None]
