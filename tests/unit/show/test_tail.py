"""`shardline tail`: a run is followed by its files as they grow, are replaced and end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from shardline.cli.main import main
from shardline.show.tail import RESTART_SECONDS, SILENCE_SECONDS, Tail
from tests.e2e.tiny import run
from tests.unit.show.made_run import STEPS, make_run, metrics_row


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def heart(folder, doing, **facts):
    (folder / "log").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"time": 1000.0, "doing": doing, "step": STEPS, **facts})
    (folder / "log" / "heartbeat.json").write_text(text)


def shown(state):
    return ["  ".join(part.text for part in line) for line in state.lines()]


def append(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_run_that_ended_is_shown_and_left(tmp_path, capsys):
    make_run(tmp_path / "run")
    heart(tmp_path / "run", "ended")
    assert main(["tail", str(tmp_path / "run"), "--lines", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "started on node0: 4 ranks, after step 0"
    assert "restart: rank 1 was killed by SIGKILL" in lines
    assert any(line.startswith("saved step 6, 4.00 KiB") for line in lines)
    assert "step  3/12  loss 5.2500  grad_norm 1.000  lr 1.0e-03  640 tok/s  0.5 GiB" in lines
    assert "step  6/12  validation loss 4.7500" in lines
    assert lines[-1] == f"ended at step {STEPS}"
    assert main(["tail", str(tmp_path / "run"), "--lines", "2", "--no-follow"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-2:]


def test_new_rows_are_shown_once_also_where_the_file_is_torn_or_replaced(tmp_path):
    run_folder, state = tmp_path / "run", None
    append(run_folder / "metrics.jsonl", metrics_row(1), metrics_row(2))
    state = Tail(run_folder, Clock())
    assert [line[:6] for line in shown(state)] == ["step 1", "step 2"]
    assert shown(state) == []
    with (run_folder / "metrics.jsonl").open("a") as file:
        text = json.dumps(metrics_row(3)) + "\n"
        file.write(text[:20])
        file.flush()
        assert shown(state) == []
        file.write(text[20:])
    assert [line[:6] for line in shown(state)] == ["step 3"]
    # A resume after step 1 replaces the file, and step 2 is trained again.
    again = run_folder / "metrics.new"
    append(again, metrics_row(1), *(metrics_row(step, tokens_per_second=99.0) for step in (2, 3, 4)))
    again.replace(run_folder / "metrics.jsonl")
    lines = shown(state)
    assert [line[:6] for line in lines] == ["step 2", "step 3", "step 4"]
    assert all("99 tok/s" in line for line in lines)


def test_saves_and_starts_stand_between_the_rows_of_their_steps(tmp_path):
    append(tmp_path / "metrics.jsonl", *map(metrics_row, (1, 2, 3, 4)))
    start, save = {"event": "start", "host": "node0"}, {"event": "save", "size": 4096, "seconds": 1.0, "staged": False}
    events = [start | {"step": 0}, save | {"step": 2}, start | {"step": 2}, save | {"step": 4}]
    append(tmp_path / "log" / "telemetry-0.jsonl", *events)
    words = [" ".join(line.split()[:3]).rstrip(",") for line in shown(Tail(tmp_path, Clock()))]
    rows = [f"step {step} loss" for step in (1, 2, 3, 4)]
    assert words == ["started on node0:", *rows[:2], "saved step 2", "started on node0:", *rows[2:], "saved step 4"]


def test_texts_of_others_cannot_move_the_cursor(tmp_path, capsys):
    append(tmp_path / "log" / "telemetry-0.jsonl", {"event": "warning", "time": 1.0, "text": "\x1b[2Jgone\nnext"})
    append(tmp_path / "metrics.jsonl", {"step": "x"}, {"no": 1}, {"step": 4, "loss": None, "tokens_per_second": 5.0})
    assert main(["tail", str(tmp_path), "--no-follow"]) == 0
    assert capsys.readouterr().out.splitlines() == ["warning: gone next", "step 4  loss not finite  5 tok/s"]


def test_a_failure_counts_once_no_restart_has_come(tmp_path):
    clock = Clock()
    state = Tail(tmp_path, clock)
    heart(tmp_path, "failed", error="RuntimeError: it broke")
    assert (shown(state), state.code) == ([], None)
    clock.now += RESTART_SECONDS - 1
    heart(tmp_path, "training")
    assert (shown(state), state.code) == ([], None)
    heart(tmp_path, "failed", error="RuntimeError: it broke", time=clock.now)
    shown(state)
    clock.now += RESTART_SECONDS
    assert shown(state) == [f"failed after step {STEPS}: RuntimeError: it broke"]
    assert state.code == 1


def test_without_following_a_failure_counts_at_once(tmp_path, capsys):
    append(tmp_path / "metrics.jsonl", metrics_row(1))
    heart(tmp_path, "failed", error="RuntimeError: it broke", time=time.time())
    assert main(["tail", str(tmp_path), "--no-follow"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"failed after step {STEPS}: RuntimeError: it broke"


def test_what_stopped_a_run_is_named(tmp_path, capsys):
    heart(tmp_path, "ended", stopped_by="SIGTERM")
    assert main(["tail", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ended at step {STEPS} (SIGTERM)"]


def test_a_run_that_went_silent_is_said_once(tmp_path):
    clock = Clock()
    heart(tmp_path, "saving")
    state = Tail(tmp_path, clock)
    assert shown(state) == []
    clock.now += SILENCE_SECONDS + 1
    assert shown(state) == ["no sign of the run for 1:01: it was saving, and now hangs or was killed"]
    assert shown(state) == []
    append(tmp_path / "metrics.jsonl", metrics_row(5))
    assert len(shown(state)) == 1
    assert state.code is None


@pytest.mark.parametrize("what", ["nothing", "file", "empty"])
def test_what_is_no_run_is_refused(tmp_path, capsys, what):
    path = tmp_path / what
    if what == "file":
        path.write_text("")
    elif what == "empty":
        path.mkdir()
    assert main(["tail", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_run_is_followed_through_a_pipe_until_it_ends(tmp_path):
    folder = tmp_path / "run"
    (folder / "log").mkdir(parents=True)
    words = [sys.executable, "-m", "shardline", "tail", str(folder)]
    following = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(60, following.kill)
    watchdog.start()
    try:
        run(folder, training__steps=4, checkpoint__enable=True)
        out, _ = following.communicate()
    finally:
        watchdog.cancel()
        following.kill()
        following.wait()
    lines = out.splitlines()
    assert following.returncode == 0
    assert [line.split("  ")[0] for line in lines if "tok/s" in line] == [f"step {step}/4" for step in range(1, 5)]
    assert lines[-1] == "ended at step 4"
    assert [line for line in lines if line.startswith("saved step 4")]
    assert "\x1b" not in out
