"""Validation: computes the mean loss per target token, or per pair, over the validation set, read once in order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.data.loader import Loader
from shardline.parallel.data.fsdp import free_gathered
from shardline.run.device import read
from shardline.run.stop import Request
from shardline.telemetry.telemetry import Telemetry
from shardline.training.pipelined_step import PipelinedModel
from shardline.training.step import Stepper
from shardline.training.whole_model import WholeModel

log = logging.getLogger("shardline")


class Validator:
    """Validates after the first step, the last one and every `validation.freq` steps; never without a `loader`.

    Between batches, `requests` collects the requests made to all ranks since the step: one to stop ends the validation.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        loader: Loader | None,
        mesh: Mesh,
        last_step: int,
        telemetry: Telemetry,
        requests: Callable[[], Request],
    ) -> None:
        self.section, self.stepper, self.loader, self.mesh = config.validation, stepper, loader, mesh
        self.last_step, self.telemetry, self.requests = last_step, telemetry, requests
        self.loss: float | None = None  # of the validation after this step, if there was one

    def is_due(self, step: int) -> bool:
        due = step in (1, self.last_step) or step % self.section.every(self.last_step) == 0
        return self.loader is not None and due

    def run_if_due(self, step: int, request: Request) -> Request:
        """Validate if it is time to; returns `request` with the requests made to any rank meanwhile."""
        self.loss = None
        if self.loader is None or not self.is_due(step):
            return request
        found = None
        with self.telemetry.paused("validating"):
            if request.stop is None:
                with self.stepper.global_weights():
                    found, request = self._numbers(self.loader, request)
        if found is None:
            log.info("step %d: stopping, validation is skipped", step)
        else:
            self.telemetry.log_validation(step, found)
            self.loss = found["loss"]
        return request

    @torch.no_grad()
    def _numbers(self, loader: Loader, request: Request) -> tuple[dict[str, float] | None, Request]:
        """Return the means per target or pair over `validation.steps` batches (-1: all) of every data rank.

        Returns None if ranks are asked to stop, which all of them notice after the same batch.
        """
        model, passes = self.stepper.model, self.stepper.passes
        self.stepper.float8_gather.prepare()
        was_training = model.training
        model.eval()
        sums = torch.zeros(1 + len(passes.names), dtype=torch.float64, device=loader.device)
        batches = iter(loader.epoch(None if self.section.steps < 0 else self.section.steps))
        shared = self.mesh.layout.tp * self.mesh.layout.pp
        while request.stop is None and (some := list(itertools.islice(batches, passes.batches_at_once))):
            some = [batch if model.context is None else model.context.cut(batch) for batch in some]
            add_losses(sums, passes, some, shared)
            request = request.and_then(self.requests())
        free_gathered(model)
        model.train(was_training)
        if request.stop is not None:
            return None, request
        return means(sums, passes, self.mesh)[1], request


def add_losses(sums: Tensor, passes: WholeModel | PipelinedModel, batches: Sequence[Batch], shared: int = 1) -> None:
    """Add up the targets (or pairs) of some batches, each counted by `shared` ranks, and the sums of their numbers."""
    sums[1:] += passes.losses(batches) * passes.share
    for batch in batches:
        sums[0] += passes.count(batch) / shared


def means(sums: Tensor, passes: WholeModel | PipelinedModel, mesh: Mesh) -> tuple[float, dict[str, float]]:
    """Return the number of targets (or pairs) on all ranks, and the means over them."""
    if mesh.world_size > 1:
        collectives.sum_in_place(sums, "world")
    count, *totals = read(sums)
    return count, {name: total / max(count, 1.0) for name, total in zip(passes.names, totals, strict=True)}
