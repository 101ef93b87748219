"""torchrun on two hosts, from one to two machines: one host is killed, and the other goes on to the last step."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.clusters.test_slurm import HOOKS, flags, losses
from tests.faults.test_ranks import wait_until
from tests.hosts import missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


KEYS = {"training.steps": 40, "checkpoint.interval": 5, "checkpoint.enable": "true"}


def start(host, first, folder, name, *words):
    """torchrun with none of our options of how machines meet."""
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29874"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--rdzv-conf", "last_call_timeout=5", *words]
    command += ["--nproc-per-node", "1", "-m", "shardline.train", *flags(**KEYS), f"--job.dump_folder={folder / 'run'}"]
    log = (folder / name).open("w")
    return host.start(command, {"STEP_SECONDS": "0.2"}, cwd=folder, stdout=log, stderr=log)


def right_losses(folder):
    """The losses of one process to which nothing happens."""
    words = [sys.executable, "-m", "shardline", "train", *flags(**KEYS), f"--job.dump_folder={folder / 'whole'}"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    return losses(folder / "whole")


def test_a_killed_host_costs_a_restart_and_no_saved_step(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOKS)
    with two_hosts(rate=None) as (a, b):
        jobs = [start(host, a, tmp_path, name, "--max-restarts=3") for host, name in ((a, "a"), (b, "b"))]
        wait_until(
            lambda: (tmp_path / "run/metrics.jsonl").exists() and max(losses(tmp_path / "run"), default=0) >= 12, 120
        )
        ranks = json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())
        assert sorted(row["host"] for row in ranks) == [a.name, b.name]
        b.cut()
        for pid in subprocess.run(["ip", "netns", "pids", b.name], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        assert jobs[0].wait(240) == 0, (tmp_path / "a").read_text()
    after = losses(tmp_path / "run")
    assert list(after) == list(range(1, 41))
    assert after == pytest.approx(right_losses(tmp_path), rel=1e-4)
    ranks = json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())
    assert len(ranks) == 1
    assert "resum" in (tmp_path / "a").read_text()
