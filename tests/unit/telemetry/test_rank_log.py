"""What each rank writes of itself: rows of a run, the parts of a step, actions of a pipeline, and what it costs."""

import json
import logging
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline import registry
from shardline.comm.exposed_time import exposed
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.parallel.data.asynchronous.exchange import waiting
from shardline.parallel.pipeline.executor import ActionClock
from shardline.parallel.pipeline.timeline import Action, TimedAction
from shardline.show.run_files import read_ranks
from shardline.telemetry.rank_log import READER, RankLog, StepParts, idle_seconds, last_walk
from tests.e2e.tiny import run

CPU = torch.device("cpu")
VALIDATION = {"validation__enable": True, "validation__freq": 6, "validation__steps": 1}
log = logging.getLogger("shardline")


def rank_log(folder, **held):
    return RankLog(folder, Mesh(Layout(), "cpu"), CPU, held)


def written(folder):
    return [json.loads(line) for line in (folder / "log" / "telemetry-0.jsonl").read_text().splitlines()]


def test_a_run_writes_where_its_steps_go_its_memory_and_what_happened(tmp_path):
    run(tmp_path, checkpoint__enable=True, checkpoint__interval=3, **VALIDATION)
    rows = written(tmp_path)
    start, end = rows[0], rows[-1]
    assert (start["event"], start["step"], start["last_step"], start["world_size"]) == ("start", 0, 6, 1)
    assert start["layout"]["tp"] == 1
    assert start["layers"] == [0, 1]
    assert start["parameters"] == start["weight_bytes"] // 4 > 10_000
    assert (end["event"], end["error"], end["stopped_by"]) == ("end", None, None)
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert 0 < row["optimizer"] < row["seconds"]
        assert 0 < row["data"] < row["seconds"]
        assert 0.05 < row["now_gib"] <= row["peak_gib"] + 0.01
    saves = [row for row in rows if row["event"] == "save"]
    assert [(row["step"], row["kind"]) for row in saves] == [(3, "full"), (6, "full")]
    assert all(row["size"] > 100_000 and row["seconds"] > 0 for row in saves)
    assert [row["step"] for row in rows if row["event"] == "validation"][-1] == 6


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    run(tmp_path, checkpoint__enable=True, checkpoint__interval=2, training__steps=4)
    run(tmp_path, checkpoint__enable=True, checkpoint__interval=2, training__steps=6)
    ((_, rows),) = read_ranks(tmp_path / "log")
    assert [start["step"] for start in rows.starts] == [0, 4]
    assert sorted(rows.steps) == [1, 2, 3, 4, 5, 6]


def test_the_end_names_the_error(tmp_path):
    with pytest.raises(RuntimeError), rank_log(tmp_path).running(0, 10):
        raise RuntimeError("it broke")
    assert written(tmp_path)[-1]["error"] == "RuntimeError: it broke"


def test_the_end_names_what_stopped_the_run(tmp_path, monkeypatch):
    def ask(trainer, state):
        trainer.requests.stop = "SIGTERM"

    monkeypatch.setitem(registry.hooks, "after_step", [ask])
    run(tmp_path)
    end = written(tmp_path)[-1]
    assert (end["error"], end["stopped_by"]) == (None, "SIGTERM")
    assert len([row for row in written(tmp_path) if row["event"] == "step"]) == 2


def test_warnings_and_events_of_the_log_become_rows(tmp_path):
    with rank_log(tmp_path).running(0, 10):
        log.info("not this")
        log.warning("slow %s", "disk")
        log.info("saved", extra={"event": {"event": "save", "step": 3}})
    log.warning("not this either")
    assert [(row["event"], row.get("text"), row.get("step")) for row in written(tmp_path)[1:-1]] == [
        ("warning", "slow disk", None),
        ("save", None, 3),
    ]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "log").write_text("a file in the place of the folder")
    with rank_log(tmp_path).running(0, 10) as rows:
        rows.write("step", {"step": 1})
    assert "telemetry-0.jsonl is no longer written" in caplog.text


def test_details_become_rare_and_the_last_step_has_one(tmp_path):
    rows = rank_log(tmp_path)
    wanted = []
    for number in range(1, 70):
        rows.logged = number
        wanted += [number] * rows.wants_detail(last=number == 69)
    assert wanted == [1, 2, 4, 8, 16, 32, 64, 69]


def test_communication_is_timed_by_axis(monkeypatch):
    parts = StepParts(CPU)
    monkeypatch.setattr("shardline.telemetry.rank_log.runs_on_host", lambda group, device: True)
    monkeypatch.setattr(job, "axes", {"world": type("Axis", (), {"group": None})()})
    parts.begin(0.5)
    job.spans.add("tp", "all_gather", 0, 3_000_000_000, waiting=False)
    job.spans.add("tp", "all_gather", 2_000_000_000, 3_000_000_000, waiting=True)
    job.spans.add("dp_shard", "all_gather", 0, 1_000_000_000, waiting=False)
    row = parts.end()
    assert row["comm"] == {"dp_shard": 1.0, "tp": 3.0}
    assert row["exposed"] == {"dp_shard": 0.0, "tp": 1.0}
    assert row["seconds"] > row["data"] == 0.5
    assert not job.spans.enabled, "spans cost nothing between logged steps"


def test_the_update_is_timed_in_logged_steps_only():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer, parts = torch.optim.SGD([weight], lr=0.1), StepParts(CPU)
    parts.watch(optimizer)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.02))
    optimizer.step()
    parts.begin(0.0)
    assert "optimizer" not in parts.end(), "the one before was not logged"
    parts.begin(0.0)
    optimizer.step()
    row = parts.end()
    assert 0.02 <= row["optimizer"] <= row["seconds"]


def test_a_step_that_failed_leaves_no_reader_of_spans():
    parts = StepParts(CPU)
    job.spans.record(READER)
    parts.stop()
    assert not job.spans.enabled


def test_a_step_that_is_repeated_has_the_times_of_its_last_attempt(monkeypatch):
    """A step of a replica group that failed never ended."""
    monkeypatch.setattr("shardline.telemetry.rank_log.runs_on_host", lambda group, device: True)
    monkeypatch.setattr(job, "axes", {"world": type("Axis", (), {"group": None})()})
    parts, clock = StepParts(CPU), ActionClock(CPU)
    for seconds in (2, 1):
        parts.begin(0.0)
        clock.begin()
        job.spans.add("tp", "all_gather", 0, seconds * 10**9, waiting=True)
        with clock.around(Action("F", 0, seconds)):
            pass
    assert parts.end()["exposed"] == {"tp": 1.0}
    assert [timed.action for timed in clock.take()] == [Action("F", 0, 1)]


# ---- pipelines -------------------------------------------------------------------------------------------------------


def test_actions_have_their_times_since_1970():
    clock = ActionClock(CPU)
    with clock.around(Action("F", 0, 0)):
        pass
    assert clock.take() == [], "it is off"
    before = time.time()
    clock.begin()
    with clock.around(Action("F", 0, 1)):
        time.sleep(0.01)
    (timed,) = clock.take()
    assert timed.action == Action("F", 0, 1)
    assert before - 0.01 <= timed.start < timed.end - 0.009 <= time.time()
    assert clock.take() == []


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_the_last_walk_is_one_of_the_walks(walks, microbatches, stages):
    order = [Action(kind, stage, n) for n in range(microbatches) for stage in range(stages) for kind in "FB"]
    actions = [TimedAction(action, place, place + 1) for place, action in enumerate(order * walks)]
    assert [timed.action for timed in last_walk(actions)] == order
    assert list(last_walk(actions)) == actions[-len(order) :]


def test_idle_time_is_before_and_between_actions():
    actions = [TimedAction(Action("F", 0, 0), 12.0, 13.0), TimedAction(Action("B", 0, 0), 15.0, 17.0)]
    assert idle_seconds(actions, began=10.0) == pytest.approx(2.0 + 2.0)
    assert idle_seconds([], began=10.0) == 0.0


def test_waits_for_other_workers_are_exposed_and_not_idle(monkeypatch):
    """Those between two contributions; the wait for the step's end comes after the last action."""
    monkeypatch.setattr("shardline.telemetry.rank_log.runs_on_host", lambda group, device: True)
    monkeypatch.setattr(job, "axes", {"world": type("Axis", (), {"group": None})()})
    parts = StepParts(CPU)
    parts.begin(0.0)
    exposed.reset()
    for seconds in (0.02, 0.03):
        with waiting("ticket"):
            time.sleep(seconds)
    row, waited = parts.end(), exposed.take()
    assert row["exposed"]["workers"] == row["comm"]["workers"] == pytest.approx(waited)
    assert 0.05 <= waited < row["seconds"]
    first, second = parts.waits
    actions = [TimedAction(Action("F", 0, 0), first.end / 1e9 + 1.0, first.end / 1e9 + 2.0)]
    began = first.start / 1e9
    assert idle_seconds(actions, began, [first, second._replace(end=second.end + 9 * 10**9)]) == pytest.approx(1.0)
