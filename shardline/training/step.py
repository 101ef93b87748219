"""One optimizer step on every rank: forward and backward of the micro-batches, sum, clip, step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.loader import Batch
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.optim.clip import clip_, nonfinite_parameters, shards, squared_norm
from shardline.optim.early_step import EarlyStep, step_early
from shardline.optim.lr_schedule import set_lr
from shardline.parallel.apply import Applied
from shardline.parallel.data.ddp import Replicas
from shardline.parallel.data.fsdp import set_gradient_sync
from shardline.parallel.tensor.tensor import replicated_parameters, sum_replicated_gradients
from shardline.run.device import read
from shardline.run.stop import Request, no_requests, request_of
from shardline.training.loss import Head, count_targets
from shardline.training.pipelined_step import Pipelined

log = logging.getLogger("shardline")
RequestNumbers = Callable[[], Sequence[float]]  # asked as late as possible: a signal during the step still counts


class StepResult(NamedTuple):
    """Numbers of the whole job: every rank has the same."""

    loss: float
    grad_norm: float
    request: Request  # to stop, or to save, of some rank


class Stepper:
    def __init__(
        self,
        config: Config,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        applied: Applied,
        device: torch.device,
    ) -> None:
        self.config, self.model, self.optimizer, self.mesh = config, model, optimizer, mesh
        tensor = applied.tensor
        compiled = config.compile.enable and "loss" in config.compile.components
        self.head = Head(tensor, config.training.loss_chunk_tokens, compiled, config.compile.backend)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.summed_over_tp = replicated_parameters(model, tensor) if tensor is not None else []
        plain_replicas = mesh.axis("dp_replicate") is not None and mesh.axis("fsdp") is None
        self.pipelined = None
        if applied.pipeline is not None:
            self.pipelined = Pipelined(config, model, mesh, applied.pipeline, self.head, device)
        self.replicas = Replicas(model, config) if plain_replicas and self.pipelined is None else None
        self.early = None
        if config.optimizer.early_step_in_backward:
            self.early = EarlyStep(
                optimizer, late=self.summed_over_tp, share=lambda parameter: shards(parameter) / mesh.world_size
            )

    @property
    def all_replicas(self) -> Replicas | None:
        """Whoever sums gradients over replicas, here or stage by stage."""
        return self.replicas if self.pipelined is None else self.pipelined.replicas

    def forward_backward(self, batches: list[Batch]) -> Tensor:
        """Gradients of the mean loss over all targets of the global batch, summed over data ranks.

        Returns this rank's part of that loss.
        """
        if self.model.context is not None:
            batches = [self.model.context.cut(batch) for batch in batches]
        device = batches[0].labels.device
        targets = sum((count_targets(batch.labels) for batch in batches), torch.zeros((), device=device))
        if self.mesh.size("loss") > 1:
            collectives.sum_in_place(targets, "loss")
        scale = 1.0 / targets.clamp(min=1)
        total = torch.zeros((), device=device)
        section = self.config.parallelism
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            if self.pipelined is not None:
                total += self.pipelined.forward_backward(batch, scale, last)
                continue
            set_gradient_sync(self.model, section, last)
            if self.early is not None:
                self.early.enabled = last
            if self.replicas is not None:
                self.replicas.expect(last, every_micro_batch=section.accumulation_sync == "micro_batch")
            hidden = self.model.hidden(batch.tokens, documents=batch.documents)
            loss = self.head.loss(self.model, hidden, batch.labels, scale)
            loss.backward()
            total += loss.detach()
        if self.replicas is not None:
            self.replicas.finish()
        if self.pipelined is not None:
            self.pipelined.finish()
        sum_replicated_gradients(self.summed_over_tp)
        if self.pipelined is not None:
            self.pipelined.sum_tied()
        return total

    def step(self, batches: list[Batch], lr: float, number: int, requests: RequestNumbers = no_requests) -> StepResult:
        """One optimizer step, unless its loss or gradients are not finite."""
        if self.early is not None:
            return self._step_early(self.early, batches, lr, number, requests)
        loss = self.forward_backward(batches)
        result = self._agree(loss, requests)
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            clip_(self.parameters, result.grad_norm, self.config.training.max_norm)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        else:
            self._nonfinite(result, number)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _step_early(
        self, early: EarlyStep, batches: list[Batch], lr: float, number: int, requests: RequestNumbers
    ) -> StepResult:
        """The same with parameters updated inside backward."""
        set_lr(self.optimizer, lr)
        result, changed = step_early(
            early,
            lambda: self.forward_backward(batches),
            lambda loss, squares: self._agree(loss, requests, squares),
            self.config.training.max_norm,
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._nonfinite(result, number, changed)
        return result

    def _agree(self, loss: Tensor, requests: RequestNumbers, squares: Tensor | None = None) -> StepResult:
        """Loss, gradient norm and requests of all ranks: one all-reduce, one wait for the device a step."""
        if squares is None:
            twice = frozenset() if self.pipelined is None else self.pipelined.on_two_stages
            squares = squared_norm(self.parameters, self.mesh.world_size // self.mesh.layout.pp, twice)
        asked = torch.tensor(requests(), device=loss.device)
        numbers = torch.cat([torch.stack([loss * self.head.share, squares.to(loss.device)]), asked])
        if self.mesh.world_size > 1:
            collectives.sum_in_place(numbers, "world")
        total, squared, *sums = read(numbers)
        return StepResult(total, math.sqrt(squared) if squared >= 0 else math.nan, request_of(sums))

    def _nonfinite(self, result: StepResult, number: int, changed: bool = False) -> None:
        broken = nonfinite_parameters(self.model, of_gradients=False)
        names = nonfinite_parameters(self.model)
        where = f"; not finite in the gradient of {_shortened(names)}" if names else ""
        where = f"; not finite in the weights of {_shortened(broken)}" if broken else where  # the cause, not its trail
        text = f"step {number}: loss {result.loss}, gradient norm {result.grad_norm}{where}"
        if changed:
            raise UserError(f"{text}. The weights were already changed: continue from the last checkpoint")
        if broken:  # of any rank, so all ranks stop; with "skip" too, as every later step would be the same
            raise UserError(
                f"{text}. No step can mend that: load another checkpoint, of this run with checkpoint.load_step,"
                " of another one with checkpoint.initial_load_path"
            )
        if self.config.training.nonfinite == "stop":
            raise UserError(
                f'{text}. The parameters were not changed. Lower optimizer.lr, or set training.nonfinite = "skip"'
            )
        log.warning("%s: step skipped", text)


def _shortened(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
