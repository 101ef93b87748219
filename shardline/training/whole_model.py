"""The passes of a model whose layers are all on this rank: forward and backward of a micro-batch, for next tokens."""

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
    """The passes of a model whose layers are all on this rank, sharded or not: micro-batch after micro-batch."""

    pipeline = None
    batches_at_once = 1  # of a validation
    names: tuple[str, ...] = ("loss",)  # of the numbers that a pass gives
    on_two_stages: frozenset[nn.Parameter] = frozenset()

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, head: Head) -> None:
        self.section, self.model, self.head = config.parallelism, model, head
        self.replicas = Replicas(model, config) if mesh.has_plain_replicas else None

    @property
    def share(self) -> float:
        """The part of this rank's numbers that counts in their sum over all ranks."""
        return self.head.share

    def count(self, batch: Batch) -> Tensor:
        """What the loss is a mean of: this rank's targets."""
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
        """Nothing to do: autograd has added up what both uses of a tied embedding give it."""

    def losses(self, batches: Sequence[Batch]) -> Tensor:
        """The sums of the numbers of some batches, without backward."""
        return torch.stack([self._loss(batch, 1.0)[1] for batch in batches]).sum(0)

    def logits_at(self, batch: Batch, places: Sequence[int]) -> Tensor:
        """(B, V): the logits after one token of each row, as `Head.logits_at` has them on this rank."""
        return self.head.logits_at(self.model, self.model.hidden(batch.tokens, documents=batch.documents), places)

    def _loss(self, batch: Batch, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """What backward begins with, and the numbers that are shown."""
        hidden = self.model.hidden(batch.tokens, documents=batch.documents, noise=batch.noise)
        loss = self.head.loss(self.model, hidden, batch.labels, scale)
        return loss, loss.detach()[None]
