"""Lines for the user, and the progress of a long read: a bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from typing import Any, Literal

from shardline.words import sized, to_stderr

LINE_SECONDS = 10.0
LEAST_BYTES = 1 << 30  # smaller reads show no progress
log = logging.getLogger("shardline.data")


def say(message: str) -> None:
    """Log a line, or print it to stderr if no log is set up yet, for example while data is prepared before a run."""
    if _has_log():
        log.info(message)
    else:
        to_stderr(message)


def _has_log() -> bool:
    """Whether log lines appear at once; a log held in memory until the run has a folder would show them too late."""
    handlers = logging.getLogger("shardline").handlers
    is_held = any(isinstance(handler, logging.handlers.MemoryHandler) for handler in handlers)
    return log.hasHandlers() and log.isEnabledFor(logging.INFO) and not is_held


class Progress:
    """Counts what was read out of `total` (None: unknown) and, with `unit="tokens"`, the tokens made from it."""

    def __init__(
        self,
        title: str,
        total: float | None,
        done: float = 0,
        show: bool = True,
        unit: Literal["tokens", "bytes"] = "bytes",
    ) -> None:
        self.title, self.total, self.done, self.unit, self.tokens = title, total, done, unit, 0
        self.show = show and (unit == "tokens" or total is None or total >= LEAST_BYTES)
        self.started = self.last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.show and sys.stderr.isatty():
            self._bar = _rich_bar()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, rate="")
            self._bar.start()
        return self

    def advance(self, size: float, tokens: int = 0) -> None:
        self.done += size
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self._amount())
        elif self.show and time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            share = f" {min(100 * self.done / self.total, 100):.0f} %," if self.total else ""
            say(f"{self.title}:{share} {self._amount()}")

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.show and kind is None:
            say(f"{self.title}: done in {time.monotonic() - self.started:.1f} s, {self._amount()}")

    def _amount(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-6)
        if self.unit == "tokens":
            return f"{self.tokens / 1e6:,.1f} M tokens, {self.tokens / 1e6 / seconds:,.2f} M/s"
        return f"{sized(self.done)}, {sized(self.done / seconds)}/s"


def _rich_bar() -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
