"""Writes traces, tables of the most expensive ops and CUDA memory snapshots every `profiling.profile_freq` steps."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd import DeviceType

from shardline.comm.job import job
from shardline.config.schema import Config
from shardline.telemetry.trace_file import add_spans

log = logging.getLogger("shardline")
# Annotations of the profiler itself and, if stacks are recorded, Python calls: `file.py(12): function`.
NOT_AN_OP = re.compile(r"^ProfilerStep|\(\d+\): |^<built-in |^nn\.Module: ")
SNAPSHOT_ENTRIES = 100_000  # allocations and frees the snapshot remembers


class Profiler:
    """Records steps; `step()` is called after each of them. Costs nothing unless traces or snapshots are enabled.

    With freq 10, warmup 3, active 1:   step  1 2 3 4 5 6 | 7 8 9 | 10 -> iteration_10
                                              idle          warmup  recorded
    """

    def __init__(
        self, config: Config, folder: Path, rank: int = 0, device: torch.device | None = None, start_step: int = 0
    ) -> None:
        self.options, self.folder, self.rank, self.at = config.profiling, folder, rank, start_step
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.since, self.traces = start_step, 0
        self.trace = self._new_trace() if self.options.enable_profiling else None
        self._record_spans()
        self.snapshots = self._start_snapshots()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.snapshots and isinstance(error, torch.OutOfMemoryError):  # in the step after `at`
            self._save_snapshot(f"iteration_{self.at + 1}_out_of_memory")
        self.close()

    def writes_next(self) -> bool:
        """Whether the next `step()` writes a trace or a snapshot, which takes time apart from training."""
        return (self.trace is not None or self.snapshots) and (self.at + 1) % self.options.profile_freq == 0

    def step(self) -> None:
        self.at += 1
        if self.trace is not None:
            self.trace.step()
            self._record_spans()
        if self.snapshots and self.at % self.options.profile_freq == 0:
            self._save_snapshot(f"iteration_{self.at}")

    def close(self) -> None:
        if self.trace is not None:
            self.trace.stop()
            self.trace = None
            self._record_spans()
            if self.traces == 0:
                log.warning("no trace was recorded: the run ended before profile_freq = %d", self.options.profile_freq)
        if self.snapshots:
            self.snapshots = False
            torch.cuda.memory._record_memory_history(enabled=None)

    # ---- traces ------------------------------------------------------------------------------------------------------

    def _new_trace(self) -> torch.profiler.profile:
        options = self.options
        idle = options.profile_freq - options.profiler_warmup - options.profiler_active
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # One trace per cycle is intended; torch warns that it does not add cycles up.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        trace = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=idle, warmup=options.profiler_warmup, active=options.profiler_active),
            on_trace_ready=self._save_trace,
            record_shapes=options.record_shapes,
            with_stack=options.with_stack,
        )
        trace.start()
        return trace

    def _records(self, step: int) -> bool:
        """Whether the trace records this step: it records the last ones of each cycle."""
        in_cycle = (step - self.since - 1) % self.options.profile_freq + 1
        return step > self.since and in_cycle > self.options.profile_freq - self.options.profiler_active

    def _record_spans(self) -> None:
        """Record communication spans in the steps that the trace records."""
        if self.trace is not None and self._records(self.at + 1):
            job.spans.record("trace")
            job.clock.traced = [] if self.device.type == "cuda" else None
        else:
            job.spans.stop("trace")
            job.clock.traced = None

    def _save_trace(self, trace: torch.profiler.profile) -> None:
        if not self._records(self.at):  # the run ended just after recording had begun
            return
        self.traces += 1
        folder = self.folder / self.options.save_traces_folder / f"iteration_{self.at}"
        path = folder / f"rank{self.rank}_trace.json"
        table = folder / ("ops.txt" if self.rank == 0 else f"rank{self.rank}_ops.txt")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in (path, table):  # torch would follow a link
                file.unlink(missing_ok=True)
            trace.export_chrome_trace(str(path))
            kernels = [kernel.as_row() for kernel in job.clock.traced or []]
            job.clock.traced = []
            add_spans(path, self.rank, self.since + 1, job.axes, job.spans.take("trace"), kernels)
            table.write_text(ops_table(list(trace.key_averages()), self.options.top_ops))
        except (OSError, RuntimeError) as error:  # the run is worth more than its trace
            log.warning("the trace of step %d was not saved: %s", self.at, error)
            for left in (path, path.with_name(f"{path.name}.tmp"), table):  # the folder is shared with other ranks
                with contextlib.suppress(OSError):
                    left.unlink()
            return
        log.info("trace of step %d: %s", self.at, path)

    # ---- memory snapshots --------------------------------------------------------------------------------------------

    def _start_snapshots(self) -> bool:
        if not self.options.enable_memory_snapshot:
            return False
        if self.device.type != "cuda":
            log.warning("profiling.enable_memory_snapshot has no effect: memory snapshots need CUDA")
            return False
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)  # a private API of torch
        return True

    def _save_snapshot(self, name: str) -> None:
        """Write torch's own snapshot format, for https://pytorch.org/memory_viz."""
        folder = self.folder / self.options.save_memory_snapshot_folder / name
        path = folder / f"rank{self.rank}_memory_snapshot.pickle"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # torch would follow a link
            torch.cuda.memory._dump_snapshot(str(path))
            log.info("memory snapshot of step %d: %s", self.at, path)
        except (OSError, RuntimeError) as error:
            log.warning("the memory snapshot of step %d was not saved: %s", self.at, error)


# ---- the table of ops ------------------------------------------------------------------------------------------------


def ops_table(events: list[Any], rows: int) -> str:
    """The ops with the most CPU time of their own and, on a GPU, the most expensive kernels."""
    events = [event for event in events if not event.is_user_annotation and not NOT_AN_OP.search(event.key)]
    ops = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    text = _part("CPU ops", ops, "cpu_time_total", rows)
    if kernels:
        launched = [event for event in ops if event.self_device_time_total > 0]
        text += "\n" + _part("GPU time of the ops that launch it", launched, "device_time_total", rows)
        text += "\n" + _part("GPU kernels", kernels, "device_time_total", rows)
    return text


def _part(title: str, events: list[Any], measure: str, rows: int) -> str:
    """One table, sorted by own time; `total` adds the ops called inside."""
    whole = sum(getattr(event, f"self_{measure}") for event in events) or 1.0
    events = sorted(events, key=lambda event: getattr(event, f"self_{measure}"), reverse=True)
    lines = [title, f"{'self ms':>12}{'share':>8}{'total ms':>12}{'calls':>9}  name"]
    for event in events[:rows]:
        own, total = getattr(event, f"self_{measure}"), getattr(event, measure)
        lines.append(f"{own / 1e3:>12.3f}{own / whole:>8.1%}{total / 1e3:>12.3f}{event.count:>9}  {event.key:.100}")
    return "\n".join(lines) + "\n"
