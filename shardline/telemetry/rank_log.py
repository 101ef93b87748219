"""What each rank writes about itself to log/telemetry-RANK.jsonl, the source of `shardline report`.

    {"event": "start", ...}     the loop begins: the rank's place in the layout, its host, device and weights
    {"event": "step", ...}      a logged step: where its time went, its memory, the bytes it sent
    {"event": "detail", ...}    for ever fewer logged steps: actions of the pipeline, tokens of each expert
    {"event": "save", ...}      and "validation", "warning", "end"

docs/report.md lists every field. A row is a single write by this rank: no collective, no waiting for another rank.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardline.comm.exposed_time import Moments
from shardline.comm.hidden_time import host_times
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import runs_on_host
from shardline.comm.spans import Span
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.parallel.data.asynchronous.exchange import AXIS as WORKERS
from shardline.parallel.pipeline.executor import busy_and_span
from shardline.parallel.pipeline.timeline import TimedAction
from shardline.run.device import GIB, device_name, resident_memory
from shardline.storage.atomic import plain_file

log = logging.getLogger("shardline")
READER = "rank log"  # its name as a reader of spans
MOST_EXPERTS = 20_000  # numbers in a detail row: layers x experts


@dataclass
class StepParts:
    """Where the time of this rank's logged step goes: `begin` after its data has arrived, `end` after its update.

    Communication is timed here if it runs on the host; that of a GPU is timed elsewhere.
    """

    device: torch.device
    enabled: bool = False
    _updates: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moments = Moments(self.device)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Time the optimizer's step; a step inside backward counts as a part of backward."""
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())

    def begin(self, data_seconds: float) -> None:
        self.enabled, self._updates, self._data = True, [], data_seconds
        job.spans.stop(READER)  # a replica group repeats a step that failed
        if "world" in job.axes and runs_on_host(job.axes["world"].group, self.device):
            job.spans.record(READER)
        self._began = self.moments.mark()

    def stop(self) -> None:
        """Stop measuring, during a step or after it."""
        self.enabled = False
        job.spans.stop(READER)

    def end(self) -> dict[str, Any]:
        """The seconds of the step and of its parts; communication and waiting for it by axis."""
        marks = [self._began, self.moments.mark(), *(moment for both in self._updates for moment in both)]
        began, ended, *updates = self.moments.unix(marks)
        self.began, spans = began, job.spans.take(READER)
        self.waits = [span for span in spans if span.axis == WORKERS and span.waiting]
        self.stop()
        times = {axis: host_times(spans, axis) for axis in sorted({span.axis for span in spans})}
        parts: dict[str, Any] = {"seconds": ended - began + self._data, "data": self._data}
        if updates:
            parts["optimizer"] = sum(updates[1::2]) - sum(updates[::2])
        parts["comm"] = {axis: seconds.comm for axis, seconds in times.items()}
        parts["exposed"] = {axis: seconds.exposed for axis, seconds in times.items()}
        return parts

    def _before_update(self) -> None:
        if self.enabled:
            self._updates.append((self.moments.mark(), None))

    def _after_update(self) -> None:
        if self.enabled:
            self._updates[-1] = (self._updates[-1][0], self.moments.mark())


class RankLog(logging.Handler):
    """The file of one rank. As a log handler it writes warnings and, on rank 0, the records that have an `event`."""

    def __init__(self, folder: Path, mesh: Mesh, device: torch.device, held: Mapping[str, Any]) -> None:
        super().__init__(logging.INFO)
        self.rank, self.device, self.logged = mesh.rank, device, 0
        self.start = {
            "rank": mesh.rank,
            "world_size": mesh.world_size,
            "layout": asdict(mesh.layout),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device_name(device),
            **held,
        }
        self.path = folder / "log" / f"telemetry-{mesh.rank}.jsonl"
        self.file: FileIO | None = None

    def running(self, step: int, last_step: int) -> RankLog:
        """Prepare the log, a context manager, for a loop that starts after `step`."""
        self.first_row = {"step": step, "last_step": last_step, **self.start}
        self.stopped_by: str | None = None
        return self

    def __enter__(self) -> RankLog:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0, opener=plain_file)
        except OSError as error:
            self._give_up(error)
        self.logged = 0
        self.write("start", self.first_row)
        log.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        log.removeHandler(self)
        text = None if kind is None else f"{kind.__name__}: {error}" if str(error) else kind.__name__
        self.write("end", {"error": text, "stopped_by": self.stopped_by})
        if self.file is not None:
            self.file.close()
            self.file = None

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        try:
            line = json.dumps({"event": event, "time": round(time.time(), 6), **_rounded(row)}, separators=(",", ":"))
            self.file.write(line.encode() + b"\n")
        except OSError as error:
            self._give_up(error)

    def step(self, number: int, parts: dict[str, Any], sent: Mapping[str, int], peak_gib: float) -> None:
        """Write the row of a logged step; `parts` come from `StepParts.end`, plus `idle` for a pipeline."""
        memory = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else resident_memory()
        self.write("step", {"step": number, **parts, "peak_gib": peak_gib, "now_gib": memory / GIB, "sent": sent})
        self.logged += 1

    def wants_detail(self, last: bool) -> bool:
        """Whether the logged step is the 1st, 2nd, 4th, 8th, ... of this start, or the last: few rows, some recent."""
        return last or self.logged & (self.logged - 1) == 0

    def detail(self, number: int, actions: Sequence[TimedAction], loads: torch.Tensor, layers: Sequence[int]) -> None:
        """Write a detail row; `loads` (layers, experts) are the tokens of each expert over all ranks, for rank 0."""
        row: dict[str, Any] = {}
        walk = last_walk(actions)
        if walk:
            began = walk[0].start
            row["began"] = began
            row["actions"] = [[str(a), round(1e6 * (s - began)), round(1e6 * (e - began))] for a, s, e in walk]
        if self.rank == 0 and 0 < loads.numel() <= MOST_EXPERTS:
            row |= {"layers": list(layers), "experts": [[round(n) for n in line] for line in loads.tolist()]}
        if row:
            self.write("detail", {"step": number, **row})

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event is not None and self.rank == 0:
            self.write(event["event"], event)
        elif record.levelno >= logging.WARNING:
            self.write("warning", {"text": record.getMessage()[:500]})

    def _give_up(self, error: OSError) -> None:
        """Stop writing this file; the run goes on without it."""
        self.file = None
        log.warning("%s is no longer written: %s", self.path, error.strerror or error)


def held_by_rank(model: Decoder) -> dict[str, Any]:
    """What the first row says about the weights on this rank."""
    shards = [local(parameter) for parameter in model.parameters()]
    return {
        "layers": [int(layer) for layer in model.layers],
        "parameters": sum(shard.numel() for shard in shards),
        "weight_bytes": sum(shard.numel() * shard.element_size() for shard in shards),
    }


def idle_seconds(actions: Sequence[TimedAction], began: float, waits: Sequence[Span] = ()) -> float:
    """How long a pipeline rank was idle between the beginning of the step and the end of its last action.

    `waits` for other workers, between their contributions, count apart.
    """
    if not actions:
        return 0.0
    busy, span = busy_and_span(actions)
    waited = sum(wait.end - wait.start for wait in waits if wait.end / 1e9 <= actions[-1].end) / 1e9
    return max(0.0, span - busy + actions[0].start - began - waited)


def last_walk(actions: Sequence[TimedAction]) -> Sequence[TimedAction]:
    """The actions of the last pass through the schedule, which gradient accumulation repeats within a step."""
    walks = sum(timed.action == actions[0].action for timed in actions) if actions else 1
    return actions[len(actions) - len(actions) // walks :]


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round numbers to six decimals: to a microsecond, or about a KiB in GiB."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            value = _rounded(value)
        found[key] = round(value, 6) if isinstance(value, float) else value
    return found
