"""What a user sees of a run in a terminal of 80 columns, and the commands that it shows: each is run as it stands."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading

import pyte
import pytest

from tests import processes
from tests.e2e.tiny import flags, rows

COLUMNS = 80


class Terminal:
    """A command in a terminal, until it ends; `when` it has shown a text, something is done, once."""

    def __init__(self, *words, cwd, when=None, then=lambda terminal: None):
        here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        sizes = ("COLUMNS", "LINES", "NO_COLOR")
        environment = {name: text for name, text in os.environ.items() if name not in sizes}
        command = [sys.executable, "-m", "shardline", *words]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), there)
        self.process = processes.start(command, cwd=cwd, env=environment | {"TERM": "xterm-256color"}, **streams)
        os.close(there)
        watchdog = threading.Timer(90, self.process.kill)
        watchdog.start()
        self.written = ""
        with contextlib.suppress(OSError):  # what reading raises once the other side is closed
            while piece := os.read(here, 65536):
                self.written += piece.decode(errors="replace")
                if when is not None and re.search(when, self.written):
                    when = None
                    then(self)
        os.close(here)
        self.code = self.process.wait()
        watchdog.cancel()
        display = pyte.Screen(COLUMNS, 400)
        pyte.Stream(display).feed(self.written)
        self.lines = [line.rstrip() for line in display.display]

    def command(self, label):
        """The words of a command in the closing table, which may be broken into lines."""
        first = next(place for place, line in enumerate(self.lines) if line.startswith(f"{label}  "))
        last = next(place for place, line in enumerate(self.lines) if place >= first and not line.endswith("\\"))
        return joined([self.lines[first].removeprefix(label), *self.lines[first + 1 : last + 1]])


def joined(lines):
    """The words of a command, as a shell joins its lines."""
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def value(lines, label):
    """What a table of the start or the end says, its lines joined."""
    first = next(place for place, line in enumerate(lines) if line.startswith(f"{label}  "))
    width = len(lines[first]) - len(lines[first].removeprefix(label).lstrip())
    more = []
    for line in lines[first + 1 :]:
        if not line.startswith(" " * width):
            break
        more.append(line.strip())
    return " ".join([lines[first][width:], *more])


def saving(**more):
    return {"checkpoint__enable": True, "checkpoint__interval": 1000, "lr_scheduler__total_steps": 1000, **more}


def test_ctrl_c_leaves_whole_lines_and_a_command_that_continues(tmp_path):
    words = flags("run", **saving(training__steps=100_000, validation__enable=True, validation__freq=3))
    words += ["--validation.seq_len=32", "--validation.steps=1", "--metrics.log_freq=4"]

    def interrupt(terminal):
        os.killpg(terminal.process.pid, signal.SIGINT)

    ended = Terminal("train", *words, cwd=tmp_path, when=r"step +4/", then=interrupt)
    assert ended.code == 130
    text, lines = ended.written, ended.lines
    assert text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")  # the cursor was hidden for a live line and is back
    assert "━" in text
    assert "━" not in "".join(lines)
    step = int(next(line for line in lines if line.startswith("stopped at step ")).split()[3])
    shown = [line for line in lines if line.startswith("step ")]
    assert shown[0].startswith("step      1/100000  loss ")
    assert "step      3/100000  validation loss " in "".join(shown)
    logged = rows(tmp_path / "run")
    assert f"saved run/checkpoint/step-{step}" in lines
    assert value(lines, "steps") == f"{step} of 100000"
    assert re.fullmatch(rf"\d\.\d{{4}} \(step {step}\)", value(lines, "last loss"))
    validated = [row for row in logged if "validation_loss" in row][-1]
    expected = f"{validated['validation_loss']:.4f} (step {validated['step']})"
    assert value(lines, "validation loss") == expected
    assert re.fullmatch(rf"step {step}, [\d.]+ MiB: all of the run is in it", value(lines, "last save"))
    words_shown = {word for line in lines for word in line.split()}
    written = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    for line in written.partition("What the first step did")[0].splitlines()[:-1]:  # the table is in the file alone
        if " INFO step " not in line:  # of which narrow terminals show less
            assert set(line.split(" INFO ")[-1].split()) <= words_shown  # no word is broken
    again = ended.command("go on")
    done = subprocess.run(
        [*again, f"--training.steps={step + 2}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert f"changed      training.steps from 100000 to {step + 2}\n" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row][-1] == step + 2


def test_the_commands_after_a_normal_end_work(tmp_path):
    ended = Terminal("train", *flags("run", **saving(training__steps=3)), cwd=tmp_path)
    assert ended.code == 0
    for label, more in {"generate": ["--max-new-tokens", "2"], "export": [], "train on": []}.items():
        done = subprocess.run([*ended.command(label), *more], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (label, done.stderr)
    assert (tmp_path / "FOLDER" / "config.json").is_file()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_after_a_lost_rank_the_last_save_and_the_way_on_are_shown(tmp_path, killed):
    def kill(terminal):
        ranks = json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())
        os.kill(ranks[killed]["pid"], signal.SIGKILL)

    words = flags("run", **saving(training__steps=100_000, checkpoint__interval=4))
    lost = Terminal("train", "--nproc", "2", *words, cwd=tmp_path, when=r"saved run/checkpoint/step-4\b", then=kill)
    assert lost.code == 1
    lines = lost.lines
    note = "2 data ranks make the batch 2 times that of one process: 8, not 4; training.local_batch_size = 2 keeps it"
    assert f"note: {note} " in " ".join(lines)
    saved = max(int(step) for step in re.findall(r"saved run/checkpoint/step-(\d+)", lost.written))
    if killed != 0:  # else nobody is left who knows the last loss
        steps = int(value(lines, "steps").split()[0])
        assert value(lines, "last loss").endswith(f"(step {steps})")
        assert value(lines, "last save").startswith(f"step {saved}, ")
    place = lines.index(f"the last save is of step {saved}; to continue from there:")
    assert joined(lines[place + 1 :])[-5:] == ["shardline", "train", "run/config.toml", "--resume", "--nproc=2"]
