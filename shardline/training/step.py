"""One optimizer step on every rank: forward and backward of the micro-batches, all-reduce, clip, update."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.noise import noise_keys
from shardline.optim.clip import clip_, clipping_factor, nonfinite_parameters, shards, squared_norm
from shardline.optim.early_step import EarlyStep, step_early
from shardline.optim.frozen_rows import FrozenRows
from shardline.optim.gpu_adam import GPUAdam
from shardline.optim.lr_schedule import set_lr
from shardline.parallel.apply import Applied, batches_of_step
from shardline.parallel.data.float8_gather import Float8Gather
from shardline.parallel.expert.balance import ExpertLoad
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.parallel.tensor.tensor import replicated_parameters, sum_replicated_gradients
from shardline.precision.loss_scale import LossScale
from shardline.run.device import read
from shardline.run.stop import Request, no_requests, request_of
from shardline.training.async_steps import AsyncSteps
from shardline.training.graphed_model import GraphedModel
from shardline.training.loss import Head
from shardline.training.pairs import PairedModel, Reference
from shardline.training.pipelined_step import PipelinedModel
from shardline.training.whole_model import WholeModel
from shardline.training.workers import Workers
from shardline.words import counted, listed

log = logging.getLogger("shardline")
RequestNumbers = Callable[[], Sequence[float]]  # called late, so that a signal during the step still counts


class StepResult(NamedTuple):
    """The step's numbers for the whole job, the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    request: Request  # to stop or to save, made to any rank
    more: dict[str, Any] = {}  # what metrics.jsonl says about pairs and experts  # noqa: RUF012
    counts: bool = True  # False: a replica group was lost during the step, which changed nothing and is repeated

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Stepper:
    """Makes optimizer steps. `passes` runs forward and backward of a whole model or of pipeline stages."""

    def __init__(
        self,
        config: Config,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        applied: Applied,
        device: torch.device,
        reference: Reference | None = None,
    ) -> None:
        """`reference` is the model against which preference pairs are compared, if the objective has pairs."""
        self.groups: ReplicaGroups | None = None  # with fault_tolerance
        self.config, self.model, self.optimizer, self.mesh = config, model, optimizer, mesh
        tensor = applied.tensor
        compiled = config.compile.enable and "loss" in config.compile.components
        self.head = Head(tensor, config.training.loss_chunk_tokens, config.compile.backend if compiled else None)
        self.passes: WholeModel | PipelinedModel
        if reference is not None:
            self.passes = PairedModel(config, model, mesh, self.head, reference)
        elif config.compile.enable and config.compile.cuda_graphs:
            self.passes = GraphedModel(config, model, mesh, self.head, applied)
        elif applied.pipeline is None:
            self.passes = WholeModel(config, model, mesh, self.head)
        else:
            self.passes = PipelinedModel(config, model, mesh, applied.pipeline, self.head, device)
        self.seed, alpha = config.debug.seed or 0, config.training.neftune_alpha
        model.noise_bound = 0.0 if alpha is None else alpha / math.sqrt(config.training.seq_len * model.arch.dim)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = LossScale(dynamic=model.compute_dtype == torch.float16)
        self.summed_over_tp = replicated_parameters(model, tensor) if tensor is not None else []
        self.experts = ExpertLoad(model, device, batches_of_step(config, mesh))
        section = config.quantize.linear.float8
        gathered = applied.float8_modules if section.enable_fsdp_float8_all_gather else ()
        self.float8_gather = Float8Gather(model, gathered, section.precompute_float8_dynamic_scale_for_fsdp)
        if gathered and mesh.size("fsdp") > 1:
            log.info("%d of %d weights in float8 are gathered in float8", len(self.float8_gather), len(gathered))
        self.frozen_rows = FrozenRows(model, optimizer)
        if self.frozen_rows.places:
            tensors = counted(len(self.frozen_rows.places), "tensor")
            log.info("%s trained in part (unfrozen_parameters): gradients and optimizer state have all rows", tensors)
        average = config.parallelism.data_parallel_mode == "diloco"
        self.workers = Workers(config, model, mesh, self.passes.on_two_stages) if average else None
        self.asynchronous: AsyncSteps | None = None  # if workers do not wait for each other
        self.early = None
        if config.optimizer.early_step_in_backward:
            self.early = EarlyStep(
                optimizer,
                late=self.summed_over_tp,
                share=lambda parameter: shards(parameter) / mesh.world_size,
                prepare=self.frozen_rows.clear,
            )

    def forward_backward(self, batches: list[Batch]) -> Tensor:
        """Compute gradients of the mean loss over all targets (or pairs) of the global batch, summed over data ranks.

        Workers that train independently take the mean over their own batch. Returns this rank's part of that loss, and
        of the other numbers of a pass.
        """
        self.experts.begin()
        self.float8_gather.prepare()
        if self.model.noise_bound:
            batches = [self._with_noise(batch) for batch in batches]
        if self.model.context is not None:
            batches = [self.model.context.cut(batch) for batch in batches]
        device = self.experts.device
        targets = sum((self.passes.count(batch) for batch in batches), torch.zeros((), device=device))
        apart = self.workers or self.asynchronous
        axis = "loss" if apart is None else apart.count(targets)
        if self.mesh.size(axis) > 1:
            collectives.sum_in_place(targets, axis)
        if self.groups is not None:
            self.groups.sum_targets(targets)
        scale = self.loss_scale.value / targets.clamp(min=1)
        total = torch.zeros(len(self.passes.names), device=device)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            if self.early is not None:
                self.early.enabled = last
            total += self.passes.forward_backward(batch, scale, last)
        if batches:  # a replica group may have none; then none of its ranks has any
            self.passes.finish()
            sum_replicated_gradients(self.summed_over_tp)
            self.passes.sum_tied()
        self.frozen_rows.clear()
        if self.groups is not None:
            self.groups.sum_gradients(self.parameters, total)
        return total

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has its global weights, which all workers share, if they train independently."""
        return contextlib.nullcontext() if self.workers is None else self.workers.outer.global_weights()

    def _with_noise(self, batch: Batch) -> Batch:
        """Return the batch with noise for its embeddings, which depends only on its samples and their positions."""
        return replace(batch, noise=noise_keys(self.seed, batch.sample_ids, batch.tokens.shape[1]))

    def step(
        self,
        batches: list[Batch],
        lr: float,
        number: int,
        requests: RequestNumbers = no_requests,
        momentum: float | None = None,
        last: bool = False,
    ) -> StepResult:
        """Make one optimizer step, unless its loss or gradients are not finite; `momentum` if the schedule has one.

        In the `last` step of the run, independent workers synchronise.
        """
        if self.asynchronous is not None:
            return self.asynchronous.step(number, requests)
        set_lr(self.optimizer, lr, momentum)
        if self.early is not None:
            result = self._step_early(self.early, batches, lr, number, requests)
        else:
            result = self._step_late(batches, lr, number, requests)
        if result.finite and result.counts:
            self.experts.balance()
        if self.workers is not None:
            self.workers.outer.after_step(number, last)
            return result._replace(more=result.more | self.workers.row())
        return result

    def _step_late(self, batches: list[Batch], lr: float, number: int, requests: RequestNumbers) -> StepResult:
        """Make one step after the whole backward pass."""
        result = self._agree(self.forward_backward(batches), lr, requests)
        if self.groups is not None:
            self.groups.ready()
            if self.groups.failed_anywhere():
                self.optimizer.zero_grad(set_to_none=True)
                return result._replace(counts=False)
            self.groups.commit()
        if result.finite:
            norm = result.grad_norm if self.workers is None else self.workers.norm
            if isinstance(self.optimizer, GPUAdam):
                factor = clipping_factor(norm, self.config.training.max_norm)
                self.optimizer.scale = factor / self.loss_scale.value
            else:
                clip_(self.parameters, norm, self.config.training.max_norm, self.loss_scale.value)
            self.optimizer.step()
            self.loss_scale.advance()
        else:
            self._nonfinite(result, number)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _step_early(
        self, early: EarlyStep, batches: list[Batch], lr: float, number: int, requests: RequestNumbers
    ) -> StepResult:
        """Make one step that updates parameters during the backward pass."""
        result, changed = step_early(
            early,
            lambda: self.forward_backward(batches),
            lambda loss, squares: self._agree(loss, lr, requests, squares),
            self.config.training.max_norm,
        )
        if not result.finite:
            self._nonfinite(result, number, changed)
        return result

    def _agree(self, loss: Tensor, lr: float, requests: RequestNumbers, squares: Tensor | None = None) -> StepResult:
        """Combine loss, gradient norm, requests and expert loads of all ranks: one all-reduce and one wait per step."""
        if squares is None:
            ranks = self.mesh.world_size // self.mesh.layout.pp // self.mesh.workers
            squares = squared_norm(self.parameters, ranks, self.passes.on_two_stages)
        alone = self.mesh.world_size == 1
        asked = torch.tensor(() if alone else requests(), device=loss.device)
        numbers, sums = squares.to(loss.device)[None], loss * self.passes.share
        if self.workers is not None:
            numbers, sums = self.workers.spread(numbers), self.workers.weigh(sums)
        first, many = len(numbers), len(numbers) + len(sums)
        numbers = torch.cat([numbers, sums, asked, self.experts.tallies()])
        if not alone:
            collectives.sum_in_place(numbers, "world")
        tallies = many + len(asked)
        if isinstance(self.optimizer, GPUAdam) and self.groups is None:  # a group that heals gets other step counts
            self.optimizer.prepare()  # while the device computes
        row = read(torch.cat([numbers[:tallies], self.experts.summary(numbers[tallies:])]))
        sums_of_all, others = row[first:many], row[many:]
        if self.workers is not None:
            sums_of_all = self.workers.means(sums_of_all)
        means = [one / self.loss_scale.value for one in sums_of_all]
        norms = [math.sqrt(one) / self.loss_scale.value if one >= 0 else math.nan for one in row[:first]]
        if self.workers is not None:
            self.workers.norm = norms[self.mesh.worker]
        return StepResult(
            means[0],
            sum(norms) / len(norms),
            lr,
            request_of(requests() if alone else others[: len(asked)]),
            dict(zip(self.passes.names[1:], means[1:], strict=True)) | self.experts.row(others[len(asked) :]),
        )

    def _nonfinite(self, result: StepResult, number: int, changed: bool = False) -> None:
        """Stop, or skip the step. If weights themselves are not finite, name them: they are the cause."""
        broken = nonfinite_parameters(self.model, of_gradients=False)
        if self.loss_scale.dynamic and not broken:
            self.loss_scale.back_off(number)
            log.info("step %d: skipped; the loss is scaled by %g from now on", number, self.loss_scale.value)
            return
        names, what = (broken, "weights") if broken else (nonfinite_parameters(self.model), "gradient")
        where = f"; not finite in the {what} of {listed(names)}" if names else ""
        text = f"step {number}: loss {result.loss}, gradient norm {result.grad_norm}{where}"
        if changed:
            raise UserError(f"{text}. The weights were already changed: continue from the last checkpoint")
        if broken:  # on any rank, so all ranks stop, even with "skip": every later step would fail as well
            raise UserError(
                f"{text}. No step can repair them: load an earlier checkpoint of this run with checkpoint.load_step, or"
                " one of another run with checkpoint.initial_load_path"
            )
        if self.config.training.nonfinite == "stop":
            raise UserError(
                f'{text}. The parameters were not changed. Lower optimizer.lr, or set training.nonfinite = "skip"'
            )
        log.warning("%s: step skipped", text)
