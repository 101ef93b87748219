"""Keeps the last collectives of a rank in memory, and writes them to a file when the job hangs, or on request.

    issued ──> waited for, if the host waits ──> done
      |                 |                          |
      number on its axis, tag, bytes        a collective without `done` is where the rank, or its device, is

`shardline trace hang` compares the files of all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardline.storage.atomic import write_atomically

CLOSE_SECONDS = 1.0


@dataclass(slots=True)
class Flight:
    """One collective of this rank; times are seconds since 1970, or 0 for events that have not happened."""

    axis: str
    number: int  # counted on this axis, equally on all of its ranks
    tag: str
    size: int  # bytes that this rank sends; 0 where another rank counts them
    step: int
    issued: float
    waited: float = 0.0
    done: float = 0.0


class FlightRecorder:
    """Keeps the last `size` collectives; their file in `folder` is named by `prefix` and the rank."""

    def __init__(self, rank: int, size: int, folder: Path, prefix: str) -> None:
        self.rank, self.path = rank, folder / f"{prefix}{rank}.json"
        self.flights: collections.deque[Flight] = collections.deque(maxlen=size)
        self._closed = threading.Event()
        self._listener: threading.Thread | None = None

    def issue(self, axis: str, number: int, tag: str, size: float | None, step: int) -> Flight:
        """Note a collective that was just issued; the code that waits for it sets its times."""
        flight = Flight(axis, number, tag, round(size or 0), step, time.time())
        self.flights.append(flight)
        return flight

    def write(self, reason: str, members: Mapping[str, tuple[int, ...]]) -> None:
        """Write what is known now. The members of each axis tell which other files to compare with."""
        about = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "reason": reason}
        rows = [_row(flight) for flight in list(self.flights)]
        text = json.dumps({**about, "at": time.time(), "members": dict(members), "collectives": rows})
        write_atomically(self.path, text)

    def listen(self, requested: Callable[[], object]) -> None:
        """Call `requested` for each SIGUSR2, in a thread: the main thread may be blocked where it gets no signal.

        Do nothing if the signal is not blocked: it could go to another thread and end a process that is not ours.
        """
        if signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, []):
            return
        self._listener = threading.Thread(target=self._hear, args=[requested], name="shardline-recorder", daemon=True)
        self._listener.start()

    def _hear(self, requested: Callable[[], object]) -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            if self._closed.is_set():
                return
            with contextlib.suppress(RuntimeError):  # from the store
                requested()

    def close(self) -> None:
        self._closed.set()
        if self._listener is not None and self._listener.is_alive():
            signal.pthread_kill(self._listener.ident or 0, signal.SIGUSR2)
            self._listener.join(CLOSE_SECONDS)


def _row(flight: Flight) -> list[str | int | float]:
    return [
        *(flight.axis, flight.number, flight.tag, flight.size, flight.step),
        *(flight.issued, flight.waited, flight.done),
    ]
