"""What every kind of cluster needs to know about a job, and the file that it is written to."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardline.config.names import PROGRAM_VARIABLE
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.run.stop import why_not_saved

MARK = "# Written by `shardline launch"  # a file that begins with this may be overwritten
PREEMPTED = 99  # the exit code of a run that saved and wants to continue, if the config sets none
NAME = re.compile(r"[A-Z_a-z][A-Z_a-z0-9]*")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # stands in the names of files, and in a script


@dataclass(frozen=True)
class ClusterJob:
    """A run of `nodes` machines with `nproc` ranks each. `file` and `flags` are the config as the user gave it."""

    name: str
    config: Config
    file: str | None
    flags: tuple[str, ...]
    nodes: int
    nproc: int
    max_restarts: int
    words: tuple[str, ...] = ()  # the command line of `shardline launch`, for the head of the file

    @property
    def saves(self) -> bool:
        """Whether the run saves its state, or will, because nobody has switched that off."""
        config = self.config
        return why_not_saved(config) is None or not ({"checkpoint.enable", "checkpoint.load_only"} & {*config.given()})

    @property
    def preempted_exit_code(self) -> int:
        return self.config.checkpoint.preempted_exit_code or PREEMPTED

    def needed_flags(self, folder: str) -> list[str]:
        """Flags without which a restarted job would not continue; `folder` is used if the config names none."""
        section, added = self.config.checkpoint, []
        if self.config.job.dump_folder is None:
            added.append(f"--job.dump_folder={folder}")
        if self.saves:
            added += [] if section.enable else ["--checkpoint.enable"]
            added += [] if section.preempted_exit_code else [f"--checkpoint.preempted_exit_code={PREEMPTED}"]
        return added

    def options(self) -> list[str]:
        """Options of `shardline train` besides the config and the rendezvous."""
        return [f"--nproc={self.nproc}", *([f"--max-restarts={self.max_restarts}"] if self.max_restarts else [])]

    def head(self, kind: str) -> str:
        return f"{MARK} {shlex.join([kind, *self.words])}`"


def make_job(
    config: Config,
    file: str | None,
    flags: Sequence[str],
    words: tuple[str, ...],
    *,
    name: str,
    nodes: int,
    nproc: int | None,
    gpus_per_node: int | None,
    max_restarts: int,
) -> ClusterJob:
    """The job, once its layout fits its ranks; one machine has a rank for each GPU, or `nproc` of them."""
    from shardline.launch.preflight import fitting_layout

    if name and not JOB_NAME.fullmatch(name):
        raise UserError(f"--job-name {name!r}: expected letters, digits, dots, dashes and underscores")
    job = ClusterJob(
        name or job_name(file), config, file, tuple(flags), nodes, nproc or gpus_per_node or 1, max_restarts, words
    )
    fitting_layout(config, job.nodes * job.nproc)
    return job


def job_name(file: str | None) -> str:
    """A name that SLURM and Kubernetes both take: lowercase letters, digits and dashes."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(file or "shardline").stem.lower()).strip("-")[:40].strip("-")
    return stem if stem[:1].isalpha() else f"run-{stem}".strip("-")


def program() -> str:
    """How this program is called, in the folder in which it was called."""
    return os.environ.get(PROGRAM_VARIABLE, "shardline")


def check_env_file(file: str) -> None:
    """Refuse a file of variables that does not exist, or has a line that is not NAME=VALUE."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--env-file {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(lines, 1):
        name, equals, _ = line.partition("=")
        if line.strip() and not line.startswith("#") and not (equals and NAME.fullmatch(name)):
            # not the line itself: it may be a password
            raise UserError(f"--env-file {file}, line {number}: expected NAME=VALUE, as `docker --env-file` takes it")


def write_file(path: Path, text: str) -> None:
    """Write the text, but never over a file that somebody else made."""
    try:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise UserError(f"{path} was not written by `shardline launch`: --out FILE names another file")
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error
