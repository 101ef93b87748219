"""Which machines take part, and for how long: the rounds of a job that is started again when something fails.

The launcher that serves the store leads: what it decides is in the store for the others to read.

    count, machine/I      every launcher that ever came, by the order of arrival
    beat/I                grows as long as that launcher lives and is not cut off; "left" when it went
    ready/I               the round that it waits for, and what it knows of the rounds before
    latest, round/N       the leader's: the machines of round N, in the order of their ranks
    end/N                 why round N ended; whoever knows it writes it, a failure may replace what is none
    done/N                how many machines have finished it
    refused/I, over       the leader's: why that launcher must go; the job has ended

Each launcher has one thread that talks to the store, because an answer may never come where the network is cut. Beats
are compared by the leader's clock alone. A launcher that cannot beat ends its ranks (`cut_off`) before the leader gives
it up, so that two attempts never write at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shardline.errors import UserError
from shardline.parallel.report import Report
from shardline.training.meeting import PATIENCE, Meeting

PERIOD = 0.25
LAST_CALL = 10.0  # seconds that the first meeting waits for more machines once there are enough
FENCE = 0.6  # part of the time after which a silent machine is given up; its launcher ends its ranks by then
LINGER = 3.0
NO_FAILURE = ("regroup", "leave", "stop")


@dataclass(frozen=True)
class Terms:
    """What every machine must be started with alike."""

    least: int
    most: int
    job: str
    max_restarts: int

    def difference(self, other: Terms) -> str:
        """The first option that differs, with this machine's value and the other's."""
        nodes = tuple(f"{one.least}:{one.most}" if one.least < one.most else str(one.most) for one in (self, other))
        pairs = {
            "nnodes": nodes,
            "rdzv-id": (self.job, other.job),
            "max-restarts": (str(self.max_restarts), str(other.max_restarts)),
        }
        differing = [(name, *values) for name, values in pairs.items() if values[0] != values[1]]
        return "".join(f"--{name} differs: {own} here, {theirs}" for name, own, theirs in differing[:1])


@dataclass(frozen=True)
class Memory:
    """What outlives an attempt. Every launcher remembers it, because each may be the one that is left."""

    round: int = 0  # the next one
    restarts: int = 0
    folder: str | None = None  # of the run
    begun: bool = False  # that run has its weights: from now on it is resumed


@dataclass(frozen=True)
class Peer:
    """A launcher, as it announces itself."""

    index: int
    host: str
    pid: int
    ranks: int
    number: int | None
    terms: Terms


@dataclass(frozen=True)
class Round:
    number: int
    peers: tuple[Peer, ...]
    memory: Memory

    @property
    def ranks(self) -> int:
        return sum(peer.ranks for peer in self.peers)

    def first_rank(self, index: int) -> int:
        """The first rank of a machine; its place among machines is that of its index in `peers`."""
        return sum(peer.ranks for peer in self.peers[: self.place(index)])

    def place(self, index: int) -> int:
        return [peer.index for peer in self.peers].index(index)


@dataclass(frozen=True)
class End:
    """Why a round ended. `delay`: seconds from the fault to this word of it, by the clock of who tells."""

    report: Report
    delay: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.report.kind not in NO_FAILURE


class Gathering(Meeting):
    """Torchrun's rendezvous handler for jobs that restart; also the line between their launchers."""

    def __init__(
        self,
        endpoint: str,
        terms: Terms,
        number: int | None,
        ranks: int,
        timeout_seconds: float,
        lost_seconds: float,
        misfit: Callable[[int], str],
        may_regroup: Callable[[], bool],
    ) -> None:
        super().__init__(endpoint, terms.most, number, terms.job, timeout_seconds)
        self.terms, self.ranks, self.lost_seconds = terms, ranks, lost_seconds
        self.misfit, self.may_regroup = misfit, may_regroup
        self.memory = Memory()
        self.line: Line | None = None
        self.stopped_for_regroup = False
        self.why = ""  # this machine meets again

    @property
    def leads(self) -> bool:
        return self.server is not None

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the round that this machine is part of."""
        self.stopped_for_regroup = False
        self.patience, self.said = time.monotonic() + PATIENCE, ""
        met = self._wait_for_round()
        self.round: Round = met
        self.memory = replace(met.memory, round=met.number + 1)
        place = met.place(self._line.index)
        return RendezvousInfo(self._line.store, place, len(met.peers), RendezvousStoreInfo(*self.meeting_place))

    @property
    def meeting_place(self) -> tuple[str, int]:
        """The store's address for ranks; those of a single machine need no network."""
        return "127.0.0.1" if len(self.round.peers) == 1 else self.host, self.port

    def _wait_for_round(self) -> Round:
        while True:
            if self.line is None or self.line.cut_off:
                self._open()
            line = self._line
            line.ready = self.memory
            while not line.cut_off:
                if line.round is not None and line.round.number >= self.memory.round:
                    return line.round
                if line.refusal:
                    raise UserError(line.refusal)
                if line.is_over or (line.end is not None and line.end.report.kind in ("user", "stop")):
                    raise RendezvousGracefulExitError("the job has ended")
                self._pause(line.waits_for)

    def _pause(self, what: str) -> None:
        if time.monotonic() > self.patience and self.said != what:
            say(f"{self.why}{'; ' if self.why else ''}waiting for {what} at {self.endpoint}")
            self.said, self.why = what, ""
        time.sleep(PERIOD / 2)

    def _open(self) -> None:
        """Reach the store, which is another one where the machine that served it was started again."""
        if self.line is not None:
            self.line.close()
        self.deadline = time.monotonic() + self.timeout_seconds
        if self.server is None:
            self._serve()
        store = dist.PrefixStore("shardline/gathering", self._connect())
        leader = None if self.server is None else Leader(store, self)
        self.line = Line(store, self, leader)

    @property
    def _line(self) -> Line:
        assert self.line is not None
        return self.line

    # ---- during a round ----------------------------------------------------------------------------------------------

    @property
    def end(self) -> End | None:
        """Why this round ended, if somebody told."""
        return self._line.end

    def tell(self, end: End) -> None:
        self._line.outbox = end

    def settle(self, end: End) -> End:
        """Tell why this round ended; what counts is the failure that was told first."""
        line = self._line
        line.outbox = end
        deadline = time.monotonic() + 8 * PERIOD
        while line.outbox is not None and not line.cut_off and time.monotonic() < deadline:
            time.sleep(0.02)
        return line.end if line.end is not None and line.end.is_failure else end

    @property
    def cut_off(self) -> bool:
        return self._line.cut_off

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._line.reached

    def is_done(self) -> bool:
        """This machine has finished; whether all have."""
        self._line.finished = True
        return self._line.all_done

    def machines(self) -> int:
        return len(self.round.peers)

    def num_nodes_waiting(self) -> int:
        """Torchrun's agent asks; it meets again when its ranks have stopped for that."""
        return int(self.stopped_for_regroup)

    def close(self) -> None:
        """Say good-bye; who serves the store stays until the others have heard, or for a few seconds."""
        if self.line is None:
            return
        self.line.leave()
        if self.line.leader is not None and not self.line.cut_off:
            self.line.leader.linger()
        self.line.close()


class Line:
    """The thread of a launcher that talks to one store. Its attributes are read and set by the main thread."""

    def __init__(self, store: dist.Store, gathering: Gathering, leader: Leader | None) -> None:
        self.store, self.leader = store, leader
        self.fence_seconds = FENCE * gathering.lost_seconds
        self.ready = gathering.memory
        self.outbox: End | None = None
        self.finished = self.all_done = self.is_over = self.leaving = self.said_goodbye = False
        self.round: Round | None = None
        self.end: End | None = None
        self.refusal, self.waits_for = "", "the first machine"
        self.reached = time.monotonic()
        self._told: Memory | None = None
        self._told_done = -1
        self._beat = 0
        self._closed = threading.Event()
        self.index = -1
        self._me = Peer(-1, socket.gethostname(), os.getpid(), gathering.ranks, gathering.number, gathering.terms)
        self._thread = threading.Thread(target=self._run, name="shardline-gathering", daemon=True)
        self._thread.start()

    @property
    def cut_off(self) -> bool:
        """The store has not answered for so long that the leader may soon give this machine up."""
        return self.leader is None and time.monotonic() - self.reached > self.fence_seconds

    def leave(self) -> None:
        self.leaving = True
        deadline = time.monotonic() + 1
        while not (self.said_goodbye or self.cut_off) and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """A thread that comes back from the store while the interpreter ends would abort the process."""
        self._closed.set()
        if not self.cut_off:
            self._thread.join(8 * PERIOD)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            started = time.monotonic()
            try:
                self._exchange()
            except (RuntimeError, ValueError, KeyError):
                continue
            self.reached = started

    def _exchange(self) -> None:
        if self.index < 0:
            self._announce()
        if self.leaving:
            self.store.set(f"beat/{self.index}", "left")
            self.said_goodbye = True
            if self.leader is not None:
                self.leader.alive()
            return
        self._beat += 1
        self.store.set(f"beat/{self.index}", str(self._beat))
        if self._told != self.ready:
            told = self.ready
            self.store.set(f"ready/{self.index}", json.dumps(asdict(told)))
            self._told = told
        if self.round is not None:
            self._exchange_ends(self.round)
        if self.leader is not None:
            self.leader.lead(self.index)
        self._hear()

    def _announce(self) -> None:
        self.index = self.store.add("count", 1) - 1
        self.store.set(f"beat/{self.index}", "0")
        self.store.set(f"ready/{self.index}", json.dumps(asdict(self.ready)))
        self._me = replace(self._me, index=self.index)
        self.store.set(f"machine/{self.index}", json.dumps(asdict(self._me)))

    def _exchange_ends(self, current: Round) -> None:
        if self.outbox is not None:
            end = tell_end(self.store, current.number, self.outbox)
            self.end, self.outbox = end, None  # in this order: the main thread waits for the second
        else:
            self.end = read_end(self.store, current.number)
        if self.finished and self._told_done < current.number:
            self.store.add(f"done/{current.number}", 1)
            self._told_done = current.number
        if self._told_done == current.number:
            self.all_done = self.store.add(f"done/{current.number}", 0) >= len(current.peers)

    def _hear(self) -> None:
        if self.store.check([f"refused/{self.index}"]):
            self.refusal = self.store.get(f"refused/{self.index}").decode()
        self.is_over = self.store.check(["over"])
        if self.store.check(["waits"]):
            self.waits_for = self.store.get("waits").decode()
        if not self.store.check(["latest"]):
            return
        number = int(self.store.get("latest"))
        if number < self.ready.round or (self.round is not None and number <= self.round.number):
            return
        found = read_round(self.store, number)
        if any(peer.index == self.index for peer in found.peers):
            self.end, self.outbox, self.finished, self.all_done = None, None, False, False
            self.round = found


@dataclass
class Leader:
    """Decides who takes part. Runs in the thread of the launcher that serves the store."""

    store: dist.Store
    gathering: Gathering
    peers: dict[int, Peer] = field(default_factory=dict)
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)  # index -> beat, and when it was first seen
    came: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # those of them that said so
    index: int = 0  # of this machine
    looked: float = field(default_factory=time.monotonic)
    last: Round | None = None
    under_way: bool = False
    since: float = field(default_factory=time.monotonic)  # of the gathering for the next round
    enough_since: float | None = None

    def lead(self, index: int) -> None:
        self.index = index
        self._meet_newcomers()
        alive = self.alive()
        ready = {index: self._memory(index) for index in alive}
        waiting = [index for index in alive if self._is_waiting(index, ready[index])]
        if self.last is not None:
            self._watch_members(self.last, alive, waiting)
        if self.under_way:
            self._look_for_more(waiting)
        else:
            self._gather(alive, waiting, ready)

    # ---- who is there ------------------------------------------------------------------------------------------------

    def _meet_newcomers(self) -> None:
        for index in range(self.store.add("count", 0)):
            if index in self.peers or index in self.gone or not self.store.check([f"machine/{index}"]):
                continue
            entry = json.loads(self.store.get(f"machine/{index}"))
            peer = Peer(**{**entry, "terms": Terms(**entry["terms"])})
            refusal = self._refusal(peer, self.came.setdefault(index, time.monotonic()))
            if refusal is None:
                continue
            if refusal:
                self.store.set(f"refused/{index}", refusal)
                self.gone.add(index)
                continue
            for other in list(self.peers.values()):
                if (other.host, other.pid) == (peer.host, peer.pid):  # it was cut off and came again
                    self.gone.add(other.index)
            self.peers[index] = peer
            self.seen[index] = ("", time.monotonic())

    def _refusal(self, peer: Peer, since: float) -> str | None:
        """Why a newcomer must go; None where that is not known yet: who has its number may be dead."""
        own = self.gathering
        difference = peer.terms.difference(own.terms)
        if difference:
            return f"{difference} on {socket.gethostname()}"
        rivals = [other for other in self._present() if other.number is not None and other.number == peer.number]
        rivals = [other for other in rivals if (other.host, other.pid) != (peer.host, peer.pid)]
        if not rivals:
            return ""
        if self.seen[rivals[0].index][1] < since + 2 * PERIOD:
            return None
        return (
            f"--node-rank {peer.number}: {rivals[0].host} (pid {rivals[0].pid}) has this number;"
            f" give each machine its own, 0 to {own.nodes - 1}"
        )

    def _present(self) -> Iterator[Peer]:
        now = time.monotonic()
        for index, peer in list(self.peers.items()):
            if index not in self.gone and now - self.seen[index][1] < self.gathering.lost_seconds:
                yield peer

    def alive(self) -> list[int]:
        """Those whose beat has changed lately."""
        asked = [index for index in self.peers if index not in self.gone]
        now = time.monotonic()
        if now - self.looked > self.gathering.lost_seconds / 2:  # this process itself was stopped for a while
            self.seen = {index: (beat, now) for index, (beat, _) in self.seen.items()}
        self.looked = now
        for index, text in zip(asked, self.store.multi_get([f"beat/{index}" for index in asked]), strict=True):
            beat = text.decode()
            if beat == "left":
                self.gone.add(index)
                self.left.add(index)
            elif beat != self.seen[index][0]:
                self.seen[index] = (beat, now)
            elif now - self.seen[index][1] > self.gathering.lost_seconds:
                self.gone.add(index)
        return [index for index in asked if index not in self.gone]

    def _memory(self, index: int) -> Memory:
        return Memory(**json.loads(self.store.get(f"ready/{index}")))

    def _is_waiting(self, index: int, memory: Memory) -> bool:
        """Those of the last round may still be in it."""
        if self.last is None or all(peer.index != index for peer in self.last.peers):
            return True
        return memory.round > self.last.number

    # ---- a round -----------------------------------------------------------------------------------------------------

    def _watch_members(self, current: Round, alive: Sequence[int], waiting: Sequence[int]) -> None:
        """A machine that is lost ends the round, also where the others are stopping for another reason."""
        lost = [peer for peer in current.peers if peer.index not in alive]
        pending = any(peer.index in alive and peer.index not in waiting for peer in current.peers)
        end = read_end(self.store, current.number)
        if end is not None:  # who leaves now has read it
            lost = [peer for peer in lost if peer.index not in self.left]
        done = self.store.add(f"done/{current.number}", 0) >= len(current.peers)
        if lost and pending and not done and (end is None or not end.is_failure):
            silent = time.monotonic() - self.seen[lost[0].index][1]
            why = "ended" if lost[0].index in self.left else f"is lost: no sign of life for {silent:.0f} s"
            report = Report("machine", -1, lost[0].host, lost[0].pid, f"host {lost[0].host} {why}", at=time.time())
            end = tell_end(self.store, current.number, End(report, silent))
        if end is not None and self.under_way:
            self.under_way, self.since, self.enough_since = False, time.monotonic(), None

    def _look_for_more(self, waiting: Sequence[int]) -> None:
        """Ask a running round to stop where machines wait that would make it larger."""
        assert self.last is not None
        if not waiting:
            return
        members = [peer.index for peer in self.last.peers]
        larger = self._choose([*members, *waiting])
        new = [self.peers[index].host for index in larger if index not in members]
        if len(larger) <= len(members):
            self._say("a place: the job runs with as many machines as it can use")
        elif not self.gathering.may_regroup():
            self._say("the running ranks: they can stop after their first step, where checkpoint.enable is true")
        else:
            text = f"host {', '.join(new)} {'join' if len(new) > 1 else 'joins'}"
            tell_end(self.store, self.last.number, End(Report("regroup", -1, new[0], 0, text, at=time.time())))

    def _gather(self, alive: Sequence[int], waiting: Sequence[int], ready: dict[int, Memory]) -> None:
        chosen = self._choose(waiting)
        everybody = len(waiting) == len(alive)
        if chosen and everybody:
            now = time.monotonic()
            self.enough_since = self.enough_since or now
            called = self.last is not None or now - self.enough_since > LAST_CALL
            if called or len(chosen) == self.gathering.terms.most:
                self._decide(chosen, ready)
                return
        what = self._missing(waiting, chosen) if everybody else "ranks that are stopping"
        if everybody and not chosen and time.monotonic() - self.since > self.gathering.timeout_seconds:
            seconds = self.gathering.timeout_seconds
            for index in waiting:
                self.store.set(f"refused/{index}", f"waited {seconds:g} s at {self.gathering.endpoint} for {what}")
        self._say(what)

    def _choose(self, indices: Sequence[int]) -> list[int]:
        """As many of these machines as fit the layout, in the order of their ranks; none where too few do.

        The leader comes first: the store's machine has rank 0, and so the run's folder.
        """
        own, terms = self.gathering, self.gathering.terms
        order = [index for index in self.peers if index in indices]
        if own.number is not None:
            order.sort(key=lambda index: self.peers[index].number or 0)
        else:
            members = [] if self.last is None else [peer.index for peer in self.last.peers]
            order.sort(key=lambda index: (index != self.index, index not in members, index))
        for count in range(min(len(order), terms.most), terms.least - 1, -1):
            if not own.misfit(sum(self.peers[index].ranks for index in order[:count])):
                return order[:count]
        return []

    def _missing(self, waiting: Sequence[int], chosen: Sequence[int]) -> str:
        terms, there = self.gathering.terms, len(waiting)
        if chosen or there < terms.least:
            numbers = sorted(str(self.peers[index].number) for index in waiting if self.peers[index].number is not None)
            named = f", numbers {', '.join(numbers)}" if numbers else ""
            least = f"at least {terms.least}" if terms.least < terms.most else str(terms.most)
            return f"more machines ({there} of {least} {'is' if there == 1 else 'are'} there{named})"
        ranks = sum(self.peers[index].ranks for index in waiting)
        return f"machines with which the layout fits ({self.gathering.misfit(ranks)})"

    def _decide(self, chosen: Sequence[int], ready: dict[int, Memory]) -> None:
        known = max((ready[index] for index in chosen), key=lambda memory: (memory.begun, memory.round))
        number = max([ready[index].round for index in chosen] + ([self.last.number + 1] if self.last else []))
        memory = replace(known, round=number, restarts=max(ready[index].restarts for index in chosen))
        self.last = Round(number, tuple(self.peers[index] for index in chosen), memory)
        self.store.set(f"round/{number}", json.dumps(asdict(self.last)))
        self.store.set("latest", str(number))
        self.under_way = True

    def _say(self, what: str) -> None:
        self.store.set("waits", what)

    def linger(self) -> None:
        """The store ends with this process: stay until the others have gone, or for a few seconds."""
        with contextlib.suppress(RuntimeError):
            self.store.set("over", "1")
        deadline = time.monotonic() + LINGER
        while time.monotonic() < deadline and any(peer.index != self.index for peer in self._present()):
            time.sleep(PERIOD / 2)


def read_round(store: dist.Store, number: int) -> Round:
    entry = json.loads(store.get(f"round/{number}"))
    peers = tuple(Peer(**{**peer, "terms": Terms(**peer["terms"])}) for peer in entry["peers"])
    return Round(entry["number"], peers, Memory(**entry["memory"]))


def read_end(store: dist.Store, number: int) -> End | None:
    if not store.check([f"end/{number}"]):
        return None
    return _end(store.get(f"end/{number}"))


def tell_end(store: dist.Store, number: int, end: End) -> End:
    """The first failure counts, and before what is none."""
    key, text = f"end/{number}", json.dumps(asdict(end))
    held = store.compare_set(key, "", text)
    if end.is_failure and not _end(held).is_failure:
        held = store.compare_set(key, held.decode(), text)
    return _end(held)


def _end(text: bytes) -> End:
    entry = json.loads(text)
    return End(Report(**entry["report"]), entry["delay"])


def say(line: str) -> None:
    """A line of the launcher; a bar of rank 0 may stand where it goes."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    print(line, file=sys.stderr, flush=True)
