"""A stop is enforced whatever the main thread is in, and only where the process is a program's own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardline.run import enforcer, signals
from shardline.run.enforcer import SAVING, SECOND_SIGNAL_SECONDS, STEPPING, StopClock, enforced_stop
from tests import processes
from tests.faults.test_ranks import wait_until

# The words: what the main thread is in when the signal comes, and whether the process is a rank.
PROGRAM = """
import hashlib, os, signal, sys, threading, time
from shardline.run import enforcer, signals
from shardline.run.stop import Requests

signals.claim_process()
what, is_rank = sys.argv[1], sys.argv[2] == "rank"
enforcer.LAUNCHER_SECONDS = 0.0

def worker():
    child = os.fork()
    if child == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)
        os._exit(0)
    os.waitpid(child, 0)

with enforcer.enforced_stop(0.5, 60.0, is_rank), signals.listening(Requests()) as requests:
    if what == "worker":
        threading.Thread(target=worker, daemon=True).start()
    os.write(1, b"ready\\n")
    if what == "native":  # does not hold Python's lock
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    if what == "locked":  # holds it
        sum(range(10**12))
    if what == "saving":
        with enforcer.saving():
            hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[3]))
    while requests.stop is None:
        time.sleep(0.02)
    if what == "boundary":
        enforcer.reached_boundary()
        time.sleep(1.0)
    print("stopped by", requests.stop, flush=True)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*words, **environment):
        command = [sys.executable, str(tmp_path / "program.py"), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = processes.start(command, env={**os.environ, **environment}, **pipes)
        process.first = process.stdout.readline().strip()
        return process

    return start


def told(name, seconds="0.5"):
    key = "comm.stop_timeout_seconds gives more time"
    return f"error: {name}: the run did not finish its step within {seconds} s and was ended ({key})\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)], ids=lambda one: str(one)
)
def test_a_native_call_does_not_outlast_a_signal(program, number, code):
    process = program("native", "alone")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", told(number.name))


def test_not_even_one_that_holds_pythons_lock(program):
    process = program("locked", "alone")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGKILL, told("SIGTERM"))


def test_a_rank_ends_itself_and_reports_to_its_launcher(program, tmp_path):
    alone = program("native", "rank")
    alone.send_signal(signal.SIGTERM)
    assert alone.communicate(timeout=30)[1] == told("SIGTERM")
    assert alone.returncode == 143
    launched = program("native", "rank", SHARDLINE_REPORT=str(tmp_path / "report"))
    launched.send_signal(signal.SIGTERM)
    assert launched.communicate(timeout=30)[1] == ""  # the launcher shows it
    assert launched.returncode == 75
    assert "did not finish its step" in (tmp_path / "report").read_text()


@pytest.mark.parametrize("what", ["python", "boundary"])
def test_a_run_that_stops_in_time_is_left_alone(program, what):
    """From the boundary on it has the time of a save, which is longer than that for a stop."""
    process = program(what, "alone")
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopped by SIGHUP\n", "")


def test_a_save_that_is_under_way_has_its_own_time(program):
    process = program("saving", "alone", "4000000")  # a second or more
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "stopped by SIGTERM\n", "")


def test_signals_of_data_workers_are_not_those_of_the_run(program):
    process = program("worker", "alone")
    lines = {process.first, process.stdout.readline().strip()} - {"ready"}
    (worker,) = map(int, lines)
    for _ in range(2):
        os.kill(worker, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_nothing_of_it_outlives_a_run_that_is_killed(program):
    process = program("python", "alone")
    (beside,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if parent_of(path) == process.pid]
    process.kill()
    process.communicate(timeout=10)  # until nobody holds its output
    wait_until(lambda: parent_of(Path(f"/proc/{beside}/stat")) is None, 10)


def parent_of(stat):
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def test_a_program_that_calls_a_run_is_never_ended(monkeypatch):
    assert not signals.ends_with_run
    before, threads = signal.set_wakeup_fd(-1), threading.active_count()
    try:
        with enforced_stop(0.1, 0.1, is_rank=False):
            assert signal.set_wakeup_fd(-1) == -1
            assert threading.active_count() == threads
            with enforcer.saving():
                enforcer.reached_boundary()
    finally:
        signal.set_wakeup_fd(before)


def test_the_time_for_a_stop(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = StopClock(30.0, 1800.0)
    for byte in (SAVING, STEPPING, signal.SIGUSR1):
        clock.hear(byte)
    assert (clock.deadline, clock.is_over()) == (None, False)
    clock.hear(signal.SIGTERM)
    assert clock.deadline == 130.0
    now[0] = 110.0
    clock.hear(SAVING)
    assert clock.deadline == 110.0 + 1830.0
    clock.hear(STEPPING)
    assert (clock.deadline, clock.is_over()) == (140.0, False)
    clock.hear(signal.SIGINT)
    assert (clock.deadline, clock.code) == (110.0 + SECOND_SIGNAL_SECONDS, 130)
    now[0] = 115.0
    assert clock.is_over()
