"""Runs a save in a thread of its own: the run waits for it, or goes on and gets its error later.

    submit --> writing ... --> done          check(): raises the save's error, once
       |________ wait() _______|             wait():  logs the file being written if that takes long

The thread checks `SaveActivity.cancelled` between pieces and stops if it is set. A thread that hangs in the file system
cannot be stopped; it does not keep the process from ending.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from shardline.errors import UserError

log = logging.getLogger("shardline")
PATIENCE_SECONDS = 10.0  # before a wait is logged for the first time
LAST_SECONDS = 2.0  # to wait for a save that was cancelled


class Cancelled(Exception):
    """The run ends without this save."""


class SaveActivity:
    """What the thread is doing, in words for a log line, and whether it was cancelled."""

    def __init__(self, at: str) -> None:
        self.at, self.cancelled = at, False

    def check(self) -> None:
        if self.cancelled:
            raise Cancelled


Job = Callable[[SaveActivity], object]


class Background:
    """Runs at most one job at a time."""

    def __init__(self, timeout_seconds: float, rank: int) -> None:
        self.timeout_seconds, self.rank = timeout_seconds, rank
        self._thread: threading.Thread | None = None
        self._activity = SaveActivity("")
        self._what, self._began = "", 0.0
        self.seconds = 0.0  # duration of the last job that ended
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and not self._done.is_set()

    def submit(self, what: str, job: Job) -> None:
        """Start `job` once the previous one has ended without an error."""
        self.wait()
        self._what, self._began, self._activity = what, time.monotonic(), SaveActivity("its beginning")
        self._done.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), name="shardline-save", daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            job(self._activity)
        except Cancelled:
            pass
        except BaseException as error:  # `check` raises it in the run's thread
            self._error = error
        finally:
            self.seconds = time.monotonic() - self._began
            self._done.set()

    def check(self) -> None:
        """Raise the error of a job that has ended, once."""
        if self._thread is None or not self._done.is_set():
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until the job has ended, then `check`. An interrupt or a timeout cancels it."""
        try:
            began, patience = time.monotonic(), PATIENCE_SECONDS
            while self.busy and not self._done.wait(0.5):
                now = time.monotonic()
                if now - self._began > self.timeout_seconds or now - began > seconds:
                    raise UserError(
                        f"the save of {self._what} has not ended after {now - self._began:.0f} s: rank {self.rank} is"
                        f" at {self._activity.at}; earlier ones are intact. checkpoint.save_timeout_seconds allows more"
                    )
                if now - began > patience:
                    patience *= 4
                    log.warning("waiting for the save of %s, which is at: %s", self._what, self._activity.at)
        except BaseException:
            self.cancel()
            raise
        self.check()

    def cancel(self) -> None:
        """End the job where it next checks for it, or with the process."""
        self._activity.cancelled = True
        if self._thread is not None:
            self._done.wait(LAST_SECONDS)
        self._thread = self._error = None
