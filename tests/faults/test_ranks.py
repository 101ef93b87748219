"""One rank fails, dies, hangs or is interrupted: the job ends on every rank, in time, with one message."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import processes
from tests.faults.ahead import fixtures, job

ROOT = Path(__file__).parents[2]
PROMPT = 10.0  # seconds within which one rank's end is everybody's


class Job:
    """A launcher and its ranks, running `tests.faults.programs`."""

    def __init__(self, folder, fault, ranks=2, restarts=0):
        self.folder, self.ranks = folder, ranks
        command = [sys.executable, "-m", "tests.faults.programs", fault, str(ranks), str(folder), str(restarts)]
        self.process = processes.start(
            command,
            shared=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder)},  # a launcher that is killed cannot tidy up
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def pid(self, rank):
        return int((self.folder / f"pid-{rank}").read_text())

    def step(self, rank):
        path = self.folder / f"step-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, step):
        wait_until(lambda: all(self.step(rank) >= step for rank in range(self.ranks)), 60)

    def end(self, within):
        """(exit code, stdout, stderr), once launcher and ranks are gone."""
        stdout, stderr = self.process.communicate(timeout=within)
        wait_until(lambda: not any(map(is_alive, self.pids())), 2)
        return self.process.returncode, stdout, stderr

    def pids(self):
        return [int(path.read_text()) for path in self.folder.glob("pid-*")]

    def close(self):
        processes.end(self.process)  # its ranks die with it


def is_alive(pid):
    """A zombie is not: it waits for its parent, which may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)


run, jobs = fixtures(Job, ahead=2)


@job("raise", ranks=3)
def test_a_rank_that_raises_ends_all_with_its_own_traceback_once(run):
    code, stdout, stderr = run.end(60)
    assert code == 1
    assert stderr.count("Traceback") == 1
    assert stderr.count("ValueError: a fault of its own") == 1
    assert re.search(r"error: rank 2 \(host \S+, pid \d+\) failed:", stderr)
    assert "Connection" not in stderr  # what the other ranks met in consequence
    assert "stray words of rank 1" not in stdout + stderr


@job("user everywhere")
def test_an_error_of_the_user_on_every_rank_is_shown_once_without_a_traceback(run):
    code, _, stderr = run.end(60)
    assert (code, stderr) == (2, "error: the data is not there\n")


@job("exit")
def test_a_rank_that_just_exits_is_named_with_its_last_words(run):
    code, _, stderr = run.end(60)
    assert code == 1
    assert re.search(r"error: rank 1 \(host \S+, pid \d+\) ended with exit code 7\n", stderr)
    assert "last words" in stderr


@job("none")
def test_a_killed_rank_is_named_with_its_signal(run):
    run.wait_for_step(3)
    pid = run.pid(1)
    os.kill(pid, signal.SIGKILL)
    code, _, stderr = run.end(PROMPT)
    assert code == 1
    assert stderr.startswith(f"error: rank 1 (host {os.uname().nodename}, pid {pid}) was killed by SIGKILL")
    assert "Traceback" not in stderr


@job("none", ranks=3)
def test_a_stopped_rank_ends_the_job_after_the_time_out_and_is_named(run):
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    code, _, stderr = run.end(PROMPT)
    assert code == 1
    assert stderr.count("no progress for") == 1
    assert "ranks 0, 2 wait in all_reduce over world of (4,) float32" in stderr
    assert "where rank 1 did not arrive" in stderr
    assert f"pid {run.pid(1)}) has not been heard of" in stderr


@job("mismatch")
def test_a_mismatched_collective_names_both_sides(run):
    code, _, stderr = run.end(60)
    assert code == 1
    assert re.search(r"rank [01] waits in all_\w+ over world of .* \(call 3\), where rank [01] did not arrive", stderr)
    assert "in all_gather over world of (2,) float32 (call 3)" in stderr
    assert "in all_reduce over world of (4,) float32 (call 3)" in stderr


@job("busy")
def test_a_rank_that_says_it_is_busy_may_take_longer_than_the_time_out(run):
    code, stdout, stderr = run.end(60)
    assert (code, stderr) == (0, "")
    assert "ranks" in stdout


@job("none")
def test_ctrl_c_ends_all_ranks_at_the_same_step(run):
    run.wait_for_step(3)
    os.killpg(run.process.pid, signal.SIGINT)
    code, _, stderr = run.end(PROMPT)
    assert (code, stderr) == (130, "")
    assert (run.folder / "stopped-0").read_text() == (run.folder / "stopped-1").read_text()


@job("deaf")
def test_ranks_that_do_not_heed_a_signal_are_killed(run):
    run.wait_for_step(1)
    run.process.terminate()
    code, _, stderr = run.end(PROMPT)
    assert code == 143
    assert "ranks 0-1 did not stop within 2 s" in stderr


@job("none")
def test_ranks_die_with_a_launcher_that_is_killed(run):
    run.wait_for_step(1)
    run.process.kill()
    assert run.end(PROMPT)[0] == -signal.SIGKILL
