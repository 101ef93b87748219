"""`shardline report`: what a page holds of one run or several, what it says is missing, and what it refuses."""

import json
import re
import shutil
import statistics
import threading
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cli.main import main
from shardline.config.layout import Layout
from shardline.show.pictures import groups_of
from shardline.show.report import report_data, thinned
from shardline.show.serve import make_server
from shardline.show.step_parts import PartTimes, parts_of, rank_paces
from tests.e2e.tiny import run as train
from tests.unit.show.made_run import BEGAN, STEPS, make_run, metrics_row, write_lines

MOST_BYTES = 3_000_000


def data_of(page):
    """What a page carries, as a browser would read it."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def run_of(folder):
    return report_data([folder])["runs"][0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "run")


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_a_trained_run_becomes_one_small_file_without_a_network(tmp_path, capsys):
    validation = {"validation__enable": True, "validation__freq": 3, "validation__steps": 1}
    rows = train(tmp_path, checkpoint__enable=True, checkpoint__interval=3, **validation)
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    assert f"wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert len(text.encode()) < MOST_BYTES
    assert not re.search(r'(?:src|href)="(?!#|data:)|@import|url\((?!data:)', text)
    run = data_of(page)["runs"][0]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert run["series"]["loss"] == losses
    assert run["state"]["word"] == "finished"
    assert run["validation"]["step"][-1] == 6
    assert [event["step"] for event in run["events"] if event["kind"] == "save"] == [3, 6]
    assert run["parts"]["names"][:2] == ["data", "compute"]
    assert ["optimizer", "AdamW", ""] in run["engaged"]


def test_a_name_cannot_end_the_script_it_stands_in(tmp_path):
    folder = make_run(tmp_path / "<script>alert(1)<")
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert data_of(tmp_path / "page.html")["runs"][0]["name"] == folder.name
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_long_runs_stay_small_and_keep_their_spikes(tmp_path):
    rows = [metrics_row(step, loss=90.0 if step == 7_234 else 2.0) for step in range(1, 12_001)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    assert max(data_of(tmp_path / "report.html")["runs"][0]["series"]["loss"]) == 90.0


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=80), st.integers(4, 40))
def test_thinned_keeps_the_ends_and_the_extremes(values, most):
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    assert {0, len(values) - 1} <= set(kept)
    assert len(kept) <= most + 2
    known = [value for value in values if value is not None]
    assert not known or {min(known), max(known)} <= {values[place] for place in kept}


# ---- what is drawn of ranks ------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_and_the_slow_rank_is_named(made):
    run = run_of(made)
    assert all(sum(of_rank) == pytest.approx(0.1) for of_rank in run["parts"]["by_rank"])
    names, first = run["parts"]["names"], run["parts"]["by_rank"][0]
    by_name = dict(zip(names, first, strict=True))
    assert by_name["exposed ep"] == pytest.approx(0.02)
    assert by_name["hidden dp_shard"] == pytest.approx(0.006)
    assert by_name["idle"] == pytest.approx(0.04)
    assert {pace["rank"]: pace["phase"] for pace in run["paces"]} == {0: "", 1: "compute", 2: "", 3: ""}


def test_ranks_are_compared_with_those_of_their_stage_and_without_the_first_step():
    def times(*steps):
        seconds = [[[0.1, compute, 0.1] for compute in step] for step in steps]
        return PartTimes(list(range(len(steps))), [0, 1, 2, 3], ["data", "compute", "optimizer"], seconds)

    layout = Layout(pp=2, dp_shard=2)
    alike = rank_paces(times((9.0, 1.0, 1.0, 1.0), (0.9, 0.9, 0.5, 0.54)), layout)
    assert [(pace.own, pace.phase) for pace in alike] == [(pytest.approx(own), "") for own in (1.1, 1.1, 0.7, 0.74)]
    slow = rank_paces(times((0.9, 0.9, 0.5, 0.8)), layout)
    assert [pace.phase for pace in slow] == ["", "", "", "compute"]
    assert slow[3].ratio == pytest.approx(1.0 / 0.85)


def test_ranks_of_an_earlier_and_larger_start_are_left_out(made, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    shutil.copy(folder / "log" / "telemetry-3.jsonl", folder / "log" / "telemetry-4.jsonl")
    assert [pace["rank"] for pace in run_of(folder)["paces"]] == [0, 1, 2, 3]


seconds = st.floats(0, 2)


@given(seconds, seconds, seconds, seconds, seconds, st.none() | seconds)
def test_parts_are_never_negative_and_always_the_whole_step(whole, data, update, comm, exposed, idle):
    row = {"seconds": whole, "data": data, "optimizer": update, "comm": {"tp": comm}, "exposed": {"tp": exposed}}
    parts = parts_of(row if idle is None else {**row, "idle": idle})
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(whole)


def test_the_pipeline_as_it_ran_stands_beside_the_ideal_one(made):
    picture = run_of(made)["pipeline"]
    assert picture["ranks"] == [0, 2]
    assert picture["measured"]["total"] == pytest.approx(1e-3, rel=0.01)
    busy = [
        [sum(end - start for *_, start, end in row) for row in picture[name]["spans"]] for name in ("measured", "ideal")
    ]
    assert busy[0] == pytest.approx([6e-4, 6e-4], rel=0.01)
    assert busy[1] == pytest.approx(busy[0], rel=0.01)
    assert picture["ideal"]["total"] < picture["measured"]["total"]
    begins = {
        (kind, stage, micro): start for row in picture["measured"]["spans"] for kind, stage, micro, start, _ in row
    }
    assert begins["F", 1, 0] >= begins["F", 0, 0] + 9e-5


def test_the_mesh_has_who_talks_to_whom_and_the_bytes(made):
    mesh = run_of(made)["mesh"]
    assert mesh["groups"]["pp"] == [[0, 2], [1, 3]]
    assert mesh["groups"]["ep"] == [[0, 1], [2, 3]]
    assert [rank["sent"]["dp_shard"] for rank in mesh["ranks"]] == [2048] * 4
    assert mesh["ranks"][3]["holds"] == "layers 2-3; 1,000 parameters, 3.91 KiB"


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4), Layout(dp_shard=4, tp=2)]
)
def test_groups_hold_every_rank_once(layout):
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_shard"):
        groups = groups_of(layout, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {getattr(layout, axis)}


def test_experts_memory_events_and_the_first_step(made):
    run = run_of(made)
    assert run["experts"]["loads"] == [[1.5] * STEPS, [2.0] * STEPS]
    assert run["experts"]["tokens"][-1]["experts"] == [[8, 24], [16, 16]]
    assert [row[0] for row in run["memory"]["now"]] == [0.25, 0.26, 0.27, 0.28]
    assert [event["kind"] for event in run["events"]] == ["start", "fault", "save", "end"]
    assert "SIGKILL; training again after 2.5 s, from step 2" in run["events"][1]["text"]
    assert ("kept bytes", "2.00 KiB", "1") in run["engaged"]
    assert ("attention", "flash x 16", "") in run["engaged"]
    assert run["numbers"]["tokens_per_second"] == statistics.median([640.0])
    assert run["numbers"]["validation"] == 4.75


def test_the_numbers_at_the_head_are_of_all_rows_but_speeds_leave_out_the_first(tmp_path):
    make_run(tmp_path)
    speeds, memory = [10.0, 600.0, 700.0, 650.0], [0.5, 0.75, 2.5, 1.5]
    rows = [
        metrics_row(step, tokens_per_second=speed, mfu=speed / 1e3, memory_gib=most)
        for step, (speed, most) in enumerate(zip(speeds, memory, strict=True), start=1)
    ]
    losses = [{"step": step, "validation_loss": loss} for step, loss in ((1, 5.5), (2, 4.5), (4, 4.75))]
    write_lines(tmp_path / "metrics.jsonl", [*rows, *losses])
    assert run_of(tmp_path)["numbers"] == {
        "loss": 5.0,
        "validation": 4.5,
        "tokens_per_second": 650.0,
        "mfu": 0.65,
        "memory_gib": 2.5,
        "tokens": 256,
        "seconds": STEPS + 1,
        "restarts": 1,
    }


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "end", "word"),
    [
        (5.0, None, "running"),
        (4000.0, None, "lost"),
        (5.0, {"error": "ValueError: bad", "stopped_by": None}, "failed"),
        (5.0, {"error": None, "stopped_by": "SIGTERM"}, "stopped"),
        (5.0, {"error": None, "stopped_by": None}, "finished"),
    ],
)
def test_the_state_of_a_run(tmp_path, monkeypatch, after, end, word):
    make_run(tmp_path, ended=False)
    if end is not None:
        with (tmp_path / "log" / "telemetry-0.jsonl").open("a") as file:
            file.write(json.dumps({"event": "end", "time": BEGAN + STEPS + 1, **end}) + "\n")
    monkeypatch.setattr("shardline.show.report.time.time", lambda: BEGAN + STEPS + after)
    assert run_of(tmp_path)["state"]["word"] == word


# ---- what is missing, and what is refused ----------------------------------------------------------------------------


def test_a_run_with_curves_alone_says_what_is_missing_and_how_to_get_it(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 5.0}, {"step": 2, "loss": float("nan")}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a crash in the middle of a line
    assert main(["report", str(tmp_path)]) == 0
    run = data_of(tmp_path / "report.html")["runs"][0]
    assert run["series"] == {"step": [1, 2], "loss": [5.0, None]}
    assert run["pipeline"] is run["mesh"] is run["parts"] is None
    missing = {what: (why, how) for what, why, how in run["missing"]}
    assert missing["validation loss"] == ("the run has no validation", "--validation.enable")
    assert any(what.startswith("memory by rank") and "telemetry-0.jsonl" in why for what, (why, _) in missing.items())
    assert all(why and how for why, how in missing.values())


def test_ranks_whose_files_are_elsewhere_are_missed(made, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    (folder / "log" / "telemetry-3.jsonl").unlink()
    assert "1 rank wrote no" in {what: why for what, why, _ in run_of(folder)["missing"]}["charts of all ranks"]


def test_a_full_run_misses_only_what_it_cannot_have(made):
    assert [what for what, *_ in run_of(made)["missing"]] == ["MFU", "checkpoints"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none is not a folder"),
        (["empty"], "empty holds no run"),
        (["new"], "new has nothing to draw yet"),
        (["run"] * 2, "run was given twice"),
        ([f"run{number}" for number in range(6)], "6 runs were given; one page holds at most 5"),
        (["run", "--watch", "--out", "x.html"], "pass only one of them"),
        (["run", "--watch", "--port", "70000"], "--port 70000: ports end at 65535"),
        (["run", "--out", "."], "--out .: is a folder"),
        ([], "RUN"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text("")
    assert main(["report", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) <= 2
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log/telemetry-0.jsonl", '{"event": "start", "time": 1, "layout": {"pq": 2}}'),
        ("log/telemetry-0.jsonl", '{"event": "step", "step": 1}\n{"event": "start"}'),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n{"step": 2, "loss": 1.0}'),
        ("log/restarts.jsonl", '{"time": "late"}'),
        ("engaged.json", "[" * 5000),
        ("config.toml", "a = ["),
    ],
)
def test_files_that_no_run_writes_are_one_sentence_or_left_out(tmp_path, capsys, name, text):
    make_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    code = main(["report", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert code == (0 if name in ("engaged.json", "config.toml") else 2)
    assert (code == 0) == (error == "")
    assert code == 0 or "its files are not as a run writes them" in error


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_runs_beside_each_other_with_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", lr=2e-3)]
    assert main(["report", *map(str, folders)]) == 0
    data = data_of(tmp_path / "report.html")
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    different = {row["key"]: row["values"] for row in data["config"] if row["differs"]}
    assert different == {"optimizer.lr": ["0.001", "0.002"]}
    changed = {row["key"] for row in data["config"] if row["changed"]}
    assert {"optimizer.lr", "training.steps"} <= changed
    assert "training.seq_len" not in changed


# ---- watching --------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with make_server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def fetch(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
        return answer.headers["ETag"], answer.read().decode()


def test_a_watched_page_gets_new_rows_and_nothing_twice(served):
    folder, address = served
    assert '"watch":true' in fetch(f"{address}/")[1]
    tag, text = fetch(f"{address}/data.json")
    assert json.loads(text)["runs"][0]["series"]["step"][-1] == STEPS
    with pytest.raises(urllib.error.HTTPError) as same:
        fetch(f"{address}/data.json", **{"If-None-Match": tag})
    assert same.value.code == 304
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_row(STEPS + 1)) + "\n")
    newer, text = fetch(f"{address}/data.json", **{"If-None-Match": tag})
    assert newer != tag
    assert json.loads(text)["runs"][0]["series"]["step"][-1] == STEPS + 1


@pytest.mark.parametrize(("path", "host", "code"), [("/etc/passwd", "localhost:1", 404), ("/", "evil.example:1", 403)])
def test_only_the_page_is_served_and_only_to_this_machine(served, path, host, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(served[1] + path, Host=host)
    assert refused.value.code == code


def test_a_port_in_use_is_named(served, capsys):
    folder, address = served
    port = address.rpartition(":")[2]
    assert main(["report", str(folder), "--watch", "--port", port]) == 2
    assert f"--port {port}: " in capsys.readouterr().err
