"""Traces, op tables and memory snapshots."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from shardline.config.schema import Config
from shardline.telemetry.profile import Profiler, ops_table

CPU = torch.device("cpu")


def make_config(**options) -> Config:
    options = {"enable_profiling": True, "profile_freq": 4, "profiler_warmup": 1} | options
    return Config.model_validate({"profiling": options})


def work(device=CPU):
    a = torch.ones(64, 64, device=device)
    return (a @ a).relu().sum().item()


def run(config, folder, steps, *, rank=0, device=CPU, start_step=0):
    with Profiler(config, folder, rank, device, start_step) as profiler:
        for _ in range(steps):
            work(device)
            profiler.step()


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def trace_events(path):
    return json.loads(path.read_text())["traceEvents"]


def test_traces_and_tables_at_every_freq(tmp_path):
    run(make_config(), tmp_path, 9)
    assert files_in(tmp_path) == {
        f"profile_traces/iteration_{step}/{name}" for step in (4, 8) for name in ("rank0_trace.json", "ops.txt")
    }
    events = trace_events(tmp_path / "profile_traces" / "iteration_8" / "rank0_trace.json")
    mm = [event for event in events if event.get("name") == "aten::mm"]
    assert len(mm) == 1  # one active step
    assert mm[0]["args"]["Input Dims"][:2] == [[64, 64], [64, 64]]
    assert not [event for event in events if event.get("cat") == "python_function"]


def test_table_names_the_costliest_ops(tmp_path):
    run(make_config(top_ops=3), tmp_path, 4)
    title, header, *rows = (tmp_path / "profile_traces" / "iteration_4" / "ops.txt").read_text().splitlines()
    assert title == "CPU ops"
    assert header.split() == ["self", "ms", "share", "total", "ms", "calls", "name"]
    assert len(rows) == 3
    own = [float(row.split()[0]) for row in rows]
    assert own == sorted(own, reverse=True)
    assert "aten::mm" in [row.split()[-1] for row in rows]


def test_options_for_folder_active_steps_shapes_and_stacks(tmp_path):
    options = {"save_traces_folder": "t", "profiler_active": 2, "record_shapes": False, "with_stack": True}
    run(make_config(**options), tmp_path, 4, rank=3)
    assert files_in(tmp_path) == {"t/iteration_4/rank3_trace.json", "t/iteration_4/rank3_ops.txt"}
    events = trace_events(tmp_path / "t" / "iteration_4" / "rank3_trace.json")
    mm = [event for event in events if event.get("name") == "aten::mm"]
    assert len(mm) == 2
    assert "Input Dims" not in mm[0]["args"]
    assert any(event.get("cat") == "python_function" for event in events)
    # Python's own calls are in the trace, not in the table of ops.
    assert ".py(" not in (tmp_path / "t" / "iteration_4" / "rank3_ops.txt").read_text()


def test_resumed_run_names_its_own_steps(tmp_path):
    run(make_config(), tmp_path, 4, start_step=100)
    assert (tmp_path / "profile_traces" / "iteration_104" / "ops.txt").exists()


def test_freq_of_warmup_and_active_alone_records_from_the_start(tmp_path):
    run(make_config(profile_freq=2), tmp_path, 2)
    assert (tmp_path / "profile_traces" / "iteration_2" / "ops.txt").exists()


def test_run_that_ends_before_the_first_trace_says_so(tmp_path, caplog):
    for steps in range(4):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardline"):
            run(make_config(), tmp_path, steps)
        assert "no trace was recorded" in caplog.text
    assert files_in(tmp_path) == set()


def test_run_that_ends_while_recording_keeps_what_it_has(tmp_path):
    run(make_config(profile_freq=5, profiler_active=3), tmp_path, 8)
    assert {path.name for path in (tmp_path / "profile_traces").iterdir()} == {"iteration_5", "iteration_8"}


def test_nothing_is_recorded_unless_enabled(tmp_path):
    run(make_config(enable_profiling=False, profile_freq=1), tmp_path, 3)
    assert files_in(tmp_path) == set()


def test_full_disk_costs_the_trace_and_not_the_run(tmp_path, caplog):
    (tmp_path / "profile_traces").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "shardline"):
        run(make_config(), tmp_path, 5)
    assert "the trace of step 4 was not saved" in caplog.text
    assert "no trace was recorded" not in caplog.text


def test_a_trace_that_is_half_written_goes(tmp_path, monkeypatch):
    def full(self, path):
        Path(f"{path}.tmp").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    run(make_config(), tmp_path, 4)
    assert files_in(tmp_path) == set()


# ---- memory snapshots ------------------------------------------------------------------------------------------------


def snapshot_config(**options):
    return make_config(enable_profiling=False, enable_memory_snapshot=True, profile_freq=2, **options)


def test_snapshots_on_cpu_say_that_they_need_cuda(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shardline"):
        run(snapshot_config(), tmp_path, 2)
    assert "memory snapshots need CUDA" in caplog.text
    assert files_in(tmp_path) == set()


def test_snapshots_per_freq_and_at_out_of_memory(tmp_path, monkeypatch):
    switched = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **options: switched.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("x"))

    def train():
        config = snapshot_config(save_memory_snapshot_folder="memory")
        with Profiler(config, tmp_path, 0, torch.device("cuda")) as profiler:
            for _ in range(3):
                profiler.step()
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        train()
    assert files_in(tmp_path) == {
        "memory/iteration_2/rank0_memory_snapshot.pickle",
        "memory/iteration_4_out_of_memory/rank0_memory_snapshot.pickle",
    }
    assert switched == ["all", None]


def test_other_errors_leave_no_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    with pytest.raises(KeyError):
        with Profiler(snapshot_config(), tmp_path, 0, torch.device("cuda")):
            raise KeyError
    assert files_in(tmp_path) == set()


@pytest.mark.gpu
def test_cuda_traces_tables_and_snapshots(tmp_path):
    run(make_config(enable_memory_snapshot=True), tmp_path, 4, device=torch.device("cuda"))
    table = (tmp_path / "profile_traces" / "iteration_4" / "ops.txt").read_text()
    assert "GPU kernels" in table
    ops = table.split("GPU time of the ops that launch it")[1].split("GPU kernels")[0]
    assert "aten::mm" in ops
    snapshot = tmp_path / "memory_snapshot" / "iteration_4" / "rank0_memory_snapshot.pickle"
    assert snapshot.stat().st_size > 1000


@pytest.mark.gpu
def test_cuda_out_of_memory_leaves_a_snapshot(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        with Profiler(snapshot_config(), tmp_path, 0, torch.device("cuda")):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert files_in(tmp_path) == {"memory_snapshot/iteration_1_out_of_memory/rank0_memory_snapshot.pickle"}


def test_shares_in_the_table_are_of_the_time_of_ops_alone():
    def op(name, own, total):
        measures = {"self_cpu_time_total": own, "cpu_time_total": total, "self_device_time_total": 0, "count": 2}
        return SimpleNamespace(key=name, is_user_annotation=False, device_type=DeviceType.CPU, **measures)

    rows = ops_table([op("outer", 1500.0, 6000.0), op("inner", 4500.0, 4500.0)], 5).splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["4.500", "75.0%", "4.500", "2", "inner"],
        ["1.500", "25.0%", "6.000", "2", "outer"],
    ]


def test_time_is_set_aside_for_the_step_that_writes(tmp_path):
    with Profiler(make_config(), tmp_path, 0, CPU, start_step=100) as profiler:
        found = []
        for _ in range(8):
            found.append(profiler.writes_next())
            profiler.step()
    assert found == [False, False, False, True] * 2
