"""Forward and backward of a micro-batch as one CUDA graph: where kernels are short, launching them takes the time.

    step 1     as it is: everything is compiled, chosen and allocated
    step 2     the first micro-batch is recorded, which writes gradients, and the second, which adds to them
    later      tokens, labels and scale are copied to where the recording reads them, and it is replayed

Nothing of Python runs in a replay. What it would do with each batch is refused by `check_cuda_graphs`, or done before a
replay: narrow copies of weights are made again where torch has changed the weights (a loaded checkpoint, for instance).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.products.narrow import renew_copies
from shardline.parallel.apply import Applied
from shardline.training.loss import Head
from shardline.training.whole_model import WholeModel

log = logging.getLogger("shardline")
SECOND_STEP = 2


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # that the pass gives
    held: Any  # what the kernels read, and the model may replace: tables of positions


class GraphedModel(WholeModel):
    """The passes of a whole model on one GPU, recorded in the second step and replayed from then on."""

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, head: Head, applied: Applied) -> None:
        super().__init__(config, model, mesh, head)
        self.applied = applied
        self.trained: list[nn.Parameter] = [one for one in model.parameters() if one.requires_grad]
        self.steps = 0
        self.recordings: dict[bool, Recording] = {}  # of the first micro-batch of a step, and of another one
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # which the recordings write

    def forward_backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        first = all(parameter.grad is None for parameter in self.trained)
        self.steps += first
        if self.steps < SECOND_STEP:
            return super().forward_backward(batch, scale, last)
        if first and not self.recordings:
            self.batch, self.scale = batch, scale.clone()
            self.pool = torch.cuda.graph_pool_handle()
        self._fill(batch, scale)
        if first not in self.recordings:
            self._record(first)
        recording = self.recordings[first]
        recording.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return recording.numbers

    def _fill(self, batch: Batch, scale: Tensor) -> None:
        """Put what differs between micro-batches where the recordings read it."""
        renew_copies(self.trained)
        for place, given in ((self.batch.tokens, batch.tokens), (self.batch.labels, batch.labels), (self.scale, scale)):
            if place.shape != given.shape:
                raise UserError(
                    f"compile.cuda_graphs: a batch of shape {tuple(given.shape)} comes after those of shape"
                    f" {tuple(place.shape)}; set compile.cuda_graphs = false"
                )
            if place is not given:
                place.copy_(given)

    def _record(self, first: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        held = self.model.tables_for(
            self.batch.tokens
        )  # made before, where a validation of another length replaced them
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                numbers = super().forward_backward(self.batch, self.scale, last=True)
        except RuntimeError as error:
            what = f"this model's kernels cannot be recorded ({str(error).strip().splitlines()[0]})"
            raise UserError(f"compile.cuda_graphs: {what}; set compile.cuda_graphs = false") from error
        self.recordings[first] = Recording(graph, numbers, held)
        if first:
            self.gradients = list(self._written())
            log.info("forward and backward are recorded as a CUDA graph, and replayed from now on")
        self.applied.cuda_graphs = len(self.recordings)

    def _written(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.trained:
            if parameter.grad is not None:
                yield parameter, parameter.grad
