"""Jobs that are told to go or run out of time: they save at a step boundary and say by their exit code how it ended."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

from tests import processes
from tests.e2e.tiny import flags
from tests.faults.ahead import fixtures, job
from tests.faults.test_ranks import wait_until
from tests.faults.test_trainer import Run
from tests.prefork import children

SAVING = {"checkpoint.enable": "true", "checkpoint.interval": 100000, "comm.train_timeout_seconds": 20}
run, jobs = fixtures(Run)


def saved(run):
    return sorted(int(path.name.removeprefix("step-")) for path in (run.folder / "run/checkpoint").glob("step-*[0-9]"))


@job(**SAVING, **{"checkpoint.preempted_exit_code": 75})
def test_sigterm_to_the_launcher_saves_and_ends_with_the_configured_code(run):
    run.wait_for_step(2)
    run.process.terminate()
    code, stdout, stderr = run.end(30)
    assert (code, stderr) == (75, ""), stderr
    assert re.search(r"stopped at step \d+ at your request \(SIGTERM\)", stdout)
    assert saved(run) == [run.step()]


@job("slow", **SAVING)
def test_a_second_ctrl_c_ends_it_at_once_and_says_what_there_is(run):
    wait_until(lambda: all((run.folder / f"slow-{rank}").exists() for rank in (0, 1)), 60)
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in (run.folder / "run/log/rank-0.log").read_text(), 10)
    run.process.send_signal(signal.SIGINT)
    code, stdout, stderr = run.end(10)
    assert (code, stderr) == (130, "interrupted\n"), stderr
    assert "warning: ended at once, after step 2; nothing was saved\n" in stdout
    assert saved(run) == []


def test_ctrl_c_while_ranks_start(tmp_path):
    with contextlib.closing(Run(tmp_path, "starting", **SAVING)) as run:
        wait_until(lambda: all((tmp_path / f"starting-{rank}").exists() for rank in (0, 1)), 60)
        run.process.send_signal(signal.SIGINT)
        stdout, stderr = run.process.communicate(timeout=90)
        assert (run.process.returncode, stdout, stderr) == (130, "", "interrupted\n")


SLOW_START = """
import time
from pathlib import Path
(Path(__file__).parent / "starting").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda one: one.name)
def test_a_run_of_one_process_that_has_no_steps_says_that_it_was_interrupted(tmp_path, number):
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = command(tmp_path / "run", experimental__custom_import=tmp_path / "slow_start.py")
    process = processes.start(words, **pipes)
    wait_until(lambda: (tmp_path / "starting").exists(), 60)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (143, "", "interrupted\n")


SLOW_DISK = """
import time
from pathlib import Path
from shardline.storage import crash_points
def slowly(point, path):
    if point == "shard-synced":
        time.sleep(6)
crash_points.listener = slowly
from shardline.registry import register_hook
@register_hook("after_step")
def after(trainer, row):
    (Path(__file__).parent / "stepped").touch()
"""


def test_a_slow_save_is_not_cut_short(tmp_path):
    """The time for a step is over before the save is: the launcher leaves ranks that save alone."""
    (tmp_path / "slow_disk.py").write_text(SLOW_DISK)
    more = {"comm__stop_timeout_seconds": 2, "experimental__custom_import": tmp_path / "slow_disk.py"}
    words = command(tmp_path / "run", **more, checkpoint__interval=100_000, checkpoint__preempted_exit_code=75)
    process = processes.start([*words, "--nproc=2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "stepped").exists(), 90)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (75, ""), stderr
    assert len(list((tmp_path / "run/checkpoint").glob("step-*[0-9]"))) == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_closed_terminal_is_a_reason_to_save(tmp_path, ranks):
    """Nothing can be written to it any more, by whoever is first to try."""
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        pytest.skip(f"no terminal can be opened here: {error}")
    process = processes.start(
        [
            *command(tmp_path / "run", checkpoint__interval=100_000, checkpoint__preempted_exit_code=75),
            f"--nproc={ranks}",
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    shown = b""
    while b"loss" not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(60) == 75
    log = (tmp_path / "run/log/rank-0.log").read_text()
    (name,) = (path.name for path in (tmp_path / "run/checkpoint").iterdir())
    assert f"stopped at step {name.removeprefix('step-')} at your request (SIGHUP)" in log


def wait_for_saves(run, count):
    wait_until(lambda: run.process.poll() is not None or len(saved(run)) == count, 60)
    assert len(saved(run)) == count


def test_sigusr1_saves_and_goes_on_whoever_gets_it(tmp_path):
    """First before there are steps, or handlers: ranks are still importing."""
    with contextlib.closing(Run(tmp_path, **SAVING)) as run:
        wait_until(lambda: len(children(run.process.pid)) == 2, 60)
        run.process.send_signal(signal.SIGUSR1)
        wait_for_saves(run, 1)
        assert saved(run) == [1]
        run.wait_for_step(2)
        os.kill(run.pid(1), signal.SIGUSR1)
        wait_for_saves(run, 2)
        run.wait_for_step(saved(run)[-1] + 1)
        run.process.send_signal(signal.SIGUSR1)
        wait_for_saves(run, 3)
        run.wait_for_step(saved(run)[-1] + 1)
        os.kill(run.pid(1), signal.SIGTERM)  # as a machine's own shutdown does, past the launcher
        code, stdout, stderr = run.end(30)
        assert (code, stderr) == (0, ""), stderr
        assert len(saved(run)) == stdout.count("saved ") == 4
        assert saved(run)[-1] == run.step()


@job(**{"comm.train_timeout_seconds": 20})
def test_without_checkpoints_nothing_is_saved_and_the_lines_say_so(run):
    run.wait_for_step(1)
    os.kill(run.pid(1), signal.SIGUSR1)
    step = run.step()
    run.wait_for_step(step + 3)
    run.process.terminate()
    code, stdout, stderr = run.end(30)
    assert (code, stderr) == (143, ""), stderr
    assert "nothing is saved at SIGUSR1: checkpoint.enable is false" in stdout
    assert "nothing is saved at SIGTERM: checkpoint.enable is false" in stdout
    assert not (run.folder / "run" / "checkpoint").exists()


@pytest.mark.slow
@job(**SAVING, **{"checkpoint.save_before": "20s", "checkpoint.preempted_exit_code": 99})
def test_all_ranks_stop_together_before_the_time_limit(run):
    code, stdout, stderr = run.end(60)
    assert (code, stderr) == (99, ""), stderr
    assert re.search(r'this run saves and stops before \S+ \S+: checkpoint.save_before = "20s"', stdout)
    assert re.search(r"stopping after this step: -?[\d.]+ s are left until .*no save was seen, a step [\d.]+ s", stdout)
    assert f"stopped at step {run.step()} before the time limit" in stdout
    assert saved(run) == [run.step()]


def command(folder, **more):
    words = flags(folder, **{"training__steps": 100_000, "checkpoint__enable": True, **more})
    return [sys.executable, "-m", "shardline", "train", *words]


def test_the_end_of_a_slurm_job_is_a_limit_of_its_own(tmp_path):
    """One that is past: the run does one step, saves it and goes."""
    environment = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": "1700000000"}
    done = subprocess.run(command(tmp_path / "run"), env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"saves and stops before 2023-11-1\d \S+: the end of SLURM job 77\n", done.stdout)
    assert "stopped at step 1 before the time limit" in done.stdout
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-1"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_two_runs_in_the_same_instant_one_has_the_folder(tmp_path, ranks):
    """The other one is told who has it, and has written nothing there."""
    for number in range(3):
        folder = tmp_path / f"run-{number}"
        words = command(folder, training__steps=8, training__local_batch_size=1)
        words += ["--nproc", str(ranks), "--metrics.log_freq=1"]
        with contextlib.ExitStack() as stack:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            both = [stack.enter_context(processes.running(words, **pipes)) for _ in range(2)]
            ended = [(process.communicate(timeout=120), process.returncode) for process in both]
        ended.sort(key=lambda one: one[1])
        ((_, fine), code), ((_, refused), other) = ended
        assert (code, fine, other) == (0, "", 2), ended
        assert re.search(rf"{folder} is in use by another run \(pid \d+ on |already holds a run", refused), refused
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, 9))


def test_after_kill_9_the_next_start_goes_on_at_once_and_says_so(tmp_path):
    """While the first run lives the second one is refused."""
    folder, words = tmp_path / "run", {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 2}
    with processes.running(command(folder, **words), stdout=subprocess.PIPE, text=True) as first:
        for line in first.stdout:
            if line.startswith("saved "):
                break
        refused = subprocess.run(command(folder, **words), capture_output=True, text=True, timeout=120)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"is in use by another run (pid {first.pid} on " in refused.stderr
        first.kill()
    limit = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": "1700000000"}  # one step
    done = subprocess.run(
        command(folder, **words), env={**os.environ, **limit}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"the run that had this folder (pid {first.pid} on " in done.stdout
    resumed = re.search(r"resumed from \S+/step-(\d+)\n", done.stdout)
    assert f"stopped at step {int(resumed[1]) + 1} before the time limit" in done.stdout


@pytest.mark.parametrize(
    ("more", "line", "code", "ranks"),
    [
        ({"checkpoint__preempted_exit_code": 99}, "stopped at step", 99, 1),  # told once more while it ends
        ({"checkpoint__preempted_exit_code": 99}, "stopped at step", 99, 2),
        ({"training__steps": 2}, "last save", 0, 1),  # told when it has finished
        pytest.param({"training__steps": 2}, "last save", 0, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_that_comes_when_all_is_done_does_not_change_the_end(tmp_path, more, line, code, ranks):
    words = [*command(tmp_path / "run", **more), "--nproc", str(ranks)]
    with processes.running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for printed in process.stdout:
            if printed.startswith("step 1/") and code:
                process.terminate()
            if line in printed:
                break
        while process.poll() is None:
            process.terminate()
            time.sleep(0.02)
        assert (process.returncode, process.stderr.read()) == (code, "")


NATIVE = """
import hashlib
from pathlib import Path
from shardline.registry import register_hook

@register_hook("after_step")
def after(trainer, row):
    if row["step"] == 2:
        (Path(__file__).parent / "inside").touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # for many minutes
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_is_heard_in_a_long_native_call(tmp_path, ranks):
    """With one process there is no launcher that could kill it."""
    (tmp_path / "hooks.py").write_text(NATIVE)
    more = {"comm__stop_timeout_seconds": 2, "experimental__custom_import": tmp_path / "hooks.py"}
    words = command(tmp_path / "run", **more, checkpoint__interval=1, training__steps=100)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = processes.start([*words, f"--nproc={ranks}"], **pipes)
    wait_until(lambda: (tmp_path / "inside").exists(), 90)
    process.terminate()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "the run did not finish its step within 2 s" in stderr or "did not stop within 2 s" in stderr
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step-1"]
    if ranks == 1:
        assert "SIGTERM: the run did not finish its step" in (tmp_path / "run/log/rank-0.log").read_text()
