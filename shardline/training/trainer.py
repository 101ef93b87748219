"""The training loop: fetch micro-batches, forward and backward, clip, step, measure, save."""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shardline import registry
from shardline.config.options import TrainOptions
from shardline.config.rules import check, notes, refuse_pending
from shardline.config.schema import Config
from shardline.config.write import to_toml
from shardline.data.loader import Batch, Loader, build_loader, steps_for_epochs
from shardline.data.tokenizer import check_vocabulary, choose_tokenizer
from shardline.errors import UserError
from shardline.models.attention import check_attention
from shardline.models.flavors import resolve
from shardline.models.fused import parameter_count
from shardline.precision.mixed import choose_precision
from shardline.training.build import build_model, seed_of, set_determinism, transform_model
from shardline.training.clip import clip_, grad_norm, nonfinite_parameters
from shardline.training.console import Console, setup_logging
from shardline.training.device import choose_device, device_name, peak_memory_gib, reset_peak, supports_bf16
from shardline.training.loss import chunked_cross_entropy, count_targets
from shardline.training.metrics import Meter, Metrics
from shardline.training.optimizer import build_optimizer
from shardline.training.profile import Profiler
from shardline.training.run_folder import open_run_folder, write_atomically
from shardline.training.saving import Saver
from shardline.training.schedule import lr_factor, schedule_notes, set_lr
from shardline.training.starting import DataIdentity, Progress, Start, resumable_step
from shardline.training.validate import validation_loss

log = logging.getLogger("shardline")


@dataclass(frozen=True)
class Result:
    """How a run ended; `stopped_by` names the signal that ended it early."""

    step: int
    last_loss: float | None
    stopped_by: str | None = None
    finished_before: bool = False


class Trainer:
    """One training run: built from a config, run by `train()`."""

    def __init__(self, config: Config, options: TrainOptions | None = None) -> None:
        options = options or TrainOptions()
        registry.import_custom(config.experimental.custom_import)
        check(config)
        refuse_pending(config)
        self.device = choose_device()
        set_determinism(config, self.device)  # first: kernels are chosen by it
        self.arch = resolve(config.model)
        self.tokenizer = choose_tokenizer(config)
        check_vocabulary(self.tokenizer, self.arch)
        self.precision = choose_precision(config, self.device, supports_bf16(self.device))
        self.kernel = check_attention(self.arch, self.device, self.precision.compute)
        self.loader = self._open_data(config, "training")
        self.validation = self._open_data(config, "validation") if config.validation.enable else None
        self.total_steps = config.training.steps
        if config.training.epochs is not None:
            self.total_steps = steps_for_epochs(self.loader, config.training.epochs, self.loader.global_batch_size)
        self.folder = open_run_folder(
            config,
            resume=options.resume,
            overwrite=options.overwrite,
            has_good_checkpoint=lambda path: resumable_step(path, config, self.arch, self.total_steps),
        )
        self.config = config.replace({"job.dump_folder": str(self.folder.path)})
        try:
            self._announce()
            self._build()
            self.progress, self.finished = self._start()
            if not self.finished:
                self._record()
        except BaseException:
            self.close()
            raise

    def _open_data(self, config: Config, section: Any) -> Loader:
        return build_loader(config, section, self.arch, self.tokenizer, device=self.device)

    def _announce(self) -> None:
        """Say what runs where, what was adjusted and what has no effect."""
        config = self.config
        setup_logging(self.folder, rank=0, color=not config.metrics.disable_color_printing)
        if config.is_set("job.description"):
            log.info("%s", config.job.description)
        if config.job.print_config:
            log.info("%s", to_toml(config))
        size = f"{parameter_count(self.arch):,} parameters"
        log.info("%s %s, %s, on %s", config.model.name, config.model.flavor, size, device_name(self.device))
        log.info("computing in %s, attention by %s", str(self.precision.compute).removeprefix("torch."), self.kernel)
        schedule = schedule_notes(config, self.total_steps) if config.training.epochs is not None else ()
        for line in (*config.alias_notes, *notes(config), *self.precision.notes, *schedule, *self._length_notes()):
            log.info("note: %s", line)

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
        self.model = build_model(self.arch, self.device, self.precision)
        self.optimizer = build_optimizer(config, self.model)
        self.identity = DataIdentity(
            seed=seed_of(config),
            dataset=self.loader.samples.store.source_fingerprint,
            seq_len=config.training.seq_len,
            global_batch_size=self.loader.global_batch_size,
            tokenizer=self.tokenizer.fingerprint,
        )
        self.saver = Saver(config, self.folder.checkpoint_folder, self.model, self.optimizer, self.identity)
        self.compile_loss = config.compile.enable and "loss" in config.compile.components

    def _start(self) -> tuple[Progress, bool]:
        """Give the model its weights: resumed, loaded or drawn; (how far the run is, whether it had finished)."""
        folder, config = self.folder.checkpoint_folder, self.config
        start = Start(config, folder, self.model, self.optimizer, self.identity, self.total_steps)
        progress, finished = start.run(self.folder.resume, seed_of(config))
        self.saver.saved_step = progress.step
        self.loader.seek(progress.samples)
        registry.run_hooks("after_build", self.model, self.config)
        if self.config.model.print_after_conversion:
            log.info("%s", self.model)
        for line in transform_model(self.model, self.config):
            log.info("%s", line)
        return progress, finished

    def _record(self) -> None:
        """Keep the config with the run, once it is sure that the run takes place."""
        text = to_toml(self.config)
        self.folder.write_config(text)
        if self.config.job.save_config_file:
            write_atomically(Path(self.config.job.save_config_file), text)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batches: list[Batch]) -> torch.Tensor:
        """Gradients of the mean loss over all targets of the global batch; returns that loss."""
        targets = sum((count_targets(batch.labels) for batch in batches), torch.zeros((), device=self.device))
        scale = 1.0 / targets.clamp(min=1)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            hidden = self.model.hidden(batch.tokens, documents=batch.documents)
            loss = chunked_cross_entropy(
                hidden,
                self.model.output_weight(),
                batch.labels,
                scale=scale,
                chunk_tokens=self.config.training.loss_chunk_tokens,
                compiled=self.compile_loss,
                backend=self.config.compile.backend,
            )
            loss.backward()
            total += loss.detach()
        return total

    def train_step(self, batches: list[Batch]) -> tuple[float, float, float]:
        """One optimizer step; returns loss, gradient norm and learning rate."""
        loss = self.forward_backward(batches)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norm = grad_norm(parameters)
        origin = self.progress.schedule_start
        factor = lr_factor(self.progress.step - origin, self.config, self.total_steps - origin)
        lr = self.config.optimizer.lr * factor
        loss_value, norm_value = torch.stack([loss, norm]).tolist()  # the step's one wait for the device
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            clip_(parameters, norm_value, self.config.training.max_norm)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        else:
            self._nonfinite(loss_value, norm_value)
        self.optimizer.zero_grad(set_to_none=True)
        return loss_value, norm_value, lr

    def _nonfinite(self, loss: float, norm: float) -> None:
        broken = [name for name, parameter in self.model.named_parameters() if not torch.isfinite(parameter).all()]
        names = nonfinite_parameters(self.model)
        where = f"; not finite in the gradient of {_shortened(names)}" if names else ""
        where = f"; not finite in the weights of {_shortened(broken)}" if broken else where  # the cause, not its trail
        text = f"step {self.progress.step + 1}: loss {loss}, gradient norm {norm}{where}"
        if self.config.training.nonfinite == "stop":
            raise UserError(
                f'{text}. The parameters were not changed. Lower optimizer.lr, or set training.nonfinite = "skip"'
            )
        log.warning("%s: step skipped", text)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Run to the last step, or to the step at which a signal asks to stop."""
        if self.finished:
            log.info("%s already finished at step %d; nothing to do", self.folder.path, self.progress.step)
            self.close()
            return Result(self.progress.step, None, finished_before=True)
        if self.config.checkpoint.create_seed_checkpoint:
            self.saver.save(self.progress)
            self.close()
            return Result(0, None)
        config, row = self.config, dict[str, Any]()
        console = Console(config, self.folder.path)
        metrics: Metrics | None = None
        meter = Meter(self.arch, config.training.seq_len, self.device, self.precision.compute)
        console.start(self.total_steps, self.progress.step)
        stopped_by = None
        try:
            metrics = Metrics(config, self.folder, self.progress.step)
            with _signals() as stop, _controlled_gc(config) as collect, self._profiler() as profiler:
                reset_peak(self.device)
                while self.progress.step < self.total_steps and not stop.name:
                    fetch_started = time.perf_counter()
                    batches = self.loader.step()
                    meter.fetched(time.perf_counter() - fetch_started)
                    loss, norm, lr = self.train_step(batches)
                    self._advance(batches, meter)
                    console.advance(self.progress.step)
                    if self._is_logged(self.progress.step):
                        row = self._row(loss, norm, lr, meter)
                        metrics.log(row)
                        console.update(row)
                    registry.run_hooks("after_step", self, {"step": self.progress.step, "loss": loss, "lr": lr})
                    with self._pause(meter, profiler):
                        self._validate(metrics, console)
                        if self.saver.is_due(self.progress.step, self.total_steps):
                            self.saver.save(self.progress, last=self.progress.step == self.total_steps)
                        profiler.step()
                    collect(self.progress.step)
                if stop.name and self.progress.step < self.total_steps:
                    self.saver.save_at_stop(self.progress)
                    stopped_by = stop.name
        except BaseException as error:
            self._log_failure(error)
            raise
        finally:
            console.close(stopped_by)
            if metrics is not None:
                metrics.close()
            self.close()
        return Result(self.progress.step, row.get("loss"), stopped_by)

    def _log_failure(self, error: BaseException) -> None:
        """For the log file alone: whoever catches the error shows it."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        log.error("ended after step %d: %s", self.progress.step, text, extra={"file_only": True})

    def _profiler(self) -> Profiler:
        return Profiler(self.config, self.folder.path, device=self.device, start_step=self.progress.step)

    def _advance(self, batches: list[Batch], meter: Meter) -> None:
        tokens = sum(batch.tokens.numel() for batch in batches)
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.samples = self.loader.position
        meter.stepped(tokens)

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step == self.total_steps or step % self.config.metrics.log_freq == 0

    def _row(self, loss: float, norm: float, lr: float, meter: Meter) -> dict[str, Any]:
        row = {"step": self.progress.step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": self.progress.tokens}
        return row | meter.rates() | {"memory_gib": peak_memory_gib(self.device), "comm_bytes": {}}

    def _pause(self, meter: Meter, profiler: Profiler) -> contextlib.AbstractContextManager[None]:
        """Stop the clock for what is not training, after the device has finished the step that is."""
        saves = self.saver.is_due(self.progress.step, self.total_steps)
        if not (saves or self._validates() or profiler.writes_next()):
            return contextlib.nullcontext()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return meter.paused()

    def _validates(self) -> bool:
        step = self.progress.step
        due = step == 1 or step == self.total_steps or step % self.config.validation.freq == 0
        return self.validation is not None and due

    def _validate(self, metrics: Metrics, console: Console) -> None:
        section, step = self.config.validation, self.progress.step
        if self.validation is None or not self._validates():
            return
        loss = validation_loss(self.model, self.validation, section.steps, self.config.training.loss_chunk_tokens)
        metrics.log_validation(step, loss)
        console.message(f"step {step}  validation loss {loss:.4f}")

    def close(self) -> None:
        """Stop data workers and give the run's folder free."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        self.folder.close()


class _Stop:
    name: str | None = None


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    """The first Ctrl-C or SIGTERM asks to stop at the next step boundary; the second one interrupts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.name:
            raise KeyboardInterrupt(number)
        stop.name = signal.Signals(number).name
        # From a thread: the signal may have come in the middle of a print, and one inside another repeats its text.
        _thread.start_new_thread(log.info, ("%s: stopping after this step (again: at once)", stop.name))

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def _shortened(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
