"""One process that has imported torch and shardline, and forks a job's ranks for each trial: a trial costs no import.

    test session --jobs, as JSON lines--> nursery --fork--> launcher of one job --fork--> ranks
                 <-----how it ended------                     the job's store, signals, time limit

The nursery and the launcher compute nothing and start no thread before they fork. Ranks are real processes with what
torchrun would set in their environment; they run the trainer, end with its exit codes and leave its reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import processes

PR_SET_PDEATHSIG = 1
SESSION_VARIABLE = "SHARDLINE_NURSERY_OF"  # the process that starts the nursery


@dataclass(frozen=True)
class Fault:
    """What happens to one rank. With `point` None it is killed from outside, `after` seconds after `since`.

    `action` is kill-rank, kill-all, hang, slow (until the log speaks of the wait), read-only (the file system on
    the trial's "disk"), or the name of an errno that is raised as an OSError.
    """

    point: str | None
    action: str
    rank: int = 0
    step: int = 0  # of the save that it happens in
    nth: int = 0  # time that the point is reached in that save
    after: float = 0.0
    since: str = "first step"  # or "start"


@dataclass(frozen=True)
class Job:
    """Some ranks that train with the same config."""

    folder: Path  # for what the job tells: ledgers, reports, output
    ranks: int
    settings: dict[str, Any]
    fault: Fault | None = None
    grace: float = 10.0  # from the first rank that ends badly to the end of all
    seconds: float = 150.0  # then it hangs
    patience: float = 10.0  # before a wait for a save is spoken of
    resume: bool = False  # insist on it
    entry: str = "tests.faults.nursery:train"  # what a rank does
    words: tuple[str, ...] = ()  # for it

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})


def job_of(text: str) -> Job:
    fields = json.loads(text)
    fault = None if fields["fault"] is None else Fault(**fields["fault"])
    return Job(**{**fields, "folder": Path(fields["folder"]), "fault": fault, "words": tuple(fields["words"])})


@dataclass
class Ended:
    """How a job ended: exit codes by rank (negative: a signal), what the ranks reported, whether it ran out of time."""

    codes: list[int]
    hung: bool = False
    seconds: float = 0.0
    reports: dict[int, str] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)  # of the reports
    fired: dict[str, Any] | None = None  # where the fault happened
    folder: Path = Path()

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("out-*")))


class Nursery:
    """The other end, in the test session."""

    def __init__(self, **variables: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {**variables, SESSION_VARIABLE: str(os.getpid())}
        self.process = processes.start(
            [sys.executable, "-m", "tests.faults.nursery"],
            shared=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, job: Job) -> Ended:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job.folder.mkdir(parents=True, exist_ok=True)
        self.process.stdin.write(job.to_json() + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the nursery has died"
        ended = Ended(**json.loads(answer), folder=job.folder)
        for rank in range(job.ranks):
            with contextlib.suppress(FileNotFoundError):
                report = json.loads((job.folder / f"report-{rank}").read_text())
                ended.reports[rank], ended.kinds[rank] = report["text"], report["kind"]
        with contextlib.suppress(FileNotFoundError):
            ended.fired = json.loads((job.folder / "fired").read_text())
        return ended

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        processes.end(self.process)


# ---- the nursery -----------------------------------------------------------------------------------------------------


# What ranks import sooner or later; by the last name they find `train`.
IMPORTS = (
    "torch._dynamo",
    "shardline.config.load",
    "shardline.training.trainer",
    "tests.faults.ledger",
    "tests.faults.nursery",
)


def die_with_session() -> None:
    """End when the test session does, also where it is killed: jobs and their ranks end with the nursery."""
    session, deadline = int(os.environ[SESSION_VARIABLE]), time.monotonic() + 10
    while os.getppid() != session and time.monotonic() < deadline:
        time.sleep(0.01)  # a program that was forked has another parent for a moment
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != session:
        sys.exit("the test session is gone")


def main() -> None:
    die_with_session()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages it shares
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork, nor does what it has locked"
    for line in sys.stdin:
        reading, writing = os.pipe()
        launcher = _fork()
        if launcher == 0:
            os.close(reading)
            ended = _launch(job_of(line))
            os.write(writing, json.dumps(ended).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(launcher, 0)
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()


def _fork() -> int:
    """A child that dies with its parent."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return child


# ---- the launcher of one job -----------------------------------------------------------------------------------------


def _launch(job: Job) -> dict[str, Any]:
    listening = socket.create_server(("127.0.0.1", 0))
    started, first_step = os.pipe()
    children: list[int] = []
    for rank in range(job.ranks):
        child = _fork()
        if child == 0:
            os.setpgid(0, children[0] if children else 0)  # one group: a fault may kill all at once
            os.close(started)
            _be_rank(job, rank, listening.getsockname()[1], first_step)
        with contextlib.suppress(OSError):  # the child may have done it, or be gone
            os.setpgid(child, children[0] if children else child)
        children.append(child)
    os.close(first_step)
    store = _serve_store(listening) if job.ranks > 1 else None
    ended = _watch(job, children, started)
    del store
    return ended


def _serve_store(listening: socket.socket) -> Any:
    import torch.distributed as dist

    port, descriptor = listening.getsockname()[1], listening.detach()
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True
    )


def _watch(job: Job, children: Sequence[int], started: int) -> dict[str, Any]:
    """Until all ranks have ended; the launcher ends those that outlive a failed one."""
    began, codes, hung = time.monotonic(), dict[int, int](), False
    limit, kill_at, signalled = began + job.seconds, None, False
    while len(codes) < len(children):
        now = time.monotonic()
        if kill_at is None and job.fault is not None and job.fault.point is None:
            stepped = select.select([started], [], [], 0)[0] and os.read(started, 1)
            if job.fault.since == "start" or stepped:
                kill_at = now + job.fault.after
        if kill_at is not None and now >= kill_at and not signalled and job.fault is not None:
            signalled = True
            doomed = children if job.fault.action == "kill-all" else [children[job.fault.rank]]
            for child in (child for child in doomed if child not in codes):
                os.kill(child, signal.SIGKILL)
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] != 0:
                        limit = min(limit, time.monotonic() + job.grace)
        if now > limit:
            hung = not any(codes.values())
            _end(children, codes, ask=hung)
        time.sleep(0.002)
    return {"codes": [codes[child] for child in children], "hung": hung, "seconds": time.monotonic() - began}


def _end(children: Sequence[int], codes: dict[int, int], ask: bool) -> None:
    left = [child for child in children if child not in codes]
    if ask:
        for child in left:
            os.kill(child, signal.SIGUSR1)  # where it is
        time.sleep(0.5)
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _be_rank(job: Job, rank: int, port: int, first_step: int) -> None:
    import torch

    from shardline.launch import rank_main
    from shardline.report import REPORT_VARIABLE

    # Here, while there is one thread: torch replaces the pool of a forked process, and two threads of autograd that
    # find it so at the same time end the process.
    torch.set_num_threads(1)
    output = os.open(job.folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    if job.ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    os.environ[REPORT_VARIABLE] = str(job.folder / f"report-{rank}")
    _arm(job, rank)
    rank_main.leave(rank_main.run(job.entry, [job.to_json(), str(rank), str(first_step), *job.words]))


def _arm(job: Job, rank: int) -> None:
    from shardline.checkpoint import background
    from shardline.storage import blocks
    from shardline.storage import crash_points as save_points

    blocks.BLOCK_BYTES = 1 << 14  # so that files have several
    background.PATIENCE_SECONDS = job.patience
    if job.fault is not None and job.fault.point is not None and job.fault.rank == rank:
        save_points.listener = Listener(job, job.fault)


class Listener:
    """Lets the fault happen at its place."""

    def __init__(self, job: Job, fault: Fault) -> None:
        self.job, self.folder, self.fault, self.step, self.seen = job, job.folder, fault, 0, 0

    def __call__(self, point: str, path: Path | None) -> None:
        if point == "staging" and path is not None:
            self.step = int(path.name.removeprefix("step-"))
        if point != self.fault.point or self.step != self.fault.step:
            return
        self.seen += 1
        if self.seen == self.fault.nth + 1:
            note(self.folder / "fired", {"point": point, "step": self.step, "path": str(path)})
            self._happen(self.fault.action, path)

    def _happen(self, action: str, path: Path | None) -> None:
        import errno

        if action == "kill-rank":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "kill-all":
            os.killpg(0, signal.SIGKILL)
        elif action == "hang":
            while True:
                time.sleep(3600)
        elif action == "slow":
            log = Path(self.job.settings["job.dump_folder"]) / "log" / "rank-0.log"
            while "waiting for the save" not in log.read_text():
                time.sleep(0.05)
        elif action == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(self.folder.parent / "disk")], check=True)
        else:
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number), str(path))


def note(path: Path, content: Any) -> None:
    """A line that is in the file when this returns, whatever happens to the process."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, json.dumps(content).encode() + b"\n")
    os.close(descriptor)


def train(words: Sequence[str]) -> int:
    """What a rank does: the trainer, with every step written down in this rank's ledger."""
    from shardline.config.load import load_config
    from shardline.run.options import TrainOptions
    from shardline.training.trainer import Trainer

    job, rank, first_step = job_of(words[0]), int(words[1]), int(words[2])
    trainer = Trainer(load_config(overrides=job.settings), TrainOptions(resume=job.resume))
    ledger, step = job.folder / f"ledger-{rank}", trainer.train_step

    def recorded(batches: Any, *arguments: Any) -> Any:
        result = step(batches, *arguments)
        samples = [int(number) for batch in batches for number in batch.sample_ids.tolist()]
        row = {"step": trainer.progress.step + 1, "loss": result.loss, "grad_norm": result.grad_norm}
        note(ledger, {**row, "samples": samples, "data_rank": trainer.mesh.data_rank, "at": time.monotonic()})
        os.write(first_step, b".")
        return result

    trainer.train_step = recorded  # type: ignore[method-assign]
    trainer.train()
    return 0


if __name__ == "__main__":
    main()
