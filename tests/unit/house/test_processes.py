"""Tests end what they start, however they end, and start it as a user would."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[3]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
UNDER_NOHUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from tests import processes
processes.reset_signals()
processes.start([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGHUP).name)"]).wait()
signal.raise_signal(signal.SIGHUP)
print("still there")
"""


def is_gone(pid):
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_under_nohup_processes_have_sighup_as_usual_and_the_tests_outlive_it():
    assert run(UNDER_NOHUP).stdout == "SIG_DFL\nstill there\n"


def test_a_process_ends_with_its_test_and_all_of_its_session_with_it():
    script = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $!; wait"
    process = processes.start(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    processes.end_all()
    assert process.returncode == -signal.SIGKILL
    assert is_gone(child)


def test_a_process_ends_with_its_block():
    with processes.running(SLEEPS) as process:
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL
    with processes.running([sys.executable, "-c", ""]) as process:
        process.wait()
    assert process.returncode == 0
