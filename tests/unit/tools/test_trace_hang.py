"""`shardline trace hang`: what the flight recorders of several ranks say together."""

import json
import time

import pytest

from shardline.cli.main import main
from shardline.comm.flight_recorder import FlightRecorder
from shardline.tools.trace_hang import partings, read_files

GATHER, REDUCE = "all_gather over tp of (4,) float32", "all_reduce over tp of (4,) float32"


def record(folder, rank, calls, members=(0, 1, 2), size=100):
    """Write the file of a rank; `calls` are (tag, how far) of axis tp, numbered from 1."""
    recorder = FlightRecorder(rank, size, folder, "rank_")
    for number, (tag, state) in enumerate(calls, 1):
        flight = recorder.issue("tp", number, tag, 16, step=number)
        flight.waited = time.time() if state != "issued" else 0.0
        flight.done = time.time() if state == "done" else 0.0
    recorder.write("no progress for 5 s", {"tp": members})


def test_the_rank_that_did_not_arrive(tmp_path, capsys):
    record(tmp_path, 0, [(GATHER, "done"), (REDUCE, "waiting")])
    record(tmp_path, 1, [(GATHER, "done")])
    record(tmp_path, 2, [(GATHER, "done"), (REDUCE, "issued")])
    (found,) = partings(read_files(tmp_path))
    assert (found.axis, found.number, found.tag, found.step, found.done_by_all) == ("tp", 2, REDUCE, 2, 1)
    assert found.ranks == {"waiting": [0], "issued": [2], "not arrived": [1]}
    assert main(["trace", "hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "ranks 0-2: no progress for 5 s" in text
    assert "tp, ranks 0-2: all have done call 1" in text
    assert f"not arrived  rank 1; the last collective of rank 1 is {GATHER} (call 1)" in text
    assert main(["trace", "hang", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"]["not arrived"] == [1]


def test_ranks_that_issued_something_else_and_one_without_a_file(tmp_path, capsys):
    record(tmp_path, 0, [(GATHER, "waiting")])
    record(tmp_path, 1, [(REDUCE, "waiting")])
    (found,) = partings(read_files(tmp_path))
    assert found.ranks == {"waiting": [0], "other": [1], "no file": [2]}
    main(["trace", "hang", str(tmp_path)])
    assert f"other        rank 1: {REDUCE}" in capsys.readouterr().out


def test_the_files_of_a_run_are_where_its_config_says(tmp_path):
    for run, folder in (("own", "flights/of"), ("usual", "comm_traces")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "config.toml").write_text(f'[comm]\nsave_traces_folder = "{folder}"\n')
        record(tmp_path / run / folder, 0, [(GATHER, "done")])
    (tmp_path / "old" / "comm_traces").mkdir(parents=True)
    (tmp_path / "old" / "config.toml").write_text("[comm]\n")
    record(tmp_path / "old" / "comm_traces", 0, [(GATHER, "done")])
    assert [list(read_files(tmp_path / run)) for run in ("own", "usual", "old")] == [[0]] * 3


def test_the_ring_keeps_the_last_ones_and_a_quiet_end_is_said(tmp_path, capsys):
    for rank in range(3):
        record(tmp_path, rank, [(GATHER, "done")] * 5, size=2)
    files = read_files(tmp_path)
    assert [number for _, number, *_ in files[0].collectives] == [4, 5]
    assert list(partings(files)) == []
    main(["trace", "hang", str(tmp_path)])
    assert "every issued collective is done" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", '{"rank": "x"}', "[" * 5000])
def test_a_file_that_is_none(tmp_path, capsys, text):
    (tmp_path / "rank_0.json").write_text(text)
    assert main(["trace", "hang", str(tmp_path)]) == 2
    assert "rank_0.json is not a flight recorder file" in capsys.readouterr().err


def test_a_folder_without_files(tmp_path, capsys):
    assert main(["trace", "hang", str(tmp_path)]) == 2
    assert "SIGUSR2" in capsys.readouterr().err
