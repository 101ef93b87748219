"""Records when this rank communicated and when it waited for communication, for traces and metrics.

Times are nanoseconds of the Unix clock (`now`), as in the profiler's traces. A collective that returns when it is done
counts as communication and as waiting. One that runs in the background is communication from its issue to its
completion, and waiting only while the rank is in `wait`:

    communication   [ all_gather ---------------------------- ]
    computation     [ product of what is there ]
    waiting                                     [ ------------ ]      exposed = communication without computation

NCCL's collectives are not recorded here: they run on the GPU, where the profiler sees them.
"""

from __future__ import annotations

import time
from typing import NamedTuple

now = time.time_ns
RANGE = "communication over "  # prefix of the ranges that `observe.labelled` leaves in a trace
COPIES = " (copies)"


class Span(NamedTuple):
    axis: str
    what: str
    start: int
    end: int
    waiting: bool  # True: the rank waited; False: the collective ran


class Spans:
    """The spans of this rank. There may be several readers: each has a name, begins with `record`, and gets every span
    that was added since its last `take`.

    `enabled` is true while there is a reader. Callers check it before they read the clock, so unread spans are free.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._readers: dict[str, list[Span]] = {}

    def record(self, reader: str = "step") -> None:
        """Start keeping spans for a reader; a reader that has already started continues."""
        self._readers = {**self._readers, reader: self._readers.get(reader, [])}  # another thread may be adding
        self.enabled = True

    def stop(self, reader: str = "step") -> None:
        """Remove a reader and the spans that it has not taken."""
        self._readers = {name: kept for name, kept in self._readers.items() if name != reader}
        self.enabled = bool(self._readers)

    def add(self, axis: str, what: str, start: float, end: float, waiting: bool) -> None:
        span = Span(axis, what, int(start), int(end), waiting)
        for kept in self._readers.values():
            kept.append(span)

    def take(self, reader: str = "step") -> list[Span]:
        """Return the spans added since the last call; none if the reader does not record."""
        kept = self._readers.get(reader, [])
        taken = kept[:]
        del kept[: len(taken)]  # the rest was added meanwhile
        return taken

    def ended(self, axis: str, what: str, start: int, only_waiting: bool = False) -> None:
        """Add the spans of a collective that the rank entered at `start` and has just returned from.

        The rank waited from then until now, and unless it ran in the background, so long did the collective run.
        """
        end = now()
        if not only_waiting:
            self.add(axis, what, start, end, waiting=False)
        self.add(axis, what, start, end, waiting=True)
