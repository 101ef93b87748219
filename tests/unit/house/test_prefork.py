"""A forked program is what an executed one would be: a child with its own files, folder, environment and signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers, prefork, progress, proven

WORDS = [sys.executable, "-m", "tests.unit.house.forked_program"]
pytestmark = pytest.mark.skipif(not prefork.wanted(), reason="programs are executed here")


def test_it_is_a_child_with_what_it_was_given(tmp_path):
    reader, writer = os.pipe()
    environment = {**os.environ, "SHARDLINE_WORD": "given"}
    process = subprocess.Popen(
        [*WORDS, "show", str(writer)],
        cwd=tmp_path,
        env=environment,
        pass_fds=[writer],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    os.close(writer)
    said, _ = process.communicate("a line\n", timeout=60)
    pid, parent, session, folder, word, imported, line = said.splitlines()
    assert (int(pid), int(parent), int(session)) == (process.pid, os.getpid(), process.pid)
    assert (folder, word, imported, line) == (str(tmp_path), "given", "True", "a line")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(reader)
    assert process.returncode == 3


def test_it_takes_signals_and_its_programs_are_its_children():
    process = subprocess.Popen([*WORDS, "start"], stdout=subprocess.PIPE, text=True)
    pid, parent = map(int, process.stdout.readline().split())
    assert parent == process.pid
    assert prefork.children(process.pid) == [pid]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert process.stdout.read() == ""  # the other one has ended too: it holds the pipe
    process.stdout.close()


def test_an_error_ends_with_a_traceback():
    done = subprocess.run([*WORDS, "raise"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: raised\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["-m", "shardline", "train", "x"], ("shardline", ["train", "x"], False)),
        (["-P", "-m", "shardline.launch.rank_main"], ("shardline.launch.rank_main", [], True)),
        (["-m", "shardline", "config"], None),
        (["-m", "pip", "install"], None),
        (["-c", "import shardline"], None),
        (["-u", "-m", "shardline", "train"], None),
    ],
)
def test_what_is_forked(words, found):
    assert prefork.program_of([sys.executable, *words]) == found


def test_a_process_that_is_left_over_is_found_with_its_test(monkeypatch, tmp_path):
    monkeypatch.setenv(leftovers.VARIABLE, str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as executed, subprocess.Popen([*WORDS, "sleep"]) as forked:
        found = {one.pid: one for one in leftovers.find(str(tmp_path)) if one.pid == executed.pid}
        assert "test_a_process_that_is_left_over" in found[executed.pid].test
        assert "test_a_process_that_is_left_over" in (tmp_path / str(forked.pid)).read_text()
        executed.kill()
        forked.kill()
    assert executed.pid not in [one.pid for one in leftovers.find(str(tmp_path))]


def test_the_line_of_what_was_proven():
    tally = proven.Tally()
    tally.add([("layout", "tp2"), ("layout", "tp2"), ("layout", "pp2"), ("fault", "kill"), ("other", "x")])
    assert tally.line() == "proven: 2 layouts, 1 faults, 0 model families"


def test_the_line_of_progress(capsys):
    class Reporter:
        _tw = type("Writer", (), {"_file": sys.stdout})

        def write_line(self, line, **_):
            print(line)

    shown = progress.Progress(Reporter())
    shown.total, shown.counts = 9, {"passed": 7, "failed": 1, "skipped": 1}
    shown.pytest_sessionfinish()
    assert re.fullmatch(r"7/9 passed, 1 failed, 1 skipped, 0m0\ds\n", capsys.readouterr().out)


def test_root_is_the_repository():
    assert (prefork.ROOT / "tests" / "unit" / "house" / Path(__file__).name).is_file()
