"""The passes of a model that is split into pipeline stages, with the methods of `WholeModel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.models.decoder import Decoder, Stage
from shardline.models.dtensor import local
from shardline.parallel.data.ddp import Replicas
from shardline.parallel.data.stage_reduction import StageSums, stage_users
from shardline.parallel.pipeline.executor import MicroBatch, Pipeline
from shardline.parallel.pipeline.stages import PipelinePlan
from shardline.training.loss import Head, count_targets


class PipelinedModel:
    """The stages of this rank. `replicas` are built here, because their buckets must not span stages."""

    def __init__(
        self, config: Config, model: Decoder, mesh: Mesh, plan: PipelinePlan, head: Head, device: torch.device
    ) -> None:
        self.plan, self.model, self.head = plan, model, head
        self.batches_at_once = mesh.layout.pp  # during validation: one for each pipeline rank
        self.rank = mesh.coordinates["pp"]
        self.stages = {index: plan.stages[index] for index in plan.schedule.stages_of(self.rank)}
        users = stage_users(model, self.stages)
        self.replicas = Replicas(model, config, users) if mesh.has_plain_replicas else None
        self.sums = StageSums(model, config.parallelism, self.stages, self.replicas)
        self.pipeline = Pipeline(plan, device, self._describe)

    def _describe(self, tokens: Tensor) -> tuple[Sequence[int], torch.dtype]:
        """Shape and type of the residual stream: (B, S, dim), or flat rows under tensor parallelism."""
        arch, tensor = self.model.arch, self.head.tensor
        dtype = self.model.compute_dtype or torch.get_default_dtype()
        if tensor is None:
            return (*tokens.shape, arch.dim), dtype
        return (tokens.numel() // (tensor.degree if tensor.sequence_parallel else 1), arch.dim), dtype

    names: tuple[str, ...] = ("loss",)

    @property
    def share(self) -> float:
        return self.head.share

    def count(self, batch: Batch) -> Tensor:
        return count_targets(batch.labels)

    # ---- training ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        """Run the schedule once and return this rank's part of the loss; the `last` call of a step sums gradients."""

        def forward(micro_batch: MicroBatch, x: Tensor | None, stage: Stage) -> Tensor:
            return self._forward(micro_batch, x, stage, scale)

        self.sums.begin(last)
        return self.pipeline.run(self._cut(batch), forward, self.sums.done)

    def finish(self) -> None:
        """After the last batch of a step: wait until the replicas' gradients are summed."""
        if self.replicas is not None:
            self.replicas.finish()

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        size = self.plan.microbatch_size
        count = batch.tokens.shape[0] // size
        documents, noise = (
            [None] * count if rows is None else rows.split(size) for rows in (batch.documents, batch.noise)
        )
        return [
            MicroBatch(*parts)
            for parts in zip(batch.tokens.split(size), batch.labels.split(size), documents, noise, strict=True)
        ]

    def _forward(self, batch: MicroBatch, x: Tensor | None, stage: Stage, scale: Tensor | float) -> Tensor:
        out = self.model.hidden(batch.tokens, stage=stage, x=x, documents=batch.documents, noise=batch.noise)
        return self.head.loss(self.model, out, batch.labels, scale) if stage.last else out

    # ---- tied embeddings ---------------------------------------------------------------------------------------------

    @property
    def on_two_stages(self) -> frozenset[nn.Parameter]:
        """The embedding if it is tied to the output on another rank: two ranks then hold the same parameter."""
        first, last = self.plan.ends
        if not self.model.arch.tie_word_embeddings or first == last or self.rank not in (first, last):
            return frozenset()
        assert self.model.tok_embeddings is not None
        return frozenset({self.model.tok_embeddings.weight})

    def sum_tied(self) -> None:
        """Add up the gradients of the two ranks that hold it; a sum of two has the same bits in either order."""
        first, last = self.plan.ends
        for parameter in self.on_two_stages:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                peer = last if self.rank == first else first
                gradient += self.pipeline.channels.swap(gradient, peer, "tied embedding's gradient")

    # ---- validation --------------------------------------------------------------------------------------------------

    def losses(self, batches: Sequence[Batch]) -> Tensor:
        """Sum the token losses of some batches without backward; 0 if another rank has the last stage."""

        def forward(micro_batch: MicroBatch, x: Tensor | None, stage: Stage) -> Tensor:
            return self._forward(micro_batch, x, stage, 1.0)

        return self.pipeline.losses([MicroBatch(b.tokens, b.labels, b.documents) for b in batches], forward)

    def logits_at(self, batch: Batch, places: Sequence[int]) -> Tensor:
        """(B, V): the logits after one token of each row, as in `Head.logits_at`; 0 without the last stage."""
        logits = torch.zeros((len(places), self.model.arch.vocab_size), device=batch.tokens.device)
        parts = iter(zip(logits.split(size := self.plan.microbatch_size), range(0, len(places), size), strict=True))

        def forward(micro_batch: MicroBatch, x: Tensor | None, stage: Stage) -> Tensor:
            out = self.model.hidden(micro_batch.tokens, stage=stage, x=x, documents=micro_batch.documents)
            if not stage.last:
                return out
            part, start = next(parts)  # the last stage gets them in order
            part.copy_(self.head.logits_at(self.model, out, places[start : start + size]))
            return part.new_zeros(())

        self.pipeline.losses(self._cut(batch), forward)
        return logits
