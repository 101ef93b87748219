"""The console: plain lines, the live bar, log files, the closing table."""

import io
import logging
import re
import warnings

import pytest
import rich.console

from shardline.config.schema import Config
from shardline.run.folder import RunFolder
from shardline.telemetry.console import (
    Console,
    ConsoleHandler,
    RunSummary,
    format_time,
    hold_log,
    make_terminal,
    setup_logging,
)


@pytest.fixture(autouse=True)
def _clean_loggers():
    logging.captureWarnings(False)  # another test of this process may have left it on
    yield
    logging.captureWarnings(False)
    for name in ("shardline", "py.warnings"):
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if getattr(h, "of_run", False)]:
            logger.removeHandler(handler)
            handler.close()


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_row(step: int, **changes):
    row = {
        "step": step,
        "loss": 3.21,
        "grad_norm": 1.2,
        "lr": 3e-4,
        "tokens_per_second": 12345.0,
        "memory_gib": 1.2,
        "mfu": 0.451,
        "step_seconds": 0.5,
    }
    return row | changes


def open_console(tmp_path, *, terminal=False, width=100, rank=0, clock=None, **options):
    stream = io.StringIO()
    screen = rich.console.Console(file=stream, force_terminal=terminal, width=width, highlight=False, **options)
    setup_logging(RunFolder(tmp_path), rank, terminal=screen)
    return Console(Config(), tmp_path, rank, clock or Clock()), stream


def log_text(tmp_path, rank=0):
    return (tmp_path / "log" / f"rank-{rank}.log").read_text()


def test_plain_line_per_logged_step(tmp_path):
    clock = Clock()
    console, stream = open_console(tmp_path, clock=clock)
    console.start(200)
    console.update(make_row(1))
    clock.now += 0.9
    console.advance(9)
    clock.now += 0.1
    console.update(make_row(11, mfu=None))
    first, second = stream.getvalue().splitlines()
    rest = "loss 3.2100  grad_norm 1.200  lr 3.0e-04  12,345 tok/s  1.2 GiB"
    assert first == f"step 1/200  {rest}  mfu 45.1%  eta 1:40"  # 199 steps of 0.5 s, as the row says
    assert second == f"step 11/200  {rest}  eta 0:19"  # 189 steps of 0.1 s, as the clock says


def test_plain_output_has_no_control_codes_and_does_not_wrap(tmp_path):
    console, stream = open_console(tmp_path, width=30)
    console.start(200)
    console.update(make_row(1))
    console.message("word " * 40)
    console.close()
    assert "\x1b" not in stream.getvalue()
    assert "word " * 39 in stream.getvalue()


def test_terminal_draws_one_bar_and_no_step_lines(tmp_path):
    console, stream = open_console(tmp_path, terminal=True)
    console.start(200, 100)
    console.update(make_row(110))
    shown = stream.getvalue()
    assert "━" in shown
    assert "110/200" in shown
    assert "loss 3.2100  12,345 tok/s  1.2 GiB  mfu 45.1%  eta 0:45" in shown
    assert "step 110/200" not in shown
    assert "step 110/200  loss 3.2100" in log_text(tmp_path)
    console.close()


def test_lines_do_not_tear_the_bar(tmp_path):
    console, stream = open_console(tmp_path, terminal=True, color_system=None)
    console.start(200)
    console.update(make_row(10))
    logging.getLogger("shardline").info("a [b]line[/b]")
    shown = stream.getvalue()
    # The bar's line is cleared, the message takes its place, and the bar is drawn below it.
    assert re.search(r"\r\x1b\[2Ka \[b\]line\[/b\]\n10/200 .*eta", shown)
    console.close()


@pytest.mark.parametrize("width", [40, 80])
def test_bar_is_one_line_on_a_narrow_terminal(tmp_path, width):
    console, stream = open_console(tmp_path, terminal=True, width=width, color_system=None)
    console.start(200)
    console.update(make_row(10))
    drawn = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", part) for part in stream.getvalue().split("\r")]
    assert all(len(line) <= width and "\n" not in line for line in drawn)
    console.close()


def test_bar_follows_steps_without_rows(tmp_path):
    clock = Clock()
    console, stream = open_console(tmp_path, terminal=True, clock=clock)
    console.start(50)
    clock.now += 1
    console.advance(7)
    assert "7/50" in stream.getvalue()
    clock.now += 0.01  # too soon to draw again
    console.advance(8)
    assert "8/50" not in stream.getvalue()
    console.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_summary(tmp_path, terminal):
    console, stream = open_console(tmp_path, terminal=terminal, color_system=None)
    console.start(30)
    console.update(make_row(1, loss=9.0, tokens_per_second=1.0, memory_gib=0.5))
    console.update(make_row(10, tokens_per_second=100.0, memory_gib=2.0))
    console.update(make_row(20, loss=2.5, tokens_per_second=300.0, memory_gib=1.0))
    console.advance(23)
    before = len(stream.getvalue())
    console.close("SIGINT")
    shown = stream.getvalue()[before:]
    assert "stopped at step 23 at your request (SIGINT)" in shown
    for name, value in {
        "steps": "23 of 30",
        "first loss": r"9\.0000 \(step 1\)",
        "last loss": r"2\.5000 \(step 20\)",
        "tokens/s": "200",  # the first row's speed is start-up
        "peak memory": r"2\.00 GiB",
    }.items():
        line = re.compile(rf"{name}\W+{value}\W")
        assert line.search(shown), name
        assert line.search(log_text(tmp_path)), name
    assert str(tmp_path)[:40] in shown
    assert ("┌" in shown) == terminal
    assert shown.count("first loss") == 1


def test_summary_of_a_finished_run_and_of_none(tmp_path):
    console, stream = open_console(tmp_path)
    console.start(1)
    console.close()
    assert stream.getvalue() == ""
    console.update(make_row(1))
    console.close()
    assert re.search(r"steps +1\n", stream.getvalue())
    assert "your request" not in stream.getvalue()


def test_speed_of_a_single_row_is_its_own():
    seen = RunSummary()
    seen.add(make_row(1, tokens_per_second=7.0))
    assert seen.speed == 7.0


def test_other_ranks_write_their_log_and_show_nothing(tmp_path, capsys):
    setup_logging(RunFolder(tmp_path), rank=1)
    console = Console(Config(), tmp_path, rank=1)
    console.start(10)
    console.update(make_row(1))
    console.message("hello")
    console.close()
    logging.getLogger("shardline").info("from one")
    assert capsys.readouterr().out == ""
    assert log_text(tmp_path, 1).count("\n") == 1
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO from one", log_text(tmp_path, 1))


def test_warnings_are_captured(tmp_path):
    _, stream = open_console(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    assert re.fullmatch(r"warning: .*UserWarning: careful\n", stream.getvalue())
    assert "UserWarning: careful" in log_text(tmp_path)


def test_second_setup_replaces_the_first(tmp_path):
    _, first = open_console(tmp_path / "a")
    _, second = open_console(tmp_path / "b")
    logging.getLogger("shardline").info("once")
    assert first.getvalue() == ""
    assert second.getvalue() == "once\n"
    assert log_text(tmp_path / "a") == ""
    assert log_text(tmp_path / "b").count("once") == 1


def test_lines_from_before_the_log_opens_come_first(tmp_path):
    stream, log = io.StringIO(), logging.getLogger("shardline")
    hold_log()
    log.info("of a start that failed")
    hold_log()
    log.info("resuming from step %d", 5)
    setup_logging(RunFolder(tmp_path), terminal=rich.console.Console(file=stream, width=80))
    log.info("then")
    assert stream.getvalue() == "resuming from step 5\nthen\n"
    assert "resuming from step 5" in log_text(tmp_path)


def test_records_for_the_file_alone_are_not_shown(tmp_path):
    _, stream = open_console(tmp_path)
    logging.getLogger("shardline").error("why it ended", extra={"file_only": True})
    assert "why it ended" in log_text(tmp_path)
    assert stream.getvalue() == ""


def test_a_log_file_that_cannot_be_written_is_said_once(tmp_path, capsys, monkeypatch):
    log = setup_logging(RunFolder(tmp_path), terminal=rich.console.Console(file=io.StringIO()))
    file = next(handler for handler in log.handlers if isinstance(handler, logging.FileHandler))

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file.stream, "write", full, raising=False)
    log.info("one")
    log.info("two")
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(("color", "no_color", "expected"), [(True, "", True), (False, "", False), (True, "1", False)])
def test_colors_can_be_switched_off(monkeypatch, color, no_color, expected):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLORTERM", raising=False)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stream)
    terminal = make_terminal(color)
    assert terminal.is_interactive
    ConsoleHandler(terminal).emit(logging.LogRecord("shardline", logging.WARNING, "", 0, "careful", None, None))
    assert ("\x1b[33m" in stream.getvalue()) == expected
    assert "warning: careful" in stream.getvalue()


def test_output_into_a_file_is_plain_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not make_terminal(True).is_interactive


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (12.4, "0:12"), (3723, "1:02:03"), (2 * 86400 + 3 * 3600 + 4, "2d 03:00:04")]
)
def test_format_time(seconds, text):
    assert format_time(seconds) == text


def test_lines_for_the_user_show_before_there_is_a_log_and_warnings_survive_a_failed_start(capsys):
    from shardline.storage.progress import say
    from shardline.telemetry.console import release_log

    hold_log()
    say("preparing data (once)")
    assert capsys.readouterr().err == "preparing data (once)\n"
    logging.getLogger("shardline").info("a line of the set-up")
    logging.getLogger("shardline").warning("a kernel does not run here")
    release_log()
    assert capsys.readouterr().err == "warning: a kernel does not run here\n"
    assert not any(getattr(handler, "of_run", False) for handler in logging.getLogger("shardline").handlers)
