"""When this rank communicated, and when it waited for that: for traces and metrics.

Times are nanoseconds of the unix clock (`now`), which the profiler's traces are in as well. A collective that returns
when it is done is communication and waiting at once. One that runs on in the background is communication from its
issue to its completion, and waiting only while the rank stands in `wait`:

    communication   [ all_gather ---------------------------- ]
    computation     [ product of what is there ]
    waiting                                     [ ------------ ]      exposed = communication without computation

NCCL's collectives are not written down here: they run on the GPU, where the profiler sees them itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

now = time.time_ns
RANGE = "communication over "  # begins the names of the ranges that `labelled` leaves in a trace
COPIES = " (copies)"


class Span(NamedTuple):
    axis: str
    what: str
    start: int
    end: int
    waiting: bool  # the rank stood still; False: the collective itself


class Spans:
    """Several may read: each has a name, begins with `record` and gets every span that was added since its last `take`.

    `enabled` says whether anybody reads; whoever adds asks it first, so that it costs nothing else.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._readers: dict[str, list[Span]] = {}

    def record(self, reader: str = "step") -> None:
        """Begin to keep spans for a reader; one that reads already goes on."""
        self._readers = {**self._readers, reader: self._readers.get(reader, [])}  # another thread may be adding
        self.enabled = True

    def stop(self, reader: str = "step") -> None:
        """Forget a reader and what it has not taken."""
        self._readers = {name: kept for name, kept in self._readers.items() if name != reader}
        self.enabled = bool(self._readers)

    def add(self, axis: str, what: str, start: float, end: float, waiting: bool) -> None:
        span = Span(axis, what, int(start), int(end), waiting)
        for kept in self._readers.values():
            kept.append(span)

    def take(self, reader: str = "step") -> list[Span]:
        """What was added since the last call; nothing where the reader does not record."""
        kept = self._readers.get(reader, [])
        taken = kept[:]
        del kept[: len(taken)]  # the rest was added meanwhile
        return taken

    @contextlib.contextmanager
    def waiting(self, axis: str, what: str) -> Iterator[None]:
        """Around a place where the rank stands still for a collective that was issued before."""
        if not self.enabled:
            yield
            return
        start = now()
        yield
        self.add(axis, what, start, now(), waiting=True)

    def blocked(self, axis: str, what: str, start: int) -> None:
        """A collective that returns when it is done has just returned."""
        end = now()
        self.add(axis, what, start, end, waiting=False)
        self.add(axis, what, start, end, waiting=True)


spans = Spans()


class Running:
    """A collective in the background, which began at `start` and ends when its work is complete or `end` is called.

    Where the work cannot tell (gloo's sends and receives), that is when somebody has waited for it.
    """

    def __init__(self, work: dist.Work, axis: str, what: str, start: int) -> None:
        self.axis, self.what, self.start = axis, what, start
        self._open = [True]
        with contextlib.suppress(RuntimeError):
            # Called by the backend's thread when the work is complete, or here where it is already.
            work.get_future().add_done_callback(lambda _: self.end())

    def end(self) -> None:
        ended = now()
        with contextlib.suppress(IndexError):  # the thread and the one that waits may both come: the first one counts
            self._open.pop()
            spans.add(self.axis, self.what, self.start, ended, waiting=False)


def runs_on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's collectives on this device are carried by the CPU, as gloo's are, also those of GPU tensors."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get(device.type) != "nccl"


@contextlib.contextmanager
def labelled(axis: str, what: str, copies_only: bool = False) -> Iterator[None]:
    """Around launches on a GPU that communicate without a process group: what runs by them counts for the axis.

    copies_only: memory copies alone, where products are launched in between.
    """
    if not spans.enabled:
        yield
        return
    with torch.profiler.record_function(f"{RANGE}{axis}{COPIES if copies_only else ''}: {what}"):
        yield
