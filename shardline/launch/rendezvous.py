"""How the launchers of a job come together for each round, and what they report to each other during one.

The launcher that serves the store leads (leader.py); what it decides is in the store, where the others read it
(rounds.py). Each launcher has one thread that talks to the store, because an answer may never come where the network is
cut. A launcher that cannot reach the store (`cut_off`) ends its ranks before the leader gives it up, so that two rounds
never write at the same time.

A job without restarts has a single round. There a silent machine is not given up, and no launcher counts as cut off,
because a short break in the network need not end the job. Its ranks notice one that lasts.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from shardline.comm.store import SignedStore, derived_key
from shardline.errors import UserError
from shardline.launch import rounds
from shardline.launch.endpoint import Endpoint, print_line
from shardline.launch.leader import Leader
from shardline.launch.rounds import (
    End,
    JobHistory,
    LeaderRecord,
    MachineRecord,
    Peer,
    Round,
    Terms,
    decode_leader,
    decode_machine,
    decode_round,
    read_end,
    write_end,
)

SCOPE = "shardline/launchers"
STRANGER_SECONDS = 10.0  # for a valid signature of the leader, whose record a stranger may have overwritten

FENCE = 0.6  # fraction of the time after which a silent machine is given up; by then its launcher ends its ranks


class Rendezvous:
    """Where a launcher waits for its rounds. `ranks` is how many it starts on this machine.

    `misfit(ranks)` returns why that many ranks cannot run the layout, `may_regroup()` whether the ranks of the running
    round could stop without loss. `secret` signs what launchers write; an empty one is known to everybody.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        terms: Terms,
        ranks: int,
        lost_seconds: float,
        misfit: Callable[[int], str],
        may_regroup: Callable[[], bool],
        secret: bytes = b"",
    ) -> None:
        self._secret, self._met_stranger = secret, False
        self.endpoint, self.terms, self.ranks, self.lost_seconds = endpoint, terms, ranks, lost_seconds
        self.misfit, self.may_regroup = misfit, may_regroup
        self.state = JobHistory()
        self.round: Round | None = None  # the last one
        self.thread: StoreThread | None = None
        self.closed = False
        self.token = secrets.token_hex(8)

    @property
    def leads(self) -> bool:
        return self.endpoint.server is not None

    # ---- between two rounds ------------------------------------------------------------------------------------------

    def next_round(self, reason: str = "") -> Round | None:
        """Wait for the round that this machine is part of; None where the job has ended, or this launcher has left.

        `reason` is why there is a next one.
        """
        self.endpoint.announce_after(reason)
        found = self._wait_for_round()
        if found is not None:
            self.round = found
            self.state = replace(found.state, round=found.number + 1)
        return found

    def _wait_for_round(self) -> Round | None:
        while True:
            if self.thread is None or self.thread.cut_off:
                self._open()
            thread = self._talking
            thread.ready = self.state
            thread.wake.set()
            while not thread.cut_off:
                if thread.round is not None and thread.round.number >= self.state.round:
                    return thread.round
                if thread.refusal:
                    raise UserError(thread.refusal)
                if thread.is_over and self.round is None and not self.terms.is_elastic:
                    raise UserError(f"--rdzv-endpoint {self.endpoint.address}: the launcher there has ended")
                if self.closed or thread.is_over:
                    return None
                if thread.end is not None and thread.end.report.kind in ("user", "stop"):
                    return None
                self.endpoint.pause(thread.waits_for, rounds.PERIOD / 8)
                thread = self._talking

    def _open(self) -> None:
        """Connect to the store, which is a new one if the machine that serves it was restarted."""
        if self.thread is not None:
            self.thread.close()
        first = self.endpoint.server is None
        store = SignedStore(self.endpoint.open(), SCOPE, derived_key(self._secret, "leader"), self._ignore)
        if first and self.leads and not self._secret and self.terms.most > 1:
            print_line(
                f"note: this job has no secret: whoever reaches {self.endpoint.address} can stop or change it;"
                " SHARDLINE_JOB_SECRET on every machine keeps others out"
            )
        self.thread = StoreThread(store, self, Leader(store, self) if self.leads else None)

    def _ignore(self, name: str) -> None:
        if not self._met_stranger:
            print_line(f"note: {name} in the store at {self.endpoint.address} was not written by this job: ignored")
        self._met_stranger = True

    def session_store(self, job: SignedStore, session: str) -> SignedStore:
        """What belongs to one session of a leader."""
        key = derived_key(self._secret, "session", session)
        return SignedStore(job.base, f"{SCOPE}/{session}", key, job.on_stranger)

    def rank_key(self) -> str:
        """The key of what the ranks of this round write, in hexadecimal."""
        assert self.round is not None
        return derived_key(self._secret, "ranks", self._talking.session, self.round.number).hex()

    @property
    def _talking(self) -> StoreThread:
        assert self.thread is not None
        if self.thread.error is not None:
            raise self.thread.error
        return self.thread

    # ---- during a round ----------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """The position of this machine in the round."""
        assert self.round is not None
        return self.round.place(self._talking.index)

    @property
    def machines(self) -> int:
        assert self.round is not None
        return len(self.round.peers)

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the store for the ranks; those of a single machine need no name server."""
        return self.endpoint.near if self.machines == 1 else self.endpoint.host, self.endpoint.port

    @property
    def end(self) -> End | None:
        """Why this round ended, if some launcher has reported it."""
        return self._talking.end

    def report(self, end: End) -> None:
        """Report to the other launchers why this round ends."""
        self._talking.outbox = end
        self._talking.wake.set()

    def settle(self, end: End) -> End:
        """Report why this round ended, and return what counts: the failure that was reported first."""
        self.report(end)
        thread, deadline = self._talking, time.monotonic() + 8 * rounds.PERIOD
        while thread.outbox is not None and not thread.cut_off and time.monotonic() < deadline:
            time.sleep(0.02)
        return thread.end if thread.end is not None and thread.end.is_failure else end

    @property
    def cut_off(self) -> bool:
        return self._talking.cut_off

    @property
    def silent_seconds(self) -> float:
        return self._talking.silent_seconds

    def is_done(self) -> bool:
        """Report that this machine has finished, and return whether all have."""
        thread = self._talking
        if not thread.finished:
            thread.finished = True
            thread.wake.set()
        return thread.all_done or self.machines == 1

    def close(self) -> None:
        """Leave the job; the launcher that serves the store stays until the others have left, or for a few seconds."""
        self.closed = True
        if self.thread is None:
            return
        self.thread.leave()
        if self.thread.leader is not None:
            self.thread.leader.linger()
        self.thread.close()


class StoreThread:
    """The thread of a launcher that talks to one store. The main thread reads and sets its attributes."""

    def __init__(self, job: SignedStore, own: Rendezvous, leader: Leader | None) -> None:
        self.job, self.own, self.leader = job, own, leader
        self.is_elastic, self.fence_seconds = own.terms.is_elastic, FENCE * own.lost_seconds
        self.ready = own.state
        self.outbox: End | None = None
        self.finished = self.all_done = self.is_over = self.leaving = self.has_left = False
        self.round: Round | None = None
        self.end: End | None = None
        self.refusal, self.waits_for = "", "the first machine"
        self.reached = time.monotonic()
        self.error: BaseException | None = None
        self.wake = threading.Event()  # there is something to report
        self.session = ""
        self.store = job  # that of the session, once that is known
        self._done = -1
        self._beat = 0
        self._unknown_since: float | None = None  # since when the leader's record is known not to be this job's
        self._closed = threading.Event()
        self.index = -1
        self.me = Peer(-1, socket.gethostname(), os.getpid(), own.ranks, own.endpoint.number, own.terms, own.token)
        self._thread = threading.Thread(target=self._run, name="shardline-store", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the store has answered."""
        return time.monotonic() - self.reached

    @property
    def cut_off(self) -> bool:
        """The store has not answered for so long that the leader may soon give this machine up."""
        gives_up = self.is_elastic or self.round is None
        return self.leader is None and gives_up and self.silent_seconds > self.fence_seconds

    def leave(self) -> None:
        """Report that this launcher leaves, if the store answers."""
        self.leaving = True
        self.wake.set()
        deadline = time.monotonic() + 1
        while not (self.has_left or self.cut_off) and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End the thread. One that hangs in the store is left alone: the command line ends the process all the same."""
        self._closed.set()
        self.wake.set()
        if not self.cut_off:
            self._thread.join(8 * rounds.PERIOD)

    def _run(self) -> None:
        while not self._closed.is_set():
            started = time.monotonic()
            self.wake.clear()
            try:
                self._exchange()
                self.reached = started
            except RuntimeError:  # of the store: it is gone or slow, `silent_seconds` tells for how long
                pass
            except BaseException as error:
                self.error = error
                return
            self.wake.wait(rounds.PERIOD)

    def _exchange(self) -> None:
        decided = self._decisions()
        if decided is None:
            self.has_left = self.leaving
            return
        if self.index < 0:
            self._take_place()
        if self.leaving and self.round is not None and self.outbox is not None:
            self._exchange_ends(self.round)  # the reason why it leaves was not sent yet
        if self.finished and self.round is not None:
            self._done = self.round.number
        self._beat += 1
        own = self._record()
        self.store.write(f"machine/{self.index}", asdict(own))
        if self.leaving:
            self.has_left = True
            if self.leader is not None:
                self.leader.own_record = own
                self.leader.alive()
            return
        if self.round is not None:
            self._exchange_ends(self.round)
        if self.leader is not None:
            self.leader.lead(own)
            decided = self.leader.record
        self._follow(decided)

    def _decisions(self) -> LeaderRecord | None:
        """What the leader has decided; None where that is not known, or was not written by this job."""
        found = self.leader.record if self.leader is not None else self.job.read("leader", decode_leader)
        if found is not None and self.session in ("", found.session):
            if not self.session:
                self.session = found.session
                self.store = self.own.session_store(self.job, found.session)
            self._unknown_since = None
            return found
        self._unknown_since = self._unknown_since or time.monotonic()
        if self.job.met_stranger and self.index < 0 and time.monotonic() - self._unknown_since > STRANGER_SECONDS:
            self.refusal = (
                f"--rdzv-endpoint {self.own.endpoint.address}: the launcher there has another secret, or none: give all"
                " machines the same SHARDLINE_JOB_SECRET or --rdzv-secret-file"
            )
        return None

    def _record(self) -> MachineRecord:
        return MachineRecord(self.me, self._beat, self.ready, self._done, self.leaving)

    def _take_place(self) -> None:
        """Announce this launcher in the first place that is free."""
        for index in itertools.count():
            self.me = replace(self.me, index=index)
            if self.store.offer(f"machine/{index}", asdict(self._record()), decode_machine) is None:
                self.index = index
                return

    def _exchange_ends(self, current: Round) -> None:
        """Read why the round has ended, or write it if known, again even if it is there already."""
        reported, number = self.outbox, current.number
        known = reported or self.end
        self.end = read_end(self.store, number) if known is None else write_end(self.store, number, known)
        self.outbox = None if self.outbox is reported else self.outbox  # the main thread may wait for this

    def _follow(self, decided: LeaderRecord) -> None:
        """Apply what the leader has decided."""
        self.refusal = self.store.read(f"refused/{self.me.token}", str) or ""
        self.is_over, self.waits_for = decided.over, decided.waits
        if self.round is not None and decided.done == self.round.number:
            self.all_done = True
        number = decided.latest
        if number < self.ready.round or (self.round is not None and number <= self.round.number):
            return
        found = self.store.read(f"round/{number}", decode_round)
        if found is not None and any((peer.index, peer.token) == (self.index, self.me.token) for peer in found.peers):
            self.end, self.outbox, self.finished, self.all_done = None, None, False, False
            self.round = found
