"""The training loop: fetch micro-batches, forward and backward, clip, step, measure, save."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardline import registry
from shardline.checkpoint.fetch import fetch_to_resume
from shardline.checkpoint.mirror import Mirror, check_free, open_mirror
from shardline.checkpoint.powersgd_state import Memory
from shardline.checkpoint.resume import DataIdentity, Progress, Start, resumable_step
from shardline.checkpoint.resume_batch import batch_line, batch_to_keep, keep_batch
from shardline.checkpoint.saver import Saver
from shardline.comm import collectives, symmetric_memory, watchdog
from shardline.comm.exposed_time import exposed
from shardline.comm.hidden_time import Sampler, Times
from shardline.comm.job import job
from shardline.comm.mesh import (
    Mesh,
    crossing_lines,
    sharing_lines,
    start_process_group,
    stop_process_group,
    world_size,
)
from shardline.comm.store import connect_store, gather_ranks, ranks_from_environment
from shardline.config.layout import with_degrees
from shardline.config.rules import checked_layout, notes, refuse_pending, schedule_notes
from shardline.config.schema import Config, Job
from shardline.config.write import to_toml
from shardline.data.loader import Batch, Loader, build_loader, steps_for_epochs
from shardline.data.prepare import cache_folder
from shardline.data.tokenizer import check_vocabulary, choose_tokenizer
from shardline.errors import UserError, blame
from shardline.models.attention import check_attention
from shardline.models.flavors import resolve
from shardline.models.fused_weights import parameter_count
from shardline.optim.lr_schedule import lr_factor
from shardline.optim.optimizer import build_optimizer, scaled_lr
from shardline.parallel.context.context import attention_words
from shardline.parallel.pipeline.schedules import warnings
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.parallel.replica_check import check_replicas
from shardline.parallel.tensor import async_tp
from shardline.precision.mixed import choose_precision
from shardline.run import attempt
from shardline.run.device import (
    choose_device,
    device_identity,
    device_name,
    peak_memory_gib,
    read,
    reset_peak,
    supports_bf16,
)
from shardline.run.folder import RunFolder, open_run_folder, write_atomically
from shardline.run.numa import prepare_rank
from shardline.run.options import TrainOptions
from shardline.run.output import keep_output
from shardline.run.signals import listening
from shardline.run.stop import Request, Requests, exit_code, no_requests, request_of, why_not_saved
from shardline.telemetry.console import Console, hold_log, setup_logging
from shardline.telemetry.metrics import Meter, Metrics
from shardline.telemetry.profile import Profiler
from shardline.telemetry.recompiles import CompileReport
from shardline.training.setup import build_model, seed_of, set_determinism
from shardline.training.step import RequestNumbers, Stepper, StepResult
from shardline.training.validate import validation_loss

log = logging.getLogger("shardline")


@dataclass(frozen=True)
class Result:
    """How a run ended; `stopped_by` names what ended it early: a signal, or the time limit."""

    step: int
    last_loss: float | None
    stopped_by: str | None = None
    finished_before: bool = False


class Trainer:
    """One training run: built from a config, run by `train()`."""

    def __init__(self, config: Config, options: TrainOptions | None = None) -> None:
        hold_log()
        config, options = attempt.continued(config, options or TrainOptions())
        for line in prepare_rank(config):  # before anything of CUDA or NCCL is touched
            log.info("%s", line)
        registry.import_custom(config.experimental.custom_import)
        refuse_pending(config)
        self.device = choose_device()
        self.layout = checked_layout(config, world_size())
        set_determinism(config, self.device)  # first: kernels are chosen by it
        self.arch = resolve(config.model)
        self.tokenizer = choose_tokenizer(config)
        check_vocabulary(self.tokenizer, self.arch)
        self.precision = choose_precision(config, self.device, supports_bf16(self.device))
        self.kernel = check_attention(self.arch, self.device, self.precision.compute, config.training.seq_len)
        self.pipeline = plan_pipeline(config, self.arch, self.layout)  # what cannot run is refused before ranks meet
        self._open = contextlib.ExitStack()
        try:
            self._join(config)
            config = self._keep_batch(config, options)
            self.loader = self._open_data(config, "training")
            self.validation = self._open_data(config, "validation") if config.validation.enable else None
            self.total_steps = config.training.steps
            if config.training.epochs is not None:
                self.total_steps = steps_for_epochs(self.loader, config.training.epochs, self.loader.global_batch_size)
            self.folder = self._open_folder(config, options)
            self.config = config.replace({"job.dump_folder": str(self.folder.path)})
            self._announce()
            self._build()
            self.progress, self.finished = self._start()
            attempt.note("loaded", step=self.progress.step)
            if not self.finished:
                self._record()
        except BaseException:
            self.close()
            raise

    def _join(self, config: Config) -> None:
        """Meet the other ranks, if there are any."""
        offload = config.training.enable_cpu_offload
        self.owns_group = start_process_group(self.device, config.comm.init_timeout_seconds, offload)
        attempt.note("joined")
        if self.owns_group:
            self._open.callback(stop_process_group)
        self.mesh = Mesh(self.layout, self.device.type, offload)

    def _keep_batch(self, config: Config, options: TrainOptions) -> Config:
        """On another number of ranks the global batch stays that of the checkpoint: accumulation adapts."""
        ranks = self.mesh.data_ranks
        saved = None if options.overwrite else self.mesh.from_rank_0(lambda: batch_to_keep(config))
        if saved is None or saved.size == config.training.local_batch_size * ranks:
            return config
        config = keep_batch(config, saved, ranks, lambda other: plan_pipeline(other, self.arch, self.layout))
        checked_layout(config, self.mesh.world_size)
        log.info("%s", batch_line(config, saved, ranks))
        return config

    def _open_data(self, config: Config, section: Any) -> Loader:
        """This rank's share; tensor-parallel ranks read the same samples."""
        rank, ranks = self.mesh.data_rank, self.mesh.data_ranks
        loader = build_loader(config, section, self.arch, self.tokenizer, rank=rank, ranks=ranks, device=self.device)
        self._open.callback(loader.close)
        return loader

    def _open_folder(self, config: Config, options: TrainOptions) -> RunFolder:
        """Rank 0 takes the folder and tells the others where it is, or why it could not."""
        opened = list[RunFolder]()
        self.mirror: Mirror | None = None

        def open_it() -> tuple[Path, int | None]:
            if options.overwrite and config.checkpoint.mirror is not None:
                check_free(config.checkpoint.mirror)  # before anything is removed
            folder = open_run_folder(
                config,
                resume=options.resume,
                overwrite=options.overwrite,
                has_good_checkpoint=good_step,
            )
            opened.append(folder)
            self._open.callback(folder.close)
            self.mirror = open_mirror(config, folder)
            return folder.path, folder.resume_step

        def good_step(path: Path) -> int | None:
            if options.resume and config.checkpoint.mirror is not None:
                for line in fetch_to_resume(config.checkpoint.mirror, path / config.checkpoint.folder):
                    log.info("%s", line)
            return resumable_step(path, config, self.arch, self.total_steps)

        fetches = options.resume and config.checkpoint.mirror is not None
        with watchdog.patiently("fetching a checkpoint", collectives.groups()) if fetches else contextlib.nullcontext():
            path, resume_step = self.mesh.from_rank_0(open_it)
        attempt.note("opened", folder=str(path))
        return opened[0] if opened else RunFolder(path, config.checkpoint.folder, resume_step)

    def _announce(self) -> None:
        """Say what runs where, what was adjusted and what has no effect."""
        config = self.config
        if self.owns_group and self.mesh.world_size > 1:
            keep_output(self.folder.path / "log")
            rows = gather_ranks(connect_store(), self.mesh.rank, self.mesh.world_size)
            if self.mesh.rank == 0:
                self.folder.write_ranks(rows)
        setup_logging(self.folder, rank=self.mesh.rank, color=not config.metrics.disable_color_printing)
        if config.job.description != Job().description:
            log.info("%s", config.job.description)
        if config.job.print_config:
            log.info("%s", to_toml(config))
        size = f"{parameter_count(self.arch):,} parameters"
        log.info("%s %s, %s, on %s", config.model.name, config.model.flavor, size, device_name(self.device))
        if self.mesh.world_size > 1:
            log.info("%d ranks: %s", self.mesh.world_size, self.layout)
            for line in crossing_lines(self.layout, ranks_from_environment("LOCAL_WORLD_SIZE", self.mesh.world_size)):
                log.info("%s", line)
            for line in sharing_lines(self.device):
                log.warning("%s", line)
        dtype = self.precision.compute
        kernel = attention_words(config, self.arch, self.device, dtype, otherwise=self.kernel)
        log.info("computing in %s, attention by %s", str(dtype).removeprefix("torch."), kernel)
        self.requests = Requests.of_rank(config, self.mesh.rank)
        schedule = schedule_notes(config, self.total_steps) if config.training.epochs is not None else ()
        found = notes(with_degrees(config, self.layout))
        for line in (*config.alias_notes, *found, *self.precision.notes, *schedule, *self._length_notes()):
            log.info("note: %s", line)
        for line in () if self.pipeline is None else warnings(self.pipeline.schedule):
            log.warning("%s", line)

    def _length_notes(self) -> Iterator[str]:
        length, longest = self.config.training.seq_len, self.arch.max_seq_len
        if length > longest:
            yield (
                f"training.seq_len = {length} is longer than the model's max_seq_len, {longest}, which an export"
                " states; model.overrides.max_seq_len changes it"
            )

    def _build(self) -> None:
        config = self.config
        registry.run_hooks("before_build", config)
        self.model, self.applied = build_model(self.arch, self.device, self.precision, self.mesh, config)
        self.optimizer = build_optimizer(config, self.model, reduce=collectives.sum_over_group)
        self.base_lr = scaled_lr(config, self.loader.global_batch_size)
        if config.optimizer.lr_scaling != "none":
            log.info("learning rate %g for a global batch of %d", self.base_lr, self.loader.global_batch_size)
        self.identity = DataIdentity(
            seed=seed_of(config),
            dataset=self.loader.samples.store.source_fingerprint,
            seq_len=config.training.seq_len,
            global_batch_size=self.loader.global_batch_size,
            tokenizer=self.tokenizer.fingerprint,
        )
        self.async_tensor = async_tp.prepare(
            config,
            self.arch,
            self.mesh,
            self.applied.tensor,
            self.precision.compute,
            self.device,
            cache_folder(config.training.cache_folder),
        )
        self.applied.lines += self.async_tensor.lines
        self.sampler = Sampler(self.device, job.clock, job.spans) if self.applied.tensor is not None else None
        self.stepper = Stepper(config, self.model, self.optimizer, self.mesh, self.applied, self.device)
        self.memory = Memory(self.stepper.all_replicas, self.model, self.mesh, self.stepper.summed_over_tp)
        folder, of_run = self.folder.checkpoint_folder, (self.model, self.optimizer, self.identity)
        self.saver = Saver(config, folder, *of_run, self.mesh, self.mirror, extra=self.memory.parts)
        self._open.callback(self.saver.close)

    def _start(self) -> tuple[Progress, bool]:
        """Give the model its weights: resumed, loaded or drawn; (how far the run is, whether it had finished)."""
        folder, config = self.folder.checkpoint_folder, self.config
        of_run = (self.model, self.optimizer, self.identity)
        start = Start(config, folder, *of_run, self.total_steps, self.mesh, load_extra=self.memory.load)
        progress, finished = start.run(self.folder.resume, seed_of(config))
        if not finished:
            self.total_steps = start.last_step(progress)
            self._note_validation(progress)
        self.saver.saved_step = progress.step
        self.loader.seek(progress.samples)
        registry.run_hooks("after_build", self.model, self.config)
        if self.config.model.print_after_conversion:
            log.info("%s", self.model)
        for line in self.applied.lines:
            log.info("%s", line)
        if not finished:  # the weights of a run that had finished are not loaded
            check_replicas(self.model, progress.step)
        return progress, finished

    def _note_validation(self, progress: Progress) -> None:
        """A resumed run may have another number of ranks, and validation.steps counts batches of each."""
        before, now = progress.validated, 0
        if self.validation is not None:
            now = self.validation.samples_in(self.config.validation.steps)
        if before and now and before != now:
            log.warning("validation reads %d samples, %d before this start: its losses do not compare", now, before)
        progress.validated = now

    def _record(self) -> None:
        """Keep the config with the run, once it is sure that the run takes place."""
        if self.mesh.rank != 0:
            return
        self.folder.settle()
        text = to_toml(self.config)
        self.folder.write_config(text)
        if self.async_tensor.measured:
            write_atomically(self.folder.path / async_tp.FILE, json.dumps(self.async_tensor.rows(), indent=1))
        if self.config.job.save_config_file:
            with blame("job.save_config_file"):
                write_atomically(Path(self.config.job.save_config_file), text)

    def train_step(self, batches: list[Batch], requests: RequestNumbers = no_requests) -> tuple[StepResult, float]:
        """One optimizer step; returns the job's numbers and the learning rate."""
        origin = self.progress.schedule_start
        factor = lr_factor(self.progress.step - origin, self.config, self.total_steps - origin)
        lr = self.base_lr * factor
        return self.stepper.step(batches, lr, self.progress.step + 1, requests), lr

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Run to the last step, or to the step at which a signal asks to stop."""
        if self.finished:
            log.info("%s already finished at step %d; nothing to do", self.folder.path, self.progress.step)
            self.close()
            return Result(self.progress.step, None, finished_before=True)
        if self.config.checkpoint.create_seed_checkpoint:
            self.saver.save(self.progress, wait=True)
            self.saver.complete()
            self.close()
            return Result(0, None)
        config, row = self.config, dict[str, Any]()
        pipelined = self.stepper.pipelined
        theory = None if pipelined is None else pipelined.theoretical_bubble
        console = Console(config, self.folder.path, rank=self.mesh.rank, theoretical_bubble=theory)
        metrics: Metrics | None = None
        devices = len(set(self.mesh.from_everyone(device_identity(self.device, self.mesh.rank))))
        meter = Meter(self.arch, config.training.seq_len, self.device, self.precision.compute, devices)
        console.start(self.total_steps, self.progress.step)
        asked, stopped_by = Request(), None
        try:
            metrics = Metrics(config, self.folder, self.progress.step, rank=self.mesh.rank)
            self.saver.prepare()
            with listening(self.requests), _controlled_gc(config) as collect, self._profiler() as profiler:
                reset_peak(self.device)
                first_step = self.progress.step
                compilations = CompileReport()
                while self.progress.step < self.total_steps and asked.stop is None:
                    job.traffic.take()
                    exposed.reset()
                    fetch_started = time.perf_counter()
                    batches = self.loader.step()
                    meter.fetched(time.perf_counter() - fetch_started)
                    if job.watchdog is not None:
                        job.watchdog.step(self.progress.step + 1)
                    sampled = self.sampler is not None and self._is_logged(self.progress.step + 1)
                    if self.sampler is not None and sampled:
                        self.sampler.begin()
                    if pipelined is not None and self._is_logged(self.progress.step + 1):
                        pipelined.measure()
                    result, lr = self.train_step(batches, self._request_numbers)
                    times = self.sampler.end() if self.sampler is not None and sampled else None
                    if self.progress.step == first_step and self.mesh.world_size > 1:
                        watchdog.set_timeouts(config.comm.train_timeout_seconds, collectives.groups())
                    asked = result.request
                    self._advance(batches, meter)
                    attempt.note("first_step")
                    console.advance(self.progress.step)
                    if self._is_logged(self.progress.step):
                        row = self._row(result, lr, meter, times)
                        metrics.log(row)
                        console.update(row)
                    for line in (*compilations.lines(self.progress.step, first_step), *self.async_tensor.missed()):
                        log.warning(line)
                    freq = config.debug.check_replicas_freq
                    if freq and self.progress.step % freq == 0:
                        check_replicas(self.model, self.progress.step)
                    registry.run_hooks("after_step", self, {"step": self.progress.step, "loss": result.loss, "lr": lr})
                    self.saver.check()
                    with self._pause(meter, profiler, asked):
                        asked = self._validate(metrics, console, asked)
                        self._save(asked)
                        profiler.step()
                    collect(self.progress.step)
                self.saver.complete()
                stopped_by = asked.stop if self.progress.step < self.total_steps else None
                self.requests.final_code = exit_code(stopped_by, config)
        except BaseException as error:
            self._log_failure(error)
            if isinstance(error, UserError):  # most often the same on all ranks, which are all alive
                self.saver.let_finish()
            raise
        finally:
            console.close(stopped_by)
            if metrics is not None:
                metrics.close()
            self.close()
        return Result(self.progress.step, row.get("loss"), stopped_by)

    def _kept(self) -> str:
        """What an interrupted run can go on from."""
        reason, step = why_not_saved(self.config), self.saver.saved_step
        if reason is not None:
            return f"nothing is saved: {reason}"
        if self.saver.busy:
            return f"the checkpoint of step {step} was being written"
        return f"the last checkpoint is of step {step}" if step else "nothing was saved"

    def _log_failure(self, error: BaseException) -> None:
        """For the log file, as whoever catches an error shows it; of an interrupted run that is not all to say."""
        if isinstance(error, KeyboardInterrupt):
            log.warning("ended at once, after step %d; %s", self.progress.step, self._kept())
            return
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        log.error("ended after step %d: %s", self.progress.step, text, extra={"file_only": True})

    def _profiler(self) -> Profiler:
        return Profiler(
            self.config, self.folder.path, self.mesh.rank, device=self.device, start_step=self.progress.step
        )

    def _advance(self, batches: list[Batch], meter: Meter) -> None:
        tokens = self.loader.global_batch_size * self.config.training.seq_len
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.samples = self.loader.position
        meter.stepped(tokens)

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step == self.total_steps or step % self.config.metrics.log_freq == 0

    def _row(self, result: StepResult, lr: float, meter: Meter, times: Times | None = None) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self.progress.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
        sent, waited = job.traffic.take(), exposed.take()
        of_tp = times or Times(0.0, 0.0)
        numbers = [peak_memory_gib(self.device) + symmetric_memory.shared_gib(), waited or 0.0, *of_tp]
        highest = torch.tensor(numbers, device=self.device)
        if self.mesh.world_size > 1:
            collectives.max_in_place(highest, "world")
        memory, waited_longest, *of_tp_longest = read(highest)
        row |= {"tokens": self.progress.tokens, "memory_gib": memory, "comm_bytes": sent}
        if waited is not None and self.mesh.size("loss") > 1:
            row["dp_exposed_seconds"] = waited_longest
        if times is not None:
            slowest = Times(*of_tp_longest)
            row |= {"tp_comm_seconds": slowest.comm, "tp_exposed_seconds": slowest.exposed}
            row["tp_hidden_fraction"] = slowest.hidden
        if self.stepper.pipelined is not None:
            row["pp_bubble_fraction"] = self.stepper.pipelined.bubble()
        return row | meter.rates()

    def _request_numbers(self) -> Sequence[float]:
        """What this rank asks all ranks to do after the current step."""
        self.requests.saved_in_background(self.saver.seconds)
        due = self.saver.is_due(self.progress.step + 1, self.total_steps)
        return self.requests.numbers(another_save=due or self.saver.busy)

    def _save(self, asked: Request) -> None:
        """Save where it is time to, or where a signal or the end of the job asks for it."""
        step, reason = self.progress.step, why_not_saved(self.config)
        due = self.saver.is_due(step, self.total_steps)
        if any(asked) and reason is not None:
            log.info("nothing is saved at %s: %s", asked.stop or "SIGUSR1", reason)
        elif due or any(asked):
            with watchdog.patiently("saving a checkpoint", collectives.groups()), self.requests.saving():
                if due:
                    self.saver.save(self.progress, last=step == self.total_steps)
                if any(asked):
                    self.saver.save_at_stop(self.progress)

    def _pause(self, meter: Meter, profiler: Profiler, asked: Request) -> contextlib.AbstractContextManager[None]:
        """Stop the clock for what is not training, after the device has finished the step that is."""
        saves = self.saver.is_due(self.progress.step, self.total_steps) or any(asked)
        if not (saves or self._validates() or profiler.writes_next()):
            return contextlib.nullcontext()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return meter.paused()

    def _validates(self) -> bool:
        step = self.progress.step
        due = step == 1 or step == self.total_steps or step % self.config.validation.freq == 0
        return self.validation is not None and due

    def _validate(self, metrics: Metrics, console: Console, asked: Request) -> Request:
        """Where it is time to; what ranks have been asked for since the step is added to what they were."""
        section, step, stepper = self.config.validation, self.progress.step, self.stepper
        if self.validation is None or not self._validates():
            return asked
        loss = None

        def stop() -> bool:
            nonlocal asked
            asked = asked.and_then(self._asked_meanwhile())
            return asked.stop is not None

        if asked.stop is None:
            data = self.validation
            loss = validation_loss(self.model, stepper.head, data, section.steps, self.mesh, stepper.pipelined, stop)
        if loss is None:
            log.info("step %d: stopping, validation is left out", step)
        else:
            metrics.log_validation(step, loss)
            console.message(f"step {step}  validation loss {loss:.4f}")
        return asked

    def _asked_meanwhile(self) -> Request:
        """What ranks were asked for since the last step; all of them ask together."""
        numbers = torch.tensor(self.requests.numbers(self.saver.busy, between_steps=True), device=self.device)
        if self.mesh.world_size > 1:
            collectives.sum_in_place(numbers, "world")
        return request_of(read(numbers))

    def close(self) -> None:
        """Give the run's folder free, stop data workers, leave the other ranks."""
        self._open.close()


@contextlib.contextmanager
def _controlled_gc(config: Config) -> Iterator[Any]:
    """Collect garbage every `training.gc_freq` steps and at no other time, so that ranks do not pause at random."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()

    def collect(step: int) -> None:
        if config.training.gc_debug:
            log.info("step %d: gc found %d unreachable objects", step, gc.collect())
        elif config.training.gc_freq > 0 and step % config.training.gc_freq == 0:
            gc.collect(1)

    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
