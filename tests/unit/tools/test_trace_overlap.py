"""`shardline trace overlap`: the arithmetic of intervals, what counts as communication, and a run of two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline.cli.main import main
from shardline.comm.job import job
from shardline.comm.observe import labelled
from shardline.comm.spans import now
from shardline.config.schema import Config
from shardline.telemetry.profile import Profiler
from shardline.tools.intervals import length, union, within, without
from shardline.tools.trace import rows_of
from shardline.tools.trace_events import read
from tests.e2e.tiny import command, flags, rows

# ---- intervals, against one that looks at every moment ---------------------------------------------------------------

RANGE = 40
intervals = st.lists(st.tuples(st.integers(0, RANGE), st.integers(0, RANGE)), max_size=12)


def moments(found):
    """The unit cells that are covered."""
    return {cell for start, end in found for cell in range(start, end)}


def is_a_set(found):
    flat = [moment for interval in found for moment in interval]
    return flat == sorted(set(flat))


@given(intervals)
def test_union(some):
    assert is_a_set(union(some))
    assert moments(union(some)) == moments(some)
    assert length(union(some)) == len(moments(some))


@given(intervals, intervals)
def test_without(some, others):
    a, b = union(some), union(others)
    assert is_a_set(without(a, b))
    assert moments(without(a, b)) == moments(a) - moments(b)


@given(intervals, st.integers(0, RANGE), st.integers(0, RANGE))
def test_within(some, start, end):
    a = union(some)
    assert is_a_set(within(a, start, end))
    assert moments(within(a, start, end)) == moments(a) & set(range(start, end))


# ---- traces that are written here ------------------------------------------------------------------------------------

AXES = {"tp": {"ranks": [0, 1], "group": "5"}, "dp_shard": {"ranks": [0, 2], "group": "7"}}


def event(kind, name, start, end, thread=1, **args):
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def step(number, start, end):
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def nccl(start, end, name, ranks="[0, 1]", **args):
    """A kernel as torch writes it; its name tells nothing."""
    members = {"Process Group Name": name, "Process Group Description": "d", "Process Group Ranks": ranks}
    return event("kernel", "k", start, end, thread=20, **members, **args)


def launched(number, at, start, end, kind="kernel", thread=1):
    launch = event("cuda_runtime", "cudaLaunchKernel", at, at + 1, thread, correlation=number)
    return [launch, event(kind, "k", start, end, thread=7, correlation=number)]


def write(path, events, **more):
    content = {"shardline": {"rank": 3, "first_step": 10, "axes": AXES}, "traceEvents": events} | more
    path.write_text(json.dumps(content))
    return path


def analysed(tmp_path, events, **more):
    found = rows_of(read(write(tmp_path / "trace.json", events, **more)))
    return {
        (row.step, row.dim): tuple(
            round(1000 * value) for value in (row.communication, row.exposed, row.compute, row.idle)
        )
        for row in found
    }


def test_two_groups_of_nccl_with_kernels_over_each_other(tmp_path):
    """
    computation  0 [------] 100      150 [----] 200
    tp              50 [------------] 150                 220 [--] 240
    dp_shard           80 [---------------------] 210
    """
    events = [
        step(0, 0, 260),
        event("kernel", "ncclDevKernel_AllReduce", 0, 60, thread=7),  # no group: its name does not matter
        event("gpu_memset", "Memset", 60, 100, thread=7),
        event("kernel", "gemm", 150, 200, thread=7),
        nccl(50, 150, "5"),
        nccl(60, 90, "5"),  # of another stream: counted once
        nccl(80, 210, "7", "[0, 2]"),
        nccl(220, 240, "5"),
        event("cpu_op", "aten::mm", 0, 250),  # the host is no computation where there is a GPU
    ]
    assert analysed(tmp_path, events) == {
        (10, "tp"): (120, 70, 150, 10),
        (10, "dp_shard"): (130, 60, 150, 10),
        (10, "all"): (180, 80, 150, 10),
    }


@pytest.mark.parametrize(
    ("args", "axis"),
    [
        ({"Process Group Name": "7", "Process Group Ranks": "[0, 2]"}, "dp_shard"),
        ({"Process Group Name": "99", "Process Group Ranks": [0, 1]}, "tp"),
        (
            {"Process Group Name": "99", "Process Group Ranks": "[0, ..., 9]", "Process Group Description": "mesh_cp"},
            "cp",
        ),
        ({"Process Group Name": "99", "Process Group Ranks": "[4]", "Process Group Description": ""}, "group 99"),
        ({"Process Group Name": "99"}, "group 99"),
    ],
)
def test_groups_become_dimensions(tmp_path, args, axis):
    assert set(analysed(tmp_path, [event("kernel", "k", 0, 10, **args)])) == {(None, axis)}


def test_a_kernel_gets_its_group_from_the_call_that_it_is_linked_to(tmp_path):
    call = {"Process Group Name": "7", "Process Group Ranks": "[0, 2]", "External id": 33}
    events = [
        event("cpu_op", "record_param_comms", 0, 5, **call),
        event("kernel", "k", 10, 20, thread=20, **{"External id": 33}),
        event("kernel", "k", 15, 30, thread=7, **{"External id": 34}),
    ]
    assert analysed(tmp_path, events) == {(None, "dp_shard"): (10, 5, 15, 0)}


def test_what_is_launched_in_a_labelled_range_is_communication(tmp_path):
    events = [
        event("user_annotation", "communication over tp: push", 10, 30),
        event("user_annotation", "communication over cp (copies): fused", 40, 60),
        event("user_annotation", "something else", 0, 100),
        *launched(1, 5, 100, 110),  # before the range: computation
        *launched(2, 15, 110, 120),
        *launched(3, 20, 120, 130, kind="gpu_memcpy"),
        *launched(4, 20, 130, 140, thread=2),  # by another thread: computation
        *launched(5, 45, 140, 150),  # a product between the copies: computation
        *launched(6, 50, 150, 160, kind="gpu_memcpy"),
    ]
    assert analysed(tmp_path, events) == {
        (None, "tp"): (20, 20, 30, 0),
        (None, "cp"): (10, 10, 30, 0),
        (None, "all"): (30, 30, 30, 0),
    }


KERNELS = [
    {"name": "scatter", "lasted": 20.0, "waited": 4.0, "sent": [2.0, 10.0]},
    {"name": "gather", "lasted": 10.0, "waited": 0.0, "sent": None},
    {"name": "gather", "lasted": 10.0, "waited": 3.0, "sent": None},
]


def timed_kernels(names):
    events = [event("user_annotation", "communication over cp (copies): fused", 0, 60)]
    for number, (name, start, end) in enumerate(names):
        launch, kernel = launched(number, number, start, end)
        events += [launch, kernel | {"name": name}]
    return events


def test_a_kernel_that_timed_itself_computes_less_what_it_waited(tmp_path):
    """It communicates while it sends, from 102 to 110, and while it waits: 116 to 120 and 137 to 140."""
    header = {"rank": 0, "axes": AXES, "kernels": KERNELS}
    events = timed_kernels([("scatter", 100, 120), ("gather", 120, 130), ("gather", 130, 140), ("other", 140, 150)])
    assert analysed(tmp_path, events, shardline=header) == {(None, "cp"): (8 + 4 + 3, 4 + 3, 16 + 10 + 7 + 10, 0)}


def test_times_of_other_kernels_are_not_taken_for_theirs(tmp_path):
    header = {"rank": 0, "axes": AXES, "kernels": KERNELS}
    events = timed_kernels([("gather", 120, 130), ("gather", 130, 140), ("gather", 140, 150)])
    assert analysed(tmp_path, events, shardline=header) == {(None, None): (0, 0, 30, 0)}


def test_the_kernels_of_a_collective_are_one(tmp_path):
    """Also where it waits for the host between two of them; what computes meanwhile hides it."""
    events = [
        event("user_annotation", "communication over tp: sum", 0, 50),
        event("user_annotation", "communication over tp: sum", 60, 70),
        *launched(1, 10, 100, 110),
        *launched(2, 20, 130, 140),
        *launched(3, 55, 115, 120),
        *launched(4, 65, 150, 160),
    ]
    assert analysed(tmp_path, events) == {(None, "tp"): (50, 45, 5, 10)}


def test_nested_ranges_count_for_the_inner_one_and_ends_are_seen(tmp_path):
    events = [
        event("user_annotation", "communication over dp_shard: outer", 0, 100),
        event("user_annotation", "communication over tp: inner", 10, 20),
        event("user_annotation", "communication over tp: inner", 30, 40),
        *launched(1, 15, 200, 210),
        *launched(2, 50, 210, 220),
        *launched(3, 120, 220, 230),
    ]
    assert analysed(tmp_path, events) == {
        (None, "tp"): (10, 10, 10, 0),
        (None, "dp_shard"): (10, 10, 10, 0),
        (None, "all"): (20, 20, 10, 0),
    }


def test_a_gpu_runs_behind_the_host(tmp_path):
    """Work belongs to the step that launched it; a step lasts until its last work has ended."""
    events = [step(0, 0, 50), step(1, 50, 100)]
    events += [*launched(1, 10, 40, 90), *launched(2, 60, 95, 150)]
    for number, at, start, end in ((3, 20, 80, 92), (4, 70, 160, 170)):
        launch, kernel = launched(number, at, start, end)
        kernel["args"] |= {"Process Group Name": "5"}
        events += [launch, kernel]
    assert analysed(tmp_path, events) == {(10, "tp"): (12, 2, 50, 40), (11, "tp"): (10, 10, 55, 13)}


def test_gloo_carries_tensors_of_a_gpu_in_spans_of_the_host(tmp_path):
    events = [
        step(0, 0, 100),
        event("communication", "all_gather", 20, 60, "communication tp", axis="tp", ranks=[0, 1]),
        event("communication_wait", "all_gather", 50, 60, "waiting for tp", axis="tp", ranks=[0, 1]),
        *launched(1, 10, 15, 40),
        *launched(2, 21, 22, 58, kind="gpu_memcpy", thread=9),  # by the backend's thread
        *launched(3, 55, 55, 60, kind="gpu_memcpy"),  # while the rank waits
        *launched(4, 70, 70, 90, kind="gpu_memcpy"),  # a copy of the model's own
    ]
    assert analysed(tmp_path, events) == {(10, "tp"): (40, 20, 45, 15 + 10)}


def test_without_a_gpu_computation_is_what_threads_do_and_do_not_wait_in(tmp_path):
    """
    main        0 [ op ------------------------ ] 60       80 [ op ] 90
    waiting            20 [ -- ] 40                      75 [ --- ] 85
    tp       5 [ ------------- ] 40                      75 [ --- ] 85
    """
    events = [
        step(4, 0, 100),
        event("cpu_op", "outer", 0, 60),
        event("cpu_op", "inner", 10, 30),
        event("cpu_op", "aten::add", 80, 90),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 92, 95, thread=2),
        event("cpu_op", "aten::add", 60, 75, thread=3),  # of the backend
        *(
            event(kind, "sum", start, end, "communication tp", axis="tp", ranks=[0, 1])
            for kind, start, end in (
                ("communication", 5, 40),
                ("communication_wait", 20, 40),
                ("communication", 75, 85),
                ("communication_wait", 75, 85),
            )
        ),
    ]
    assert analysed(tmp_path, events) == {(14, "tp"): (45, 30, 40 + 5 + 3, 100 - 40 - 8 - 30)}


def test_waiting_for_a_rank_that_is_late_is_exposed(tmp_path):
    events = [event("cpu_op", "op", 0, 10), event("communication_wait", "sum", 10, 30, "w", axis="tp", ranks=[])]
    assert analysed(tmp_path, events) == {(None, "tp"): (20, 20, 10, 0)}


def test_foreign_traces_are_read_as_far_as_they_go(tmp_path):
    kernel = event("kernel", "k", 0, 10, **{"Process Group Name": "1", "Process Group Description": "mesh_fsdp"})
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps([kernel]))
    assert [(row.rank, row.dim) for row in rows_of(read(plain))] == [(None, "fsdp")]
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": [kernel], "distributedInfo": {"rank": 4}}).encode()))
    assert [(row.rank, row.dim) for row in rows_of(read(packed))] == [(4, "fsdp")]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.json", b'{"traceEvents": [', "damaged, or not JSON"),
        ("t.json", b"\xff\xfe\x00", "damaged, or not JSON"),
        ("t.json", b"", "damaged, or not JSON"),
        ("t.json", b'{"loss": 1}', "it has no list of traceEvents"),
        ("t.json", b"3", "it has no list of traceEvents"),
        ("t.json", b'{"traceEvents": [1]}', "it has no list of traceEvents"),
        ("t.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "not a trace that torch wrote: KeyError"),
        ("t.json", b'{"shardline": [], "traceEvents": []}', "not a trace that torch wrote"),
        ("t.json.gz", b'{"traceEvents": []}', "cannot be read"),
        ("t.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, capsys, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["trace", "overlap", str(path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {path}: ")
    assert said in shown


def test_missing_files_and_words(tmp_path, capsys):
    assert main(["trace", "overlap", str(tmp_path / "none.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["trace", "overlap", str(tmp_path)]) == 2
    assert "holds no traces; profiling.enable_profiling writes some" in capsys.readouterr().err
    assert main(["trace", "overlap"]) == 2
    assert "TRACE... is missing" in capsys.readouterr().err


def test_a_trace_without_communication_says_so(tmp_path, capsys):
    path = write(tmp_path / "trace.json", [step(0, 0, 1000), event("cpu_op", "op", 0, 500)])
    assert main(["trace", "overlap", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"note: {path} shows no communication" in shown.err
    assert shown.out.splitlines()[1].split() == ["3", "10", "-", "0.000", "0.000", "0.000", "-", "0.500", "0.500"]
    assert main(["trace", "overlap", str(path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["dim"], row["communication_ms"], row["hidden_fraction"], row["compute_ms"]) == (None, 0, None, 0.5)


def test_table_and_json_of_several_ranks(tmp_path, capsys):
    for rank, end in ((0, 2000), (1, 3000)):
        header = {"rank": rank, "first_step": 1, "axes": AXES}
        events = [step(0, 0, 4000), event("kernel", "k", 0, 1000), nccl(0, end, "5")]
        write(tmp_path / f"{rank}.json", events, shardline=header)
    words = ["trace", "overlap", str(tmp_path / "0.json"), str(tmp_path / "1.json")]
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["rank", "step", "dim", "communication", "exposed"]
    assert lines[1] == ["0", "1", "tp", "2.000", "1.000", "1.000", "50.0", "1.000", "0.000"]
    assert lines[2] == ["1", "1", "tp", "3.000", "2.000", "1.000", "33.3", "1.000", "0.000"]
    assert lines[4] == ["tp", "2.500", "1.500", "1.000", "40.0", "1.000", "0.000"]
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[1] == {
        "trace": str(tmp_path / "1.json"),
        "rank": 1,
        "step": 1,
        "dim": "tp",
        "communication_ms": 3,
        "exposed_ms": 2,
        "hidden_ms": 1,
        "hidden_fraction": pytest.approx(1 / 3),
        "compute_ms": 1,
        "idle_ms": 0,
    }


def test_of_a_runs_folder_the_last_profile_is_read(tmp_path, capsys):
    for step_number in (2, 9, 10):
        folder = tmp_path / "profile_traces" / f"iteration_{step_number}"
        folder.mkdir(parents=True)
        for rank in range(11):
            header = {"rank": rank, "first_step": step_number, "axes": AXES}
            write(folder / f"rank{rank}_trace.json", [step(0, 0, 4000), nccl(0, 1000, "5")], shardline=header)
    assert main(["trace", "overlap", str(tmp_path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rank"], row["step"]) for row in found] == [(rank, 10) for rank in range(11)]


@pytest.mark.parametrize("overlapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_of_two_ranks(tmp_path, capsys, overlapped):
    """What is exposed fills the step with computation and idling, and is what the run itself has measured."""
    profiling = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 0, "profiler_active": 1}
    options = {f"profiling__{key}": value for key, value in profiling.items()}
    words = flags(tmp_path, training__steps=2, parallelism__tensor_parallel_degree=2, **options)
    words += ["--parallelism.enable_async_tensor_parallel"] if overlapped else []
    ring = ["--parallelism.async_tensor_parallel_backend=ring", "--parallelism.async_tensor_parallel_compare_freq=0"]
    words += ring if overlapped else []
    done = command("train", "--nproc", "2", *words)
    assert done.returncode == 0, done.stderr
    paths = sorted(str(path) for path in (tmp_path / "profile_traces" / "iteration_2").glob("*.json"))
    assert [Path(path).name for path in paths] == ["rank0_trace.json", "rank1_trace.json"]
    assert main(["trace", "overlap", *paths, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rank"], row["step"], row["dim"]) for row in found] == [
        (rank, 2, dim) for rank in (0, 1) for dim in ("tp", "world", "all")
    ]
    for row in found:
        assert row["communication_ms"] > 0
        assert row["compute_ms"] > 0
        assert 0 <= row["hidden_ms"] <= row["communication_ms"]
        assert overlapped or row["exposed_ms"] == pytest.approx(row["communication_ms"])
    for path, row in zip(paths, found[2::3], strict=True):
        events = json.loads(Path(path).read_text())["traceEvents"]
        (whole,) = [event["dur"] / 1000 for event in events if event["name"] == "ProfilerStep#1"]
        assert row["exposed_ms"] + row["compute_ms"] + row["idle_ms"] == pytest.approx(whole)
    measured = rows(tmp_path)[-1]
    tensor = [row for row in found if row["dim"] == "tp"]
    assert max(row["exposed_ms"] for row in tensor) == pytest.approx(1000 * measured["tp_exposed_seconds"], rel=0.1)
    assert max(row["communication_ms"] for row in tensor) >= 999 * measured["tp_comm_seconds"]


@pytest.mark.gpu
def test_labelled_copies_of_a_real_trace(tmp_path):
    """Launches are linked to what ran; copies in the range are communication, products are not."""

    def work():
        a = torch.ones(512, 512, device="cuda")
        with labelled("tp", "push", copies_only=True):
            a.clone()
            a @ a
        torch.cuda.synchronize()

    options = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1}
    with Profiler(Config.model_validate({"profiling": options}), tmp_path, 0, torch.device("cuda")) as profiler:
        for _ in range(2):
            start = now()
            work()
            job.spans.add("cp", "sum", start, now(), waiting=False)
            profiler.step()
    found = rows_of(read(tmp_path / "profile_traces" / "iteration_2" / "rank0_trace.json"))
    numbers = {row.dim: row for row in found}
    assert set(numbers) == {"tp", "cp", "all"}
    assert numbers["tp"].communication > 0
    assert numbers["tp"].compute > 0
    assert numbers["cp"].exposed < numbers["cp"].communication
