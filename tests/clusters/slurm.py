"""A SLURM cluster of two nodes on one machine: munged, slurmctld and a slurmd on each of two hosts (tests/hosts.py).

    with cluster(tmp_path) as slurm:
        slurm.run(["srun", "-N2", "hostname"])
        job = slurm.submit("job.sbatch")
        slurm.wait(job, "COMPLETED")

Each host has its own network, so that nothing of it can be reached from outside, and what runs there ends with it.
All files are in one folder: no file of a SLURM that the machine may have is read or changed.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import processes
from tests.hosts import FILES, Host, missing, two_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
SBIN = "/usr/sbin:/sbin"  # where Debian has the daemons, and not everybody's PATH
CONFIG = """\
ClusterName=test
SlurmctldHost={a.name}({a.address})
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MailProg=/bin/true
InactiveLimit=0
ReturnToService=1
MpiDefault=none
NodeName=n1 NodeHostname={a.name} NodeAddr={a.address} Port=17001 CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={b.name} NodeAddr={b.address} Port=17002 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    hosts: tuple[Host, Host]
    environment: dict[str, str]

    def run(self, words: list[str], timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """Run a command on the first host, to its end."""
        return self.hosts[0].run(words, {**self.environment, **options.pop("env", {})}, timeout, **options)

    def start(self, words: list[str], **options) -> subprocess.Popen:
        return self.hosts[0].start(words, {**self.environment, **options.pop("env", {})}, **options)

    def checked(self, *words: str, **options) -> str:
        done = self.run(list(words), **options)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        text = self.checked("scontrol", "show", "job", "-o", job)
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))

    def wait(self, job: str, *states: str, seconds: float = 180) -> str:
        """Wait until the job is in one of these states, and return it."""
        deadline = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}\n{self.logs()}"
            time.sleep(0.5)
        return state

    def logs(self) -> str:
        texts = [path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)


def absent() -> str:
    """Why there can be no cluster here, or nothing."""
    path = f"{os.environ['PATH']}:{SBIN}"
    gone = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"a cluster needs {', '.join(gone)}: apt-get install slurm-wlm munge" if gone else missing()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two nodes, n1 and n2, with partitions `main` (default) and `urgent`, whose jobs take the place of others."""
    if absent():
        pytest.skip(absent())
    with two_hosts(rate=None) as hosts, contextlib.ExitStack() as stack:
        for host in hosts:
            names = "".join(f"{one.address} n{number}\n" for number, one in enumerate(hosts, 1))
            with (FILES / host.name / "hosts").open("a") as file:
                file.write(names)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(a=hosts[0], b=hosts[1], folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # none is used
        home = folder / "home"  # where jobs keep the key of their secrets
        home.mkdir()
        environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:{SBIN}"}
        environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
        slurm = Cluster(folder, hosts, environment)
        _start_munge(slurm, stack)
        _daemon(slurm, stack, 0, "slurmctld", "-D", "-i")
        for number in (0, 1):
            _daemon(slurm, stack, number, "slurmd", "-D", "-N", f"n{number + 1}")
        _wait_for_nodes(slurm)
        yield slurm


def _start_munge(slurm: Cluster, stack: contextlib.ExitStack) -> None:
    key, folder = slurm.folder / "munge.key", slurm.folder
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = ("socket", "pid-file", "log-file", "seed-file")
    words = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in files]
    # `--force`: the folder of a test may be writable for others, which munged refuses otherwise.
    _daemon(slurm, stack, 0, "munged", "--foreground", "--force", f"--key-file={key}", *words)
    deadline = time.monotonic() + 20
    while not (folder / "munge.socket").exists():
        assert time.monotonic() < deadline, "munged does not start"
        time.sleep(0.1)


def _daemon(slurm: Cluster, stack: contextlib.ExitStack, host: int, *words: str) -> None:
    log = stack.enter_context((slurm.folder / f"{words[0]}-{host}.out.log").open("wb"))
    environment = {**slurm.environment, "SLURMD_NODENAME": f"n{host + 1}"}
    stack.callback(processes.end, slurm.hosts[host].start(words, environment, shared=True, stdout=log, stderr=log))


def _wait_for_nodes(slurm: Cluster) -> None:
    deadline = time.monotonic() + 30
    while slurm.run(["sinfo", "-h", "-p", "main", "-o", "%T"]).stdout.split() != ["idle"]:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.5)
