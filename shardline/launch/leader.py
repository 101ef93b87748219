"""The launcher that serves the store decides which machines take part in a round, and sees that they live.

Beats are compared by its own clock alone. A machine that is silent for `comm.lost_machine_seconds` is given up.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardline.launch import rounds
from shardline.launch.rounds import End, Memory, Peer, Round, Terms, read_end, tell_end
from shardline.report import Report

if TYPE_CHECKING:
    from shardline.launch.gathering import Gathering

LAST_CALL = 10.0  # seconds that the first meeting waits for more machines once there are enough
LINGER = 3.0


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
        if self.seen[rivals[0].index][1] < since + 2 * rounds.PERIOD:
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
            time.sleep(rounds.PERIOD / 2)
