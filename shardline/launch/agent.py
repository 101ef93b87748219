"""Starting ranks on this machine, through torchrun's agent: rendezvous with other machines, one process per rank.

A rank that fails ends all of them, and its own error is shown, once. Signals go on to the ranks, which end at a step
boundary. The ranks live in sessions of their own, so that a Ctrl-C reaches them through here alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shardline.launch.failures import OTHER_HOST_GRACE, Others, choose_cause, show
from shardline.launch.rank_main import LAUNCHER_VARIABLE
from shardline.launch.rendezvous import Meeting, interface_towards
from shardline.report import REPORT_VARIABLE, Report, read_report
from shardline.run import own_process
from shardline.run.output import OUTPUT_VARIABLE
from shardline.run.stop import ending_signals
from shardline.run.terminal import let_go

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a rank that a signal ended at a step boundary
FAILURE_GRACE = 2.0  # seconds from one rank's failure for the others to end by themselves
SECOND_SIGNAL_GRACE = 5.0
KILL_SECONDS = 5.0
SHOWN_LINES = 30


@dataclass(frozen=True)
class Launch:
    """What to start: `entry` ("module:function") runs in every rank with the same words."""

    entry: str
    words: tuple[str, ...]
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    rdzv_id: str = "none"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_timeout_seconds: int = 900
    stop_timeout_seconds: float = 30.0
    preempted_exit_code: int = 128 + signal.SIGTERM  # of ranks that SIGTERM or a time limit ended at a step boundary
    environment: Mapping[str, str] = field(default_factory=dict)
    debug: bool = False  # show the traceback of what a user can mend, too
    least_nodes: int | None = None  # go on with as few machines as this; None: with `nnodes` alone
    max_restarts: int = 0
    lost_machine_seconds: float = 10.0
    saves: bool = False  # ranks that are asked to stop lose nothing
    misfit: Callable[[int], str] = lambda ranks: ""  # why so many ranks cannot run

    @property
    def is_elastic(self) -> bool:
        return self.max_restarts > 0 or self.least_nodes not in (None, self.nnodes)


@dataclass
class Rank:
    number: int
    process: subprocess.Popen[bytes]
    report: Path
    output: Path | None  # None: the console
    code: int | None = None
    ended_at: float = 0.0


def start_ranks(launch: Launch) -> int:
    """Run the ranks of this machine to their end; the exit code. A UserError of a rank is raised here."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, we say shorter
    folder = Path(tempfile.mkdtemp(prefix="shardline-"))
    agent = _agent(launch, folder)
    try:
        with _handling(agent):
            agent.run()
        return agent.ending()
    finally:
        agent.kill()
        agent.close()
        remove_empty(rank.output for rank in agent.ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _agent(launch: Launch, folder: Path) -> Agent:
    if not launch.is_elastic:
        return Agent(launch, folder, _meeting(launch))
    from shardline.launch.elastic import RestartingAgent

    return RestartingAgent(launch, folder)


@contextlib.contextmanager
def _handling(agent: Agent) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, agent.on_signal) for number in ending_signals()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # waits to be forwarded; in ranks, for a step
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ended = all(rank.code is not None for rank in agent.ranks)
        for number, handler in previous.items():
            if not (ended and own_process.ends_with_run):  # when ranks have ended, no signal changes how
                signal.signal(number, handler)


def _meeting(launch: Launch) -> Meeting:
    """One machine needs no address; several meet at an endpoint."""
    if launch.nnodes == 1:
        return Meeting("127.0.0.1:0", 1, 0, launch.rdzv_id, launch.rdzv_timeout_seconds)
    number = launch.node_rank if launch.rdzv_backend == "static" else None
    return Meeting(launch.rdzv_endpoint, launch.nnodes, number, launch.rdzv_id, launch.rdzv_timeout_seconds)


class Agent(SimpleElasticAgent):
    """Torchrun's agent with processes, signals and errors handled here."""

    def __init__(self, launch: Launch, folder: Path, meeting: RendezvousHandler) -> None:
        super().__init__(
            WorkerSpec(
                role="rank",
                local_world_size=launch.nproc,
                rdzv_handler=meeting,
                entrypoint=launch.entry,
                max_restarts=launch.max_restarts,
            )
        )
        self.launch, self.folder = launch, folder
        self.ranks: list[Rank] = []
        self.signals: list[int] = []
        self.forwarded = 0
        self.kill_at: float | None = None
        self.failed_at: float | None = None
        self.cause: Report | None = None
        self.killed_late: list[int] = []
        self.others: Others | None = None

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        count = len(worker_group.workers)
        threads = str(max(1, len(os.sched_getaffinity(0)) // count))
        address, port = str(worker_group.master_addr), str(worker_group.master_port)
        defaults = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        interface = interface_towards(address) if (worker_group.group_world_size or 1) > 1 else None
        if interface is not None:
            defaults["GLOO_SOCKET_IFNAME"] = interface
        for worker in worker_group.workers:
            environment = {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(worker_group.group_rank),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **self._of_attempt(),
                LAUNCHER_VARIABLE: str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            }
            self.ranks.append(self._start_rank(worker.global_rank, {**defaults, **os.environ, **environment}))
        self._watch_others(address, int(port))
        return {
            worker.local_rank: rank.process.pid for worker, rank in zip(worker_group.workers, self.ranks, strict=True)
        }

    def _of_attempt(self) -> dict[str, str]:
        """Variables that differ between the starts of a job."""
        return {"TORCHELASTIC_RESTART_COUNT": "0"}

    def _watch_others(self, address: str, port: int) -> None:
        if self.launch.nnodes > 1:
            self.others = Others(address, port, self.launch.nnodes)

    def _start_rank(self, number: int, environment: dict[str, str]) -> Rank:
        report, output = self.folder / f"rank-{number}.json", self.folder / f"rank-{number}.out"
        environment = {**environment, **self.launch.environment, REPORT_VARIABLE: str(report)}
        command = [sys.executable, "-P", "-m", "shardline.launch.rank_main", self.launch.entry, *self.launch.words]
        if number == 0:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            return Rank(number, process, report, None)
        environment[OUTPUT_VARIABLE] = str(output)
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Rank(number, process, report, output)

    def kill(self) -> None:
        """End every rank and whatever it has started, at once."""
        for rank in self.ranks:
            if rank.code is None:
                _kill_group(rank.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            if rank.code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold one that waits for a device
                    rank.process.wait(KILL_SECONDS)
                rank.code = rank.process.returncode or -signal.SIGKILL
                _kill_group(rank.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the other launchers go."""
        if self.others is not None:
            self.others.close()

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any) -> None:
        self.kill()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self.kill()
        self.close()

    # ---- watching ----------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the ranks to stop at a step boundary, the second one interrupts them."""
        if number == signal.SIGHUP:
            let_go()
        if not self.ranks:
            raise KeyboardInterrupt(number)
        self.signals.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forward_signals()
        self._see_ended()
        failed = [rank for rank in self.ranks if self._has_failed(rank)]
        remote = self.others.failure if self.others is not None else None
        if failed or remote:
            return RunResult(WorkerState.FAILED if self._is_decided(failed, remote) else WorkerState.HEALTHY)
        if any(rank.code is None for rank in self.ranks):
            return RunResult(WorkerState.HEALTHY)
        done = self.others is None or bool(self.signals) or self.others.all_done()
        codes = {rank.number: rank.code for rank in self.ranks}
        return RunResult(WorkerState.SUCCEEDED if done else WorkerState.HEALTHY, return_values=codes)

    def _see_ended(self) -> None:
        for rank in self.ranks:
            if rank.code is None and rank.process.poll() is not None:
                rank.code, rank.ended_at = rank.process.returncode, time.time()
                _kill_group(rank.process.pid, signal.SIGKILL)  # data workers it left behind

    def _forward_signals(self) -> None:
        if signal.sigtimedwait({signal.SIGUSR1}, 0) is not None:  # a save, no reason to end
            one = next((rank for rank in self.ranks if rank.code is None), None)
            if one is not None:  # of two ranks one might hear of it a step later, and all would save twice
                _kill_group(one.process.pid, signal.SIGUSR1, whole=False)
        while self.forwarded < len(self.signals):
            for rank in self.ranks:
                if rank.code is None:
                    _kill_group(rank.process.pid, self.signals[self.forwarded], whole=False)
            self.forwarded += 1
            grace = self.launch.stop_timeout_seconds if self.forwarded == 1 else SECOND_SIGNAL_GRACE
            self.kill_at = time.monotonic() + grace
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self.killed_late = [rank.number for rank in self.ranks if rank.code is None]
            self.kill()

    def _has_failed(self, rank: Rank) -> bool:
        if rank.code in (None, 0, self.launch.preempted_exit_code, *STOPPED):
            return False
        if not self.signals:
            return True
        # On the way out: killed by what we sent, or surprised by the end of others.
        report = read_report(rank.report)
        return report is not None and report.kind != "lost_peer"

    def _is_decided(self, failed: list[Rank], remote: Report | None) -> bool:
        """Give the others a moment to end, and the cause a moment to show, then settle which failure is shown."""
        now = time.monotonic()
        self.failed_at = self.failed_at or now
        reports = [self._report(rank) for rank in failed]
        cause = choose_cause([*reports, *([remote] if remote else [])])
        ended = all(rank.code is not None for rank in self.ranks)
        elsewhere = self.others is not None and cause.kind == "lost_peer"
        grace = OTHER_HOST_GRACE if elsewhere else FAILURE_GRACE
        if now - self.failed_at < grace and not (ended and not elsewhere):
            return False
        if self.others is not None and remote is None:
            cause = self.others.tell(cause)
        self.cause = cause
        return True

    def _report(self, rank: Rank) -> Report:
        found = read_report(rank.report)
        if found is not None and (rank.output is None or rank.output.is_symlink()):
            return found
        details = _tail(rank.output)
        if found is not None:  # what it printed is nowhere else
            return replace(
                found, details=f"{found.details.rstrip()}\nits last output:\n{details}" if details else found.details
            )
        host, pid, code = socket.gethostname(), rank.process.pid, rank.code or 0
        if code < 0:
            return Report("signal", rank.number, host, pid, _signal_name(-code), details, rank.ended_at)
        return Report("exit", rank.number, host, pid, str(code), details, rank.ended_at)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def ending(self) -> int:
        """Show how it ended; the exit code."""
        if self.cause is not None:
            if self.others is not None:
                self.others.linger()
            return show(self.cause, self.launch.debug)
        if self.killed_late:
            numbers = ", ".join(map(str, self.killed_late))
            seconds = f"{self.launch.stop_timeout_seconds:g}"
            print(
                f"error: rank {numbers} did not stop within {seconds} s and was killed"
                " (comm.stop_timeout_seconds gives more time)",
                file=sys.stderr,
            )
        elif self.signals and any(rank.number == 0 and (rank.code or 0) < 0 for rank in self.ranks):
            print("interrupted", file=sys.stderr)  # before it could say so itself
        preempted = self.launch.preempted_exit_code
        if self.signals and not (self.signals[0] == signal.SIGTERM and self._all_ended_in(0, preempted)):
            return 128 + self.signals[0]
        return next((rank.code for rank in self.ranks if rank.code in (preempted, *STOPPED)), None) or 0

    def _all_ended_in(self, *codes: int) -> bool:
        return all(rank.code in codes for rank in self.ranks)


def _kill_group(pid: int, number: int, whole: bool = True) -> None:
    """Signal a rank, or with it all processes of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if whole else os.kill)(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def remove_empty(outputs: Iterable[Path | None]) -> None:
    """Files in the run's log folder of ranks that printed nothing."""
    for output in outputs:
        with contextlib.suppress(OSError):
            if output is not None and output.stat().st_size == 0:
                output.resolve().unlink()


def _tail(output: Path | None) -> str:
    if output is None:
        return ""
    try:
        return "\n".join(output.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
    except OSError:
        return ""
