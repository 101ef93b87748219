"""`shardline train` on two hosts that share no disk. How it starts under plain variables: `test_wire_bytes.py`."""

import json
import re
import subprocess
import sys

import pytest

from tests.faults.test_ranks import PROMPT, wait_until
from tests.faults.test_trainer import HOOKS, SMALL
from tests.hosts import two_hosts

MEETING = ["--rdzv-endpoint", "{first}:29871", "--nnodes", "2"]
SECRET = "shared by both: 11c7a9"
TORCHRUN = ["-m", "torch.distributed.run", "--node-rank", "{rank}", "--rdzv-backend", "c10d", *MEETING]


class Job:
    """A command on both hosts, each in a folder of its own."""

    def __init__(self, hosts, folder, launcher=(), options=(), fault="", **variables):
        self.hosts, self.folder = hosts, folder
        folder.mkdir(exist_ok=True)
        (folder / "hooks.py").write_text(HOOKS)
        keys = {**SMALL, "training.steps": 4, "metrics.log_freq": 1, "job.dump_folder": "run"}
        flags = [f"--{key}={value}" for key, value in keys.items()]
        if len(hosts) > 1:  # the hooks are for ranks
            flags.append(f"--experimental.custom_import={folder / 'hooks.py'}")
        self.processes = []
        for rank, host in enumerate(hosts):
            words = [*launcher, "-m", "shardline", "train", *flags, *options]
            words = [word.format(rank=rank, first=hosts[0].address) for word in words]
            (folder / host.name).mkdir()
            self.processes.append(
                host.start(
                    [sys.executable, *words],
                    {"FAULT_FOLDER": str(folder), "FAULT": fault, **variables},
                    cwd=folder / host.name,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self, within):
        """Exit codes and what was printed on each host."""
        printed = [process.communicate(timeout=within) for process in self.processes]
        return [process.returncode for process in self.processes], printed

    def check_run(self):
        """Rank 0's host has the run, with ranks on both hosts; the other one has what its rank writes of itself."""
        a, b = (self.folder / host.name / "run" for host in self.hosts)
        assert [json.loads(line)["step"] for line in (a / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
        ranks = json.loads((a / "log" / "ranks.json").read_text())
        assert [row["host"] for row in ranks] == [host.name for host in self.hosts]
        assert sorted(path.name for path in b.rglob("*.*")) == ["rank-1.log", "telemetry-1.jsonl"]


@pytest.mark.slow
def test_machines_find_each_other_whatever_their_names_stand_for(tmp_path):
    """They are not numbered, and where its own name leads, no other machine can reach one."""
    with two_hosts(loopback_names=True) as hosts:
        options = ["--rdzv-backend", "c10d", *MEETING]
        job = Job(hosts, tmp_path, options=options, SHARDLINE_JOB_SECRET=SECRET)
        codes, ((shown, error_a), (nothing, error_b)) = job.end(90)
    assert (codes, error_a, nothing, error_b) == ([0, 0], "", "", "")
    assert "2 ranks: dp_shard 2" in shown
    job.check_run()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_failure_on_one_host_ends_both_and_is_shown_once_on_each(tmp_path):
    with two_hosts() as hosts:
        job = Job(hosts, tmp_path, options=["--node-rank", "{rank}", *MEETING], fault="raise")
        wait_until((tmp_path / "raising").exists, 90)
        codes, printed = job.end(PROMPT)
    assert codes == [1, 1]
    for _, error in printed:
        assert error.count("Traceback") == 1
        assert re.search(rf"error: rank 1 \(host {hosts[1].name}, pid \d+\) failed:", error)
        assert error.rstrip().endswith("ValueError: a fault of its own")
        assert "Connection" not in error


@pytest.mark.slow
def test_torchrun_starts_ranks_on_two_hosts(tmp_path):
    with two_hosts() as hosts:
        job = Job(hosts, tmp_path, launcher=TORCHRUN)
        codes, printed = job.end(120)
    assert codes == [0, 0], printed
    job.check_run()


def losses_and_norms(folder):
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism.data_parallel_shard_degree=2"],
        ["parallelism.data_parallel_replicate_degree=2"],
        ["parallelism.tensor_parallel_degree=2", "parallelism.enable_async_tensor_parallel=true"],
        ["parallelism.context_parallel_degree=2"],
        ["parallelism.pipeline_parallel_degree=2", "training.local_batch_size=4"],
    ],
    ids=["fsdp", "ddp", "async-tp", "cp", "pp"],
)
def test_two_hosts_compute_what_one_process_does(tmp_path, layout):
    batch = ["--training.global_batch_size=4"]
    with two_hosts() as hosts:
        flags = [*batch, *(f"--{key}" for key in layout)]
        job = Job(hosts, tmp_path, options=[*flags, "--node-rank", "{rank}", *MEETING])
        alone = Job(hosts[:1], tmp_path / "alone", options=batch)
        for run in (job, alone):
            codes, printed = run.end(150)
            assert set(codes) == {0}, printed
    losses, norms = losses_and_norms(tmp_path / hosts[0].name)
    one_losses, one_norms = losses_and_norms(tmp_path / "alone" / hosts[0].name)
    assert losses == pytest.approx(one_losses, rel=1e-4)
    assert norms == pytest.approx(one_norms, rel=1e-5)


@pytest.mark.slow
def test_under_torchrun_a_rank_that_lost_another_says_so(tmp_path):
    with two_hosts() as hosts:
        codes, ((_, error_a), (_, error_b)) = Job(hosts, tmp_path, launcher=TORCHRUN, fault="raise").end(120)
    assert codes == [1, 1]
    assert re.search(rf"error: rank 0 \(host {hosts[0].name}, pid \d+\) lost another rank, whose own error is", error_a)
    assert "Connection" in error_a
    assert "[rank0]: Traceback" not in error_a
    assert "ValueError: a fault of its own" in error_b


@pytest.mark.slow
def test_the_doctor_looks_at_both_hosts(tmp_path):
    with two_hosts() as hosts:
        words = ["-m", "shardline", "doctor", "--json", "--nproc", "1", *MEETING]
        words = [word.format(first=hosts[0].address) for word in words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        doctors = [
            host.start([sys.executable, *words, "--node-rank", str(rank)], {"SHARDLINE_JOB_SECRET": SECRET}, **pipes)
            for rank, host in enumerate(hosts)
        ]
        (shown, error), (nothing, _) = [doctor.communicate(timeout=120) for doctor in doctors]
    assert ([doctor.returncode for doctor in doctors], nothing) == ([0, 0], ""), error
    found = json.loads(shown)["findings"]
    of = {topic: [one["text"] for one in found if one["topic"] == topic] for topic in ("gloo", "clocks", "cores")}
    assert all("2 ranks connected" in one for one in of["gloo"])
    assert {host.interface for host in hosts} == {re.search(r"over (\w+)", one)[1] for one in of["gloo"]}
    (clocks,) = of["clocks"]
    assert hosts[1].name in clocks
    assert [host.name in one for host, one in zip(hosts, of["cores"], strict=True)] == [True, True]
    assert any("between ranks" in one["text"] for one in found)
