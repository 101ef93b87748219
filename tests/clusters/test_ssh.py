"""`shardline launch ssh`, and mpirun of Open MPI, between two hosts with a real sshd each."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes
from tests.clusters.test_slurm import HOOKS, SHARDLINE, flags, losses
from tests.faults.test_ranks import wait_until
from tests.hosts import missing, two_hosts

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
GONE = missing() or ("" if SSHD and shutil.which("ssh") else "needs sshd and ssh: apt-get install openssh-server")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(GONE), reason=GONE or "-")]

SETTINGS = """\
ListenAddress {address}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts, and the words of an ssh that reaches them."""
    folder, privileged = tmp_path_factory.mktemp("ssh"), Path("/run/sshd")
    for name in ("host-key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    made = not privileged.exists()
    privileged.mkdir(exist_ok=True, mode=0o755)
    words = f"ssh -F none -o BatchMode=yes -i {folder}/key -o UserKnownHostsFile={folder}/known"
    try:
        with two_hosts(rate=None) as pair, contextlib.ExitStack() as stack:
            for host in pair:
                settings = folder / f"sshd_config-{host.name}"
                settings.write_text(SETTINGS.format(folder=folder, address=host.address))
                daemon = host.start([SSHD, "-D", "-e", "-f", str(settings)], shared=True)
                stack.callback(processes.end, daemon)
            time.sleep(0.5)
            yield pair, f"{words} -o StrictHostKeyChecking=accept-new"
    finally:
        if made:
            privileged.rmdir()


def start(hosts, folder, names, step_seconds="0", **keys):
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "some.env").write_text(f"STEP_SECONDS={step_seconds}\n")
    keys = {"training.steps": 6, "job.dump_folder": "run", **keys}
    words = ["launch", "ssh", f"--hosts={','.join(names)}", f"--ssh={hosts[1]}", "--env-file=some.env", *flags(**keys)]
    files = {name: (folder / name).open("w") for name in ("stdout", "stderr")}
    # From the first host, as from a login machine beside them.
    return hosts[0][0].start([sys.executable, "-m", "shardline", *words], cwd=folder, **files)


def test_two_machines_train_and_no_process_shows_the_secret(hosts, tmp_path):
    names = [host.name for host in hosts[0]]
    job = start(hosts, tmp_path, names, step_seconds="0.2")
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 60)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert b"SHARDLINE_JOB_SECRET=" not in path.read_bytes()
    assert job.wait(60) == 0, (tmp_path / "stderr").read_text()
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    ranks = json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())
    assert [row["host"] for row in ranks] == names
    assert "has no secret" not in (tmp_path / "stderr").read_text()


def test_a_signal_saves_on_both_and_a_killed_start_ends_them(hosts, tmp_path):
    names = [host.name for host in hosts[0]]
    keys = {"training.steps": 1000, "lr_scheduler.total_steps": 1000, "checkpoint.enable": "true"}
    job = start(hosts, tmp_path, names, step_seconds="0.1", **keys)
    wait_until(lambda: step(tmp_path) >= 3, 90)
    command = next(pid for pid in pids_of(hosts[0][0], b"launch\0ssh"))
    os.kill(command, signal.SIGTERM)
    job.wait(60)
    first = {path.name for path in (tmp_path / "run" / "checkpoint").glob("step-*")}
    assert len(first) == 1, (tmp_path / "stderr").read_text()
    job = start(hosts, tmp_path, names, step_seconds="0.1", **keys)
    last = step(tmp_path)
    wait_until(lambda: step(tmp_path) > last + 3, 90)
    os.kill(next(pid for pid in pids_of(hosts[0][0], b"launch\0ssh")), signal.SIGKILL)
    job.wait(60)
    wait_until(lambda: not pids_of(hosts[0][0], b"train\0") + pids_of(hosts[0][1], b"train\0"), 60)
    assert len({path.name for path in (tmp_path / "run" / "checkpoint").glob("step-*")} - first) == 1


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("10.77.0.99", "ssh to 10.77.0.99 ended with 255"),  # nobody has this address
        ("127.0.0.9", "127.0.0.9 did not answer within 30 s: nothing was started"),  # connects, and stays silent
    ],
)
def test_a_machine_that_is_not_reached_ends_the_whole_start(hosts, tmp_path, machine, said):
    first = hosts[0][0]
    silent = [sys.executable, "-c", "import socket, time; s = socket.create_server(('127.0.0.9', 22)); time.sleep(900)"]
    first.start(silent)
    job = start(hosts, tmp_path, [first.name, machine])
    assert job.wait(90) == 1
    assert f"error: {said}" in (tmp_path / "stderr").read_text()
    assert not pids_of(first, b"train\0")
    assert not (tmp_path / "run").exists()


def test_a_machine_that_is_cut_off_ends_the_run(hosts, tmp_path):
    names = [host.name for host in hosts[0]]
    keys = {"training.steps": 1000, "checkpoint.enable": "true", "comm.train_timeout_seconds": 20}
    job = start((hosts[0], f"{hosts[1]} -o ServerAliveInterval=5"), tmp_path, names, step_seconds="0.1", **keys)
    wait_until(lambda: step(tmp_path) >= 3, 90)
    hosts[0][1].cut()
    try:
        assert job.wait(120) == 1, (tmp_path / "stderr").read_text()
    finally:
        hosts[0][1].mend()
    assert f"ssh to {names[1]} ended with 255: the connection was cut" in (tmp_path / "stderr").read_text()
    wait_until(lambda: not pids_of(hosts[0][0], b"train\0") + pids_of(hosts[0][1], b"train\0"), 120)


MPIRUN = ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
with_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun: apt-get install openmpi-bin")
MPI_KEYS = {"training.steps": 3, "job.dump_folder": "run"}


def single_process_losses(folder):
    words = [*SHARDLINE, "train", *flags(**{**MPI_KEYS, "job.dump_folder": "whole"})]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    return losses(folder / "whole")


@with_mpirun
def test_mpirun_on_one_machine_needs_no_option(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOKS)
    words = [*MPIRUN, "--oversubscribe", "-n", "2", *SHARDLINE, "train", *flags(**MPI_KEYS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert [row["rank"] for row in json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())] == [0, 1]
    assert losses(tmp_path / "run") == pytest.approx(single_process_losses(tmp_path), rel=1e-4)


@with_mpirun
def test_mpirun_on_two_machines_needs_the_name_of_the_first(hosts, tmp_path):
    (tmp_path / "hooks.py").write_text(HOOKS)
    names = [host.name for host in hosts[0]]
    agent = ["--mca", "plm_rsh_agent", hosts[1], "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
    words = [*MPIRUN, *agent, "--host", ",".join(f"{name}:1" for name in names), "-n", "2"]
    train = [*SHARDLINE, "train", *flags(**MPI_KEYS)]
    done = hosts[0][0].run([*words, *train], cwd=tmp_path, timeout=180)
    assert done.returncode == 2
    assert "set MASTER_ADDR to its name (mpirun -x MASTER_ADDR=HOST" in done.stderr
    done = hosts[0][0].run([*words, "-x", f"MASTER_ADDR={names[0]}", *train], cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert [row["host"] for row in json.loads((tmp_path / "run" / "log" / "ranks.json").read_text())] == names
    assert losses(tmp_path / "run") == pytest.approx(single_process_losses(tmp_path), rel=1e-4)


def step(folder):
    """The last step in the run's metrics, 0 before there are any."""
    path = folder / "run" / "metrics.jsonl"
    return max(losses(folder / "run"), default=0) if path.exists() else 0


def pids_of(host, words):
    """Processes on a host whose command line has these words."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if words in line and b"python" in line.split(b"\0")[0]:
                found.append(int(pid))
    return found
