"""How long a rank waits for data-parallel communication that nothing hides."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Exposed:
    """Adds up waits. Those of a GPU lie between two events on its stream, so `take` waits for the device."""

    def __init__(self) -> None:
        self.measured = True  # False: the waits of this run cannot be seen
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Around a wait, on the stream that waits."""
        if device.type == "cuda":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            started = time.perf_counter()
            yield
            self.add(time.perf_counter() - started)

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float | None:
        """Seconds since the last call; None where they cannot be measured."""
        seconds, self._seconds = self._seconds, 0.0
        events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
        seconds += sum(began.elapsed_time(ended) for began, ended in events) / 1000
        return seconds if self.measured else None

    def reset(self) -> None:
        """Forget what was measured, without waiting for the device."""
        self._seconds = 0.0
        self._events = []


exposed = Exposed()
