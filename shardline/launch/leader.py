"""The launcher that serves the store decides which machines take part in a round, and watches whether they are alive.

It compares beats by its own clock alone. A machine that is silent for `comm.lost_machine_seconds` is given up, except
in the only round of a job without restarts.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from shardline.comm.store import SignedStore
from shardline.launch import rounds
from shardline.launch.endpoint import print_line
from shardline.launch.rounds import (
    End,
    JobHistory,
    LeaderRecord,
    MachineRecord,
    Peer,
    Round,
    decode_machine,
    read_end,
    write_end,
)
from shardline.report import Report, this_report
from shardline.words import listed, numbered

if TYPE_CHECKING:
    from shardline.launch.rendezvous import Rendezvous

LAST_CALL = 10.0  # seconds that the first round waits for more machines once there are enough
LINGER = 3.0


@dataclass
class Leader:
    """Decides who takes part. Runs in the thread of the launcher that serves the store.

    `job` holds its own record, `store` all that belongs to its session.
    """

    job: SignedStore
    own: Rendezvous
    record: LeaderRecord = field(default_factory=lambda: LeaderRecord(secrets.token_hex(16)))
    peers: dict[int, Peer] = field(default_factory=dict)
    records: dict[int, MachineRecord] = field(default_factory=dict)  # the last one of each peer
    refused: dict[str, str] = field(default_factory=dict)  # token -> why
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)  # index -> beat, and when it was first seen
    came: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # those of the gone that reported it
    index: int = 0  # of this machine
    looked: float = field(default_factory=time.monotonic)
    last: Round | None = None
    under_way: bool = False
    since: float = field(default_factory=time.monotonic)  # when the wait for the next round began
    enough_since: float | None = None

    def __post_init__(self) -> None:
        self.store = self.own.session_store(self.job, self.record.session)
        self.own_record: MachineRecord | None = None
        self.sealed_round: tuple[str, str] | None = None  # its name in the store, and what stands there
        self.write()

    def write(self) -> None:
        """Write all decisions, again even if they are there already."""
        if self.sealed_round is not None:
            self.store.store.set(*self.sealed_round)
        for token, why in self.refused.items():
            self.store.write(f"refused/{token}", why)
        self.job.write("leader", asdict(self.record))

    def lead(self, mine: MachineRecord) -> None:
        """Look at all machines once, and decide what there is to decide. `mine` is this machine's record."""
        self.index, self.own_record = mine.peer.index, mine
        mismatch = self._meet_newcomers()
        alive = self.alive()
        ready = {index: self.records[index].ready for index in alive}
        waiting = [index for index in alive if self._is_waiting(index, ready[index])]
        if self.last is not None:
            self._watch_members(self.last, alive, waiting)
        if self.under_way:
            self._look_for_more(waiting)
        else:
            self._gather(alive, waiting, ready, mismatch)
        self.write()

    # ---- who is there ------------------------------------------------------------------------------------------------

    def _meet_newcomers(self) -> str:
        """Admit or refuse newcomers; return the difference of one that was started with other options."""
        mismatch = ""
        for index, record in self._newcomers():
            peer = record.peer
            for other in list(self.peers.values()):
                if other.token == peer.token:  # it was cut off and came again
                    self.gone.add(other.index)
            refusal = self._refusal(peer, self.came.setdefault(index, time.monotonic()))
            if refusal is None:
                continue
            if refusal:
                difference = self.own.terms.difference(peer.terms)
                if difference and record.ready.round == 0:  # not one that is left over from another job
                    mismatch = f"{difference} on {peer.host}"
                self._refuse(peer, refusal)
                print_line(f"note: the launcher on host {peer.host} (pid {peer.pid}) is refused: {refusal}")
                continue
            self.peers[index], self.records[index] = peer, record
            self.seen[index] = (-1, time.monotonic())
        return mismatch

    def _newcomers(self) -> Iterator[tuple[int, MachineRecord]]:
        """Launchers that are neither admitted nor refused, by place. Places fill in order: a free one is the end."""
        index = 0
        while True:
            if index not in self.peers and index not in self.gone:
                record = self.store.read(f"machine/{index}", decode_machine)
                if record is None or record.peer.index != index:
                    return
                yield index, record
            index += 1

    def _refusal(self, peer: Peer, since: float) -> str | None:
        """Why a newcomer must go, "" where it may stay, None where that is not known yet: its rival may be dead."""
        terms = self.own.terms
        difference = peer.terms.difference(terms)
        if difference:
            return f"{difference} on {socket.gethostname()}"
        if self.last is not None and not terms.is_elastic:
            return f"--rdzv-endpoint {self.own.endpoint.address}: a job is under way there"
        rivals = [other for other in self._present() if other.number is not None and other.number == peer.number]
        if not rivals:
            return ""
        if self.seen[rivals[0].index][1] < since + 2 * rounds.PERIOD:
            return None
        return (
            f"--node-rank {peer.number}: {rivals[0].host} (pid {rivals[0].pid}) has this number;"
            f" give each machine its own, 0 to {terms.most - 1}"
        )

    def _refuse(self, peer: Peer, why: str) -> None:
        self.refused[peer.token] = why
        self.gone.add(peer.index)

    def _present(self) -> Iterator[Peer]:
        now = time.monotonic()
        for index, peer in list(self.peers.items()):
            if index not in self.gone and now - self.seen[index][1] < self.own.lost_seconds:
                yield peer

    def alive(self) -> list[int]:
        """The machines whose heartbeat has changed lately."""
        asked = [index for index in self.peers if index not in self.gone]
        now = time.monotonic()
        if now - self.looked > self.own.lost_seconds / 2:  # this process itself was stopped for a while
            self.seen = {index: (beat, now) for index, (beat, _) in self.seen.items()}
        self.looked = now
        gives_up = self.own.terms.is_elastic or not self.under_way
        for index in asked:
            is_own = self.own_record is not None and index == self.index  # whatever a stranger has written there
            record = self.own_record if is_own else self.store.read(f"machine/{index}", decode_machine)
            if record is not None and record.peer.token != self.peers[index].token:
                self.refused[record.peer.token] = "its place in the store was taken by another machine: start it again"
            elif record is not None and record.beat > self.seen[index][0]:  # an older one is a stranger's copy
                self.records[index], self.seen[index] = record, (record.beat, now)
            if self.records[index].left:
                self.gone.add(index)
                self.left.add(index)
            elif gives_up and now - self.seen[index][1] > self.own.lost_seconds:
                self.gone.add(index)
        return [index for index in asked if index not in self.gone]

    def _is_waiting(self, index: int, state: JobHistory) -> bool:
        """Whether a machine waits for the next round; those of the last one may still be in it."""
        if self.last is None or all(peer.index != index for peer in self.last.peers):
            return True
        return state.round > self.last.number

    # ---- a round -----------------------------------------------------------------------------------------------------

    def _watch_members(self, current: Round, alive: Sequence[int], waiting: Sequence[int]) -> None:
        """End the round if a machine is lost, even if the others are stopping for another reason."""
        lost = [peer for peer in current.peers if peer.index not in alive]
        pending = any(peer.index in alive and peer.index not in waiting for peer in current.peers)
        end = read_end(self.store, current.number)
        if end is not None:  # a machine that leaves now has read it
            lost = [peer for peer in lost if peer.index not in self.left]
        done = all(self.records[peer.index].done >= current.number for peer in current.peers)
        if done:
            self.record = replace(self.record, done=current.number)
        if lost and pending and not done and (end is None or not end.is_failure):
            silent = time.monotonic() - self.seen[lost[0].index][1]
            why = "ended" if lost[0].index in self.left else f"is lost: no sign of life for {silent:.0f} s"
            report = Report("machine", -1, lost[0].host, lost[0].pid, f"host {lost[0].host} {why}", at=time.time())
            end = write_end(self.store, current.number, End(report, silent))
        if end is not None and self.under_way:
            self.under_way, self.since, self.enough_since = False, time.monotonic(), None

    def _look_for_more(self, waiting: Sequence[int]) -> None:
        """Ask a running round to stop if waiting machines would make it larger."""
        assert self.last is not None
        if not waiting:
            return
        members = [peer.index for peer in self.last.peers]
        larger = self._choose([*members, *waiting])
        new = [self.peers[index].host for index in larger if index not in members]
        if len(larger) <= len(members):
            self._wait_for("a place: the job runs with as many machines as it can use")
        elif not self.own.may_regroup():
            self._wait_for("the running ranks: they can stop after their first step, with checkpoint.enable")
        else:
            text = f"host {listed(new)} {'join' if len(new) > 1 else 'joins'}"
            write_end(self.store, self.last.number, End(this_report("regroup", text)))

    def _gather(
        self, alive: Sequence[int], waiting: Sequence[int], ready: dict[int, JobHistory], mismatch: str
    ) -> None:
        """Decide on the next round where enough machines wait for it, and all of the last one do.

        Before the first round, a machine that was started differently is one that the others would wait for in vain.
        """
        chosen, now = self._choose(waiting), time.monotonic()
        everybody = len(waiting) == len(alive)
        silent = [index for index in chosen if now - self.seen[index][1] > 8 * rounds.PERIOD]  # may be dead
        if chosen and everybody and not silent:
            self.enough_since = self.enough_since or now
            called = self.last is not None or now - self.enough_since > LAST_CALL
            if called or len(chosen) == self.own.terms.most:
                self._decide(chosen, waiting, ready)
                return
        if not everybody:
            what = "ranks that are stopping"
        elif silent:
            what = f"a sign of life of host {self.peers[silent[0]].host}"
        else:
            what = self._missing(waiting, chosen)
        endpoint, why = self.own.endpoint, ""
        if all(state.round == 0 for state in ready.values()):
            why = mismatch
        if now - self.since > endpoint.timeout_seconds:
            why = why or f"waited {endpoint.timeout_seconds:g} s at {endpoint.address} for {what}"
        if everybody and not chosen and why:
            self.refused |= {self.peers[index].token: why for index in waiting}
        self._wait_for(what)

    def _wait_for(self, what: str) -> None:
        self.record = replace(self.record, waits=what)

    def _choose(self, indices: Sequence[int]) -> list[int]:
        """The machines of this list that fit the layout, in the order of their ranks; none if there are too few.

        The leader comes first: the store's machine has rank 0, and so the run's folder.
        """
        terms = self.own.terms
        order = [index for index in self.peers if index in indices]
        if self.own.endpoint.number is not None:
            order.sort(key=lambda index: self.peers[index].number or 0)
        else:
            members = [] if self.last is None else [peer.index for peer in self.last.peers]
            order.sort(key=lambda index: (index != self.index, index not in members, index))
        for count in range(min(len(order), terms.most), terms.least - 1, -1):
            if not self.own.misfit(sum(self.peers[index].ranks for index in order[:count])):
                return order[:count]
        return []

    def _missing(self, waiting: Sequence[int], chosen: Sequence[int]) -> str:
        """What a round waits for; of numbered machines, the missing ones are named."""
        terms, there = self.own.terms, [self.peers[index] for index in waiting]
        if not chosen and len(there) >= terms.least:
            reason = self.own.misfit(sum(peer.ranks for peer in there))
            return f"machines with which the layout fits ({reason})"
        hosts = listed([peer.host for peer in there])
        if self.own.endpoint.number is not None:
            missing = set(range(terms.most)) - {peer.number for peer in there}
            return f"{numbered('machine', missing)} of {terms.most} (present: {hosts})"
        least = f"at least {terms.least}" if terms.least < terms.most else str(terms.most)
        return f"more machines ({len(there)} of {least} {'is' if len(there) == 1 else 'are'} there: {hosts})"

    def _decide(self, chosen: Sequence[int], waiting: Sequence[int], ready: dict[int, JobHistory]) -> None:
        known = max((ready[index] for index in chosen), key=lambda state: (state.begun, state.round))
        number = max([ready[index].round for index in chosen] + ([self.last.number + 1] if self.last else []))
        state = replace(known, round=number, restarts=max(ready[index].restarts for index in chosen))
        self.last = Round(number, tuple(self.peers[index] for index in chosen), state)
        name = f"round/{number}"
        self.sealed_round = (name, self.store.sealed(name, asdict(self.last)))
        self.record = replace(self.record, latest=number)
        self.under_way = True
        if not self.own.terms.is_elastic:
            address, nodes = self.own.endpoint.address, self.own.terms.nodes
            why = f"--rdzv-endpoint {address}: {nodes} machines are there already (--nnodes)"
            for index in set(waiting) - set(chosen):
                self._refuse(self.peers[index], why)

    def linger(self) -> None:
        """Stay until the others have gone, or for a few seconds: the store ends with this process."""
        self.record = replace(self.record, over=True)
        with contextlib.suppress(RuntimeError):
            self.write()
        deadline = time.monotonic() + LINGER
        while time.monotonic() < deadline and any(peer.index != self.index for peer in self._present()):
            time.sleep(rounds.PERIOD / 8)
