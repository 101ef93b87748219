"""Jobs on a real SLURM: a controller and two nodes on this machine, each on a host of its own."""

import json
import re
import sys
import time

import pytest

from tests.clusters.slurm import absent, cluster
from tests.faults.test_ranks import wait_until
from tests.faults.test_trainer import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.skipif(bool(absent()), reason=absent() or "-")]

STEPS = 66
HOOKS = """
import os
import time
from shardline.registry import register_hook

@register_hook("after_step")
def after(trainer, row):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
"""
KEYS = {
    **SMALL,
    "training.steps": STEPS,
    "training.global_batch_size": 4,
    "metrics.log_freq": 1,
    "checkpoint.interval": 1000,
    "comm.train_timeout_seconds": 60,
    "experimental.custom_import": "hooks.py",
}
SHARDLINE = [sys.executable, "-m", "shardline"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def work(slurm):
    """The folder in which jobs are submitted, which both nodes share."""
    folder = slurm.folder / "work"
    folder.mkdir()
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "run.toml").write_text("[metrics]\nlog_freq = 1\n")
    return folder


def flags(**more):
    return [f"--{key}={value}" for key, value in {**KEYS, **more}.items()]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def uninterrupted(slurm, work):
    """The losses of a run that nothing happens to, started by srun alone, without any option of how machines meet."""
    words = [*SHARDLINE, "train", "run.toml", *flags(**{"job.dump_folder": "whole"})]
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", *words], cwd=work)
    assert done.returncode == 0, done.stderr
    assert re.search(r"note: srun: 2 machines, 1 rank on each, meeting at n1:2\d{4}", done.stderr)
    assert "has no secret" not in done.stderr
    assert (slurm.folder / "home/.config/shardline/job-key").stat().st_mode & 0o777 == 0o600
    found = losses(work / "whole")
    assert list(found) == list(range(1, STEPS + 1))
    ranks = json.loads((work / "whole" / "log" / "ranks.json").read_text())
    assert [row["host"] for row in ranks] == [host.name for host in slurm.hosts]
    return found


class Submitted:
    """A job of `shardline launch slurm --submit` on both nodes."""

    def __init__(self, slurm, work, name, *words, step_seconds=0.0, **keys):
        self.slurm, self.work, self.name = slurm, work, name
        (work / f"{name}.env").write_text(f"# of {name}\nSTEP_SECONDS={step_seconds}\n")
        asked = ["--nodes=2", f"--job-name={name}", f"--env-file={name}.env", "--submit", *words]
        done = slurm.run([*SHARDLINE, "launch", "slurm", "run.toml", *asked, *flags(**keys)], cwd=work)
        assert done.returncode == 0, done.stderr
        self.number = re.search(r"job (\d+) is submitted", done.stdout)[1]
        self.folder = work / "outputs" / f"{name}-{self.number}"

    def log(self):
        path = self.work / f"{self.name}-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step):
        def reached():
            path = self.folder / "metrics.jsonl"
            return path.exists() and max(losses(self.folder), default=0) >= step

        wait_until(reached, 90)

    def wait(self, *states, seconds=600):
        try:
            return self.slurm.wait(self.number, *states, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def restarts(self):
        return int(self.slurm.field(self.number, "Restarts"))


def test_several_tasks_on_a_machine_are_the_ranks(slurm, work):
    keys = {"job.dump_folder": "ranks", "training.steps": 3}
    words = [*SHARDLINE, "train", "run.toml", *flags(**keys)]
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=2", "--overcommit", *words], cwd=work)
    assert done.returncode == 0, done.stderr
    ranks = json.loads((work / "ranks" / "log" / "ranks.json").read_text())
    a, b = (host.name for host in slurm.hosts)
    assert [(row["rank"], row["host"]) for row in ranks] == [(0, a), (1, a), (2, b), (3, b)]


def test_the_end_of_its_time_requeues_a_job_until_the_last_step(slurm, work, uninterrupted):
    job = Submitted(slurm, work, "timed", "--time=1", step_seconds=0.9)
    assert job.wait("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL") == "COMPLETED", job.log()
    assert job.restarts() >= 1
    assert f"(the end of SLURM job {job.number})" in job.log()
    assert f"job {job.number} goes back to the queue" in job.log()
    assert losses(job.folder) == uninterrupted


def test_a_preempted_job_saves_and_goes_on_when_there_is_room_again(slurm, work, uninterrupted):
    job = Submitted(slurm, work, "preempted", step_seconds=0.1)
    job.wait_for_step(5)
    urgent = slurm.checked("sbatch", "--parsable", "-N2", "--exclusive", "-p", "urgent", "--wrap", "sleep 3", cwd=work)
    slurm.wait(urgent, "COMPLETED")
    assert job.wait("COMPLETED", "FAILED", "PREEMPTED") == "COMPLETED", job.log()
    assert job.restarts() == 1
    assert "SIGTERM: stopping after this step" in job.log()
    assert re.search(r"resum\w+ .*step", job.log())
    assert losses(job.folder) == uninterrupted


def test_a_signal_for_the_script_reaches_the_ranks(slurm, work, uninterrupted):
    job = Submitted(slurm, work, "told", step_seconds=0.1)
    job.wait_for_step(3)
    slurm.checked("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: "SIGUSR1: saving after this step" in job.log(), 30)
    job.wait_for_step(max(losses(job.folder)) + 2)  # it goes on
    slurm.checked("scancel", "--batch", "--signal=TERM", job.number)
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log()
    assert job.restarts() == 1
    assert losses(job.folder) == uninterrupted


def test_a_node_that_is_set_down_costs_a_requeue(slurm, work, uninterrupted):
    job = Submitted(slurm, work, "lost", step_seconds=0.1, **{"checkpoint.interval": 5})
    job.wait_for_step(12)
    slurm.checked("scontrol", "update", "nodename=n2", "state=DOWN", "reason=test")
    wait_until(lambda: job.restarts() == 1, 60)
    time.sleep(2)
    slurm.checked("scontrol", "update", "nodename=n2", "state=RESUME")
    assert job.wait("COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED", job.log()
    assert losses(job.folder) == uninterrupted


def test_scancel_saves_and_does_not_requeue(slurm, work):
    job = Submitted(slurm, work, "cancelled", step_seconds=0.1)
    job.wait_for_step(4)
    slurm.checked("scancel", job.number)
    job.wait("CANCELLED")
    wait_until(lambda: slurm.checked("squeue", "--noheader", "--jobs", job.number) == "", 60)
    assert "SIGTERM: stopping after this step" in job.log()
    assert [path.name for path in (job.folder / "checkpoint").glob("step-*")], job.log()
    assert job.restarts() == 0
    time.sleep(8)  # longer than a requeued job would wait
    assert job.slurm.field(job.number, "JobState") == "CANCELLED"
    assert max(losses(job.folder)) < STEPS


def test_a_run_that_fails_is_not_requeued_and_keeps_its_exit_code(slurm, work):
    job = Submitted(slurm, work, "refused", **{"training.dataset_path": "none.txt", "model.tokenizer_path": "bytes"})
    assert job.wait("COMPLETED", "FAILED") == "FAILED"
    assert slurm.field(job.number, "ExitCode") == "2:0"
    assert job.restarts() == 0
    assert job.log().count("there is no file or folder 'none.txt'") >= 1


def test_a_wrong_partition_is_named_with_those_that_there_are(slurm, work):
    words = ["launch", "slurm", "run.toml", "--nodes=2", "--partition=fast", "--submit", "--out=wrong.sbatch"]
    done = slurm.run([*SHARDLINE, *words], cwd=work)
    assert done.returncode == 2
    assert "error: --partition fast: sbatch refuses wrong.sbatch:" in done.stderr
    assert "invalid partition specified: fast" in done.stderr
    assert "partitions here: main, urgent" in done.stderr
