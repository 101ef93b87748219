"""The console: plain lines, rows above a live line, log files, tables."""

import io
import logging
import re
import warnings

import pyte
import pytest
import rich.console

from shardline.config.schema import Config
from shardline.run.folder import RunFolder
from shardline.run.stop import TIME_LIMIT
from shardline.telemetry.console import Console, LossCurve, format_time, thousands
from shardline.telemetry.log import (
    ConsoleHandler,
    hold_log,
    in_notebook,
    log_table,
    make_terminal,
    passing_line,
    release_log,
    setup_logging,
)
from shardline.telemetry.summary import RunSummary, bubble_summary, summary
from shardline.training.trainer import Trainer
from shardline.words import ShellCommand
from tests.e2e.tiny import tiny_config


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


def screen(written: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows after this output."""
    display = pyte.Screen(width, 60)
    pyte.Stream(display).feed(written.replace("\n", "\r\n"))
    lines = [line.rstrip() for line in display.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


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
    console.advance(9, 3.2)
    clock.now += 0.1
    console.update(make_row(11, mfu=None))
    first, second = stream.getvalue().splitlines()
    rest = "loss 3.2100  grad_norm 1.200  lr 3.0e-04  12,345 tok/s  1.2 GiB"
    assert first == f"step 1/200  {rest}  mfu 45.1%  eta 1:40"  # 199 steps of 0.5 s, as the row says
    assert second == f"step 11/200  {rest}  eta 0:19"  # 189 steps of 0.1 s, as the clock says


def test_plain_output_has_no_control_codes_and_does_not_wrap(tmp_path):
    console, stream = open_console(tmp_path, width=30)
    console.start(200)
    console.advance(1, 3.21)
    console.update(make_row(1))
    logging.getLogger("shardline").info("word " * 40)
    console.stop()
    console.report(None, [("go on", ShellCommand("shardline train " + "word " * 40))])
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("word " * 39) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_rows_above_one_live_line(tmp_path, width):
    console, stream = open_console(tmp_path, terminal=True, width=width)
    console.start(200, 100)
    console.update(make_row(110))
    console.validated(110, {"loss": 3.4})
    logging.getLogger("shardline").info("a [b]line[/b]")
    console.advance(111, 3.2)
    console.update(make_row(120, loss=3.1))
    row, validated, line, second, live = screen(stream.getvalue(), width)
    more = "  1.2 GiB  mfu 45.1%" if width == 120 else "  mfu 45.1%"
    assert row == f"step 110/200  loss 3.2100  grad_norm 1.200  lr 3.0e-04  12,345 tok/s{more}"
    assert validated == "step 110/200  validation loss 3.4000"
    assert line == "a [b]line[/b]"
    assert second.startswith("step 120/200  loss 3.1000")
    assert re.fullmatch(r"120/200 ━{5,}  loss 3\.1000  █▁ +12,345 tok/s .*mfu 45\.1%.* eta \d:\d\d", live)
    assert len(live) <= width
    assert "step 110/200  loss 3.2100" in log_text(tmp_path)
    console.stop()
    assert "━" not in "".join(screen(stream.getvalue(), width))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_live_line_gives_up_what_matters_least(tmp_path, width):
    console, stream = open_console(tmp_path, terminal=True, width=width)
    console.start(200)
    console.update(make_row(10, tp_hidden_fraction=0.83))
    live = screen(stream.getvalue(), width)[-1]
    assert len(live) <= width
    there = [word for word in ("loss 3.21", "12.3k tok/s", "eta", "mfu 45%", "1.2G", "hid 83%") if word in live]
    few = ["loss 3.21", "12.3k tok/s"]
    most = [*few, "eta", "mfu 45%", "1.2G"]
    assert there == {40: few, 60: most, 80: [*most, "hid 83%"]}[width]
    assert ("█" in live or "▁" in live) == (width == 80)
    console.stop()


def test_hidden_communication_is_on_a_wide_live_line(tmp_path):
    console, stream = open_console(tmp_path, terminal=True, width=120)
    console.start(200)
    console.update(make_row(10, tp_hidden_fraction=0.83))
    assert "tp hidden 83%" in screen(stream.getvalue(), 120)[-1]
    console.stop()


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    class Old(io.StringIO):
        encoding = "ascii"

    stream = Old()
    terminal = rich.console.Console(file=stream, force_terminal=True, width=80)
    setup_logging(RunFolder(tmp_path), terminal=terminal)
    console = Console(Config(), tmp_path, clock=Clock())
    console.start(20)
    console.update(make_row(10))
    stream.getvalue().encode("ascii")
    assert "10/20 -----" in screen(stream.getvalue(), 80)[-1]
    console.stop()


def test_bar_follows_steps_without_rows(tmp_path):
    clock = Clock()
    console, stream = open_console(tmp_path, terminal=True, clock=clock)
    console.start(50)
    clock.now += 1
    console.advance(7, 3.0)
    assert " 7/50" in stream.getvalue()
    clock.now += 0.01  # too soon to draw again
    console.advance(8, 3.0)
    assert " 8/50" not in stream.getvalue()
    console.stop()


@pytest.mark.parametrize("terminal", [False, True])
def test_closing_table(tmp_path, terminal):
    console, stream = open_console(tmp_path, terminal=terminal, width=80)
    console.start(30)
    console.advance(1, 9.0)
    console.update(make_row(1, loss=9.0, tokens_per_second=1.0, memory_gib=0.5))
    console.update(make_row(10, tokens_per_second=100.0, memory_gib=2.0))
    console.update(make_row(20, loss=2.5, tokens_per_second=300.0, memory_gib=1.0))
    console.validated(20, {"loss": 2.75})
    console.advance(23, 2.25)  # a step without a row
    console.stop()
    before = len(stream.getvalue())
    command = ShellCommand(f"shardline train {'folder/' * 4}config.toml --resume --nproc 2")
    console.report("SIGINT", [("last save", "step 20, 9.97 MiB: 3 steps since then are not in it"), ("go on", command)])
    shown = stream.getvalue()[before:]
    assert "stopped at step 23 at your request (SIGINT)" in shown
    expected = {
        "steps": "23 of 30",
        "first loss": "9.0000 (step 1)",
        "last loss": "2.2500 (step 23)",
        "validation loss": "2.7500 (step 20)",
        "speed": "150 tokens/s",  # of both rows after the first, whose speed is start-up: tokens over seconds
        "peak memory": "2.00 GiB",
        "last save": "step 20, 9.97 MiB: 3 steps since then are not in it",
    }
    lines = screen(shown, 80) if terminal else shown.splitlines()
    for name, value in expected.items():
        assert f"{name:<15}  {value}" in lines
        assert f"{name:<15}  {value}\n" in log_text(tmp_path)
    if terminal:
        assert lines[-2:] == [
            f"go on            shardline train {'folder/' * 4}config.toml \\",
            "                   --resume --nproc 2",
        ]
    else:
        assert lines[-1] == f"go on            {command}"
    console.report(None)
    assert stream.getvalue()[before:] == shown  # only once


def test_a_run_that_its_time_limit_stops_says_so_and_pairs_have_two_columns(tmp_path):
    console, stream = open_console(tmp_path)
    console.start(30)
    console.advance(1, 9.0)
    console.update(make_row(1, reward_margin=0.25, reward_accuracy=0.755))
    console.report(TIME_LIMIT)
    assert "lr 3.0e-04  margin 0.2500  accuracy 75.5%  12,345 tok/s" in stream.getvalue()
    assert "stopped at step 1 before the time limit\n" in stream.getvalue()


def test_there_is_no_closing_table_without_a_step(tmp_path):
    console, stream = open_console(tmp_path)
    console.start(1)
    console.stop()
    console.report("SIGINT")
    assert stream.getvalue() == ""


def test_a_finished_run_has_one_number_of_steps():
    seen = RunSummary()
    seen.stepped(1, 2.0)
    assert summary(seen, 1, 1)[0] == ("steps", "1")


def test_the_bubble_of_a_run_leaves_out_its_first_row():
    assert bubble_summary([0.9, 0.2, 0.3, 0.1], 0.25) == "20.0% of the step, 25.0% by the schedule"
    assert bubble_summary([0.9], None) == "90.0% of the step"


def test_a_schedule_that_waits_as_long_as_1f1b_would_is_not_worth_it():
    told = "13.5% of the step, 5.9% by the schedule"
    assert bubble_summary([0.135], 0.059, 0.111) == told + "; no less than 1F1B's 11.1% (not worth it here)"
    assert bubble_summary([0.135], 0.059, 0.136) == told
    assert bubble_summary([0.135], 0.059, 0.059) == told  # as many stages wait as long: nothing was promised


def test_lines_and_tables_are_broken_between_words(tmp_path):
    _, stream = open_console(tmp_path, terminal=True, width=40)
    path = "/a/" + "long/" * 12 + "path"
    logging.getLogger("shardline").info("several words that do not fit into a line of forty")
    logging.getLogger("shardline").info("saved %s", path)
    log_table([("a", "short"), ("label", "several words that do not fit into a line of forty")])
    assert screen(stream.getvalue().replace(path, "PATH"), 40) == [
        "several words that do not fit into a",
        "line of forty",
        "saved",
        "PATH",  # whole, for a terminal to wrap and a person to copy
        "",
        "a      short",
        "label  several words that do not fit",
        "       into a line of forty",
    ]
    assert "label  several words that do not fit into a line of forty\n" in log_text(tmp_path)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_passing_line_is_replaced_and_goes(tmp_path, terminal):
    _, stream = open_console(tmp_path, terminal=terminal, width=60)
    with passing_line() as tell:
        for number in (1, 2):
            tell(f"measuring product {number} of 2")
        shown = screen(stream.getvalue(), 60)
    assert shown == [f"measuring product {2 if terminal else 1} of 2"]
    assert screen(stream.getvalue(), 60) == ([] if terminal else shown)
    assert ("\x1b" in stream.getvalue()) == terminal


def test_the_curve_of_losses_keeps_its_width():
    curve = LossCurve()
    curve.add(float("nan"))
    assert curve.drawn().strip() == ""
    for number in range(100):
        curve.add(10.0 - number / 10)
        assert len(curve.drawn()) == LossCurve.WIDTH
    drawn = curve.drawn().strip()
    assert len(drawn) > LossCurve.WIDTH / 3
    assert drawn[0] == "█"
    assert drawn[-1] == "▁"
    assert list(drawn) == sorted(drawn, reverse=True)


def test_speed_of_a_single_row_is_its_own():
    seen = RunSummary()
    seen.add(make_row(1, tokens_per_second=7.0))
    assert ("speed", "7 tokens/s") in summary(seen, 1, 2)


def test_other_ranks_write_their_log_and_show_nothing(tmp_path, capsys):
    setup_logging(RunFolder(tmp_path), rank=1)
    console = Console(Config(), tmp_path, rank=1)
    console.start(10)
    console.update(make_row(1))
    console.validated(1, {"loss": 1.0})
    console.stop()
    console.report("SIGINT")
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


@pytest.mark.parametrize("colored", [True, False])
def test_a_run_has_the_colors_that_its_config_wants(tmp_path, monkeypatch, colored):
    for name in ("NO_COLOR", "COLORTERM", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stream)
    config = tiny_config(tmp_path / "run", metrics__disable_color_printing=not colored)
    assert (Console(config, tmp_path, rank=1).terminal.color_system is not None) == colored
    trainer = Trainer(config)
    logging.getLogger("shardline").warning("careful")
    trainer.close()
    assert ("\x1b[33m" in stream.getvalue()) == colored


def of_a_kernel(monkeypatch):
    """Standard output of a notebook's kernel: no terminal, of a class of ipykernel."""
    return type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()


def of_a_cell(monkeypatch):
    """Standard output of `!shardline train`: a pseudo-terminal."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    stream = io.StringIO()
    stream.isatty = lambda: True
    return stream


@pytest.mark.parametrize("kind", [of_a_kernel, of_a_cell])
def test_a_notebook_has_one_line_that_is_drawn_anew_without_other_control_characters(tmp_path, monkeypatch, kind):
    stream = kind(monkeypatch)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm-color")
    setup_logging(RunFolder(tmp_path))
    clock = Clock()
    console = Console(Config(), tmp_path, 0, clock)
    with passing_line() as tell:
        tell("measuring product 1 of 2")
        tell("measuring product 2 of 2")
        assert screen(stream.getvalue(), 100) == ["measuring product 2 of 2"]
    assert screen(stream.getvalue(), 100) == []
    console.start(200, 100)
    console.update(make_row(110))
    for step in (111, 112):
        clock.now += 1
        console.advance(step, 3.2)
    row, live = screen(stream.getvalue(), 100)
    assert row.startswith("step 110/200  loss 3.2100")
    assert row.endswith("GiB  mfu 45.1%  eta 0:45")  # whole, as in a pipe
    assert re.fullmatch(r"112/200 ━{2,} +loss 3\.21\d*  ▁ .*eta \d:\d\d", live), live
    assert len(live) <= 80
    console.stop()
    console.report(None)
    assert "━" not in "".join(screen(stream.getvalue(), 100))
    assert "\x1b" not in stream.getvalue()


def test_a_pipe_below_a_notebook_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not in_notebook()
    assert not make_terminal(True).is_interactive


def test_output_into_a_file_is_plain_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not make_terminal(True).is_interactive


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (999.4, "999"), (999.9, "1k"), (12345, "12.3k"), (345678, "346k"), (999_900, "1M"), (4.5678e6, "4.57M")],
)
def test_thousands(value, text):
    assert thousands(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (12.4, "0:12"), (3723, "1:02:03"), (2 * 86400 + 3 * 3600 + 4, "2d 03:00:04")]
)
def test_format_time(seconds, text):
    assert format_time(seconds) == text


def test_lines_for_the_user_show_before_there_is_a_log_and_warnings_survive_a_failed_start(capsys):
    from shardline.storage.progress import say

    hold_log()
    say("preparing data (once)")
    assert capsys.readouterr().err == "preparing data (once)\n"
    logging.getLogger("shardline").info("a line of the set-up")
    logging.getLogger("shardline").warning("a kernel does not run here")
    release_log()
    assert capsys.readouterr().err == "warning: a kernel does not run here\n"
    assert not any(getattr(handler, "of_run", False) for handler in logging.getLogger("shardline").handlers)
