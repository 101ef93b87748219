"""When this rank communicated, and when it waited for that: for traces and metrics.

Times are nanoseconds of the unix clock (`now`), which the profiler's traces are in as well. A collective that returns
when it is done is communication and waiting at once. One that runs on in the background is communication from its
issue to its completion, and waiting only while the rank is in `wait`:

    communication   [ all_gather ---------------------------- ]
    computation     [ product of what is there ]
    waiting                                     [ ------------ ]      exposed = communication without computation

NCCL's collectives are not recorded here: they run on the GPU, where the profiler sees them itself.
"""

from __future__ import annotations

import time
from typing import NamedTuple

now = time.time_ns
RANGE = "communication over "  # begins the names of the ranges that `observe.labelled` leaves in a trace
COPIES = " (copies)"


class Span(NamedTuple):
    axis: str
    what: str
    start: int
    end: int
    waiting: bool  # the rank waited; False: the collective itself


class Spans:
    """The spans of this rank. Several may read: each reader has a name, begins with `record`, and gets every span that
    was added since its last `take`.

    `enabled` is true while anybody reads. Callers check it before they take the time: otherwise spans cost nothing.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._readers: dict[str, list[Span]] = {}

    def record(self, reader: str = "step") -> None:
        """Begin to keep spans for a reader; a reader that has begun already goes on."""
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
        """The spans added since the last call; none where the reader does not record."""
        kept = self._readers.get(reader, [])
        taken = kept[:]
        del kept[: len(taken)]  # the rest was added meanwhile
        return taken

    def ended(self, axis: str, what: str, start: int, only_waiting: bool = False) -> None:
        """The rank has just returned from a collective that it entered at `start`.

        It waited for it; and unless the collective ran in the background, it also lasted from then until now.
        """
        end = now()
        if not only_waiting:
            self.add(axis, what, start, end, waiting=False)
        self.add(axis, what, start, end, waiting=True)
