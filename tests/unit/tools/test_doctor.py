"""`shardline doctor`: what it reads here, what it says of readings that other machines give, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from shardline.cli.main import main
from shardline.comm.mesh import Mesh, start_process_group, stop_process_group
from shardline.config.layout import Layout
from shardline.tools.bench import device
from shardline.tools.doctor import gpus
from shardline.tools.doctor import host as host_module
from shardline.tools.doctor import storage as storage_module
from shardline.tools.doctor.doctor import checkpoint_need, report
from shardline.tools.doctor.findings import GPUState, findings
from shardline.tools.doctor.gpus import parse_query, parse_topology
from shardline.tools.doctor.host import cpu_quota, read_host
from shardline.tools.doctor.ranks import compare_clocks, read_ranks
from shardline.tools.doctor.readings import (
    CheckpointNeed,
    Examination,
    HostState,
    RankState,
    Rate,
    StorageState,
)
from shardline.tools.doctor.storage import existing, lock_problem, read_storage
from tests.e2e.tiny import command, run, tiny_config
from tests.parity.pool import Pool

GIB, CPU = 2**30, torch.device("cpu")
VERSIONS = {"shardline": "0.1.0", "python": "3.12.3", "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
VERSIONS |= {"driver": "580.65.06", "linux": "6.8"}
H200 = GPUState("NVIDIA H200", 0.0, 16, 16, 0, False)
GOOD = HostState(
    *("node0", VERSIONS, 64, None, 900 * GIB, (8 * GIB, 8 * GIB), 65536, 4096, -1, True, True, True, "eth0", 2),
    gpus=(H200, H200),
    peers=((True, True), (True, True)),
    paths=(("X", "NV18"), ("NV18", "X")),
)
DISK = StorageState("/data", "", "ext4", 500 * GIB, 2e9, 4e9, 0.002)
RANKS = [RankState(0, "node0", "NVIDIA H200"), RankState(1, "node0", "NVIDIA H200")]
RATES = [Rate("products in bfloat16", rank, 780.0, 794.5, "TFLOP/s") for rank in (0, 1)]
NEED = CheckpointNeed(16 * GIB, 10, True)
WELL = Examination([GOOD], RANKS, [DISK], RATES, NEED, job=True)


def told(seen, level=None):
    return [(one.level, one.topic) for one in findings(seen) if level is None or one.level == level]


def test_a_machine_in_order_has_a_line_for_each_topic():
    found = findings(WELL)
    assert {one.level for one in found} == {"ok"}
    assert [one.topic for one in found] == [
        *("versions", "devices", "peer access", "NVLink", "gloo", "NCCL", "shared memory", "limits", "cores"),
        *("memory", "storage", "locking", "free space", "rates", "rates"),
    ]
    assert report(found).endswith("nothing breaks a run")


def test_a_terminal_gets_findings_of_its_width(monkeypatch):
    long = replace(findings(WELL)[0], text="word " * 40)
    assert max(map(len, report([long]).splitlines())) > 100
    monkeypatch.setattr("shardline.tools.doctor.doctor.width_of", lambda stream: 80)
    assert 75 < max(map(len, report([long]).splitlines())) <= 80


def with_gpu(**changes):
    return {"gpus": (replace(H200, **changes), H200)}


HOSTS = {
    "old torch": ({"versions": {**VERSIONS, "torch": "2.10.1"}}, "error", "versions", "install torch 2.11 to 2.14"),
    "new python": ({"versions": {**VERSIONS, "python": "3.14.0"}}, "error", "versions", "install python 3.11 to 3.13"),
    "no CUDA": ({"gpus": (), "cuda_problem": "torch sees no GPU"}, "error", "devices", "driver 580.65.06 supports"),
    "bad memory": (with_gpu(uncorrected_errors=3), "error", "devices", "nvidia-smi --gpu-reset"),
    "hot": (with_gpu(slowed=True), "warning", "devices", "cooling"),
    "few lanes": (with_gpu(link_width=8), "warning", "devices", "reseat the card"),
    "busy": (with_gpu(memory_used=30 * GIB), "warning", "devices", "end them"),
    "no peers": ({"peers": ((True, False), (False, True))}, "warning", "peer access", "ACS"),
    "no NVLink": ({"paths": (("X", "SYS"), ("SYS", "X"))}, "warning", "NVLink", "tensor_parallel_degree"),
    "no gloo": ({"gloo": False}, "error", "gloo", "install torch"),
    "no interface": ({"interface": None}, "error", "gloo", "GLOO_SOCKET_IFNAME"),
    "no NCCL": ({"nccl": False}, "error", "NCCL", "install torch with CUDA"),
    "full shm": ({"shared_memory": (8 * GIB, 10 * 2**20)}, "error", "shared memory", "--shm-size"),
    "Docker's shm": ({"shared_memory": (2**26, 2**26)}, "warning", "shared memory", "--shm-size"),
    "no shm": ({"shared_memory": None}, "warning", "shared memory", "tmpfs"),
    "very few files": ({"open_files": 64}, "error", "limits", "ulimit -n"),
    "few files": ({"open_files": 256}, "warning", "limits", "ulimit -n"),
    "locked memory": ({"locked_memory": 65536}, "warning", "limits", "ulimit -l"),
    "one core": ({"cores": 1}, "warning", "cores", "fewer ranks"),
    "quota": ({"cpu_quota": 8.0}, "warning", "cores", "OMP_NUM_THREADS=4"),
    "small quota": ({"cpu_quota": 0.5}, "warning", "cores", "0.25 per rank|fewer ranks"),
    "no memory": ({"memory_left": GIB}, "warning", "memory", "control group"),
    "memory of one rank": ({"memory_left": 3 * GIB}, "warning", "memory", "control group"),
    "shm of one rank": ({"shared_memory": (8 * GIB, 40 * 2**20)}, "error", "shared memory", "--shm-size"),
    "files of one rank": ({"open_files": 90}, "error", "limits", "ulimit -n"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_wrong_with_a_machine_is_named_with_its_remedy(name):
    changes, level, topic, remedy = HOSTS[name]
    wrong = [one for one in findings(replace(WELL, hosts=[replace(GOOD, **changes)])) if one.level != "ok"]
    assert [(one.level, one.topic) for one in wrong] == [(level, topic)]
    assert re.search(remedy, wrong[0].remedy)
    assert "node0" in wrong[0].text


JOBS = {
    "read-only": ({"storage": [replace(DISK, problem="Read-only file system")]}, "error", "storage"),
    "slow disk": ({"storage": [replace(DISK, write=30e6)]}, "warning", "storage"),
    "slow sync": ({"storage": [replace(DISK, sync_seconds=0.5)]}, "warning", "storage"),
    "no locks": ({"storage": [replace(DISK, lock_problem="Function not implemented")]}, "warning", "locking"),
    "full disk": ({"storage": [replace(DISK, free=10 * GIB)]}, "error", "free space"),
    "room for some": ({"storage": [replace(DISK, free=100 * GIB)]}, "warning", "free space"),
    "no room for a new one": ({"storage": [replace(DISK, free=165 * GIB)]}, "warning", "free space"),
    "below the profile": ({"rates": [replace(RATES[0], measured=500.0)]}, "warning", "rates"),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_wrong_with_a_job_is_named(name):
    changes, *expected = JOBS[name]
    wrong = [one for one in findings(replace(WELL, **changes)) if one.level != "ok"]
    assert [[one.level, one.topic] for one in wrong] == [expected]
    assert wrong[0].remedy


def test_a_device_behind_the_others_is_named_by_its_rank():
    rates = [replace(RATES[0], rank=rank, measured=640.0 if rank == 2 else 780.0) for rank in range(4)]
    (wrong,) = (one for one in findings(replace(WELL, rates=rates)) if one.level != "ok")
    assert "(rank 2): 640 TFLOP/s, 81% of the 794" in wrong.text
    assert "the median of all ranks is 780" in wrong.text


def test_machines_that_differ_and_clocks_that_disagree():
    other = replace(GOOD, host="node1", versions={**VERSIONS, "torch": "2.12.0"})
    ranks = [RANKS[0], RankState(1, "node1", "NVIDIA H200", clock_ahead=-3.0, clock_error=0.01)]
    wrong = [one for one in findings(replace(WELL, hosts=[GOOD, other], ranks=ranks)) if one.level != "ok"]
    assert [(one.level, one.topic) for one in wrong] == [("error", "versions"), ("warning", "clocks")]
    assert "torch: 2.13.0+cu130 on node0; 2.12.0 on node1" in wrong[0].text
    assert wrong[1].text.startswith("node1 is -3.000000 s off")
    for ahead, error in ((0.2, 0.01), (-1.5, 0.7)):  # the second may be an error of measuring
        fine = [ranks[0], replace(ranks[1], clock_ahead=ahead, clock_error=error)]
        assert ("ok", "clocks") in told(replace(WELL, hosts=[GOOD, replace(GOOD, host="node1")], ranks=fine))


@pytest.mark.parametrize("name", ["shardline", "torch", "cuda", "nccl"])
def test_each_version_that_must_be_alike_is_compared(name):
    other = replace(GOOD, host="node1", versions={**VERSIONS, name: "2.12.9"})
    (wrong,) = (one for one in findings(replace(WELL, hosts=[GOOD, other])) if one.level != "ok")
    assert wrong.text.startswith(f"machines differ in {name}: {VERSIONS[name]} on node0; 2.12.9 on node1")


def test_no_room_is_asked_for_where_nothing_is_saved():
    small = replace(WELL, storage=[replace(DISK, free=1)], need=replace(NEED, enabled=False))
    assert told(small, "error") == []


def test_supported_versions_are_those_of_the_package():
    from shardline.tools.doctor.findings import PYTHON, TORCH

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    span = [".".join(map(str, one)) for one in (*PYTHON, *TORCH)]
    assert project["requires-python"] == f">={span[0]},<{span[1]}"
    assert f"torch>={span[2]},<{span[3]}" in project["dependencies"]


# ---- what others print -----------------------------------------------------------------------------------------------

QUERY = """\
NVIDIA H200, 4, 16, 16, 0, Not Active, Not Active
NVIDIA H200, 31027, 8, 16, 2, Active, Not Active
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_the_words_of_nvidia_smi_are_understood():
    first, second = parse_query(QUERY)
    assert first == GPUState("NVIDIA H200", 4 * 2**20, 16, 16, 0, False)
    assert (second.memory_used, second.link_width, second.uncorrected_errors) == (31027 * 2**20, 8, 2)
    assert second.slowed
    (older,) = parse_query("NVIDIA GeForce RTX 4090, 10, 16, 16, [N/A]\n")
    assert (older.uncorrected_errors, older.slowed) == (None, None)
    assert parse_query("") == []
    paths = parse_topology(TOPOLOGY)
    assert paths == [["X", "NV18", "SYS"], ["NV18", "X", "NV18"], ["SYS", "NV18", "X"]]
    three = replace(GOOD, gpus=(H200,) * 3, peers=((True,) * 3,) * 3, paths=paths)
    (wrong,) = (one for one in findings(replace(WELL, hosts=[three])) if one.level != "ok")
    assert "GPUs 0-2 are connected by SYS" in wrong.text


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == cores


def test_clocks_are_compared_at_the_fastest_answer():
    now, delays = [100.0], iter([0.5, 0.1, 0.02] + [0.3] * 5)

    def ask():
        delay = next(delays)
        now[0] += delay  # all of it on the way there: the answer is as wrong as it may be
        there = now[0] + 7.0
        return there

    found = compare_clocks(ask, lambda: now[0])
    assert found.error == pytest.approx(0.01)
    assert found.ahead == pytest.approx(7.0, abs=found.error + 1e-9)


def two_machines():
    """What a rank of a job on two machines reads, the second of which has a clock that is five seconds late."""
    rank = int(os.environ["RANK"])
    owns = start_process_group(CPU, 60)
    now = time.time
    with (
        patch("shardline.tools.doctor.ranks.socket.gethostname", lambda: f"node{rank}"),
        patch("shardline.tools.doctor.ranks.time.time", lambda: now() - 5.0 * rank),
    ):
        found = read_ranks(Mesh(Layout(dp_shard=2), "cpu"), CPU)
    if owns:
        stop_process_group()
    return found


def test_machines_compare_their_clocks():
    pool = Pool()
    first, second = pool.run(2, two_machines)
    pool.close()
    assert first == second
    assert [rank.host for rank in first] == ["node0", "node1"]
    assert first[0].clock_ahead == 0.0
    assert first[1].clock_ahead == pytest.approx(-5.0, abs=first[1].clock_error + 0.001)
    assert 0 < first[1].clock_error < 1


# ---- this machine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(device, "SHAPES", {"cpu": ((64, 64, 64),), "cuda": ((64, 64, 64),)})
    monkeypatch.setattr(device, "COPIED", {"cpu": 2**20, "cuda": 2**20})
    monkeypatch.setattr(device, "_as_many", lambda seconds: 3)
    monkeypatch.setattr(storage_module, "BLOCKS", 2)


def test_this_machine_is_read(quick, tmp_path):
    found = read_host()
    assert found.versions["torch"] == str(torch.__version__)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_left is None or found.memory_left > 0
    assert found.gloo
    place = read_storage(tmp_path / "not" / "yet")
    assert place.path == str(tmp_path)
    assert (place.problem, place.lock_problem) == ("", "")
    assert min(place.write, place.read, place.sync_seconds) > 0
    assert place.free > 0
    assert place.kind
    assert list(tmp_path.iterdir()) == []


def test_the_numbers_of_a_disk_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "BLOCKS", 1)
    seconds = iter([0.0, 4.0, 10.0, 10.5])  # of writing, of reading
    monkeypatch.setattr(storage_module.time, "perf_counter", lambda: next(seconds))
    write, read = storage_module.speeds(tmp_path / "data")
    assert (write, read) == (storage_module.BLOCK / 4.0, storage_module.BLOCK / 0.5)
    monkeypatch.undo()
    usage = type(shutil.disk_usage(tmp_path))(1000, 700, 300)
    monkeypatch.setattr(storage_module, "BLOCKS", 1)
    monkeypatch.setattr(storage_module.shutil, "disk_usage", lambda path: usage)
    assert read_storage(tmp_path).free == 300


def test_a_folder_is_on_the_deepest_mount(tmp_path, monkeypatch):
    rows = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path.parent), "tmpfs"), (f"{tmp_path}-other", "xfs")]
    table = tmp_path / "mountinfo"
    table.write_text("".join(f"36 35 98:0 / {place} rw - {kind} /dev/x rw\n" for place, kind in rows))
    monkeypatch.setattr(storage_module, "MOUNTS", table)
    assert storage_module.file_system(tmp_path) == "nfs4"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    place = read_storage(tmp_path / "file")
    assert "director" in place.problem
    assert told(replace(WELL, storage=[place]), "error") == [("error", "storage")]
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_locks_that_keep_nobody_out_are_noticed(tmp_path, monkeypatch):
    assert lock_problem(tmp_path / "lock") == ""
    monkeypatch.setattr(storage_module.fcntl, "flock", lambda descriptor, kind: None)
    assert lock_problem(tmp_path / "lock") == "two processes get the same lock"


def test_the_command_prints_json_and_ends_with_0(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["topic"] for one in found["findings"]} >= {"versions", "devices", "gloo", "storage", "rates"}
    (host,) = found["readings"]["hosts"]
    assert host["cores"] == len(os.sched_getaffinity(0))
    rates = {rate["what"]: rate["measured"] for rate in found["readings"]["rates"]}
    assert rates["copies in its memory"] > 0


def test_what_breaks_a_run_ends_with_1(quick, tmp_path, capsys, monkeypatch):
    limits = {host_module.resource.RLIMIT_NOFILE: (16, 16)}
    known = host_module.resource.getrlimit
    monkeypatch.setattr(host_module.resource, "getrlimit", lambda kind: limits.get(kind) or known(kind))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^ERROR +limits +.*at most 16 open files", printed, re.MULTILINE)
    assert "remedy: ulimit -n" in printed
    assert printed.endswith("1 finding would break a run\n")


def test_the_size_of_a_checkpoint_is_that_of_a_save(tmp_path):
    config = tiny_config(tmp_path / "run", checkpoint__enable=True, checkpoint__interval=3, checkpoint__keep_latest_k=4)
    need = checkpoint_need(config)
    assert (need.keep, need.enabled) == (4, True)
    run(tmp_path / "run", checkpoint__enable=True, checkpoint__interval=3)
    saved = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoint" / "step-3").rglob("*"))
    assert need.size == pytest.approx(saved, rel=0.1)


@pytest.mark.slow
def test_two_ranks_meet_and_their_launcher_ends_with_the_verdict(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[model]\nflavor = "debugmodel"\n[checkpoint]\nenable = true\n')
    done = command("doctor", str(config), "--nproc", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["readings"]["ranks"]] == [0, 1]
    assert {rate["what"] for rate in found["readings"]["rates"]} >= {"between ranks"}
    assert len(found["readings"]["hosts"]) == 1
    far = tmp_path / "far"
    far.write_text("")
    done = command("doctor", str(config), "--nproc", "2", f"--job.dump_folder={far}", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("1 finding would break a run")  # a busy machine adds a warning
    assert "ended with exit code" not in done.stderr


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n", "580.159.04"),
        ("something else", None),
    ],
)
def test_the_version_of_the_driver(tmp_path, monkeypatch, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(gpus, "VERSION", tmp_path / "version")
    assert gpus.driver_version() == version
