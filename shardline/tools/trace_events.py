"""Reads from a profiler's trace when a rank computed, and when and over which mesh dimension it communicated.

Communication is recognized by its process group, never by the name of a kernel:

- an NCCL kernel carries its process group, or is linked to a call that does; the trace's own table (`shardline`) gives
  the mesh dimension of that group
- a kernel or copy launched inside one of our labeled ranges belongs to the range's dimension; all activities of a range
  form one collective, from the start of the first to the end of the last
- a kernel that communicates inside a matrix product has timed itself: it computes except while it waited, and it
  communicates while it sends and while it waits; its waits are placed at its end
- gloo collectives are in the trace as host spans, with their dimension

Everything else that runs on the GPU is computation. In a trace without a GPU, computation is the time that the threads
of forward and backward spend in operations, minus the time during which they wait for communication.
"""

from __future__ import annotations

import bisect
import functools
import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardline.comm.spans import COPIES, RANGE
from shardline.errors import UserError

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GROUP, DESCRIPTION, MEMBERS = "Process Group Name", "Process Group Description", "Process Group Ranks"
BACKWARD = "autograd::engine::evaluate_function"
STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True)
class Activity:
    """Times in microseconds. An activity belongs to the step in which the host launched it."""

    start: float
    end: float
    launched: float
    name: str = ""
    thread: Any = None  # of a host operation


class MarkedStep(NamedTuple):
    """A step that the profiler marked, with its start and end on the host."""

    number: int
    start: float
    end: float


@dataclass
class RankTrace:
    """The trace of one rank. `steps` are in order and may be empty. `main` is the thread that marked them."""

    rank: int | None
    on_gpu: bool
    steps: list[MarkedStep]
    main: Any = None
    computation: list[Activity] = field(default_factory=list)
    waits: list[Activity] = field(default_factory=list)
    communication: dict[str, list[Activity]] = field(default_factory=lambda: defaultdict(list))


def read(path: Path) -> RankTrace:
    """Read one trace; raise a UserError for any other kind of file."""
    content = _load(path)
    known = content if isinstance(content, dict) else {"traceEvents": content}
    events = known.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UserError(f"{path}: not a profiler's trace: it has no list of traceEvents")
    try:
        return _TraceReader(known, [event for event in events if event.get("ph") == "X"]).rank()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a trace that torch wrote: {type(error).__name__}: {error}") from error


def _load(path: Path) -> Any:
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            return json.load(file)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, EOFError) as error:  # or a damaged gzip file
        raise UserError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, or not JSON: {error}") from error


class _TraceReader:
    def __init__(self, content: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self.header: dict[str, Any] = content.get("shardline", {})
        self.axes: dict[str, Any] = self.header.get("axes", {})
        self.distributed: dict[str, Any] = content.get("distributedInfo", {})
        self.by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            self.by_kind[str(event.get("cat"))].append(event)
        self.launches = {
            event["args"]["correlation"]: event
            for event in self._of(*LAUNCHES)
            if "correlation" in event.get("args", {})
        }
        called = [event.get("args", {}) for event in self._of("cpu_op")]
        self.calls = {args["External id"]: args for args in called if GROUP in args and "External id" in args}
        self.ranges = Ranges(event for event in self._of("user_annotation") if event["name"].startswith(RANGE))
        self.waiting = Ranges(self._of("communication_wait"))
        self.timed = self._timed_kernels()
        self.collectives: dict[tuple[str, float], list[Activity]] = defaultdict(list)  # by axis and start of the range
        marks = [event for event in self._of("user_annotation") if STEP.fullmatch(event["name"])]
        self.main = marks[0]["tid"] if marks else None
        self.steps = sorted(MarkedStep(self._step(event), event["ts"], event["ts"] + event["dur"]) for event in marks)

    def _of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for kind in kinds for event in self.by_kind[kind]]

    def _step(self, event: dict[str, Any]) -> int:
        """Return the run's step number: the profiler counts from 0, and the table has the step at which it began."""
        return int(STEP.fullmatch(event["name"])[1]) + int(self.header.get("first_step", 0))  # type: ignore[index]

    def rank(self) -> RankTrace:
        number = self.header.get("rank", self.distributed.get("rank"))
        gpu = self._of(*GPU)
        found = RankTrace(number, bool(gpu), self.steps, self.main)
        found.waits = [_host(event) for event in self._of("communication_wait")]
        for event in self._of("communication", "communication_wait"):  # nothing hides it while its thread waits
            found.communication[event["args"]["axis"]].append(_host(event))
        for event in gpu:
            self._place(event, found)
        for (axis, _), parts in self.collectives.items():
            first, end = min(parts, key=lambda part: part.start), max(part.end for part in parts)
            found.communication[axis].append(replace(first, end=end))
        if not gpu:
            found.computation = [_host(event) for event in self._of("cpu_op") if event["tid"] in self.threads]
        return found

    @functools.cached_property
    def threads(self) -> set[Any]:
        """The threads of forward and backward, because a backend's threads have operations too."""
        backward = {event["tid"] for event in self._of("cpu_op") if event["name"].startswith(BACKWARD)}
        return backward | {self.main} if self.main is not None else {event["tid"] for event in self._of("cpu_op")}

    def _timed_kernels(self) -> dict[Any, dict[str, Any]]:
        """Return the times that kernels recorded, by correlation; none if their number differs from the trace's."""
        found: dict[Any, dict[str, Any]] = {}
        noted: list[dict[str, Any]] = self.header.get("kernels", [])
        kernels = sorted(self._of("kernel"), key=lambda event: event["ts"])
        for name in {one["name"] for one in noted}:
            events, rows = ([one for one in all_of_them if one["name"] == name] for all_of_them in (kernels, noted))
            if len(events) == len(rows):
                found |= {event["args"]["correlation"]: row for event, row in zip(events, rows, strict=True)}
        return found

    def _place_timed(self, activity: Activity, times: dict[str, Any], axis: str, found: RankTrace) -> None:
        start, end, launched, name = activity.start, activity.end, activity.launched, activity.name
        working = max(start, end - times["waited"])
        found.computation.append(Activity(start, working, launched, name))
        spans = [(working, end)] if times["sent"] is None else [(working, end), [start + at for at in times["sent"]]]
        found.communication[axis] += [Activity(begin, stop, launched, name) for begin, stop in spans if stop > begin]

    def _place(self, event: dict[str, Any], found: RankTrace) -> None:
        args = event.get("args", {})
        launch = self.launches.get(args.get("correlation"))
        launched = launch["ts"] if launch is not None else event["ts"]
        activity = Activity(event["ts"], event["ts"] + event["dur"], launched, event["name"])
        axis = self._axis(event, args, launch)
        times = self.timed.get(args.get("correlation"))
        label = self.ranges.around(launch["tid"], launch["ts"]) if launch is not None else None
        if times is not None and label is not None:
            self._place_timed(activity, times, _axis_of_label(label), found)
        elif axis is not None and label is not None and not _is_for_copies(label):
            self.collectives[axis, label["ts"]].append(activity)
        elif axis is not None:
            found.communication[axis].append(activity)
        elif not self._is_staging(event, launch):
            found.computation.append(activity)

    def _axis(self, event: dict[str, Any], args: dict[str, Any], launch: dict[str, Any] | None) -> str | None:
        """Return the mesh dimension of a GPU activity; None for computation."""
        call = args if GROUP in args else self.calls.get(args.get("External id"))
        if call is not None:
            return self._axis_of_group(call)
        label = self.ranges.around(launch["tid"], launch["ts"]) if launch is not None else None
        if label is None:
            return None
        return None if _is_for_copies(label) and event["cat"] != "gpu_memcpy" else _axis_of_label(label)

    def _axis_of_group(self, call: dict[str, Any]) -> str:
        name, members = str(call[GROUP]), _ranks(call.get(MEMBERS))
        by_name = [axis for axis, known in self.axes.items() if str(known["group"]) == name]
        by_members = [axis for axis, known in self.axes.items() if known["ranks"] == members]
        if by_name or by_members:
            return (by_name or by_members)[0]  # the table lists the mesh's own axes before derived ones
        described = str(call.get(DESCRIPTION) or "").removeprefix("mesh_")
        return described if described not in ("", "undefined") else f"group {name}"

    def _is_staging(self, event: dict[str, Any], launch: dict[str, Any] | None) -> bool:
        """Whether a copy moves a gloo tensor to or from the host: the collective's span is already counted."""
        if event["cat"] != "gpu_memcpy" or launch is None or not self.by_kind["communication"]:
            return False
        by_backend = self.main is not None and launch["tid"] not in self.threads
        return by_backend or self.waiting.around(None, launch["ts"]) is not None


class Ranges:
    """Finds the innermost event of a thread at a given time; the thread `None` stands for all threads together."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.events: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event["ts"]):
            for thread in (event["tid"], None):
                self.events[thread].append(event)
        self.starts = {thread: [event["ts"] for event in found] for thread, found in self.events.items()}
        self.latest: dict[Any, list[float]] = {  # the latest end of an event and of all before it
            thread: list(itertools.accumulate((event["ts"] + event["dur"] for event in found), max))
            for thread, found in self.events.items()
        }

    def around(self, thread: Any, moment: float) -> dict[str, Any] | None:
        if thread not in self.events:
            return None
        at = bisect.bisect_right(self.starts[thread], moment) - 1
        while at >= 0 and self.latest[thread][at] > moment:
            event = self.events[thread][at]
            if event["ts"] + event["dur"] > moment:
                return event
            at -= 1
        return None


def _dimension(label: dict[str, Any]) -> str:
    return str(label["name"].removeprefix(RANGE).partition(":")[0])


def _axis_of_label(label: dict[str, Any]) -> str:
    return _dimension(label).removesuffix(COPIES)


def _is_for_copies(label: dict[str, Any]) -> bool:
    return _dimension(label).endswith(COPIES)


def _host(event: dict[str, Any]) -> Activity:
    return Activity(event["ts"], event["ts"] + event["dur"], event["ts"], event["name"], event["tid"])


def _ranks(given: Any) -> list[int] | None:
    """Return the ranks of a group. torch writes a list or its text, and shortens long ones; None for those."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, list) else None
