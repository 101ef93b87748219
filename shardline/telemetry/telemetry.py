"""Everything that observes a run, as one object: console, metrics, clocks, profiler, recompilations, gc, watchdog.

with telemetry.running(step, last_step):
    with telemetry.step(number):             every step
        with telemetry.fetching(): ...       its batches
        ...                                  forward, backward, update
        telemetry.log(...)                   a row, if one is due
        with telemetry.paused(): ...         validation, a save: time apart from training
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shardline.comm import collectives, symmetric_memory, watchdog
from shardline.comm.exposed_time import exposed
from shardline.comm.hidden_time import Sampler, Times
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import runs_on_host
from shardline.config.schema import Config
from shardline.models.decoder import Decoder
from shardline.models.flavors import model_label
from shardline.parallel.apply import Applied
from shardline.parallel.expert.balance import ExpertLoad
from shardline.parallel.pipeline.executor import Pipeline, busy_and_span, idle_share
from shardline.parallel.pipeline.schedules import plain_bubble, theoretical_bubble
from shardline.parallel.pipeline.timeline import TimedAction
from shardline.run import attempt
from shardline.run.device import peak_memory_gib, read, reset_peak
from shardline.run.folder import RunFolder
from shardline.telemetry import engaged
from shardline.telemetry.console import Console
from shardline.telemetry.engaged import StepObserver
from shardline.telemetry.heartbeat import Heartbeat
from shardline.telemetry.log import log_table
from shardline.telemetry.loss_watch import LossWatch
from shardline.telemetry.metrics import Meter, MetricsLog
from shardline.telemetry.profile import Profiler
from shardline.telemetry.prometheus import Exporter
from shardline.telemetry.rank_log import RankLog, StepParts, held_by_rank, idle_seconds
from shardline.telemetry.recompiles import CompileReport
from shardline.telemetry.serial_steps import SerialComparison
from shardline.telemetry.slow_ranks import SlowRanks
from shardline.words import TableRows, printable

log = logging.getLogger("shardline")


class Telemetry:
    """`step_tokens` are the tokens of a global batch. `row` is the last one that was logged."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        mesh: Mesh,
        device: torch.device,
        meter: Meter,
        step_tokens: int,
        *,
        pipeline: Pipeline | None,
        applied: Applied,
        observer: StepObserver,
    ) -> None:
        self.config, self.folder, self.mesh, self.device = config, folder, mesh, device
        self.meter, self.step_tokens, self.pipeline, self.offload = meter, step_tokens, pipeline, applied.offload
        self.observer, self._observing = observer, contextlib.ExitStack()
        axes = [] if applied.tensor is None else ["tp"]
        if mesh.layout.ep > 1 and runs_on_host(job.axes["ep"].group, device):
            axes.append("ep")
        sends_rows = mesh.layout.ep > 1 and config.parallelism.expert_parallel_comm_backend != "deepep"
        self.sampler = (
            Sampler(device, job.clock, job.row_clock, job.spans, axes, sends_rows)
            if axes or mesh.layout.ep > 1
            else None
        )
        self.serial = None if applied.tensor is None else SerialComparison(config)
        schedule = None if pipeline is None else pipeline.plan.schedule
        theory, plain = (None, None) if schedule is None else (theoretical_bubble(schedule), plain_bubble(schedule))
        self.console = Console(config, folder.path, mesh.rank, theoretical_bubble=theory, plain_bubble=plain)
        self.row: dict[str, Any] = {}
        self.stopped_by: str | None = None  # what ended the run early, for its closing lines
        self.parts = StepParts(device)
        self.heartbeat = Heartbeat(folder.path, mesh.rank)
        self.loss_watch = LossWatch(config.training.max_loss)
        self.slow_ranks = SlowRanks(mesh.layout, mesh.rank)
        self.exporter = Exporter(
            {"run": folder.path.name, "model": model_label(config.model), "layout": str(mesh.layout)}
        )

    def watch(self, model: Decoder, optimizer: torch.optim.Optimizer, experts: ExpertLoad) -> None:
        """Prepare what only this rank writes: the time of its update, what it holds, the load of experts."""
        if self.config.parallelism.data_parallel_mode != "async":  # in async mode, a server's threads step at any time
            self.parts.watch(optimizer)
        self.experts = experts
        self.rank_log = RankLog(self.folder.path, self.mesh, self.device, held_by_rank(model))

    @contextlib.contextmanager
    def running(self, step: int, last_step: int) -> Iterator[None]:
        """Wrap the training loop, which starts after `step`; `report` shows the closing table afterwards."""
        config, rank = self.config, self.mesh.rank
        self.number = self.first_step = step
        self.last_step = last_step
        self.console.start(last_step, step)
        with contextlib.ExitStack() as closing:
            closing.callback(self.console.stop)
            self.metrics = MetricsLog(config, self.folder, step, rank=rank)
            closing.callback(self.metrics.close)
            closing.enter_context(self.heartbeat.running(step, last_step, lambda: self.stopped_by))
            self._serve(closing)
            closing.enter_context(self.rank_log.running(step, last_step))
            closing.callback(self.parts.stop)
            closing.enter_context(_no_automatic_gc())
            profiler = Profiler(config, self.folder.path, rank, device=self.device, start_step=step)
            self.profiler = closing.enter_context(profiler)
            self.recompiles = CompileReport()
            reset_peak(self.device)
            self.meter.restart()
            yield
            self.rank_log.stopped_by = self.stopped_by

    def _serve(self, closing: contextlib.ExitStack) -> None:
        port = self.config.metrics.prometheus_port
        if port is not None and self.mesh.rank == 0:
            log.info("metrics for Prometheus: %s", closing.enter_context(self.exporter.serving(port)))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap everything that belongs to a step."""
        self.number = number
        job.traffic.take()
        exposed.reset()
        if self.offload is not None:
            self.offload.take()
        with self._observing:
            yield
        with self.paused() if self.profiler.writes_next() else contextlib.nullcontext():
            self.profiler.step()
        self._collect_garbage()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Wrap the loading of the step's batches; the clocks of the step itself start after that."""
        began = time.perf_counter()
        yield
        data_seconds = time.perf_counter() - began
        self.meter.fetched(data_seconds)
        if self.number == self.first_step + 1:
            self._observing.enter_context(self.observer.watching())
        if job.watchdog is not None:
            job.watchdog.step(self.number)
        if self.is_logged():
            if self.serial is not None:
                self._finish_on_device()
                self.serial.begin(self.number)
            if self.sampler is not None:
                self.sampler.begin()
            if self.pipeline is not None:
                self.pipeline.clock.begin()
            self.parts.begin(data_seconds)

    @contextlib.contextmanager
    def paused(self, doing: str = "writing a profile") -> Iterator[None]:
        """Stop the clock during an activity other than training, after the device has finished the step."""
        self._finish_on_device()
        with self.heartbeat.doing(doing), self.meter.paused():
            yield

    def _finish_on_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def is_logged(self) -> bool:
        return self.number in (1, self.last_step) or self.number % self.config.metrics.log_freq == 0

    def log(self, loss: float, grad_norm: float, lr: float, tokens: int, more: dict[str, Any]) -> None:
        """Show a finished step, and record its row if one is due.

        `tokens` counts those of the run so far; `more` has numbers that not every run has.
        """
        parts = self.parts.end() if self.is_logged() else {}
        times = self.sampler.end() if self.sampler is not None and self.is_logged() else {}
        self._observing.close()
        if self.number == self.first_step + 1 and self.mesh.world_size > 1:
            watchdog.set_timeouts(self.config.comm.train_timeout_seconds)
        attempt.note("first_step")
        self.meter.stepped(self.step_tokens)
        self.console.advance(self.number, loss)
        self.heartbeat.beat("training", step=self.number, loss=loss if math.isfinite(loss) else None)
        if self.is_logged():
            of_step = {"step": self.number, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens}
            self.row = of_step | self._measured(times, parts) | self.meter.rates() | more
            self.metrics.log(self.row)
            self.console.update(self.row)
            self.exporter.update(self.row, self.slow_ranks.latest)
        if self.number == self.first_step + 1:
            self._tell_what_engaged()
        elif self.observer.found.get("cuda_graphs") != self.observer.applied.cuda_graphs:
            self._write_what_engaged({**self.observer.found, "cuda_graphs": self.observer.applied.cuda_graphs})
        jump = self.loss_watch.add(self.number, loss, grad_norm) if self.mesh.rank == 0 else None
        for line in (*self.recompiles.lines(self.number, self.first_step), *filter(None, [jump])):
            log.warning("%s", line)

    def _tell_what_engaged(self) -> None:
        """Write what the first step did on all ranks, and warn if something that the config asks for did not happen."""
        self._write_what_engaged(self.observer.found)
        log_table(engaged.table(self.observer.found), "What the first step did", file_only=True)
        if self.observer.applied.graphs == []:
            log.warning("compile.enable: no graph was compiled in the first step; blocks run eagerly")

    def _write_what_engaged(self, found: dict[str, Any]) -> None:
        self.observer.found = found
        of_ranks = self.mesh.from_everyone(found)
        if self.mesh.rank == 0:
            engaged.write(self.folder.path, self.number, of_ranks)

    def log_validation(self, step: int, found: dict[str, float]) -> None:
        self.metrics.log_validation(step, found)
        self.console.validated(step, found)
        self.exporter.update({f"validation_{name}": value for name, value in found.items()})
        if self.mesh.rank == 0:
            self.rank_log.write("validation", {"step": step, **found})

    def log_samples(self, step: int, samples: Iterable[tuple[str, str, list[int]]], seconds: float) -> None:
        """Record (prompt, text, new tokens) of each sample, and how long all of them took."""
        rows = [
            {"step": step, "prompt": prompt, "text": text, "tokens": tokens, "seconds": round(seconds, 3)}
            for prompt, text, tokens in samples
        ]
        self.metrics.log_samples(rows)
        for row in rows:
            texts = (printable(json.dumps(row[part], ensure_ascii=False)) for part in ("prompt", "text"))
            log.info("step %d  sample %s -> %s", step, *texts)

    def report(self, more: TableRows) -> None:
        """Show the closing table of a loop that has started, with `more` rows."""
        self.console.report(self.stopped_by, more)

    def _measured(self, times: dict[str, Times], parts: dict[str, Any]) -> dict[str, Any]:
        """Memory and communication of this step, the highest numbers over all ranks; `parts` are this rank's."""
        sent, waited = job.traffic.take(), exposed.take()
        offloaded = 0.0 if self.offload is None else float(self.offload.take())
        memory = peak_memory_gib(self.device) + symmetric_memory.shared_gib()
        actions = [] if self.pipeline is None else self.pipeline.clock.take()
        self._write_rank(parts, times, sent, waited, memory, actions)
        of_axes = [seconds for axis in times for seconds in times[axis]]
        lasted = 0.0 if self.serial is None else self.serial.seconds()
        together = self.mesh.world_size > 1 and self.config.parallelism.data_parallel_mode != "async"
        paces = self.slow_ranks.slots(parts) if together else []
        highest = [memory, waited or 0.0, offloaded, lasted, *of_axes, *paces]
        if together:
            numbers = torch.tensor(highest, dtype=torch.float64, device=self.device)  # float32 cannot count bytes
            highest = read(collectives.max_in_place(numbers, "world"))
        memory, waited_longest, offloaded, lasted, *longest = highest
        self._tell_slow_ranks(parts["seconds"], longest[len(of_axes) :])
        row: dict[str, Any] = {"memory_gib": memory, "comm_bytes": sent}
        if waited is not None and self.mesh.size("loss") > 1:
            row["dp_exposed_seconds"] = waited_longest
        if self.offload is not None:
            row["offloaded_bytes"] = int(offloaded)
        for number, axis in enumerate(times):
            slowest = Times(*longest[2 * number : 2 * number + 2])
            if axis == "tp" and self.serial is not None:
                row |= self.serial.end(slowest, lasted)
                continue
            row |= {f"{axis}_comm_seconds": slowest.comm, f"{axis}_exposed_seconds": slowest.exposed}
            row[f"{axis}_hidden_fraction"] = slowest.hidden
        if self.pipeline is not None:
            self.pipeline.clock.enabled = False
            if together:  # asynchronous workers do not wait for each other
                row["pp_bubble_fraction"] = idle_share(*busy_and_span(actions), self.device)
        return row

    def _tell_slow_ranks(self, seconds: float, paces: Sequence[float]) -> None:
        if self.mesh.rank != 0 or not paces:
            return
        for rank, words in self.slow_ranks.add(seconds, paces):
            log.warning("step %d: rank %d%s %s", self.number, rank, self.folder.host_words(rank), words)

    def _write_rank(
        self,
        parts: dict[str, Any],
        times: dict[str, Times],
        sent: dict[str, int],
        waited: float | None,
        memory: float,
        actions: Sequence[TimedAction],
    ) -> None:
        """Write this rank's own rows. GPU communication was timed by the sampler, and where FSDP waits."""
        of_device = {axis: both for axis, both in times.items() if axis not in parts["comm"]}
        parts["comm"] |= {axis: both.comm for axis, both in of_device.items()}
        parts["exposed"] |= {axis: both.exposed for axis, both in of_device.items()}
        if self.device.type == "cuda" and waited is not None and self.mesh.size("loss") > 1:
            parts["exposed"]["dp"] = waited
        if self.pipeline is not None:
            parts["idle"] = idle_seconds(actions, self.parts.began, self.parts.waits)
        self.rank_log.step(self.number, parts, sent, memory)
        if self.rank_log.wants_detail(last=self.number == self.last_step):
            self.rank_log.detail(self.number, actions, self.experts.loads, self.experts.layers)

    def _collect_garbage(self) -> None:
        section = self.config.training
        if section.gc_debug:
            log.info("step %d: gc found %d unreachable objects", self.number, gc.collect())
        elif section.gc_freq > 0 and self.number % section.gc_freq == 0:
            gc.collect(1)


@contextlib.contextmanager
def _no_automatic_gc() -> Iterator[None]:
    """Collect garbage only every `training.gc_freq` steps: otherwise ranks would pause at different times."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
