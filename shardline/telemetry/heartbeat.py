"""log/heartbeat.json: what a run is doing right now, for `shardline tail` and for tools that watch many runs.

    {"time": 1795000000.1, "doing": "training", "step": 120, "last_step": 500, "loss": 2.25, "host": "node0", "pid": 47}

`doing` is training, validating, saving, ended or failed. Rank 0 replaces the file at most once a second: an old file
belongs to a run that hangs or was killed. log/lock has a separate heartbeat, of the process rather than its steps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardline.storage.atomic import plain_file

log = logging.getLogger("shardline")
FILE = Path("log") / "heartbeat.json"
BEAT_SECONDS = 1.0


class Heartbeat:
    """Written only by rank 0. If the file cannot be written, a warning is logged and the run goes on without it."""

    def __init__(self, folder: Path, rank: int, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock, self.active = folder / FILE, clock, rank == 0
        self.facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
        self.written_at = float("-inf")

    @contextlib.contextmanager
    def running(self, step: int, last_step: int, stopped_by: Callable[[], str | None]) -> Iterator[None]:
        """Wrap the training loop, which starts after `step`; `stopped_by` returns what ended it early."""
        self.beat("training", step=step, last_step=last_step, loss=None, now=True)
        try:
            yield
        except BaseException as error:
            self.beat("failed", error=f"{type(error).__name__}: {error}"[:500], now=True)
            raise
        self.beat("ended", stopped_by=stopped_by(), now=True)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Wrap an activity other than training."""
        self.beat(what, now=True)
        yield
        self.beat("training", now=True)

    def beat(self, doing: str, *, now: bool = False, **facts: Any) -> None:
        self.facts |= facts
        moment = self.clock()
        if not self.active or (not now and moment - self.written_at < BEAT_SECONDS):
            return
        self.written_at = moment
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            with open(part, "x", encoding="utf-8", opener=plain_file) as file:
                file.write(json.dumps({"time": round(moment, 3), "doing": doing, **self.facts}))
            part.replace(self.path)
        except OSError as error:
            self.active = False
            log.warning("%s is no longer written: %s", self.path, error.strerror or error)
