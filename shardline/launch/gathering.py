"""Meeting again and again: the rounds of a job that is started anew when ranks fail or machines come and go.

The launcher that serves the store leads (leader.py): what it decides is in the store for others to read (rounds.py).
Each launcher has one thread that talks to the store, because an answer may never come where the network is cut. A
launcher that cannot reach it (`cut_off`) ends its ranks before the leader gives it up, so that two attempts never write
at the same time.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo, RendezvousStoreInfo

from shardline.errors import UserError
from shardline.launch import rounds
from shardline.launch.leader import Leader
from shardline.launch.rendezvous import PATIENCE, Meeting
from shardline.launch.rounds import End, Memory, Peer, Round, Terms, read_end, read_round, tell_end

FENCE = 0.6  # part of the time after which a silent machine is given up; its launcher ends its ranks by then


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
        self.stopped_for_regroup = self.closed = False
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
        if self.closed:
            raise RendezvousGracefulExitError("this machine has left")
        if time.monotonic() > self.patience and self.said != what:
            say(f"{self.why}{'; ' if self.why else ''}waiting for {what} at {self.endpoint}")
            self.said, self.why = what, ""
        time.sleep(rounds.PERIOD / 2)

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
        if self.line.error is not None:
            raise self.line.error
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
        deadline = time.monotonic() + 8 * rounds.PERIOD
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
        self.closed = True
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
        self.error: BaseException | None = None
        self._told: Memory | None = None
        self._told_done = -1
        self._beat = 0
        self._closed = threading.Event()
        self.index = -1
        self._me = Peer(-1, socket.gethostname(), os.getpid(), gathering.ranks, gathering.number, gathering.terms)
        self._thread = threading.Thread(target=self._run, name="shardline-store", daemon=True)
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
        """A thread that hangs in the store is left behind: cli.py sees to it that the process ends all the same."""
        self._closed.set()
        if not self.cut_off:
            self._thread.join(8 * rounds.PERIOD)

    def _run(self) -> None:
        while not self._closed.wait(rounds.PERIOD):
            started = time.monotonic()
            try:
                self._exchange()
            except RuntimeError:  # of the store: it is gone or slow, `cut_off` says for how long
                continue
            except BaseException as error:
                self.error = error
                return
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
        index = self.store.add("count", 1) - 1
        self.store.set(f"beat/{index}", "0")
        self.store.set(f"ready/{index}", json.dumps(asdict(self.ready)))
        self._me = replace(self._me, index=index)
        self.store.set(f"machine/{index}", json.dumps(asdict(self._me)))
        self.index = index

    def _exchange_ends(self, current: Round) -> None:
        told = self.outbox
        if told is not None:
            self.end = tell_end(self.store, current.number, told)
            self.outbox = None if self.outbox is told else self.outbox  # the main thread may wait for this
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


def say(line: str) -> None:
    """A line of the launcher; a bar of rank 0 may stand where it goes."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    print(line, file=sys.stderr, flush=True)
