"""The training loop: fetch micro-batches, step, log, validate, save."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardline import registry
from shardline.checkpoint.resume import RunPosition
from shardline.comm import collectives, watchdog
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.errors import UserError
from shardline.optim.lr_schedule import learning_rate, momentum
from shardline.parallel.replica_check import check_replicas
from shardline.parallel.replicas.groups import ReplicaGroups
from shardline.run import enforcer
from shardline.run.device import read
from shardline.run.next_steps import after_end, resume_command
from shardline.run.options import TrainOptions
from shardline.run.signals import listening
from shardline.run.stop import Request, exit_code, no_requests, request_of, why_not_saved
from shardline.telemetry.log import release_log
from shardline.training.samples import PromptSampler
from shardline.training.setup import Setup, report_choices
from shardline.training.step import RequestNumbers, StepResult
from shardline.training.validate import Validator
from shardline.words import TableRows

log = logging.getLogger("shardline")


@dataclass(frozen=True)
class Result:
    """How a run ended; `stopped_by` names what ended it early: a signal, or the time limit."""

    step: int
    last_loss: float | None
    stopped_by: str | None = None
    finished_before: bool = False


class Trainer:
    """One training run: built from a config, run by `train()`. Hooks in user modules read its public attributes."""

    def __init__(self, config: Config, options: TrainOptions | None = None) -> None:
        self._closing = contextlib.ExitStack()
        try:
            self.options = options or TrainOptions()
            run = Setup(config, self.options, self._closing)
        except BaseException:
            self.close()
            release_log()
            raise
        self.config, self.arch, self.device, self.mesh = run.config, run.arch, run.device, run.mesh
        self.model, self.optimizer, self.base_lr = run.model, run.optimizer, run.base_lr
        self.layout, self.precision, self.tokenizer = run.layout, run.precision, run.tokenizer
        self.loader, self.validation = run.loader, run.validation  # `validation` is None without a validation set
        self.folder, self.requests = run.folder, run.requests
        self.stepper, self.saver, self.telemetry = run.stepper, run.saver, run.telemetry
        self.async_tensor, self.groups = run.async_tensor, run.groups
        self.devices = run.telemetry.meter.devices
        self.progress, self.total_steps, self.finished = run.progress, run.total_steps, run.finished
        self.high_losses = 0  # steps in a row above training.max_loss
        self.validator = Validator(
            run.config, run.stepper, run.validation, run.mesh, run.total_steps, run.telemetry, self._requests_meanwhile
        )
        self.sampler = PromptSampler(
            *(run.config, run.stepper, run.tokenizer, run.mesh, run.device, run.total_steps, run.telemetry),
            self._requests_meanwhile,
        )

        if self.stepper.asynchronous is not None and not self.finished:
            self.stepper.asynchronous.start(self._rate, self._meets_after)

    def train(self) -> Result:
        """Run to the last step, or to the step after which a signal or the time limit stops the run."""
        progress, telemetry, request = self.progress, self.telemetry, Request()
        kept = Request()  # what was asked for in a step that is repeated
        try:
            if not self._has_steps():
                return Result(progress.step, None, finished_before=self.finished)
            with telemetry.running(progress.step, self.total_steps), listening(self.requests):
                self.saver.prepare()
                while progress.step < self.total_steps and request.stop is None:
                    if self.groups is not None and not self._meet(self.groups):
                        request = self._requests_meanwhile()
                        self.saver.save_if_due(progress, self.total_steps, request, self._saving)
                        continue
                    with telemetry.step(progress.step + 1):
                        with telemetry.fetching():
                            batches = self.loader.step()
                        telemetry.step_tokens = self.loader.step_tokens
                        result = self.train_step(batches, self._request_numbers)
                        if self.groups is not None and not result.counts:
                            self._repeat(self.groups)
                            kept = kept.and_then(result.request)
                            continue
                        result, kept = result._replace(request=kept.and_then(result.request)), Request()
                        more = self._advance(result)
                        telemetry.log(result.loss, result.grad_norm, result.lr, progress.tokens, more)
                        self._after_step(result)
                        request = self.validator.run_if_due(progress.step, result.request)
                        request = self.sampler.run_if_due(progress.step, request)
                        if request.stop is not None:
                            enforcer.reached_boundary()
                        self._stop_if_worse(self.validator.loss)
                        self.saver.save_if_due(progress, self.total_steps, request, self._saving)
                self._complete(request.stop)
                if self.mesh.rank == 0:
                    self.loader.samples.report_read(progress.samples)
                telemetry.stopped_by = request.stop if progress.step < self.total_steps else None
                self.requests.final_code = exit_code(telemetry.stopped_by, self.config)
            telemetry.report(self._closing_rows())
            return Result(progress.step, telemetry.row.get("loss"), telemetry.stopped_by)
        except BaseException as error:
            self._fail(error)
            telemetry.report(self._closing_rows(error))
            raise
        finally:
            self.close()

    def train_step(self, batches: list[Batch], requests: RequestNumbers = no_requests) -> StepResult:
        """Make one optimizer step at the learning rate that the schedule has for it."""
        number = self.progress.step + 1
        rate = self._rate(number - 1)
        return self.stepper.step(batches, rate[0], number, requests, rate[1], last=number == self.total_steps)

    def _rate(self, step: int) -> tuple[float, float | None]:
        """Learning rate and momentum of the step that follows `step` steps."""
        origin = self.progress.schedule_start
        place = (step - origin, self.config, self.total_steps - origin)
        return learning_rate(self.base_lr, *place), momentum(*place)

    def _meets_after(self, step: int) -> bool:
        """Whether all ranks act together after a step, so that even workers that never wait must synchronise."""
        last, freq = self.total_steps, self.config.debug.check_replicas_freq
        together = step == last or self.saver.is_due(step, last) or (freq > 0 and step % freq == 0)
        return together or self.validator.is_due(step) or self.sampler.is_due(step)

    def close(self) -> None:
        """Release the run's folder, stop data workers, and leave the process group."""
        self._closing.close()

    # ---- parts of the loop -------------------------------------------------------------------------------------------

    def _has_steps(self) -> bool:
        """Return whether there are steps to train; if the run only creates a seed checkpoint, save it."""
        if self.finished:
            longer = "" if self.config.training.epochs else f"; training.steps > {self.total_steps} continues it"
            log.info("%s already finished at step %d; nothing to do%s", self.folder.path, self.progress.step, longer)
            self._complete()  # a copy in the mirror that its end did not wait for
        elif self.config.checkpoint.create_seed_checkpoint:
            self.saver.save(self.progress, wait=True)
            self._complete()
            self.folder.settle()
        else:
            return True
        return False

    def _meet(self, groups: ReplicaGroups) -> bool:
        """Wait for the other replica groups; returns False if this one is asked to stop meanwhile.

        A group that was away takes over their position: their weights arrive while the step is made.
        """
        progress = self.progress
        self._before = dataclasses.replace(progress)
        position = dataclasses.asdict(progress)
        plan = groups.meet(progress.step, progress.history, position, lambda: self.requests.is_stopping)
        if plan is None:
            return False
        if plan.source is not None:
            self._go_to(RunPosition(**{**plan.source.position, "excluded": progress.excluded}))
            self.stepper.loss_scale.load(progress.loss_scale)
        if groups.commits == 0:
            self.telemetry.first_step = progress.step  # the first step that this group takes part in
        self.loader.take(plan.share)
        self.telemetry.meter.devices = self.devices * len(plan.participants)
        return True

    def _repeat(self, groups: ReplicaGroups) -> None:
        """Go back to repeat a step that failed, with the groups that are there by then."""
        groups.fail()
        self._go_to(self._before)
        self.stepper.loss_scale.load(self.progress.loss_scale)

    def _go_to(self, position: RunPosition) -> None:
        for name, value in dataclasses.asdict(position).items():
            setattr(self.progress, name, value)
        self.loader.seek(self.progress.samples)

    def _advance(self, result: StepResult) -> dict[str, Any]:
        """Count the step; returns what else metrics.jsonl says about it."""
        more = result.more
        if self.groups is not None and self.groups.plan is not None:
            self.progress.history = self.groups.plan.history()
            more = more | self.groups.row()
        self.progress.lr, self.progress.last_step = self._rate(self.progress.step)[0], self.total_steps
        self.progress.step += 1
        self.progress.tokens += self.telemetry.step_tokens
        self.progress.samples = self.loader.position
        self.progress.loss_scale = self.stepper.loss_scale.state()
        return more

    def _after_step(self, result: StepResult) -> None:
        """Check for silent failures, and run hooks; from the first step on, the run keeps its folder."""
        step, freq = self.progress.step, self.config.debug.check_replicas_freq
        self.folder.settle()
        self._check_loss(result.loss)
        for line in self.async_tensor.missed():
            log.warning("%s", line)
        self._doubt_choices()
        if freq and step % freq == 0:
            check_replicas(self.model, step)
        registry.run_hooks("after_step", self, {"step": step, "loss": result.loss, "lr": result.lr})
        self.saver.check()

    def _doubt_choices(self) -> None:
        """Measure once more how to run each product if this run's own steps contradict the choices."""
        comparison, measure_again = self.telemetry.serial, self.async_tensor.measure_again
        if measure_again is None or comparison is None or not comparison.is_contradicted():
            return
        log.info("Async TP: %s; measuring the products again", comparison.words())
        comparison.forget()
        with self.telemetry.paused("measuring products"), watchdog.patiently("measuring products"):
            self.async_tensor = measure_again()
        self.async_tensor.measure_again = None
        report_choices(self.async_tensor)
        if self.mesh.rank == 0:
            self.async_tensor.save(self.folder.path)

    def _check_loss(self, loss: float) -> None:
        """End a run whose loss stays above `training.max_loss`, before such weights are saved."""
        section = self.config.training
        self.high_losses = self.high_losses + 1 if section.max_loss is not None and loss > section.max_loss else 0
        if self.high_losses >= section.max_loss_steps:
            raise UserError(
                f"step {self.progress.step}: the loss was above training.max_loss = {section.max_loss:g} for"
                f" {self.high_losses} steps (now {loss:.4g}): lower optimizer.lr; {self._kept()}"
            )

    def _stop_if_worse(self, loss: float | None) -> None:
        """Make this step the last, and saved, if `validation.patience` validations in a row had no lower loss."""
        progress, patience = self.progress, self.config.validation.patience
        if loss is None or patience is None:
            return
        if math.isfinite(loss) and (progress.best_validation is None or loss < progress.best_validation):
            progress.best_validation, progress.worse_validations = loss, 0
            return
        progress.worse_validations += 1
        if progress.worse_validations >= patience:
            best = math.nan if progress.best_validation is None else progress.best_validation
            words = "no validation loss below %.4f in the last %d: the run ends here (validation.patience)"
            log.info("step %d: " + words, progress.step, best, patience)
            self.total_steps = progress.step

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Wrap a save: it is not training time, must not time out, and its duration counts for the time limit."""
        waiting = watchdog.patiently("saving a checkpoint")
        with self.telemetry.paused("saving"), waiting, self.requests.saving(), enforcer.saving():
            yield

    def _complete(self, stopped_by: str | None = None) -> None:
        """Wait for the last save and its copy in the mirror; a stop limits the time for the copy."""
        with enforcer.saving():
            self.saver.complete(self.requests.lateness(stopped_by, self.config.comm.stop_timeout_seconds))

    # ---- requests to stop or to save ---------------------------------------------------------------------------------

    def _request_numbers(self) -> Sequence[float]:
        """Return this rank's requests to all ranks for after the current step."""
        self.requests.saved_in_background(self.saver.seconds)
        due = self.saver.is_due(self.progress.step + 1, self.total_steps)
        return self.requests.numbers(another_save=due or self.saver.busy)

    def _requests_meanwhile(self) -> Request:
        """Collect the requests made to any rank since the last step; all ranks call this together."""
        numbers = torch.tensor(self.requests.numbers(self.saver.busy, between_steps=True), device=self.device)
        if self.mesh.world_size > 1:
            collectives.sum_in_place(numbers, "world")
        return request_of(read(numbers))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Log how the run ended. The caller that catches the error prints it, so it goes only to the log file."""
        if isinstance(error, KeyboardInterrupt):
            log.warning("ended at once, after step %d; %s", self.progress.step, self._kept())
            return
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        log.error("ended after step %d: %s", self.progress.step, text, extra={"file_only": True})
        if isinstance(error, UserError):  # usually the same on all ranks, so all are alive
            self.saver.let_finish()

    def _closing_rows(self, error: BaseException | None = None) -> TableRows:
        """What the closing table says about saves, and how to continue.

        After a failure, a launcher shows how to continue itself, since it may restart the run.
        """
        step, where = self.progress.step, (self.folder.path, self.config, self.options)
        rows: list[tuple[str, str]] = [("last save", self.saver.last_words(step))]
        if error is None and step == self.total_steps:
            return [*rows, *after_end(*where, step)]
        failed = error is not None and not isinstance(error, KeyboardInterrupt)
        if self.saver.last_save is not None and not (failed and LAUNCHER_VARIABLE in os.environ):
            rows.append(("go on", resume_command(*where)))
        return rows

    def _kept(self) -> str:
        """What an interrupted run can continue from."""
        reason, step = why_not_saved(self.config), self.saver.saved_step
        if reason is not None:
            return f"nothing is saved: {reason}"
        if self.saver.busy:
            return f"the checkpoint of step {step} was being written"
        return f"the last checkpoint is of step {step}" if step else "nothing was saved"
