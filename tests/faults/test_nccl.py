"""Hangs on NCCL, in real training: two launchers as on two machines, which share a GPU.

NCCL takes one rank per GPU of a host; a host name of its own for each rank (NCCL_HOSTID) makes two of one machine.
"""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests import processes
from tests.faults.test_ranks import is_alive, wait_until
from tests.faults.test_trainer import HOOKS, SMALL

pytestmark = pytest.mark.gpu

# Rank 1 waits for a sum where the other goes on with its step.
MISMATCH = """
@register_hook("after_step")
def another_sum(trainer, row):
    if os.environ.get("FAULT") == "mismatch" and os.environ["RANK"] == "1" and row["step"] == 3:
        import torch
        from shardline.comm import collectives
        from shardline.run.device import read
        read(collectives.sum_in_place(torch.ones(7, device=trainer.device), "world"))
"""


class Job:
    def __init__(self, folder, fault="", **more):
        self.folder = folder
        (folder / "hooks.py").write_text(HOOKS + MISMATCH)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"127.0.0.1:{probe.getsockname()[1]}"
        keys = {**SMALL, **more, "experimental.custom_import": folder / "hooks.py", "metrics.log_freq": 1}
        flags = [f"--{key}={value}" for key, value in keys.items()]
        self.processes = []
        for node in (0, 1):
            words = ["--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", meeting, *flags]
            own = {"FAULT_FOLDER": str(folder), "FAULT": fault}
            own |= {"NCCL_HOSTID": f"host-{node}", "NCCL_SOCKET_IFNAME": "lo"}
            self.processes.append(
                processes.start(
                    [sys.executable, "-m", "shardline", "train", *words, f"--job.dump_folder={folder}/run-{node}"],
                    env={**os.environ, **own},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )

    def pid(self, rank):
        return int((self.folder / f"pid-{rank}").read_text())

    def wait_for_step(self, step):
        def reached():
            done = [self.folder / f"step-{rank}" for rank in (0, 1)]
            return all(path.exists() and int(path.read_text()) >= step for path in done)

        wait_until(lambda: reached() or any(process.poll() is not None for process in self.processes), 120)

    def end(self, within):
        """Exit codes, and what went to standard error on each node."""
        errors = [process.communicate(timeout=within)[1] for process in self.processes]
        wait_until(lambda: not any(is_alive(self.pid(rank)) for rank in (0, 1)), 5)
        return [process.returncode for process in self.processes], errors

    def close(self):
        for process in self.processes:
            processes.end(process)
            process.communicate()
        for path in self.folder.glob("pid-*"):
            if is_alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(*arguments, **more):
        jobs.append(Job(tmp_path, *arguments, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


LAYOUTS = {"fsdp": {}, "tp": {"parallelism.tensor_parallel_degree": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_rank_is_named_after_the_time_out(start, layout):
    job = start(**LAYOUTS[layout])
    job.wait_for_step(3)
    os.kill(job.pid(1), signal.SIGSTOP)
    codes, (error, _) = job.end(60)
    assert codes[0] == 1, error
    assert error.count("no progress for") == 1, error
    assert re.search(r"rank 0 waits in \w+ over (dp_shard|world|tp|loss) .* where rank 1 did not arrive", error), error
    assert f"pid {job.pid(1)}) has not been heard of" in error


def test_a_mismatched_collective_names_both_sides(start):
    job = start("mismatch", **LAYOUTS["tp"])
    codes, (error, _) = job.end(120)
    assert codes == [1, 1], error
    assert error.count("no progress for") == 1, error
    assert "all_reduce over world of (7,) float32" in error


def test_a_killed_rank_ends_the_other(start):
    job = start(**LAYOUTS["tp"])
    job.wait_for_step(3)
    pid = job.pid(1)
    os.kill(pid, signal.SIGKILL)
    codes, (error, _) = job.end(30)
    assert codes == [1, 1]
    assert re.search(rf"rank 1 \(host \S+, pid {pid}\) was killed by SIGKILL", error)
