"""Restarts: ranks and machines that fail, go and come back, and training that goes on as if nothing had happened."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.faults.ahead import fixtures, job
from tests.faults.test_ranks import wait_until
from tests.faults.test_trainer import SMALL
from tests.hosts import two_hosts

# FAULTS is "ATTEMPT/RANK/STEP/WHAT ...": what happens to a rank after a step, or before ("build") the model is built.
HOOKS = """
import os
import signal
import time
from pathlib import Path
from shardline.errors import UserError
from shardline.registry import register_hook

ATTEMPT, RANK = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK")

def happen(step):
    folder = Path(os.environ["FAULT_FOLDER"])
    part = folder / f"at-{RANK}.part"
    part.write_text(f"{ATTEMPT} {step} {os.getpid()}")
    part.replace(folder / f"at-{RANK}")
    for fault in os.environ.get("FAULTS", "").split():
        *when, what = fault.split("/")
        if when == [ATTEMPT, RANK, str(step)]:
            if what == "raise":
                raise ValueError("a fault of its own")
            if what == "user":
                raise UserError("a file that is not there")
            os.kill(os.getpid(), getattr(signal, what))
            time.sleep(60)

@register_hook("before_build")
def before(config):
    happen("build")

@register_hook("after_step")
def after(trainer, row):
    time.sleep(float(os.environ["STEP_SECONDS"]))
    happen(row["step"])
"""
KEYS = {
    **SMALL,
    "training.steps": 6,
    "lr_scheduler.total_steps": 1000,
    "training.global_batch_size": 4,
    "metrics.log_freq": 1,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "comm.train_timeout_seconds": 60,
    "comm.lost_machine_seconds": 4,
}
HERE = socket.gethostname()
PORT = 29873


class Job:
    """A launcher on this machine, or on each host, all in one folder; `keys` with None are left out."""

    def __init__(self, folder, faults="", options=(), nproc=2, hosts=(), step_seconds=0.05, before=None, **keys):
        self.folder, self.hosts, self.launchers = folder, hosts, []
        (folder / "hooks.py").write_text(HOOKS)
        if before is not None:
            before(folder)
        keys = {**KEYS, "job.dump_folder": folder / "run", "experimental.custom_import": folder / "hooks.py", **keys}
        flags = [f"--{key}={value}" for key, value in keys.items() if value is not None]
        self.words = [sys.executable, "-m", "shardline", "train", "--nproc", str(nproc), *flags, *options]
        self.environment = {"FAULT_FOLDER": str(folder), "FAULTS": faults, "STEP_SECONDS": str(step_seconds)}
        if hosts:
            self.environment["SHARDLINE_JOB_SECRET"] = "shared by all: 3f1c0b"
        for host in hosts or (None,):
            self.start(host)

    def start(self, host=None):
        """Another launcher; its number."""
        number = len(self.launchers)
        files = {name: (self.folder / f"{name}-{number}").open("w") for name in ("stdout", "stderr")}
        options = {"cwd": self.folder, "shared": True, **files}
        if host is None:
            self.launchers.append(processes.start(self.words, env={**os.environ, **self.environment}, **options))
        else:
            self.launchers.append(host.start(self.words, self.environment, **options))
        return number

    def shown(self, launcher=0, name="stderr"):
        return (self.folder / f"{name}-{launcher}").read_text()

    def wait_for(self, text, launcher=0, seconds=90):
        wait_until(
            lambda: re.search(text, self.shown(launcher)) or self.launchers[launcher].poll() is not None, seconds
        )
        assert re.search(text, self.shown(launcher)), self.shown(launcher)

    def at(self, rank):
        """(attempt, step, pid) of a rank, the last that it told; step 0 before the first."""
        try:
            attempt, step, pid = (self.folder / f"at-{rank}").read_text().split()
        except (OSError, ValueError):
            return -1, 0, 0
        return int(attempt), 0 if step == "build" else int(step), int(pid)

    def wait_for_step(self, attempt, step, rank=0, seconds=90):
        wait_until(lambda: self.at(rank)[0] == attempt and self.at(rank)[1] >= step, seconds)

    def end(self, launcher=0, within=120):
        return self.launchers[launcher].wait(within)

    def run_folder(self):
        return self.folder / "run"

    def restarts(self):
        text = (self.run_folder() / "log" / "restarts.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, folder=None):
        rows = ((folder or self.run_folder()) / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, rows)]

    def close(self):
        for launcher in self.launchers:
            processes.end(launcher)


run, jobs = fixtures(Job)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses by step of the same training on two ranks, to which nothing happens."""
    one = Job(tmp_path_factory.mktemp("plain"))
    try:
        assert one.end() == 0, one.shown()
        return one.losses()
    finally:
        one.close()


PARTS = r"detect \d+\.\d, rendezvous \d+\.\d, load \d+\.\d, first step \d+\.\d"


@job("0/1/3/SIGKILL", ["--max-restarts", "2"], **{"job.dump_folder": None})
def test_a_killed_rank_costs_nothing_that_was_saved(run, uninterrupted):
    assert run.end() == 0, run.shown()
    (folder,) = (run.folder / "outputs").iterdir()  # every attempt goes on in the first one's
    assert run.losses(folder) == uninterrupted
    killed, recovered = run.shown().splitlines()
    assert killed == f"rank 1 on host {HERE} was killed by SIGKILL; restart 1 of 2 with 1 machine, 2 ranks"
    assert re.fullmatch(rf"recovered in \d+\.\d s: {PARTS}", recovered)
    (row,) = map(json.loads, (folder / "log" / "restarts.jsonl").read_text().splitlines())
    assert (row["restart"], row["from_step"], row["recovered"]) == (1, 2, True)
    assert list(row["parts"]) == ["detect", "rendezvous", "load", "first step"]
    assert sum(row["parts"].values()) == pytest.approx(row["seconds"], abs=0.01)


def older_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')


@job("0/0/3/raise 1/0/5/SIGKILL", ["--max-restarts", "1", "--overwrite"], nproc=1, before=older_run)
def test_when_restarts_are_used_up_the_last_cause_is_shown(run, uninterrupted):
    assert run.end() == 1
    replaced, failed, recovered, error, *_ = run.shown().splitlines()
    assert replaced.startswith("--overwrite: the previous run is now in ")
    why = f"rank 0 on host {HERE} failed: ValueError: a fault of its own"
    assert failed == f"{why}; restart 1 of 1 with 1 machine, 1 rank"
    assert recovered.startswith("recovered in ")
    assert re.fullmatch(rf"error: rank 0 \(host {HERE}, pid \d+\) was killed by SIGKILL \(out of memory\?\)", error)
    (row,) = run.restarts()
    assert "Traceback" in row["details"]
    # `--overwrite` was for the run that was there before, not for the first attempt's.
    assert {path.name for path in (run.run_folder() / "checkpoint").iterdir()} >= {"step-2", "step-4"}
    assert len(run.losses()) == 5
    check_goes_on(run, uninterrupted)


@job("0/0/2/user", ["--max-restarts", "3"], nproc=1)
def test_what_the_user_must_mend_is_not_restarted(run):
    assert run.end() == 2
    assert run.shown() == "error: a file that is not there\n"


@job("0/0/3/SIGKILL", ["--max-restarts", "1"], nproc=1, **{"checkpoint.enable": "false"})
def test_without_checkpoints_a_restart_begins_anew_and_says_so(run, uninterrupted):
    assert run.end() == 0, run.shown()
    assert run.shown().startswith("warning: checkpoint.enable is false: every restart begins at step 0\n")
    assert "restarted: nothing was saved yet" in run.shown(name="stdout")
    assert [step for step, _ in run.losses()] == [step for step, _ in uninterrupted]
    moved = (run.run_folder() / "metrics.before-resume.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in moved] == [1, 2, 3]


@job(options=["--max-restarts", "1"], nproc=1, step_seconds=0.2, **{"training.steps": 1000})
def test_a_signal_ends_the_job_and_restarts_nothing(run):
    run.wait_for_step(0, 2)
    run.launchers[0].send_signal(signal.SIGTERM)
    assert run.end(within=30) in (0, 128 + signal.SIGTERM)
    assert run.shown() == ""
    saved = max(int(path.name.removeprefix("step-")) for path in (run.run_folder() / "checkpoint").iterdir())
    assert saved == run.at(0)[1]


# ---- two hosts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_two_hosts(tmp_path):
    """Starts a job on two hosts that share a disk: (job, first host, second host)."""
    started = []
    with two_hosts(rate=None) as (a, b):

        def start(faults="", nnodes="1:2", **more):
            meeting = ["--rdzv-endpoint", f"{a.address}:{PORT}", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
            options = ["--nnodes", nnodes, "--max-restarts", "3", *meeting]
            started.append(Job(tmp_path, faults, options, nproc=1, hosts=(a, b), **more))
            return started[0], a, b

        yield start
        for one in started:
            one.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_on_one_host_is_started_again_on_both(on_two_hosts, uninterrupted):
    run, _, b = on_two_hosts("0/1/3/SIGKILL")
    assert [run.end(0), run.end(1)] == [0, 0], run.shown(0) + run.shown(1)
    assert run.losses() == uninterrupted
    event = f"rank 1 on host {b.name} was killed by SIGKILL; restart 1 of 3 with 2 machines, 2 ranks\n"
    assert run.shown(1) == event
    assert re.fullmatch(rf"{event}recovered in \d+\.\d s: {PARTS}\n", run.shown(0))


def kill_all_on(host):
    """A machine that loses its power."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(int(pid), signal.SIGKILL)


def check_goes_on(run, uninterrupted):
    """Each step once, with the loss that it would have had."""
    assert [step for step, _ in run.losses()] == list(range(1, len(run.losses()) + 1))
    for (step, loss), (_, expected) in zip(run.losses(), uninterrupted, strict=False):
        assert loss == pytest.approx(expected, rel=1e-4), step


@pytest.mark.slow
def test_a_host_that_dies_is_done_without_and_taken_in_when_it_comes_back(on_two_hosts, uninterrupted):
    run, _, b = on_two_hosts(step_seconds=0.3, **{"training.steps": 400})
    run.wait_for_step(0, 3)
    kill_all_on(b)
    run.wait_for(rf"host {b.name} is lost: no sign of life for \d s; restart 1 of 3 with 1 machine, 1 rank\nrecovered")
    assert run.launchers[0].poll() is None
    number = run.start(b)
    run.wait_for(rf"host {b.name} joins; continuing with 2 machines, 2 ranks\nrecovered in")
    run.launchers[0].send_signal(signal.SIGTERM)
    codes = [run.end(0), run.end(number)]
    assert all(code in (0, 128 + signal.SIGTERM) for code in codes), (codes, run.shown(0), run.shown(number))
    rows = run.restarts()
    assert [(row["machines"], row["ranks"], row["restart"], row["recovered"]) for row in rows] == [
        (1, 1, 1, True),
        (2, 2, 1, True),
    ]
    check_goes_on(run, uninterrupted)


@pytest.mark.slow
def test_a_host_that_is_cut_off_stops_its_ranks_and_comes_back(on_two_hosts, uninterrupted):
    run, _, b = on_two_hosts(step_seconds=0.3, **{"training.steps": 400})
    run.wait_for_step(0, 3)
    cut_off = run.at(1)[2]
    b.cut()
    run.wait_for(rf"host {b.name} is lost: .*; restart 1 of 3 with 1 machine, 1 rank\n")
    assert not Path(f"/proc/{cut_off}").exists()  # two attempts never write at the same time
    run.wait_for("recovered in")
    b.mend()
    run.wait_for(rf"host {b.name} joins; continuing with 2 machines, 2 ranks\nrecovered in")
    run.launchers[1].send_signal(signal.SIGTERM)  # one leaves, the other goes on
    assert run.end(1) in (0, 128 + signal.SIGTERM), run.shown(1)
    run.wait_for(rf"host {b.name} leaves \(SIGTERM\); continuing with 1 machine, 1 rank\nrecovered in")
    run.launchers[0].send_signal(signal.SIGTERM)
    assert run.end(0) in (0, 128 + signal.SIGTERM), run.shown(0)
    assert f"host {b.name} has not reached" in run.shown(1)
    check_goes_on(run, uninterrupted)


@pytest.mark.slow
def test_a_second_fault_during_recovery(on_two_hosts, uninterrupted):
    run, *_ = on_two_hosts("0/0/3/raise 1/1/build/SIGKILL 2/0/build/SIGSEGV")
    assert [run.end(0), run.end(1)] == [0, 0], run.shown(0) + run.shown(1)
    assert run.losses() == uninterrupted
    rows = run.restarts()
    assert [(row["restart"], row["recovered"], row["machines"]) for row in rows] == [
        (1, False, 2),
        (2, False, 2),
        (3, True, 2),
    ]
    assert [row["cause"].rpartition(" ")[2] for row in rows] == ["own", "SIGKILL", "SIGSEGV"]


@pytest.mark.slow
def test_when_the_host_of_the_endpoint_dies_the_others_wait_for_it(on_two_hosts, uninterrupted):
    run, a, b = on_two_hosts(step_seconds=0.3, **{"training.steps": 12})
    run.wait_for_step(0, 3)
    kill_all_on(a)
    run.wait_for("waiting for the first machine", launcher=1)
    number = run.start(a)
    assert [run.end(1), run.end(number)] == [0, 0], run.shown(1) + run.shown(number)
    assert rf"host {b.name} has not reached {a.address}:{PORT} for" in run.shown(1)
    assert "restart 1 of 3 with 2 machines, 2 ranks" in run.shown(1)
    assert len(run.losses()) == 12
    check_goes_on(run, uninterrupted)


@pytest.mark.slow
def test_a_layout_that_does_not_fit_waits_for_more_machines(on_two_hosts, uninterrupted):
    """Two stages need two ranks: one host alone waits, and goes on with the other."""
    stages = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2, "training.steps": 12}
    run, _, b = on_two_hosts(step_seconds=0.3, **stages)
    run.wait_for_step(0, 3)
    kill_all_on(b)
    run.wait_for(r"waiting for machines with which the layout fits \(parallelism: .* does not match 1 rank")
    number = run.start(b)
    assert [run.end(0), run.end(number)] == [0, 0], run.shown(0) + run.shown(number)
    check_goes_on(run, uninterrupted)
