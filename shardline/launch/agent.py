"""The launcher of one machine: starts its ranks, round after round, and watches them.

    watching ──failure──> kill the ranks ─────────────────┐
       │                                                  ├─> meet again (rendezvous.py) ─> start ranks ─> watching
       └──a machine joins─> ask the ranks to stop, save ──┘

A rank that fails ends all of them, and its own error is shown, once. A failure counts as a restart, machines that join
or leave do not. What a restart cannot fix (a `UserError`) ends the job, and so does a failure when no restart is left:
a job without restarts is one with 0 of them. Signals go on to the ranks, which end at a step boundary.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from shardline.comm.store import KEY_VARIABLE
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.launch import secret
from shardline.launch.endpoint import LOOPBACK, Endpoint, gloo_interface, print_line
from shardline.launch.failures import choose_cause, in_a_line, show
from shardline.launch.ranks import RankProcess, kill_ranks, remove_empty_outputs, start_rank
from shardline.launch.recovery import MARKS, Recovery
from shardline.launch.rendezvous import Rendezvous
from shardline.launch.rounds import End, Round, Terms
from shardline.launch.scratch import scratch_folder
from shardline.parallel.replicas.lighthouse import KEY_VARIABLE as GROUPS_VARIABLE
from shardline.parallel.replicas.lighthouse import derive_key
from shardline.report import HANG_CODE, Report, this_report
from shardline.run import attempt, signals
from shardline.run.options import TrainOptions, node_range
from shardline.storage.atomic import forbid_others_to_write
from shardline.words import numbered, to_stderr

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a rank that a signal ended at a step boundary
FORWARDED = {signal.SIGUSR1, signal.SIGUSR2}  # requests to save and to write the flight recorder's files, not to end
MEETING_SECONDS = 900  # that machines wait for each other
WATCH_SECONDS = 0.1
SURE_GRACE = 0.5  # seconds before a restart, from a failure with its own cause, for an earlier one to show
FAILURE_GRACE = 2.0  # seconds from a failure that ends the job for the other ranks to end by themselves
OTHER_HOST_GRACE = 5.0  # seconds for the report of another machine, where the cause seems to lie there
SECOND_SIGNAL_GRACE = 5.0


@dataclass(frozen=True)
class Launch:
    """What to start, and how: `entry` ("module:function") runs in every rank with the same words."""

    entry: str
    words: tuple[str, ...]
    options: TrainOptions
    secret: bytes = field(default=b"", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)  # of every rank, besides this process's
    stop_timeout_seconds: float = 30.0
    save_timeout_seconds: float = 0.0
    preempted_exit_code: int = 128 + signal.SIGTERM  # of ranks that SIGTERM or a time limit ended at a step boundary
    lost_machine_seconds: float = 10.0
    saves: bool = False  # ranks that are asked to stop lose nothing
    misfit: Callable[[int], str] = lambda ranks: ""  # why that many ranks cannot run the layout
    way_on: Callable[[str], list[str]] = lambda folder: []  # lines after a failure, given the run's folder

    def terms(self) -> Terms:
        least, most = node_range(self.options.nnodes)
        return Terms(least, most, self.options.rdzv_id, self.options.max_restarts)

    def endpoint(self) -> Endpoint:
        """Where launchers meet; one machine takes any free port."""
        options = self.options
        if self.terms().most == 1:
            return Endpoint(f"{LOOPBACK}:0", 0, MEETING_SECONDS)
        number = options.node_rank if options.rdzv_backend == "static" else None
        return Endpoint(options.rdzv_endpoint, number, MEETING_SECONDS)


class RoundStatus(enum.Enum):
    """What a look at a round finds."""

    RUNNING = enum.auto()
    AGAIN = enum.auto()  # it is over, and another one follows
    OVER = enum.auto()  # the job has ended


def start_ranks(launch: Launch) -> int:
    """Run the ranks of this machine to their end and return the exit code. Raises a rank's UserError."""
    umask = forbid_others_to_write()
    with scratch_folder() as folder:
        agent = Agent(launch, folder)
        try:
            with _handling_signals(agent):
                agent.run()
            return agent.exit_code()
        finally:
            kill_ranks(agent.ranks)
            agent.rendezvous.close()
            remove_empty_outputs(agent.ranks)
            os.umask(umask)


@contextlib.contextmanager
def _handling_signals(agent: Agent) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, agent.on_signal) for number in signals.ending_signals()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # kept until they are forwarded
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        ended = all(rank.code is not None for rank in agent.ranks)
        for number, handler in previous.items():
            if not (ended and signals.ends_with_run):  # once the ranks have ended, no signal changes the exit code
                signal.signal(number, handler)


class Agent:
    """The ranks of this machine, and what is known of the job."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch, self.folder, self.terms = launch, folder, launch.terms()
        self.rendezvous = Rendezvous(
            launch.endpoint(),
            self.terms,
            launch.options.nproc,
            launch.lost_machine_seconds,
            launch.misfit if self.terms.is_elastic else lambda ranks: "",  # no other machines would come
            self._may_regroup,
            launch.secret,
        )
        self.signals: list[signal.Signals] = []
        self.forwarded = 0
        self.recovery: Recovery | None = None  # under way
        self.ranks: list[RankProcess] = []
        self._forget_round()

    def _forget_round(self) -> None:
        remove_empty_outputs(self.ranks)
        self.ranks = []
        self.notes: dict[str, Any] = {}  # of this machine's first rank
        self.kill_at: float | None = None
        self.gave_more = False
        self.failed_at: float | None = None
        self.cause: Report | None = None
        self.killed_late: list[int] = []
        self.stopping_for: End | None = None  # why the ranks were asked to stop

    def run(self) -> None:
        """Start rounds until the job has ended."""
        status = RoundStatus.AGAIN
        while status is RoundStatus.AGAIN:
            self._forget_round()
            met = self.rendezvous.next_round("" if self.recovery is None else in_a_line(self.recovery.cause))
            if met is None:
                return
            if self.recovery is not None:
                self.recovery.begins(met, self.terms.max_restarts)
            self._start(met)
            while (status := self._watch()) is RoundStatus.RUNNING:
                time.sleep(WATCH_SECONDS)
            kill_ranks(self.ranks)

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _start(self, met: Round) -> None:
        place, count = self.rendezvous.place, self.launch.options.nproc
        first = sum(peer.ranks for peer in met.peers[:place])
        address, port = self.rendezvous.store_address
        folder = self.folder / f"round-{met.number}"
        folder.mkdir(exist_ok=True)
        self.notes_file = folder / "notes.json"
        state = attempt.Attempt(str(self.notes_file), met.state.folder, met.state.begun)
        defaults = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        interface = gloo_interface(address, alone=len(met.peers) == 1)
        if interface is not None:
            defaults["GLOO_SOCKET_IFNAME"] = interface
        for local in range(count):
            variables = {
                "RANK": str(first + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(met.ranks),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(place),
                "GROUP_WORLD_SIZE": str(len(met.peers)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": self.terms.job,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(met.number),
                **attempt.variable(state),
                LAUNCHER_VARIABLE: str(os.getpid()),
                KEY_VARIABLE: self.rendezvous.rank_key(),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            }
            environment = {**defaults, **os.environ, **variables, **self.launch.environment}
            if environment.pop(secret.VARIABLE, None) or self.launch.options.rdzv_secret_file:
                environment[GROUPS_VARIABLE] = derive_key(self.launch.secret).hex()  # replica groups share the secret
            self.ranks.append(start_rank(folder, self.launch.entry, self.launch.words, first + local, environment))

    # ---- watching ----------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the ranks to stop at a step boundary, the second one interrupts them."""
        if number == signal.SIGHUP:
            signals.leave_terminal()
        if not self.ranks:
            raise KeyboardInterrupt(number)
        self.signals.append(signal.Signals(number))

    def _watch(self) -> RoundStatus:
        """One look at the ranks and at what other machines report."""
        self._read_notes()
        self._report_signal()
        self._forward_signals()
        for rank in self.ranks:
            rank.poll()
        end = self.rendezvous.end
        if end is not None and not end.is_failure and not self.signals and self.stopping_for is None:
            self._stop_for(end)
        if self.stopping_for is not None and self.stopping_for.report.kind != "stop" and not self.signals:
            return self._regroup(self.stopping_for, end)
        failed = [rank for rank in self.ranks if self._has_failed(rank)]
        ended = all(rank.code is not None for rank in self.ranks)
        if self.rendezvous.cut_off and not self.signals and (failed or not ended):
            silent, address = self.rendezvous.silent_seconds, self.rendezvous.endpoint.address
            text = f"host {socket.gethostname()} has not reached {address} for {silent:.0f} s"
            return self._fail(End(this_report("machine", text), silent))
        if end is not None and end.is_failure:
            return self._fail(end)
        if failed:
            return self._settle([rank.report() for rank in failed])
        if not ended:
            return RoundStatus.RUNNING
        is_stopping = bool(self.signals) or self.stopping_for is not None
        # All ranks here have ended well; if the store is gone, nobody can report that the others have, too.
        is_alone = self.rendezvous.silent_seconds > max(OTHER_HOST_GRACE, self.launch.lost_machine_seconds)
        done = is_stopping or self.rendezvous.is_done() or self.rendezvous.cut_off or is_alone
        return RoundStatus.OVER if done else RoundStatus.RUNNING

    def _report_signal(self) -> None:
        """Report the first signal: a machine leaves the others if they can do without it, else all stop."""
        if not self.signals or self.forwarded:
            return
        name, is_asked = self.signals[0].name, signals.counts_as(self.signals[0]) == signal.SIGTERM
        leaves = is_asked and self.terms.least < self.terms.most and not self.rendezvous.leads
        text = f"host {socket.gethostname()} {'leaves' if leaves else 'stops'} ({name})"
        self.rendezvous.report(End(this_report("leave" if leaves else "stop", text)))

    def _forward_signals(self) -> None:
        if (asked := signal.sigtimedwait(FORWARDED, 0)) is not None:
            # To one rank: with two, one might see it a step later, and all would save twice.
            one = next((rank for rank in self.ranks if rank.code is None), None)
            if one is not None:
                one.send(asked.si_signo)
        while self.forwarded < len(self.signals):
            for rank in self.ranks:
                rank.send(self.signals[self.forwarded])
            self.forwarded += 1
            grace = self.launch.stop_timeout_seconds if self.forwarded == 1 else SECOND_SIGNAL_GRACE
            self.kill_at = time.monotonic() + grace
        if self.kill_at is not None and time.monotonic() > self.kill_at and not self._give_more_time():
            self.killed_late += [rank.number for rank in self.ranks if rank.code is None]
            kill_ranks(self.ranks)

    def _give_more_time(self) -> bool:
        """Once, if the ranks are saving, give them the time of a save: they end by themselves if a step hangs."""
        if self.gave_more or self.forwarded > 1 or not attempt.read(self.notes_file).get(attempt.SAVING):
            return False
        self.gave_more, self.kill_at = True, time.monotonic() + self.launch.save_timeout_seconds
        return True

    def _has_failed(self, rank: RankProcess) -> bool:
        if rank.code == HANG_CODE and (report := rank.written_report()) is not None and report.kind == "hang":
            return True  # whatever else checkpoint.preempted_exit_code says
        if rank.code in (None, 0, self.launch.preempted_exit_code, *STOPPED):
            return False
        if not self.signals and self.stopping_for is None:
            return True
        # On the way out: killed by what we sent, or surprised by the end of others.
        report = rank.written_report()
        return report is not None and report.kind != "lost_peer"

    def _stop_for(self, end: End) -> None:
        """Ranks stop together at a step boundary; where a machine leaves or stops, its own ranks have been asked."""
        self.stopping_for = end
        if end.report.kind == "regroup":
            for rank in self.ranks:
                rank.send(signal.SIGTERM)
        else:
            self.kill_at = time.monotonic() + self.launch.stop_timeout_seconds

    def _regroup(self, stopping_for: End, end: End | None) -> RoundStatus:
        """Wait for the ranks that were asked to stop, then meet again."""
        if end is not None and end.is_failure:
            return self._fail(end)
        reports = [rank.written_report() for rank in self.ranks if rank.code is not None]
        final = [report for report in reports if report is not None and report.kind == "user"]
        if final:
            return self._settle(final)
        if any(rank.code is None for rank in self.ranks):
            return RoundStatus.RUNNING
        self._begin_recovery(stopping_for)
        self.rendezvous.state = replace(self.rendezvous.state, **self._run_so_far())
        return RoundStatus.AGAIN

    def _may_regroup(self) -> bool:
        """Ranks can stop without loss once they train, where they save."""
        return self.launch.saves and MARKS[-1] in self.notes and not self.signals

    def _settle(self, reports: list[Report]) -> RoundStatus:
        """Decide which failure is the cause, after a moment for an earlier one to show, here or on another machine."""
        now = time.monotonic()
        self.failed_at = self.failed_at or now
        cause = choose_cause(reports)
        lies_elsewhere = cause.kind == "lost_peer" and self.rendezvous.machines > 1
        ended = all(rank.code is not None for rank in self.ranks)
        if lies_elsewhere:
            grace = self.launch.lost_machine_seconds + 1 if self.terms.is_elastic else OTHER_HOST_GRACE
        else:
            is_sure = cause.kind != "lost_peer" and not self._is_final(cause)
            grace = 0.0 if ended else SURE_GRACE if is_sure else FAILURE_GRACE
        if now - self.failed_at < grace:
            return RoundStatus.RUNNING
        return self._fail(self.rendezvous.settle(End(cause, max(0.0, time.time() - cause.at))))

    def _fail(self, end: End) -> RoundStatus:
        """Start again, or end with this cause."""
        self._begin_recovery(end)
        self.cause = end.report
        if self._is_final(end.report):
            return RoundStatus.OVER
        state = self.rendezvous.state
        self.rendezvous.state = replace(state, restarts=state.restarts + 1, **self._run_so_far())
        return RoundStatus.AGAIN

    def _is_final(self, cause: Report) -> bool:
        """Whether there is no restart after this failure."""
        used_up = self.rendezvous.state.restarts >= self.terms.max_restarts
        return cause.kind == "user" or used_up or bool(self.signals)

    # ---- the run so far ----------------------------------------------------------------------------------------------

    def _run_so_far(self) -> dict[str, Any]:
        """What the next round must know of the run."""
        state = self.rendezvous.state
        return {"folder": state.folder or self.notes.get("folder"), "begun": state.begun or "loaded" in self.notes}

    def _begin_recovery(self, end: End) -> None:
        """Count the time from the fault on. A recovery that was under way has failed, which its record shows."""
        self._read_notes()
        if self.recovery is not None:
            self._log_recovery(self.recovery)
        now = time.time()
        self.recovery = Recovery(end.report, now - end.delay, now)

    def _read_notes(self) -> None:
        """See how far the ranks have come; at the first step a recovery is over."""
        if MARKS[-1] in self.notes or not self.ranks:
            return
        self.notes = attempt.read(self.notes_file)
        if self.recovery is not None and self.rendezvous.leads:
            self.recovery.reached = {name: at for name, at in self.notes.items() if name in MARKS}
            if MARKS[-1] in self.notes:
                print_line(self.recovery.line())
                self._log_recovery(self.recovery)
        if MARKS[-1] in self.notes:
            self.recovery = None

    def _log_recovery(self, recovery: Recovery) -> None:
        if self.rendezvous.leads:
            recovery.append_to_log(self._run_so_far()["folder"], self.notes.get("step"))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _show_way_on(self) -> None:
        """Print how to go on with a run that has made a step."""
        folder, trained = self._run_so_far()["folder"], MARKS[-1] in self.notes or self.rendezvous.state.begun
        for line in self.launch.way_on(folder) if self.rendezvous.leads and folder is not None and trained else ():
            to_stderr(line)

    def exit_code(self) -> int:
        """Show how the job ended and return the exit code."""
        cause = self.cause
        if (
            cause is None and not self.ranks and self.rendezvous.thread is not None
        ):  # it ended before this machine joined
            end = self.rendezvous.end
            cause = end.report if end is not None and end.is_failure else None
        if cause is not None:
            try:
                return show(cause, self.launch.options.debug)
            finally:
                self._show_way_on()
        if self.killed_late:
            to_stderr(
                f"error: {numbered('rank', self.killed_late)} did not stop within"
                f" {self.launch.stop_timeout_seconds:g} s: killed (comm.stop_timeout_seconds gives more time)"
            )
        elif self.signals and any(rank.number == 0 and (rank.code or 0) < 0 for rank in self.ranks):
            print("interrupted", file=sys.stderr)  # before the rank could print it
        preempted = self.launch.preempted_exit_code
        is_cut_short = any(rank.code not in (0, preempted, *STOPPED) for rank in self.ranks)
        if self.stopping_for is not None and not self.signals and is_cut_short:  # another machine stops
            if not self.killed_late:
                to_stderr(f"error: stopped in the middle of a step: {self.stopping_for.report.text}")
            return 128 + signal.SIGTERM
        is_preempted = all(rank.code in (0, preempted) for rank in self.ranks)
        first = signals.counts_as(self.signals[0]) if self.signals else None
        if first is not None and not (first == signal.SIGTERM and is_preempted):
            return 128 + first
        return next((rank.code for rank in self.ranks if rank.code in (preempted, *STOPPED)), None) or 0
