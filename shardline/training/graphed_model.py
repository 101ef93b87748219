"""Runs forward and backward of a micro-batch as one CUDA graph: if kernels are short, launching them dominates.

    step 1     runs normally: everything is compiled, chosen and allocated
    step 2     records the first micro-batch, which writes gradients, and the second, which adds to them
    later      copies tokens, labels and scale to where the recording reads them, and replays it

No Python code runs in a replay. What needs Python for each batch is refused by `check_cuda_graphs`, or done before a
replay: narrow copies of weights are made again if torch has changed the weights (by loading a checkpoint, for example).
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
    numbers: Tensor  # the pass's result
    held: Any  # position tables: the kernels read them, but the model may replace its own


class GraphedModel(WholeModel):
    """The passes of a whole model on one GPU, recorded in the second step and replayed from then on."""

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, head: Head, applied: Applied) -> None:
        super().__init__(config, model, mesh, head)
        self.applied = applied
        self.trained: list[nn.Parameter] = [one for one in model.parameters() if one.requires_grad]
        self.steps = 0
        self.recordings: dict[bool, Recording] = {}  # by whether the micro-batch is the first of its step
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # the ones that the recordings write

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
        """Copy what differs between micro-batches to where the recordings read it."""
        renew_copies(self.trained)
        for place, given in ((self.batch.tokens, batch.tokens), (self.batch.labels, batch.labels), (self.scale, scale)):
            if place.shape != given.shape:
                raise UserError(
                    f"compile.cuda_graphs: a batch of shape {tuple(given.shape)} follows batches of shape"
                    f" {tuple(place.shape)}; set compile.cuda_graphs = false"
                )
            if place is not given:
                place.copy_(given)

    def _record(self, first: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        held = self.model.tables_for(
            self.batch.tokens
        )  # not inside the recording, even if a validation of another length has replaced them
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
            log.info("forward and backward were recorded as a CUDA graph, which is replayed from now on")
        self.applied.cuda_graphs = len(self.recordings)

    def _written(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.trained:
            if parameter.grad is not None:
                yield parameter, parameter.grad
