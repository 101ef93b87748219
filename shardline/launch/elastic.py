"""Restarts: when ranks fail or machines come and go, those that are there start again from the last save.

    watching ──failure──> kill the ranks ─────────────────┐
       │                                                  ├─> meet again (gathering.py) ─> start ranks ─> watching
       └──a machine joins─> ask the ranks to stop, save ──┘

A failure counts as a restart, machines that join or leave do not. What a restart cannot mend (a `UserError`) ends the
job, and so does a failure after the last restart, as it would have without any.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState

from shardline.launch.agent import FAILURE_GRACE, Agent, Launch, remove_empty
from shardline.launch.failures import choose_cause, in_a_line
from shardline.launch.gathering import Gathering, say
from shardline.launch.rounds import End, Terms
from shardline.report import Report, read_report
from shardline.run import attempt

SURE_GRACE = 0.5  # seconds from a failure with a cause of its own for an earlier one to show
LOG_FILE = Path("log") / "restarts.jsonl"
PARTS = ("detect", "rendezvous", "load", "first step")


@dataclass
class Recovery:
    """One way back to training; times are seconds since the epoch by the clock of the machine with rank 0."""

    cause: Report
    fault_at: float
    decided_at: float
    restart: int = 0
    machines: int = 0
    ranks: int = 0
    reached: dict[str, float] = field(default_factory=dict)  # joined, loaded, first_step: from rank 0's notes

    def parts(self) -> dict[str, float]:
        """Seconds by part, as far as they are over."""
        marks = [self.fault_at, self.decided_at]
        marks += [self.reached[name] for name in ("joined", "loaded", "first_step") if name in self.reached]
        return {name: round(max(0.0, b - a), 3) for name, a, b in zip(PARTS, marks[:-1], marks[1:], strict=False)}

    def line(self) -> str:
        parts = self.parts()
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"recovered in {sum(parts.values()):.1f} s: {shown}"

    def record(self, step: int | None) -> dict[str, Any]:
        done = "first_step" in self.reached
        return {
            "time": round(self.fault_at, 3),
            "cause": in_a_line(self.cause),
            "details": self.cause.details,
            "restart": self.restart,
            "machines": self.machines,
            "ranks": self.ranks,
            "from_step": step,
            "recovered": done,
            "seconds": round(sum(self.parts().values()), 3) if done else None,
            "parts": self.parts(),
        }


class RestartingAgent(Agent):
    """The agent for jobs with `--max-restarts` or a range of machines."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        least = launch.least_nodes or launch.nnodes
        is_numbered = launch.nnodes > 1 and launch.rdzv_backend == "static"
        self.gathering = Gathering(
            launch.rdzv_endpoint if launch.nnodes > 1 else "127.0.0.1:0",
            Terms(least, launch.nnodes, launch.rdzv_id, launch.max_restarts),
            launch.node_rank if is_numbered else 0 if launch.nnodes == 1 else None,
            launch.nproc,
            launch.rdzv_timeout_seconds,
            launch.lost_machine_seconds,
            launch.misfit,
            self._may_regroup,
        )
        super().__init__(launch, folder, self.gathering)
        self.root = folder
        self.notes: dict[str, Any] = {}
        self.recovery: Recovery | None = None
        self.ending_for: End | None = None  # why the ranks were asked to stop

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet, and number the ranks; torch's own numbering would wait for machines that died meanwhile."""
        self._forget_ranks()
        self.gathering.why = "" if self.recovery is None else in_a_line(self.recovery.cause)
        info = self.gathering.next_rendezvous()
        met = self.gathering.round
        first, world = sum(peer.ranks for peer in met.peers[: info.rank]), met.ranks
        group: Any = worker_group  # torch declares its fields as None
        group.workers = [
            Worker(local, global_rank=first + local, role_rank=first + local, world_size=world, role_world_size=world)
            for local in range(self.launch.nproc)
        ]
        group.store, group.group_rank, group.group_world_size = info.store, info.rank, info.world_size
        group.master_addr, group.master_port = self.gathering.meeting_place
        self.folder = self.root / f"attempt-{met.number}"
        self.folder.mkdir(exist_ok=True)
        if self.recovery is not None:
            self._say_restart(self.recovery)

    def _forget_ranks(self) -> None:
        remove_empty(rank.output for rank in self.ranks)
        self.ranks, self.notes, self.ending_for = [], {}, None
        self.kill_at = self.failed_at = self.cause = None
        self.killed_late = []

    def _say_restart(self, recovery: Recovery) -> None:
        met, most = self.gathering.round, self.launch.max_restarts
        machines, ranks = len(met.peers), met.ranks
        recovery.machines, recovery.ranks, recovery.restart = machines, ranks, met.memory.restarts
        counted = (
            f"restart {met.memory.restarts} of {most}"
            if recovery.cause.kind not in ("regroup", "leave")
            else "going on"
        )
        size = f"{machines} machine{'s' * (machines > 1)}, {ranks} rank{'s' * (ranks > 1)}"
        say(f"{in_a_line(recovery.cause)}; {counted} with {size}")

    def _of_attempt(self) -> dict[str, str]:
        met = self.gathering.round
        told = attempt.Attempt(str(self._notes_file), met.memory.folder, met.memory.begun)
        return {"TORCHELASTIC_RESTART_COUNT": str(met.number), **attempt.variable(told)}

    @property
    def _notes_file(self) -> Path:
        return self.folder / "notes.json"

    def _watch_others(self, address: str, port: int) -> None:
        pass  # the gathering does

    # ---- watching ----------------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._read_notes()
        self._tell_signals()
        self._forward_signals()
        self._see_ended()
        end = self.gathering.end
        if end is not None and not end.is_failure and not self.signals and self.ending_for is None:
            self._stop_for(end)
        if self.ending_for is not None and self.ending_for.report.kind != "stop" and not self.signals:
            return self._regroup(end)
        failed = [rank for rank in self.ranks if self._has_failed(rank)]
        clean = not failed and all(rank.code is not None for rank in self.ranks)
        if self.gathering.cut_off and not self.signals and not clean:
            return self._fail(End(self._cut_off_report(), self.gathering.silent_seconds))
        if end is not None and end.is_failure:
            return self._fail(end)
        if failed:
            return self._settle([self._report(rank) for rank in failed])
        if any(rank.code is None for rank in self.ranks):
            return RunResult(WorkerState.HEALTHY)
        stopping = bool(self.signals) or self.ending_for is not None
        done = stopping or self.gathering.is_done() or self.gathering.cut_off
        codes = {rank.number: rank.code for rank in self.ranks}
        return RunResult(WorkerState.SUCCEEDED if done else WorkerState.HEALTHY, return_values=codes)

    def _has_failed(self, rank: Any) -> bool:
        failed = super()._has_failed(rank)
        if failed and self.ending_for is not None:  # the others are on their way out
            report = read_report(rank.report)
            return report is not None and report.kind != "lost_peer"
        return failed

    def _tell_signals(self) -> None:
        """A machine that is told to go leaves the others where they can do without it, else all stop."""
        if not self.signals or self.forwarded:
            return
        name, host = signal.Signals(self.signals[0]).name, socket.gethostname()
        least = self.launch.least_nodes or self.launch.nnodes
        leaves = name == "SIGTERM" and least < self.launch.nnodes and not self.gathering.leads
        text = f"host {host} {'leaves' if leaves else 'stops'} ({name})"
        self.gathering.tell(End(Report("leave" if leaves else "stop", -1, host, os.getpid(), text, at=time.time())))

    def _stop_for(self, end: End) -> None:
        """Ranks stop together at a step boundary: where a machine leaves, its own have been asked."""
        self.ending_for = end
        if end.report.kind == "regroup":
            for rank in self.ranks:
                if rank.code is None:
                    rank.process.send_signal(signal.SIGTERM)
        else:
            self.kill_at = time.monotonic() + self.launch.stop_timeout_seconds

    def _regroup(self, end: End | None) -> RunResult:
        """Wait for the ranks that were asked to stop."""
        if end is not None and end.is_failure:
            return self._fail(end)
        reports = [read_report(rank.report) for rank in self.ranks if rank.code is not None]
        final = [report for report in reports if report is not None and report.kind == "user"]
        if final:
            return self._settle(final)
        if all(rank.code is not None for rank in self.ranks):
            assert self.ending_for is not None
            self._begin_recovery(self.ending_for)
            self.gathering.memory = replace(self.gathering.memory, **self._run_so_far())
            self.gathering.stopped_for_regroup = True
        return RunResult(WorkerState.HEALTHY)

    def _may_regroup(self) -> bool:
        """Ranks can stop without loss once they train, and save."""
        return self.launch.saves and "first_step" in self.notes and not self.signals

    def _settle(self, reports: list[Report]) -> RunResult:
        """Give the cause a moment to show; where it seems to lie on another machine, that one to be heard of."""
        now = time.monotonic()
        self.failed_at = self.failed_at or now
        cause = choose_cause(reports)
        grace = SURE_GRACE
        if cause.kind == "lost_peer":
            several = self.gathering.machines() > 1
            grace = self.launch.lost_machine_seconds + 1 if several else FAILURE_GRACE
        ended = all(rank.code is not None for rank in self.ranks)
        alone = ended and (cause.kind != "lost_peer" or self.gathering.machines() == 1)
        if now - self.failed_at < grace and not alone:
            return RunResult(WorkerState.HEALTHY)
        return self._fail(self.gathering.settle(End(cause, max(0.0, time.time() - cause.at))))

    def _fail(self, end: End) -> RunResult:
        """Restart, or end with this cause; torchrun's agent does what its count of restarts says."""
        self._begin_recovery(end)
        used = self.gathering.memory.restarts
        is_final = end.report.kind == "user" or used >= self.launch.max_restarts or bool(self.signals)
        self._remaining_restarts = 0 if is_final else self.launch.max_restarts - used
        self.cause = end.report
        if not is_final:
            self.gathering.memory = replace(self.gathering.memory, restarts=used + 1, **self._run_so_far())
        return RunResult(WorkerState.FAILED)

    def _run_so_far(self) -> dict[str, Any]:
        """What the next attempt must know of the run."""
        memory = self.gathering.memory
        return {
            "folder": memory.folder or self.notes.get("folder"),
            "begun": memory.begun or "loaded" in self.notes,
        }

    def _cut_off_report(self) -> Report:
        host = socket.gethostname()
        text = f"host {host} has not reached {self.launch.rdzv_endpoint} for {self.gathering.silent_seconds:.0f} s"
        return Report("machine", -1, host, os.getpid(), text, at=time.time())

    # ---- recovery times ----------------------------------------------------------------------------------------------

    def _begin_recovery(self, end: End) -> None:
        """From the fault on; one that was under way has failed, and says so in the log."""
        self._read_notes()
        if self.recovery is not None:
            self._log_recovery(self.recovery)
        now = time.time()
        self.recovery = Recovery(end.report, now - end.delay, now)

    def _read_notes(self) -> None:
        if "first_step" in self.notes or not self.ranks:
            return
        self.notes = attempt.read(self._notes_file)
        if self.recovery is not None and self.gathering.leads:
            self.recovery.reached = {
                name: at for name, at in self.notes.items() if name in ("joined", "loaded", "first_step")
            }
            if "first_step" in self.notes:
                say(self.recovery.line())
                self._log_recovery(self.recovery)
        if "first_step" in self.notes:
            self.recovery = None

    def _log_recovery(self, recovery: Recovery) -> None:
        folder = self._run_so_far()["folder"]
        if folder is None or not self.gathering.leads:
            return
        try:
            path = Path(folder) / LOG_FILE
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(recovery.record(self.notes.get("step"))) + "\n")
        except OSError as error:
            say(f"note: {folder}/{LOG_FILE} is not written: {error.strerror}")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _exit_barrier(self) -> None:
        pass  # all machines have said that they are done

    def ending(self) -> int:
        if self.cause is None and self.gathering.line is not None and not self.ranks:
            end = self.gathering.end
            self.cause = end.report if end is not None and end.is_failure else None
        return super().ending()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self.kill()  # the other launchers are left when the cause has been shown

    def close(self) -> None:
        self.gathering.close()
