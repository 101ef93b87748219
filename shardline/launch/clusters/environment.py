"""Reads how the machines of a job rendezvous from the variables that a scheduler sets.

    PET_*                    Kubeflow, and whoever writes torchrun's options as variables: this process is a launcher
    RANK and WORLD_SIZE      torchrun and its like: this process is a rank (launch.py reads them)
    OMPI_COMM_WORLD_*        mpirun of Open MPI: a rank
    SLURM_STEP_*             srun: a launcher where each machine has one task, a rank where it has more
    PMI_*                    mpiexec of MPICH and Intel MPI: a rank

The first of them that is present counts. Options on the command line take precedence over all of them. Ranks of
Shardline's own launcher, or of torchrun, already know everything.
"""

from __future__ import annotations

import glob
import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config.names import LAUNCHER_VARIABLE
from shardline.errors import UserError
from shardline.launch.launch import name_problem
from shardline.launch.secret import VARIABLE as SECRET_VARIABLE
from shardline.launch.secret import derived_secret
from shardline.words import counted, to_stderr

MEETING = ("nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint")  # options of the rendezvous
PORT = 29500
FIRST_PORT, PORTS = 20000, 10000  # of jobs that share machines; below the ephemeral ports of usual systems
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM's steps that are no srun: the batch script, an interactive shell
NAME_SECONDS = 900  # for the first machine's name to resolve: it may still be pulling its image


@dataclass(frozen=True)
class Surroundings:
    """What one scheduler says: options for a launcher, or the variables of a rank."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    job: str = ""  # identifies this start of the job; the user's machines derive a secret from it
    host: str = ""  # of the first machine, whose name may resolve a little later


def take_surroundings(
    named: Mapping[str, Any], given: Collection[str], environment: MutableMapping[str, str] = os.environ
) -> dict[str, Any]:
    """The options of a start, completed from the environment. Sets a rank's variables, and the secret of a job."""
    found = None if named["dry_run"] or set(MEETING) & set(given) else read_surroundings(environment)
    if found is None:
        return dict(named)
    if found.variables:
        environment.update(found.variables)
        return dict(named)
    options = {name: value for name, value in found.options.items() if name not in given}
    taken = {**named, **options, "surroundings": found.name}
    for name in ("RANK", "WORLD_SIZE"):  # in a PyTorchJob they number machines
        environment.pop(name, None)
    if taken["nnodes"] == "1":
        return taken
    if found.job and not (environment.get(SECRET_VARIABLE) or named["rdzv_secret_file"]):
        environment[SECRET_VARIABLE] = derived_secret(found.job)
    if taken["node_rank"] == 0:
        size = (
            f"{counted(int(taken['nnodes'].rpartition(':')[2]), 'machine')}, {counted(taken['nproc'], 'rank')} on each"
        )
        to_stderr(f"note: {found.name}: {size}, meeting at {taken['rdzv_endpoint']}")
    wait_for_name(found.host)
    return taken


def read_surroundings(environment: Mapping[str, str]) -> Surroundings | None:
    """What the scheduler that started this process says; None if there is none, or if it adds nothing."""
    if LAUNCHER_VARIABLE in environment or "TORCHELASTIC_RUN_ID" in environment:
        return None
    for read in (_torchrun_variables, _rank_variables, _open_mpi, _slurm, _process_manager):
        found = read(environment)
        if found is not None:
            return found if found.name else None
    return None


def wait_for_name(host: str, seconds: float = NAME_SECONDS, problem_of: Callable[[str], str] = name_problem) -> None:
    """Wait until the first machine's name resolves, as a pod's does once the pod has an address."""
    deadline, said = time.monotonic() + seconds, False
    while problem := problem_of(host) if host else "":
        if time.monotonic() >= deadline:
            raise UserError(f"the first machine, {host}, has no address after {seconds:g} s: {problem}")
        if not said:
            to_stderr(f"waiting for the name {host} to resolve: {problem}")
            said = True
        time.sleep(0.5)


# ---- torchrun's variables, Kubeflow's --------------------------------------------------------------------------------


def _torchrun_variables(environment: Mapping[str, str]) -> Surroundings | None:
    given = {name.removeprefix("PET_"): text for name, text in environment.items() if name.startswith("PET_") and text}
    if not given.keys() & {"NNODES", "NPROC_PER_NODE", "NODE_RANK"}:
        return None
    nodes = given.get("NNODES", "1")
    options: dict[str, Any] = {"nnodes": nodes}
    if "NPROC_PER_NODE" in given:
        options["nproc"] = _processes(given["NPROC_PER_NODE"])
    for name in ("MAX_RESTARTS", "RDZV_ID"):
        if name in given:
            options[name.lower()] = _number("PET_" + name, given[name]) if name == "MAX_RESTARTS" else given[name]
    if nodes == "1":
        return Surroundings("PET_* variables", options)
    host = given.get("MASTER_ADDR") or environment.get("MASTER_ADDR", "")
    port = given.get("MASTER_PORT") or environment.get("MASTER_PORT") or str(PORT)
    options["rdzv_endpoint"] = given.get("RDZV_ENDPOINT") or (f"{host}:{port}" if host else "")
    options["rdzv_backend"] = given.get("RDZV_BACKEND", "static")
    if options["rdzv_backend"] == "static":
        # A PyTorchJob numbers its machines by RANK if it does not set PET_NODE_RANK.
        number = given.get("NODE_RANK") or environment.get("RANK") or environment.get("JOB_COMPLETION_INDEX", "")
        options["node_rank"] = _number("PET_NODE_RANK", number)
    if not options["rdzv_endpoint"]:
        raise UserError(
            f"PET_NNODES={nodes} without PET_MASTER_ADDR or PET_RDZV_ENDPOINT: set one of them to the first machine"
        )
    return Surroundings("PET_* variables", options, host=options["rdzv_endpoint"].rpartition(":")[0])


def _processes(text: str) -> int:
    """The processes of a machine, as torchrun counts them: a number, gpu, cpu, auto."""
    if text in ("auto", "gpu", "cpu"):
        gpus = _visible_gpus(os.environ) or len(glob.glob("/dev/nvidia[0-9]*"))
        if text == "gpu" and not gpus:
            raise UserError("PET_NPROC_PER_NODE=gpu: this machine shows no GPU")
        return gpus if gpus and text != "cpu" else len(os.sched_getaffinity(0))
    number = _number("PET_NPROC_PER_NODE", text)
    if number < 1:
        raise UserError(f"PET_NPROC_PER_NODE={text}: expected 1 or more, auto, gpu or cpu")
    return number


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank_variables(environment: Mapping[str, str]) -> Surroundings | None:
    return Surroundings("") if environment.keys() & {"RANK", "WORLD_SIZE"} else None


def _open_mpi(environment: Mapping[str, str]) -> Surroundings | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_orte_ess_jobid", "")
    return _mpi("mpirun", names, job, environment)


def _process_manager(environment: Mapping[str, str]) -> Surroundings | None:
    return _mpi("mpiexec", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "", environment)


def _mpi(name: str, names: tuple[str, ...], job: str, environment: Mapping[str, str]) -> Surroundings | None:
    if names[0] not in environment:
        return None
    rank, ranks, local, local_ranks = (
        _number(known, environment.get(known, default))
        for known, default in zip(names, ("", "", "0", "1"), strict=True)
    )
    if ranks == 1:
        return Surroundings("")
    host = environment.get("MASTER_ADDR") or ("127.0.0.1" if ranks == local_ranks else "")
    if not host:
        raise UserError(
            f"{name} starts {ranks} ranks on several machines and does not say which is the first:"
            f" set MASTER_ADDR to its name ({name} -x MASTER_ADDR=HOST, or -genv MASTER_ADDR HOST)"
        )
    port = environment.get("MASTER_PORT") or str(_port(job) if job else PORT)
    return _rank(name, rank, ranks, local, local_ranks, host, port)


def _rank(name: str, rank: int, ranks: int, local: int, local_ranks: int, host: str, port: str) -> Surroundings:
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_ranks}
    variables = {known: str(number) for known, number in numbers.items()}
    return Surroundings(name, variables={**variables, "MASTER_ADDR": host, "MASTER_PORT": port})


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def _slurm(environment: Mapping[str, str]) -> Surroundings | None:
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP or "SLURM_PTY_PORT" in environment:
        return None  # a batch script, or an interactive shell
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
    tasks, nodes, node, task, local = (_number(name, environment.get(name, "")) for name in names)
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or first_host(nodelist)
    job = f"{environment.get('SLURM_CLUSTER_NAME', '')} {environment.get('SLURM_JOB_ID', '')} {step}"
    port = environment.get("MASTER_PORT") or str(_port(job))
    if tasks > nodes:
        here = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))[node]
        return _rank("srun", task, tasks, local, here, host, port)
    gpus = _visible_gpus(environment) or int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    options: dict[str, Any] = {"nnodes": str(nodes), **({"nproc": gpus} if gpus else {})}
    if nodes > 1:
        options |= {"node_rank": node, "rdzv_endpoint": f"{host}:{port}", "rdzv_id": environment["SLURM_JOB_ID"]}
    return Surroundings("srun", options, job=f"{job} {environment.get('SLURM_RESTART_COUNT', '0')}", host=host)


def first_host(nodelist: str) -> str:
    """The first host of a list as SLURM writes it: gpu003 for `gpu[003-007,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0])


def tasks_of_nodes(text: str) -> list[int]:
    """The tasks of each node from what SLURM writes: `2(x3),1` are 2, 2, 2, 1."""
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in groups:
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected numbers such as 2(x3),1")
    return [int(group[1]) for group in groups if group is not None for _ in range(int(group[2] or 1))]


def _visible_gpus(environment: Mapping[str, str]) -> int:
    return len([name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()])


def _port(job: str) -> int:
    """A port that all machines of a job choose, and other jobs on the same machine most likely do not."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name}={text!r}: expected a whole number, as the scheduler sets it")
    return int(text)
