"""`shardline launch ssh`: the ranks of a run on machines that one ssh command reaches, without a scheduler.

    this machine ── ssh a ── shell ── shardline train ... --node-rank 0   serves the store at a
                 └─ ssh b ── shell ── shardline train ... --node-rank 1

What goes to a machine goes through the standard input of its shell, which nobody else can read: the secret, then the
names of signals. Where that input ends, because ssh or this machine is gone, the run there is asked to stop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.launch.clusters.job import ClusterJob, check_env_file, make_job, program
from shardline.launch.secret import VARIABLE

WATCH_SECONDS = 0.1
UNREACHED = 255  # how ssh ends where it did not reach the machine
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# Descriptor 3: the shell gives a command in the background no standard input.
SHELL = """\
IFS= read -r {secret} && export {secret}
while IFS= read -r line && [ "$line" != end ]; do export "$line"; done
cd {folder} || exit 2
exec 3<&0
{command} </dev/null 3<&- &
run=$!
{{ while read -r name <&3; do kill -s "$name" "$run"; done; kill -s TERM "$run"; }} 2>/dev/null &
listens=$!
wait "$run"
code=$?
kill "$listens" 2>/dev/null
exit "$code"
"""


def command(
    config: Config,
    file: str | None,
    flags: list[str],
    words: tuple[str, ...],
    *,
    hosts: str,
    nproc: int | None,
    port: int,
    ssh: str,
    folder: str,
    max_restarts: int,
    env_file: str,
    dry_run: bool,
) -> int:
    """Start the run on all hosts and wait for its end, or print what would be started."""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if not names:
        raise UserError("--hosts is missing: the machines, such as --hosts a,b; the first one has rank 0")
    if len(set(names)) < len(names):
        raise UserError(f"--hosts {hosts}: a machine stands there twice; --nproc N starts N ranks on each")
    job = make_job(
        config, file, flags, words,
        name="", nodes=len(names), nproc=nproc, gpus_per_node=None, max_restarts=max_restarts,
    )  # fmt: skip
    variables = []
    if env_file:
        check_env_file(env_file)
        lines = Path(env_file).expanduser().read_text(encoding="utf-8").splitlines()
        variables = [line for line in lines if line.strip() and not line.startswith("#")]
    here = folder or str(Path.cwd())
    shells = [shell(job, here, number, names, port) for number in range(len(names))]
    reached = [[*shlex.split(ssh), name] for name in names]
    if dry_run:
        for words_of_ssh, text in zip(reached, shells, strict=True):
            print(f"{shlex.join(words_of_ssh)} <<'END'\n{text}END")
        return 0
    if shutil.which(reached[0][0]) is None:
        raise UserError(f"--ssh: there is no command {reached[0][0]!r}")
    given = "\n".join([os.environ.get(VARIABLE) or secrets.token_hex(32), *variables, "end"]) + "\n"
    return Machines(names, reached, shells, given).run()


def shell(job: ClusterJob, folder: str, number: int, hosts: list[str], port: int) -> str:
    """What the shell of a machine runs."""
    address = hosts[0].rpartition("@")[2]
    meeting = ["--nnodes", str(job.nodes), "--node-rank", str(number), "--rdzv-endpoint", f"{address}:{port}"]
    config = [*([job.file] if job.file else []), *job.flags]
    words = [*shlex.split(_absolute(program())), "train", *config, *job.options(), *(meeting if job.nodes > 1 else [])]
    return SHELL.format(secret=VARIABLE, folder=shlex.quote(folder), command=shlex.join(words))


def _absolute(called: str) -> str:
    """The program with its whole path: a shell that ssh starts knows few places."""
    first, *rest = shlex.split(called)
    found = shutil.which(first)
    return shlex.join([os.path.abspath(found) if found else first, *rest])


class Machines:
    """The ssh processes of a run, one for each machine."""

    def __init__(self, names: list[str], reached: list[list[str]], shells: list[str], given: str) -> None:
        self.names, self.given = names, given
        self.processes = [
            # In sessions of their own: a Ctrl-C is passed on, and does not end the connections.
            subprocess.Popen([*words, text], stdin=subprocess.PIPE, stdout=None if first else subprocess.PIPE,
                             stderr=subprocess.STDOUT if not first else None, start_new_session=True)
            for words, text, first in zip(reached, shells, [True] + [False] * len(names), strict=False)
        ]  # fmt: skip
        self.signals: list[int] = []

    def run(self) -> int:
        """Wait for all machines, and return the exit code of the run."""
        previous = {one: signal.signal(one, self._on_signal) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        readers = [
            threading.Thread(target=self._show, args=(name, process.stdout), daemon=True)
            for name, process in zip(self.names, self.processes, strict=True)
            if process.stdout is not None
        ]
        try:
            for process in self.processes:
                self._tell(process, self.given)
            for reader in readers:
                reader.start()
            while any(process.poll() is None for process in self.processes):
                self._pass_on()
                if any(process.returncode == UNREACHED for process in self.processes):
                    break
                time.sleep(WATCH_SECONDS)
            return self._end(readers)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def _pass_on(self) -> None:
        """Signals go to the first machine, whose launcher tells the others; where it is gone, to all that are left."""
        while self.signals:
            name = signal.Signals(self.signals.pop(0)).name.removeprefix("SIG")
            left = [process for process in self.processes if process.poll() is None]
            for process in left[:1] if left[:1] == self.processes[:1] else left:
                self._tell(process, f"{name}\n")

    def _end(self, readers: list[threading.Thread]) -> int:
        unreached = [
            name for name, process in zip(self.names, self.processes, strict=True) if process.returncode == UNREACHED
        ]
        for process in self.processes:  # the end of its input ends what still runs there
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        codes = [process.wait() for process in self.processes]
        for reader in readers:
            reader.join(1)
        if unreached:
            print(f"error: ssh to {', '.join(unreached)} ended with {UNREACHED}: not reached, or cut", file=sys.stderr)
            return 1
        failed = [code for code in codes if code not in (0, *STOPPED)]
        return codes[0] if codes[0] or not failed else failed[0]

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], text: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: seen where processes are watched
            process.stdin.write(text.encode())
            process.stdin.flush()

    @staticmethod
    def _show(name: str, stream: IO[bytes]) -> None:
        for line in stream:
            print(f"{name}: {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)
