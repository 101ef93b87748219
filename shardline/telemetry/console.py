"""What the user sees while a run trains: a row for each logged step and, on a terminal, a live line below them.

step 20/200  loss 3.9125  grad_norm 1.204  lr 3.0e-03  21,482 tok/s  0.5 GiB
step 30/200  loss 3.4410  grad_norm 0.981  lr 3.0e-03  21,534 tok/s  0.5 GiB
34/200 ━━━━━━━━                        loss 3.4410 ▇▅▃▁  21,534 tok/s  0.5 GiB  eta 0:15
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console
from rich.live import Live
from rich.text import Text

from shardline.config.schema import Config
from shardline.run.stop import TIME_LIMIT
from shardline.telemetry.log import ConsoleHandler, NotebookLine, live_line, log_table, make_terminal
from shardline.telemetry.summary import RunSummary, summary
from shardline.words import Part, TableRows, fitted

log = logging.getLogger("shardline")

LEAST_BAR, MOST_BAR = 5, 40
DRAW_SECONDS = 0.1  # least time between two drawings of the live line, so that a slow terminal is not flooded
BLOCKS = "▁▂▃▄▅▆▇█"


class Column(NamedTuple):
    """How a number of a row is written; if a line is too narrow, the number with the highest `place` is dropped first.

    `short` is used in a live line that has no room for all numbers.
    """

    text: Callable[[float], str]
    place: int
    short: Callable[[float], str] | None = None


COLUMNS: dict[str, Column] = {
    "loss": Column(lambda value: f"loss {value:.4f}", 0, lambda value: f"loss {value:.3g}"),
    "grad_norm": Column(lambda value: f"grad_norm {value:.3f}", 4),
    "lr": Column(lambda value: f"lr {value:.1e}", 5),
    "reward_margin": Column(lambda value: f"margin {value:.4f}", 2),
    "reward_accuracy": Column(lambda value: f"accuracy {value:.1%}", 3),
    "expert_load": Column(lambda value: f"expert load {value:.2f}", 7),
    "tokens_per_second": Column(lambda value: f"{value:,.0f} tok/s", 1, lambda value: f"{thousands(value)} tok/s"),
    "memory_gib": Column(lambda value: f"{value:.1f} GiB", 6, lambda value: f"{value:.{int(value < 100)}f}G"),
    "mfu": Column(lambda value: f"mfu {value:.1%}", 3, lambda value: f"mfu {value:.0%}"),
    "tp_hidden_fraction": Column(lambda value: f"tp hidden {value:.0%}", 8, lambda value: f"hid {value:.0%}"),
    "ep_hidden_fraction": Column(lambda value: f"ep hidden {value:.0%}", 8, lambda value: f"ep hid {value:.0%}"),
}
HIDDEN = ("tp_hidden_fraction", "ep_hidden_fraction")
PREFERENCES = ("reward_margin", "reward_accuracy")
IN_ROWS = tuple(name for name in COLUMNS if name not in HIDDEN)
LIVE = ("tokens_per_second", "mfu", "memory_gib", *HIDDEN)


def columns(row: dict[str, Any], names: Sequence[str], short: bool = False) -> list[Part]:
    """Format those of the named numbers that the row has."""
    found = [(COLUMNS[name], row.get(name)) for name in names]
    texts = [(column.short or column.text if short else column.text, column.place, value) for column, value in found]
    return [Part(text(value), place) for text, place, value in texts if value is not None]


def thousands(value: float) -> str:
    """Format with three digits: `987`, `12.3k`, `4.57M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            digits = value / size
            return f"{digits:.0f}{unit}" if digits >= 99.95 else f"{digits:.3g}{unit}"
    return f"{value:.0f}"


class Console:
    """Shows a run's progress, only on rank 0. Every row is also in log/rank-0.log."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        theoretical_bubble: float | None = None,
        plain_bubble: float | None = None,
    ) -> None:
        self.folder, self.rank, self.clock = folder, rank, clock
        there = [handler for handler in log.handlers if isinstance(handler, ConsoleHandler)]
        self.terminal = there[0].terminal if there else make_terminal(not config.metrics.disable_color_printing)
        self.line = LiveLine()
        self.live: Live | NotebookLine | None = None
        self.seen = RunSummary(theoretical_bubble=theoretical_bubble, plain_bubble=plain_bubble)
        self.first_mark: tuple[int, float] | None = None  # (step, time) from which the ETA is computed
        self.drawn_at = 0.0

    def start(self, total_steps: int, start_step: int = 0) -> None:
        self.line.total, self.line.step = total_steps, start_step
        if self.rank == 0:
            self.live = live_line(self.line, self.terminal)

    def advance(self, step: int, loss: float) -> None:
        """Move the live line after a step, with or without a row."""
        self.line.step = step
        self.seen.stepped(step, loss)
        self.first_mark = self.first_mark or (step, self.clock())
        if self.clock() - self.drawn_at > DRAW_SECONDS:
            self._draw()

    def update(self, row: dict[str, Any]) -> None:
        """Show a logged step."""
        if self.rank != 0:
            return
        step = self.line.step = row["step"]
        self.seen.add(row)
        eta = f"eta {format_time(self._eta(row))}"
        numbers = columns(row, IN_ROWS)
        whole = [f"step {step}/{self.line.total}", *(part.text for part in numbers), eta]
        log.info("  ".join(whole), extra={"parts": [Part(f"step {self.line.count()}"), *numbers]})
        self.line.show(row, eta)
        self._draw()

    def validated(self, step: int, found: dict[str, float]) -> None:
        """Show the result of a validation."""
        if self.rank == 0:
            self.seen.validation = (step, found["loss"])
            numbers = [Part(f"validation loss {found['loss']:.4f}"), *columns(found, PREFERENCES)]
            whole = "  ".join([f"step {step}", *(part.text for part in numbers)])
            log.info(whole, extra={"parts": [Part(f"step {self.line.count()}"), *numbers]})

    def stop(self) -> None:
        """Remove the live line."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def report(self, stopped_by: str | None, more: TableRows = ()) -> None:
        """Show the closing table, with `more` rows, only once; `stopped_by` says why the run ended early."""
        seen, self.seen = self.seen, RunSummary()
        if self.rank != 0 or seen.first is None:
            return
        if stopped_by is not None:
            why = "before the time limit" if stopped_by == TIME_LIMIT else f"at your request ({stopped_by})"
            log.info("stopped at step %d %s", self.line.step, why)
        log_table([*summary(seen, self.line.step, self.line.total), ("run folder", str(self.folder)), *more])

    def _draw(self) -> None:
        if self.live is not None:
            self.live.refresh()
            self.drawn_at = self.clock()

    def _eta(self, row: dict[str, Any]) -> float:
        """Seconds left at the speed since the end of the first step, which is slow (compilation, caches)."""
        now = self.line.step
        step, since = self.first_mark = self.first_mark or (now, self.clock())
        pace = (self.clock() - since) / (now - step) if now > step else row.get("step_seconds") or 0.0
        return max(0.0, pace * (self.line.total - now))


def format_time(seconds: float) -> str:
    """`0:12`, `1:02:03`, `2d 03:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


# ---- the live line ---------------------------------------------------------------------------------------------------


class LiveLine:
    """Steps, a bar, and the numbers of the last row that fit beside them."""

    def __init__(self) -> None:
        self.step = self.total = 0
        self.curve = LossCurve()
        self.row: dict[str, Any] = {}
        self.eta = "the first step takes longest"

    def count(self) -> str:
        """`  7/200`, padded to the same width for every step."""
        return f"{self.step:>{len(str(self.total))}}/{self.total}"

    def show(self, row: dict[str, Any], eta: str) -> None:
        self.row, self.eta = row, eta
        self.curve.add(row["loss"])

    def __rich_console__(
        self, terminal: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.console.RenderableType]:
        plain, width = options.ascii_only, options.max_width
        count = self.count()
        text, room = self._text(plain, short=False), width - len(count) - LEAST_BAR - 3
        line = "  ".join(part.text for part in text)
        if len(line) > room:  # the bar shrinks before numbers are dropped
            line = fitted(self._text(plain, short=True), width - len(count) - 3)
        length = max(0, min(MOST_BAR, width - len(count) - len(line) - 3))
        done = length * self.step // max(self.total, 1)
        sign = "-" if plain else "━"
        rest = (sign, "bright_black") if terminal.color_system else (" ", "")
        bar = Text.assemble((sign * done, "cyan"), (rest[0] * (length - done), rest[1]))
        yield Text.assemble(count, " ", bar, "  ", line, no_wrap=True, overflow="crop")

    def _text(self, plain: bool, short: bool) -> list[Part]:
        curve = [Part(self.curve.drawn(), 7)] if self.row and not plain else []
        numbers = columns(self.row, LIVE, short)
        return [*columns(self.row, ("loss",), short), *curve, *numbers, Part(self.eta, 2)]


class LossCurve:
    """The losses of a run as a row of blocks; when there are too many, each pair is replaced by its mean."""

    WIDTH = 8

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.each = 1  # rows averaged in each loss
        self.pending: list[float] = []

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self.pending.append(loss)
        if len(self.pending) == self.each:
            self.losses.append(sum(self.pending) / self.each)
            self.pending = []
        if len(self.losses) > self.WIDTH:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            left = self.losses[-1:] if len(self.losses) % 2 else []
            self.losses, self.pending = [(a + b) / 2 for a, b in pairs], left * self.each + self.pending
            self.each *= 2

    def drawn(self) -> str:
        low, high = min(self.losses, default=0.0), max(self.losses, default=0.0)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((loss - low) * scale)] for loss in self.losses).ljust(self.WIDTH)
