"""`shardline launch slurm`: a script for sbatch that a person can read, and that starts itself again until the end.

    sbatch ─> pending ─> running: srun ─> a launcher on each machine ─> ranks
                 ^                              │ exit code
                 │        requeue               v
                 └───────────────────── saved before its end (99)      0: the last step is reached      else: failed

The script needs no rendezvous: what srun puts into the environment is enough (environment.py).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.launch.clusters.job import ClusterJob, check_env_file, make_job, program, write_file
from shardline.words import to_stderr

SUBMIT_SECONDS = 60
BEGIN = """\
# The machines of one start sign what they tell each other with this secret. srun passes it on.
export SHARDLINE_JOB_SECRET="${SHARDLINE_JOB_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}"

# When the job ends: before SLURM 23.02, and in a container, the run could not find out by itself.
ends=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)
export SLURM_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(date --date "$ends" +%s 2>/dev/null)}"

is_running() { [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; }

# A signal for this script alone goes on to the ranks. What ends the whole job has reached them already.
trap 'is_running && scancel --signal=TERM "$SLURM_JOB_ID"' TERM
trap 'is_running && scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
"""
WAIT = """\
step=$!
wait "$step"
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal ends `wait` early
wait "$step"
code=$?
"""
REQUEUE = """
# {code}: saved and stopped, for the end of its time or for SIGTERM. 143: SIGTERM came before there was a step to save.
if {{ [ "$code" -eq {code} ] || [ "$code" -eq 143 ]; }} && is_running; then
    echo "job $SLURM_JOB_ID goes back to the queue, to continue from its last save"
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
READ_VARIABLES = """\
# Lines NAME=VALUE; nothing in them is run.
while IFS= read -r line || [ -n "$line" ]; do
    case $line in '' | '#'*) ;; *) export "$line" ;; esac
done < {file}

"""


def command(
    config: Config,
    file: str | None,
    flags: list[str],
    words: tuple[str, ...],
    *,
    nodes: int,
    gpus_per_node: int | None,
    nproc: int | None,
    cpus_per_task: int | None,
    time: str,
    partition: str,
    account: str,
    qos: str,
    sbatch: str,
    job_name: str,
    max_restarts: int,
    container: str,
    mounts: str,
    env_file: str,
    out: str,
    dry_run: bool,
    submit: bool,
) -> int:
    """Write the script, print it, or submit it."""
    if dry_run and submit:
        raise UserError("--dry-run prints the script and --submit submits it: use only one of them")
    if mounts and not container:
        raise UserError("--mounts is for --container: without a container, a run sees all files of the machine")
    job = make_job(
        config, file, flags, words,
        name=job_name, nodes=nodes, nproc=nproc, gpus_per_node=gpus_per_node, max_restarts=max_restarts,
    )  # fmt: skip
    if env_file:
        check_env_file(env_file)
    asked = {"time": time, "partition": partition, "account": account, "qos": qos}
    wanted = [f"--{name}={value}" for name, value in asked.items() if value]
    if cpus_per_task is None:
        wanted += ["--exclusive", "--mem=0"]
    else:
        wanted.append(f"--cpus-per-task={cpus_per_task}")
    text = script(job, [*wanted, *shlex.split(sbatch)], gpus_per_node, cpus_per_task, container, mounts, env_file)
    if not job.saves:
        to_stderr("note: this run saves nothing that it could continue from: the job does not requeue itself")
    if dry_run:
        print(text, end="")
        return 0
    path = Path(out or f"{job.name}.sbatch")
    write_file(path, text)
    if submit:
        return _submit(path, job, partition)
    print(f"{path} is written; nothing is submitted. To submit it:\n  sbatch {shlex.quote(str(path))}")
    return 0


def script(
    job: ClusterJob,
    wanted: list[str],
    gpus_per_node: int | None = None,
    cpus_per_task: int | None = None,
    container: str = "",
    mounts: str = "",
    env_file: str = "",
) -> str:
    """The text of the script. `wanted` are further words for sbatch."""
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",  # a launcher, which starts the ranks of its machine
        *([f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *wanted,
        *(["--requeue"] if job.saves else ["--no-requeue"]),
        "--open-mode=append",  # all starts of a job write into one log
        "--output=%x-%j.out",
        f"--chdir={Path.cwd()}",
    ]
    lines = ["#!/bin/bash", job.head("slurm"), *(f"#SBATCH {_directive(word)}" for word in directives), ""]
    parts = ["\n".join(lines), "\n"]
    if env_file:
        parts.append(READ_VARIABLES.format(file=shlex.quote(str(Path(env_file).expanduser().absolute()))))
    parts += [BEGIN, "\n", _srun(job, cpus_per_task, container, mounts, gpus_per_node), WAIT]
    if job.saves:
        parts.append(REQUEUE.format(code=job.preempted_exit_code))
    return "".join([*parts, 'exit "$code"\n'])


def _directive(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else word


def _srun(job: ClusterJob, cpus_per_task: int | None, container: str, mounts: str, gpus: int | None) -> str:
    """The line that starts everything: one launcher on each machine, which keeps all cores that the job has there."""
    srun = ["srun", "--kill-on-bad-exit=0", "--cpu-bind=none"]
    if cpus_per_task is not None:
        srun.append(f"--cpus-per-task={cpus_per_task}")  # since SLURM 22.05 srun does not take it from sbatch
    here = str(Path.cwd())
    if container.endswith(".sif"):
        binds = ",".join([here, *filter(None, [mounts])])
        inside = ["apptainer", "exec", *(["--nv"] if gpus else []), f"--bind={binds}", f"--pwd={here}", container]
    elif container:
        places = ",".join([f"{here}:{here}", *filter(None, [mounts])])
        srun += [f"--container-image={container}", f"--container-mounts={places}", f"--container-workdir={here}"]
        inside = []
    else:
        inside = []
    called = "shardline" if container else program()
    config = [*([job.file] if job.file else []), *job.flags]
    lines = [shlex.join(srun), *([shlex.join(inside)] if inside else [])]
    lines.append(f"{called} train {shlex.join(config)}".rstrip())
    # In double quotes: the shell fills in the number of the job, which is the same after a requeue.
    lines.append(" ".join(f'"{flag}"' if "$" in flag else flag for flag in job.needed_flags(_folder(job))))
    lines.append(shlex.join(job.options()))
    return " \\\n    ".join(filter(None, lines)) + " &\n"


def _folder(job: ClusterJob) -> str:
    return f"outputs/{job.name}-$SLURM_JOB_ID"


def _submit(path: Path, job: ClusterJob, partition: str) -> int:
    if shutil.which("sbatch") is None:
        raise UserError(f"--submit: this machine has no sbatch; {path} is written: submit it where SLURM is")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=SUBMIT_SECONDS)
    if done.returncode:
        known = f"; partitions here: {_partitions()}" if partition and "partition" in done.stderr else ""
        what = f"--partition {partition}: " if known else ""
        raise UserError(f"{what}sbatch refuses {path}: {done.stderr.strip()}{known}")
    number = done.stdout.strip().partition(";")[0]
    log = Path(f"{job.name}-{number}.out")
    print(f"job {number} is submitted\n  squeue --jobs {number}\n  tail -F {log}\n  scancel {number}")
    return 0


def _partitions() -> str:
    words = ["sinfo", "--noheader", "--format=%R"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=SUBMIT_SECONDS).stdout.split()
    return ", ".join(found) or "none"
