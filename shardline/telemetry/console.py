"""What a person sees of a run: log lines, a live bar on a terminal or plain lines elsewhere, and a closing table."""

from __future__ import annotations

import errno
import io
import logging
import logging.handlers
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import rich.console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.run.folder import RunFolder
from shardline.run.stop import TIME_LIMIT
from shardline.storage.atomic import plain_file

log = logging.getLogger("shardline")
LOGGERS = ("shardline", "py.warnings")  # the second one carries what the warnings module reports
FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}


class TerminalOutput:
    """Standard output. What is written to a terminal that was closed goes nowhere: the log file has every line."""

    def __init__(self) -> None:
        self.stream = sys.stdout  # what a bar puts in its place later prints through this one

    def write(self, text: str) -> int:
        return int(self._tried(lambda: self.stream.write(text)))

    def flush(self) -> None:
        self._tried(self.stream.flush)

    def _tried(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())
        return action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def make_terminal(color: bool) -> rich.console.Console:
    """Standard output. Without colours no styles are written at all; NO_COLOR has the same effect."""
    colored = color and not os.environ.get("NO_COLOR")
    # Rich takes FORCE_COLOR for a terminal and would draw a bar into a log file: ask the stream itself.
    is_terminal = sys.stdout.isatty()
    return rich.console.Console(
        file=cast(IO[str], TerminalOutput()) if is_terminal else None,
        force_terminal=is_terminal,
        color_system="auto" if colored else None,
        highlight=False,
    )


class FileHandler(logging.FileHandler):
    """The log file. If it cannot be written, as on a full disk, the run goes on after one warning."""

    failed = False

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=plain_file)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            print(f"warning: {self.baseFilename} is incomplete: {sys.exc_info()[1]}", file=sys.stderr)


class ConsoleHandler(logging.Handler):
    """Prints log lines through the terminal that also draws the bar, so that they do not overwrite each other."""

    def __init__(self, terminal: rich.console.Console) -> None:
        super().__init__(logging.INFO)
        self.terminal = terminal
        self.live = False  # a bar or a table shows the content of records marked `shown_live`

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False) or (self.live and getattr(record, "shown_live", False)):
            return
        try:
            text = self.format(record)
            if record.name == "py.warnings":
                text = text.split("\n", 1)[0]  # the second line quotes the source; the log file has it
            prefix, style = STYLES.get(record.levelno, ("", ""))
            self.terminal.print(Text(prefix + text, style=style), soft_wrap=True)
        except Exception:
            self.handleError(record)


def hold_log() -> None:
    """Keep log lines in memory until `setup_logging` knows where they go."""
    _remove_handlers()
    held = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    held.of_run = True  # type: ignore[attr-defined]
    log.addHandler(held)
    log.setLevel(logging.INFO)


def release_log() -> None:
    """The set-up failed: print the warnings that were held, and let later lines go where they went before."""
    if any(isinstance(handler, logging.handlers.MemoryHandler) for handler in log.handlers):
        for record in _remove_handlers():
            if record.levelno >= logging.WARNING:
                print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def _remove_handlers() -> list[logging.LogRecord]:
    """Remove what an earlier call set up, and return the lines that were held."""
    held: list[logging.LogRecord] = []
    for name in LOGGERS:
        for handler in [h for h in logging.getLogger(name).handlers if getattr(h, "of_run", False)]:
            logging.getLogger(name).removeHandler(handler)
            if isinstance(handler, logging.handlers.MemoryHandler):
                held += handler.buffer
            handler.close()
    return held


def setup_logging(
    folder: RunFolder, rank: int = 0, color: bool = True, terminal: rich.console.Console | None = None
) -> logging.Logger:
    """Send the `shardline` log and Python's warnings to log/rank-N.log and, on rank 0, to the console.

    Lines that `hold_log` kept come first. A second call replaces what the first one set up.
    """
    held = _remove_handlers()
    path = folder.log_path(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    file.setFormatter(logging.Formatter(FILE_FORMAT))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(ConsoleHandler(terminal or make_terminal(color)))
    for handler in handlers:
        handler.of_run = True  # type: ignore[attr-defined]
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for record in held:
        log.handle(record)
    return log


@dataclass
class RunSummary:
    """What the closing table needs from the rows shown so far."""

    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    memory: float = 0.0
    speed: float = 0.0  # mean tokens per second; the first row, with start-up costs, counts only while it is alone
    counted: int = 0
    tensor: list[tuple[float, float, float]] = field(default_factory=list)  # seconds: step, tp communication, exposed
    bubbles: list[float] = field(default_factory=list)
    theoretical_bubble: float | None = None
    expert_loads: list[float] = field(default_factory=list)  # the largest of all layers, max over mean

    def add(self, row: dict[str, Any]) -> None:
        self.counted = 0 if self.last is self.first else self.counted
        self.speed += (row["tokens_per_second"] - self.speed) / (self.counted + 1)
        self.counted += 1
        self.memory = max(self.memory, row["memory_gib"])
        if "tp_comm_seconds" in row:
            self.tensor.append((row["step_seconds"], row["tp_comm_seconds"], row["tp_exposed_seconds"]))
        if "pp_bubble_fraction" in row:
            self.bubbles.append(row["pp_bubble_fraction"])
        if "expert_load" in row:
            self.expert_loads.append(row["expert_load"])
        self.first = self.first or row
        self.last = row


class Console:
    """Shows a run's progress, on rank 0 alone. Every line is also in log/rank-0.log."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        theoretical_bubble: float | None = None,
    ) -> None:
        self.folder, self.rank, self.clock = folder, rank, clock
        there = [handler for handler in log.handlers if isinstance(handler, ConsoleHandler)]
        self.handler = (there or [ConsoleHandler(make_terminal(not config.metrics.disable_color_printing))])[0]
        self.terminal = self.handler.terminal
        self.bar: Progress | None = None
        self.seen = RunSummary(theoretical_bubble=theoretical_bubble)
        self.step = self.total = 0
        self.first_mark: tuple[int, float] | None = None  # (step, time) from which the ETA is computed
        self.drawn_at = 0.0

    def start(self, total_steps: int, start_step: int = 0) -> None:
        self.total, self.step = total_steps, start_step
        if self.rank != 0 or not self.terminal.is_interactive:
            return
        # No refresh thread: data workers forked while it holds a lock would hang.
        self.bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
            console=self.terminal,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self.bar.add_task("", total=total_steps, completed=start_step, text="")
        self.bar.start()
        self.handler.live = True

    def advance(self, step: int) -> None:
        """Move the bar after a step, with or without a row."""
        self.step = step
        self.first_mark = self.first_mark or (step, self.clock())
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)
            if self.clock() - self.drawn_at > 0.1:
                self._draw()

    def update(self, row: dict[str, Any]) -> None:
        """Show a logged step, as a line or as the bar's text."""
        if self.rank != 0:
            return
        self.step = row["step"]
        self.seen.add(row)
        eta = self._eta(row)
        log.info(format_row(row, self.step, self.total, eta), extra={"shown_live": True})
        if self.bar is not None:
            text = "  ".join(part for part in (*parts(row, ("loss", *SPEED)), f"eta {format_time(eta)}") if part)
            self.bar.update(self.bar.task_ids[0], completed=self.step, text=text)
            self._draw()

    def message(self, text: str) -> None:
        if self.rank == 0:
            log.info(text)

    def close(self, stopped_by: str | None = None) -> None:
        """Remove the bar and show the summary; `stopped_by` is why the run ended early."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.rank != 0 or self.seen.first is None:
            self.handler.live = False
            return
        if stopped_by is not None:
            why = "before the time limit" if stopped_by == TIME_LIMIT else f"at your request ({stopped_by})"
            log.info("stopped at step %d %s", self.step, why)
        lines = summary(self.seen, self.step, self.total, self.folder)
        width = max(len(name) for name, _ in lines)
        self.handler.live = self.terminal.is_interactive
        log.info("\n".join(f"{name:<{width}}  {value}" for name, value in lines), extra={"shown_live": True})
        if self.handler.live:
            table = Table(Column(style="bold", no_wrap=True), Column(overflow="fold"), show_header=False)
            for line in lines:
                table.add_row(*line)
            self.terminal.print(table)
        self.handler.live = False
        self.seen = RunSummary()

    def _draw(self) -> None:
        assert self.bar is not None
        self.bar.refresh()
        self.drawn_at = self.clock()

    def _eta(self, row: dict[str, Any]) -> float:
        """Seconds to go at the pace since the end of the first step, which is slow (compilation, caches)."""
        step, since = self.first_mark = self.first_mark or (self.step, self.clock())
        pace = (self.clock() - since) / (self.step - step) if self.step > step else row.get("step_seconds") or 0.0
        return max(0.0, pace * (self.total - self.step))


PREFERENCES = ("reward_margin", "reward_accuracy")
SPEED = ("tokens_per_second", "memory_gib", "mfu")
FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "grad_norm": lambda value: f"grad_norm {value:.3f}",
    "lr": lambda value: f"lr {value:.1e}",
    "reward_margin": lambda value: f"margin {value:.4f}",
    "reward_accuracy": lambda value: f"accuracy {value:.1%}",
    "expert_load": lambda value: f"expert load {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "memory_gib": lambda value: f"{value:.1f} GiB",
    "mfu": lambda value: f"mfu {value:.1%}",
}


def parts(row: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    return [FORMATS[name](row[name]) for name in names if row.get(name) is not None]


def format_row(row: dict[str, Any], step: int, total: int, eta: float) -> str:
    """`step 10/200  loss 3.2100  grad_norm 1.200  lr 3.0e-04  12,345 tok/s  1.2 GiB  mfu 45.1%  eta 0:12`."""
    return "  ".join([f"step {step}/{total}", *parts(row, tuple(FORMATS)), f"eta {format_time(eta)}"])


def format_time(seconds: float) -> str:
    """`0:12`, `1:02:03`, `2d 03:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def summary(seen: RunSummary, step: int, total: int, folder: Path) -> list[tuple[str, str]]:
    """Name and value of each line of the closing table."""
    assert seen.first is not None
    assert seen.last is not None
    tensor = [("tp communication", tensor_summary(seen.tensor))] if seen.tensor else []
    pipeline = [("pp bubble", bubble_summary(seen.bubbles, seen.theoretical_bubble))] if seen.bubbles else []
    experts = [("expert load", expert_summary(seen.expert_loads, seen.last))] if seen.expert_loads else []
    return [
        ("steps", f"{step}" if step == total else f"{step} of {total}"),
        ("first loss", f"{seen.first['loss']:.4f} (step {seen.first['step']})"),
        ("last loss", f"{seen.last['loss']:.4f} (step {seen.last['step']})"),
        ("tokens/s", f"{seen.speed:,.0f}"),
        ("peak memory", f"{seen.memory:.2f} GiB"),
        *tensor,
        *pipeline,
        *experts,
        ("run folder", str(folder)),
    ]


def tensor_summary(rows: list[tuple[float, float, float]]) -> str:
    """How long tensor-parallel communication takes, how much was hidden, and the speed-up beside the possible one."""
    step, sent, exposed = (statistics.median(column) for column in zip(*(rows[1:] or rows), strict=True))
    hidden = max(sent - exposed, 0.0)
    serial = step + hidden  # the step with nothing hidden
    share = min(sent / serial, 0.999) if serial > 0 else 0.0
    reached = f"speed-up {serial / step:.2f} of at most {1 / (1 - share):.2f}" if step > 0 else ""
    return f"{sent:.3f} s a step ({share:.0%}), {hidden / sent if sent else 0:.0%} hidden: {reached}"


def bubble_summary(bubbles: list[float], theory: float | None) -> str:
    """The idle share of a step, without the first one's start-up costs, beside the schedule's own."""
    measured = statistics.median(bubbles[1:] or bubbles)
    return f"{measured:.1%} of the step" + (f", {theory:.1%} by the schedule" if theory is not None else "")


def expert_summary(loads: list[float], last: dict[str, Any]) -> str:
    """How much more than the mean the most used expert got, in the last row and in the worst."""
    layers: dict[str, float] = last["expert_load_layers"]
    worst = max(layers, key=lambda layer: layers[layer])
    return f"{loads[-1]:.2f} times the mean at most (layer {worst}), {max(loads):.2f} in the worst step"
