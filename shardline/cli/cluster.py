"""Commands that start a run elsewhere: SLURM, Kubernetes, ssh; and the lighthouse of replica groups."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from shardline.cli.common import load, placing, processes
from shardline.cli.parser import Command, Option, Parsed

if TYPE_CHECKING:
    pass


def _launch(name: str, parsed: Parsed) -> int:
    from shardline.config.check import refuse_pending

    # The model's folder may exist only inside the cluster.
    config = load(parsed.file, parsed.flags, check_model=name != "kubernetes")
    with placing(config):
        refuse_pending(config)
        module = importlib.import_module(f"shardline.launch.clusters.{name}")
        code: int = module.command(config, parsed.file, parsed.flags, parsed.words, **parsed.named())
        return code


_KINDS = ("trainjob", "pytorchjob", "jobset")
_NODES = Option("nodes", "Number of machines.", int, "N", default=1, low=1)
_GPUS = Option("gpus-per-node", "GPUs of each machine; unset: none.", int, "N", low=1)
_JOB_NAME = Option("job-name", "Name of the job; unset: that of FILE.", str, "NAME", default="")
_RESTARTS = Option("max-restarts", "How often failed ranks are restarted inside the job.", int, "N", default=0, low=0)
_ENV_FILE = Option("env-file", "File of NAME=VALUE lines, variables for every rank.", str, "FILE", default="")
_SUBMISSION = (
    Option("out", "File to write; unset: named after the job.", str, "FILE", default=""),
    Option("dry-run", "Print it, write nothing.", bool),
    Option("submit", "Also submit it.", bool),
)
LAUNCH_SLURM = Command(
    "launch slurm",
    "Write a script for sbatch that requeues itself until the run's last step is reached; --submit submits it.",
    ("[FILE]",),
    (
        _NODES,
        _GPUS,
        processes("; unset: one per GPU, or one"),
        Option("cpus-per-task", "Cores of each machine; unset: whole machines, --exclusive.", int, "N", low=1),
        Option("time", "Time limit of one start, in sbatch's format: 24:00:00.", str, "TIME", default=""),
        Option("partition", "Partition.", str, "NAME", default=""),
        Option("account", "Account.", str, "NAME", default=""),
        Option("qos", "Quality of service.", str, "NAME", default=""),
        Option("sbatch", "Further options of sbatch, in quotes.", str, "WORDS", default=""),
        _JOB_NAME,
        _RESTARTS,
        Option("container", "Image: a .sif file for apptainer, any other for pyxis.", str, "IMAGE", default=""),
        Option("mounts", "Folders for the container, besides this one: A:B,C:D.", str, "LIST", default=""),
        _ENV_FILE,
        *_SUBMISSION,
    ),
    functools.partial(_launch, "slurm"),
    config_flags=True,
    details="Nothing is submitted without --submit. docs/clusters.md explains the script.",
    examples=(
        "shardline launch slurm run.toml --nodes 4 --gpus-per-node 8 --time 24:00:00 --partition batch",
        "shardline launch slurm run.toml --nodes 4 --gpus-per-node 8 --submit",
        "shardline launch slurm run.toml --sbatch='--constraint=h100 --mail-type=FAIL' --dry-run",
    ),
)
LAUNCH_K8S = Command(
    "launch k8s",
    "Write manifests of a TrainJob, a PyTorchJob or a JobSet, with shared disk, restarts and probes.",
    ("[FILE]",),
    (
        Option("image", "Image that has shardline.", str, "IMAGE", default=""),
        Option("kind", "trainjob, pytorchjob or jobset.", str, "NAME", (), _KINDS, "trainjob"),
        _NODES,
        _GPUS,
        processes("; unset: one per GPU, or one"),
        Option("claim", "PersistentVolumeClaim of the shared disk; unset: a new one.", str, "NAME", default=""),
        Option("storage", "Size of the new disk.", str, "SIZE", default="200Gi"),
        Option("mount", "Where pods see the disk; relative paths of FILE start there.", str, "PATH", default="/shared"),
        Option("namespace", "Namespace.", str, "NAME", default="default"),
        _JOB_NAME,
        _RESTARTS,
        Option("restarts", "How often the cluster restarts the job.", int, "N", default=10, low=0),
        _ENV_FILE,
        *_SUBMISSION,
    ),
    functools.partial(_launch, "kubernetes"),
    config_flags=True,
    details="Nothing is submitted without --submit, which calls kubectl. docs/clusters.md explains the manifests.",
    examples=(
        "shardline launch k8s run.toml --image registry.example.org/shardline:1 --nodes 4 --gpus-per-node 8",
        "shardline launch k8s run.toml --image IMAGE --kind jobset --claim my-disk --dry-run",
    ),
)
LAUNCH_SSH = Command(
    "launch ssh",
    "Run on machines that ssh reaches, without a scheduler; ends when the run ends.",
    ("[FILE]",),
    (
        Option("hosts", "The machines, the first one with rank 0: a,b or me@a,me@b.", str, "LIST", default=""),
        processes("; unset: one"),
        Option("port", "Port of the first machine, at its name in --hosts.", int, "N", default=29500, low=1),
        Option(
            "ssh",
            "Command that reaches a machine.",
            str,
            "WORDS",
            default="ssh -o BatchMode=yes -o ServerAliveInterval=15",
        ),
        Option("folder", "Folder on every machine; unset: this one.", str, "PATH", default=""),
        _RESTARTS,
        _ENV_FILE,
        Option("dry-run", "Print what every machine would run.", bool),
    ),
    functools.partial(_launch, "ssh"),
    config_flags=True,
    details="Folder, FILE and this program need the same paths on all machines; the run's folder, a shared disk.",
    examples=("shardline launch ssh run.toml --hosts a,b --nproc 8",),
)


def _lighthouse(parsed: Parsed) -> int:
    from shardline.launch.lighthouse import serve

    return serve(**parsed.named())


LIGHTHOUSE = Command(
    "lighthouse",
    "Serve the lighthouse, where replica groups find each other (fault_tolerance.enable), until Ctrl-C.",
    (),
    (
        Option("bind", "Address to listen at; port 0: any free port.", str, "HOST:PORT", default="127.0.0.1:29510"),
        Option("min-replicas", "Fewest groups that train.", int, "N", default=1, low=1),
        Option(
            "join-timeout", "Seconds to wait for a group that is alive but does not join.", float, "S", default=60.0
        ),
        Option("heartbeat-timeout", "Seconds of silence after which a group is lost.", float, "S", default=5.0),
    ),
    _lighthouse,
    details="It needs the package torchft (pip install 'shardline[ft]'), and prints the variable that groups read.",
    examples=(
        "shardline lighthouse",
        "shardline lighthouse --bind 10.0.0.1:29510 --heartbeat-timeout 2",
    ),
)
