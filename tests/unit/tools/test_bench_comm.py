"""`shardline bench comm`: what it refuses, what it counts, and that a wrong result is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from shardline.cli.main import main
from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.errors import UserError
from shardline.tools.bench import comm as bench
from shardline.tools.bench.collectives import OPS, Bench, CollectiveTime, WrongResult
from shardline.tools.bench.comm import measure_all, parse_sizes
from tests.e2e.tiny import command
from tests.parity.pool import Pool

ROOT = Path(__file__).parents[3]
KEYS = ["benchmark", "op", "dim", "world", "bytes", "dtype", "iterations", "milliseconds", "algbw_gbs", "busbw_gbs"]
KEYS += ["device", "backend", "torch"]


@pytest.fixture(scope="module")
def pool():
    workers = Pool()
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512", [512]),
        ("1M", [2**20]),
        ("1M:8M", [2**20, 2**21, 2**22, 2**23]),
        ("3K:10K", [3072, 6144]),
        ("4k,1MiB,2gb", [4096, 2**20, 2**31]),
        ("1K:2K, 1M", [1024, 2048, 2**20]),
        ("8:8", [8]),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1X", "1M:", ":1M", "-1M", "1.5M", "2M:1M", "1M,", "M", "0:1M"])
def test_bad_sizes(text):
    with pytest.raises(UserError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "big"], "--sizes big: expected sizes such as 512K, 1M or 1M:2G, above 0, got 'big'"),
        (["--ops", "all_reduce,all_gathr"], "got 'all_gathr', did you mean 'all_gather'?"),
        (["--dim", "dp_shart"], "--dim: expected one of pp, dp_replicate, dp_shard, cp, tp, fsdp, loss, world"),
        (["--nproc", "1"], "one rank has no collectives: --nproc 2"),
        (["--nproc", "4", "--tp", "3"], "does not match 4 ranks"),
        (["--dim", "cp", "--tp", "2"], "--dim cp: the layout tp 2 has only one rank there"),
        (["--dim", "fsdp", "--tp", "2"], "--dim fsdp: the layout tp 2 has only one rank there"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, said, capsys, monkeypatch):
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: pytest.fail("ranks were started"))
    assert main(["bench", "comm", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nproc"),
    [
        (["--nproc", "3"], 3),
        (["--dim", "tp", "--tp", "4"], 4),
        (["--tp", "2", "--parallelism.data_parallel_shard_degree", "3"], 6),
        (["--tp", "4", "--nnodes", "2", "--rdzv-endpoint", "h:1"], 2),
        (["--dim", "tp"], 2),
    ],
)
def test_ranks_are_started_as_the_layout_needs(words, nproc, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    seen = []
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: seen.append(launch) or 0)
    assert main(["bench", "comm", *words]) == 0
    assert seen[0].options.nproc == nproc
    assert seen[0].words == ("bench", "comm", *words)


def test_commands_of_two_words(capsys):
    assert main(["bench", "com"]) == 2
    said = "shardline bench: there is no command 'com', did you mean 'comm'? (comm, overlap, experts, device)"
    assert said in capsys.readouterr().err
    assert main(["bench"]) == 0
    assert "usage: shardline bench overlap" in capsys.readouterr().out


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(layout, dim, size, dtype):
    Mesh(layout, "cpu")
    tester = Bench(collectives.axis(dim), torch.device("cpu"), dtype, iterations=2)
    return [tester.measure(op, size) for op in OPS]


@pytest.mark.parametrize(
    ("ranks", "layout", "dim", "n"),
    [(2, Layout(tp=2), "tp", 2), (3, Layout(tp=3), "world", 3), (4, Layout(dp_shard=2, tp=2), "dp_shard", 2)],
)
def test_every_operation_is_right_and_counted_as_nccl_tests_do(pool, ranks, layout, dim, n):
    dtype = torch.bfloat16 if ranks == 3 else torch.float32
    results = pool.run(ranks, measured, layout, dim, 10_000, dtype)
    assert all(rows == results[0] for rows in results)  # the slowest rank's time, on all of them
    part = 10_000 // dtype.itemsize // n
    for row in results[0]:
        assert row.size == part * n * dtype.itemsize
        assert row.count == (part * n if row.op in ("all_reduce", "p2p") else part)
        assert row.iterations == 2
        assert row.algbw == pytest.approx(row.size / row.seconds / 1e9)
        factor = {"all_reduce": 2 * (n - 1) / n, "p2p": 1}.get(row.op, (n - 1) / n)
        assert row.busbw == pytest.approx(row.algbw * factor)


def timed_by_own_clock():
    """Seconds of a call where the clock advances by three with each, and on rank 1 by four."""
    mesh, calls = Mesh(Layout(tp=2), "cpu"), []
    tester = Bench(collectives.axis("tp"), torch.device("cpu"), torch.float32, iterations=5)
    case = tester.case("all_gather", 4096)
    case.run = lambda: calls.append(None)
    clock = SimpleNamespace(perf_counter=lambda: len(calls) * (3.0 + mesh.rank))
    with patch("shardline.tools.bench.collectives.time", clock):
        return tester._timed(case, 5)


def test_the_time_of_a_call_is_measured(pool):
    assert pool.run(2, timed_by_own_clock) == [4.0, 4.0]  # the slowest rank's


def spoiled(op):
    """What is said of a right result, and of one in which the last element is wrong."""
    Mesh(Layout(tp=2), "cpu")
    tester = Bench(collectives.axis("tp"), torch.device("cpu"), torch.float32, iterations=1)
    case = tester.case(op, 4096)
    tester._fill(case)
    case.run()
    tester._check(case)
    case.result[-1] += 1
    try:
        tester._check(case)
    except WrongResult as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_is_found(pool, op):
    for said in pool.run(2, spoiled, op):
        assert said.startswith(f"{op} over tp by gloo returned")


def test_sums_over_many_ranks_fit_the_narrowest_type():
    for n in (2, 8, 19, 64, 128):
        tester = Bench.__new__(Bench)
        tester.axis, tester.period = collectives.Axis("tp", None, n, 0), max(2, min(13, 256 // n))
        assert tester._sum().max() <= 256


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_lines_of_all_operations():
    done = command("bench", "comm", "--sizes", "4K:8K", "--dim", "tp", "--nproc", "2", "--iterations", "3", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["op"], row["bytes"]) for row in rows] == [(op, size) for op in OPS for size in (4096, 8192)]
    for row in rows:
        assert list(row) == KEYS
        assert (row["benchmark"], row["dim"], row["world"], row["iterations"]) == ("comm", "tp", 2, 3)
        assert (row["dtype"], row["backend"], row["torch"]) == ("float32", "gloo", torch.__version__)
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["milliseconds"] / 1e6)


@pytest.mark.slow
def test_the_table_under_torchrun():
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardline", "bench", "comm"]
    words += ["--sizes", "1K", "--ops", "p2p", "--dtype", "bfloat16"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    title, names, units, row, mean, *_ = done.stdout.splitlines()
    assert title.startswith("# p2p over world: 2 ranks, gloo")
    assert names.split() == ["#", "size", "count", "type", "time", "algbw", "busbw"]
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]
    assert row.split()[:3] == ["1024", "512", "bfloat16"]
    assert mean.startswith("# average bus bandwidth: ")


def test_a_wrong_sum_ends_with_exit_code_1(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import torch.distributed as dist\n"
        "right = dist.all_reduce\n"
        "def wrong(x, *more, **named):\n"
        "    right(x, *more, **named)\n"
        "    x[-1] += dist.get_rank()\n"
        "dist.all_reduce = wrong\n"
    )
    words = ["--sizes", "1K", "--ops", "all_gather,all_reduce", "--nproc", "2", "--iterations", "1"]
    done = command("bench", "comm", *words, f"--experimental.custom_import={tmp_path / 'wrong.py'}")
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "all_reduce over world by gloo returned" in done.stderr
    assert "# all_gather over world" in done.stdout


def test_shared_gpus_are_told_to_be_numbers_of_gloo(monkeypatch, capsys):
    tester = Bench.__new__(Bench)
    tester.axis, tester.device, tester.backend = collectives.Axis("tp", None, 2, 0), torch.device("cuda"), "gloo"
    tester.through_host = True
    monkeypatch.setattr(bench, "device_name", lambda device: "a GPU")
    tester.measure = lambda op, size: CollectiveTime(op, size, 2, 1, 0.001, 0.5, 0.5)
    measure_all(tester, ["p2p"], [8], "float32", json=True, prints=False)
    assert capsys.readouterr() == ("", "")
    measure_all(tester, ["p2p"], [8], "float32", json=True, prints=True)
    shown = capsys.readouterr()
    assert "numbers of gloo" in shown.err
    assert json.loads(shown.out)["device"] == "a GPU"


@pytest.mark.gpu
def test_every_operation_on_a_gpu():
    done = command("bench", "comm", "--sizes", "1M", "--nproc", "2", "--json", env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["op"] for row in rows] == list(OPS)
    if torch.cuda.device_count() == 1:
        assert {row["backend"] for row in rows} == {"gloo"}
        assert "numbers of gloo" in done.stderr
