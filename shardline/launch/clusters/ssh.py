"""`shardline launch ssh`: the ranks of a run on machines that one ssh command reaches, without a scheduler.

    this machine ── ssh a ── shell ── shardline train ... --node-rank 0   serves the store at a
                 └─ ssh b ── shell ── shardline train ... --node-rank 1

Every shell first reports that it is there, and nothing starts before all have. What goes to a machine goes through the
standard input of its shell, which nobody else can read: the secret, then the names of signals. Where that input ends,
because ssh or this machine is gone, the run there is asked to stop.
"""

from __future__ import annotations

import contextlib
import io
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

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.launch.clusters.job import ClusterJob, check_env_file, make_job, program
from shardline.launch.secret import VARIABLE
from shardline.words import to_stderr

WATCH_SECONDS = 0.1
REACH_SECONDS = 30.0  # for all machines to answer
FAILED_SECONDS = 60.0  # for the others to end by themselves, once the run of one machine has failed
UNREACHED = 255  # exit code of ssh if it did not reach the machine, or was cut
MARK = "shardline: this machine is reached"
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# Descriptor 3: the shell gives a command in the background no standard input.
# The second cat takes what is printed after the connection is gone: a run that cannot print would not save.
SHELL = """\
echo '{mark}'
IFS= read -r {secret} || exit 2
export {secret}
while IFS= read -r line && [ "$line" != end ]; do export "$line"; done
cd {folder} || exit 2
exec 3<&0 4>&1
code=$({{
    {{
        {command} </dev/null 3<&- 4>&- 5>&- &
        run=$!
        {{ while read -r name <&3; do kill -s "$name" "$run"; done; kill -s TERM "$run"; }} >/dev/null 2>&1 5>&- &
        listens=$!
        wait "$run"
        echo "$?" >&5
        kill "$listens" 2>/dev/null
    }} 2>&1 | {{ trap '' PIPE; cat; cat >/dev/null; }} >&4 2>/dev/null 5>&-
}} 5>&1)
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
        raise UserError(f"--hosts {hosts} names a machine twice; --nproc N starts N ranks on each")
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
    return SHELL.format(mark=MARK, secret=VARIABLE, folder=shlex.quote(folder), command=shlex.join(words))


def _absolute(called: str) -> str:
    """The program with its full path: a shell that ssh starts has a short PATH."""
    first, *rest = shlex.split(called)
    found = shutil.which(first)
    return shlex.join([os.path.abspath(found) if found else first, *rest])


class Machines:
    """The ssh processes of a run, one for each machine."""

    def __init__(self, names: list[str], reached: list[list[str]], shells: list[str], given: str) -> None:
        self.names, self.given = names, given
        self.processes = [
            # In sessions of their own: a Ctrl-C is passed on, and does not end the connections.
            subprocess.Popen([*words, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=None if number == 0 else subprocess.STDOUT, start_new_session=True)
            for number, (words, text) in enumerate(zip(reached, shells, strict=True))
        ]  # fmt: skip
        self.answers = [threading.Event() for _ in names]
        self.signals: list[int] = []
        self.is_started = False

    def run(self) -> int:
        """Wait for all machines, and return the exit code of the run."""
        previous = {one: signal.signal(one, self._on_signal) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        readers = [threading.Thread(target=self._show, args=(place,), daemon=True) for place in range(len(self.names))]
        for reader in readers:
            reader.start()
        try:
            if error := self._reach():
                self._end(readers)
                to_stderr(f"error: {error}")
                return 1
            if self.signals:
                self._end(readers)
                return 128 + self.signals[0]
            self.is_started = True
            for process in self.processes:
                self._tell(process, self.given)
            self._watch()
            return self._exit_code(self._end(readers))
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _reach(self) -> str:
        """Wait until every machine has answered, or a signal has come; return what is wrong."""
        deadline = time.monotonic() + REACH_SECONDS
        while not self.signals and not all(answer.is_set() for answer in self.answers):
            gone = [place for place, code in enumerate(self._codes()) if code is not None]
            if gone:
                return "; ".join(f"ssh to {self.names[place]} ended with {self._codes()[place]}" for place in gone)
            if time.monotonic() > deadline:
                silent = [name for name, answer in zip(self.names, self.answers, strict=True) if not answer.is_set()]
                names = ", ".join(silent)
                return f"{names} did not answer within {REACH_SECONDS:g} s: nothing was started"
            time.sleep(WATCH_SECONDS)
        return ""

    def _watch(self) -> None:
        """Pass signals on until all have ended, a connection is cut, or one machine's run failed a while ago."""
        failed_at = None
        while None in (codes := self._codes()):
            self._pass_on()
            if UNREACHED in codes:
                return
            if failed_at is None and {1, 2} & {*codes}:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + FAILED_SECONDS:
                return
            time.sleep(WATCH_SECONDS)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_started or number != signal.SIGUSR1:  # before the start, there is nothing to save
            self.signals.append(number)

    def _pass_on(self) -> None:
        """Send signals to the first machine, whose launcher tells the others; if it is gone, to all that are left."""
        while self.signals:
            name = signal.Signals(self.signals.pop(0)).name.removeprefix("SIG")
            left = [process for process in self.processes if process.poll() is None]
            for process in left[:1] if left[:1] == self.processes[:1] else left:
                self._tell(process, f"{name}\n")

    def _end(self, readers: list[threading.Thread]) -> list[int]:
        """End what still runs by closing its input, and return the exit codes."""
        for process, answer in zip(self.processes, self.answers, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            if not answer.is_set():
                process.terminate()  # it would wait for the machine, and read no input
        codes = [process.wait() for process in self.processes]
        for reader in readers:
            reader.join(1)
        return codes

    def _exit_code(self, codes: list[int]) -> int:
        cut = [name for name, code in zip(self.names, codes, strict=True) if code == UNREACHED]
        if cut:
            to_stderr(f"error: ssh to {', '.join(cut)} ended with {UNREACHED}: the connection was cut")
            return 1
        failed = [code for code in codes if code not in (0, *STOPPED)]
        return failed[0] if failed else codes[0]

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], text: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: seen where processes are watched
            process.stdin.write(text.encode())
            process.stdin.flush()

    def _show(self, place: int) -> None:
        """Show the output of a machine: that of the first one as it is, that of others by lines with their names."""
        name, stream = self.names[place], self.processes[place].stdout
        assert isinstance(stream, io.BufferedReader)
        for line in stream:
            if not self.answers[place].is_set() and line.decode(errors="replace").strip() == MARK:
                self.answers[place].set()
                if place == 0:
                    break
            else:
                print(f"{name}: {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)
        while place == 0 and (part := stream.read1()):
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
