"""The log of a run: lines and tables in log/rank-N.log and, for rank 0, on the console.

Files and pipes get whole lines. A terminal gets lines wrapped between words, and step rows without their least
important numbers if it is narrow.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import rich.console
from rich.live import Live
from rich.text import Text

from shardline.errors import UserError
from shardline.run.folder import RunFolder
from shardline.storage.atomic import plain_file
from shardline.words import TableRows, fitted, table_lines, to_stderr, wrapped

log = logging.getLogger("shardline")
LOGGERS = ("shardline", "py.warnings")  # the second one receives what the warnings module reports
FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
NOTEBOOK_VARIABLE = "JPY_PARENT_PID"  # set in a notebook's processes: its pseudo-terminal cannot move the cursor
NOTEBOOK_WIDTH = 80  # of a redrawn line: a notebook does not report its width
STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}


class TerminalOutput:
    """Standard output. If its terminal was closed, output is discarded: the log file has every line."""

    def __init__(self) -> None:
        self.stream = sys.stdout  # a live bar that later replaces sys.stdout prints through this one

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


class NotebookOutput:
    """Standard output shown in a notebook, where the only control character that works is the carriage return.

    The output ends with one line that is redrawn; spaces erase its previous text.
    """

    def __init__(self) -> None:
        self.stream = sys.stdout
        self.line = ""

    def draw(self, line: str) -> None:
        """Replace the redrawn line; an empty one erases it."""
        if line != self.line:
            wiped, self.line = self._wiped(), line
            self.stream.write(wiped + line)
            self.stream.flush()

    def write(self, text: str) -> int:
        wiped, below = self._wiped(), self.line
        self.line = below if text.endswith("\n") else ""  # after an incomplete line it would hide that text
        self.stream.write(wiped + text + self.line)
        return len(text)

    def _wiped(self) -> str:
        return "\r" + " " * len(self.line) + "\r" if self.line else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class NotebookLine:
    """The replacement for rich's live line in a notebook."""

    def __init__(self, content: rich.console.RenderableType, terminal: rich.console.Console) -> None:
        self.content, self.terminal = content, terminal
        self.output = cast(NotebookOutput, terminal.file)

    def refresh(self) -> None:
        parts = self.terminal.render(self.content, self.terminal.options.update(width=NOTEBOOK_WIDTH))
        self.output.draw("".join(part.text for part in parts).rstrip())

    def stop(self) -> None:
        self.output.draw("")


def in_notebook() -> bool:
    """Whether output goes to a notebook: from its kernel itself, or from a command that a cell runs."""
    of_kernel = type(sys.stdout).__module__.startswith("ipykernel.")
    return of_kernel or (sys.stdout.isatty() and NOTEBOOK_VARIABLE in os.environ)


def live_line(content: rich.console.RenderableType, terminal: rich.console.Console) -> Live | NotebookLine | None:
    """Show a line below the others that `refresh` redraws, if the terminal can do that; `stop` removes it."""
    if isinstance(terminal.file, NotebookOutput):
        line = NotebookLine(content, terminal)
        line.refresh()
        return line
    if not terminal.is_interactive:
        return None
    # No refresh thread: data workers forked while it holds a lock would hang.
    live = Live(content, console=terminal, auto_refresh=False, transient=True)
    live.start(refresh=True)
    return live


def make_terminal(color: bool) -> rich.console.Console:
    """A console for standard output. Without `color`, no styles are written; NO_COLOR has the same effect."""
    colored = color and not os.environ.get("NO_COLOR")
    # With FORCE_COLOR, rich assumes a terminal and would draw a bar into a log file, so ask the stream itself.
    notebook = in_notebook()
    is_terminal = sys.stdout.isatty() and not notebook
    output = NotebookOutput() if notebook else TerminalOutput() if is_terminal else None
    return rich.console.Console(
        file=cast(IO[str] | None, output),
        force_terminal=is_terminal,
        force_jupyter=False,  # otherwise every line would be a separate output of the cell
        color_system="auto" if colored else None,
        highlight=False,
    )


class FileHandler(logging.FileHandler):
    """The log file. If it cannot be written, for example on a full disk, the run goes on after one warning."""

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

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        try:
            self.terminal.print(self._text(record), soft_wrap=True)
        except Exception:
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> Text:
        """Format a record for printing: on a terminal, lines, tables and rows are fitted to its width."""
        width = self.terminal.width if self.terminal.is_interactive else None
        if hasattr(record, "table"):
            lines = [Text.assemble((label, "bold"), rest) for label, rest in table_lines(record.table, width)]
            return Text("\n").join([Text(), *lines])
        if width is not None and hasattr(record, "parts"):
            return Text(fitted(record.parts, width))
        text = self.format(record)
        if record.name == "py.warnings":
            text = text.split("\n", 1)[0]  # the second line quotes the source; the log file has it
        prefix, style = STYLES.get(record.levelno, ("", ""))
        text = prefix + text
        return Text(text if width is None else wrapped(text, width), style=style)


def log_table(rows: TableRows, title: str = "", file_only: bool = False) -> None:
    """Log labels and values in two columns."""
    lines = [*filter(None, [title]), *(label + rest for label, rest in table_lines(rows))]
    log.info("\n".join(lines), extra={"table": rows, "file_only": file_only})


@contextlib.contextmanager
def passing_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the progress of a long part of the start, on rank 0.

    On a terminal, each text replaces the one before, and the last one is removed; elsewhere only the first is printed.
    """
    terminals = [handler.terminal for handler in log.handlers if isinstance(handler, ConsoleHandler)]
    content = Text("", no_wrap=True, overflow="ellipsis")
    live: list[Live | NotebookLine] = []
    shown = False

    def tell(text: str) -> None:
        nonlocal shown, live
        content.plain = text
        if not shown:
            live = [line for one in terminals if (line := live_line(content, one)) is not None]
            if not live:
                log.info("%s", text)
        for line in live:
            line.refresh()
        shown = True

    try:
        yield tell
    finally:
        for line in live:
            line.stop()


# ---- where lines go --------------------------------------------------------------------------------------------------


def hold_log() -> None:
    """Keep log lines in memory until `setup_logging` knows where they go."""
    _remove_handlers()
    held = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    held.of_run = True  # type: ignore[attr-defined]
    log.addHandler(held)
    log.setLevel(logging.INFO)


def release_log() -> None:
    """After a failed set-up, print the warnings that were held, and restore where log lines went before."""
    if any(isinstance(handler, logging.handlers.MemoryHandler) for handler in log.handlers):
        for record in _remove_handlers():
            if record.levelno >= logging.WARNING:
                to_stderr(f"{record.levelname.lower()}: {record.getMessage()}")


def _remove_handlers() -> list[logging.LogRecord]:
    """Remove the handlers that an earlier call set up, and return the lines that were held."""
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
