"""How the launchers of a job come together for each round, and what they report to each other during one.

The launcher that serves the store leads (leader.py); what it decides is in the store, where the others read it
(rounds.py). Each launcher has one thread that talks to the store, because an answer may never come where the network is
cut. A launcher that cannot reach the store (`cut_off`) ends its ranks before the leader gives it up, so that two rounds
never write at the same time.

A job without restarts has a single round. There a silent machine is not given up, and no launcher counts as cut off,
because a short break in the network need not end the job. Its ranks notice one that lasts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist

from shardline.errors import UserError
from shardline.launch import rounds
from shardline.launch.endpoint import Endpoint
from shardline.launch.leader import Leader
from shardline.launch.rounds import End, JobHistory, Peer, Round, Terms, decode_round, read_end, write_end

FENCE = 0.6  # of the time after which a silent machine is given up; its launcher ends its ranks by then


class Rendezvous:
    """Where a launcher waits for its rounds. `ranks` is how many it starts on this machine.

    `misfit(ranks)` returns why the layout cannot be had with so many ranks, `may_regroup()` whether the ranks of the
    running round could stop without loss.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        terms: Terms,
        ranks: int,
        lost_seconds: float,
        misfit: Callable[[int], str],
        may_regroup: Callable[[], bool],
    ) -> None:
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
        """Reach the store, which is another one where the machine that served it was started again."""
        if self.thread is not None:
            self.thread.close()
        store = dist.PrefixStore("shardline/launchers", self.endpoint.open())
        self.thread = StoreThread(store, self, Leader(store, self) if self.leads else None)

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
        """Host and port of the store for the ranks; those of a single machine need no network."""
        return "127.0.0.1" if self.machines == 1 else self.endpoint.host, self.endpoint.port

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

    def __init__(self, store: dist.Store, own: Rendezvous, leader: Leader | None) -> None:
        self.store, self.leader = store, leader
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
        self._reported_ready: JobHistory | None = None
        self._reported_done = -1
        self._beat = 0
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
        """Report that this launcher goes, where the store answers."""
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
        if self.index < 0:
            self._announce()
        if self.leaving:
            if self.round is not None and self.outbox is not None:
                self._exchange_ends(self.round)  # why it leaves was not sent yet
            self.store.set(f"beat/{self.index}", "left")
            self.has_left = True
            if self.leader is not None:
                self.leader.alive()
            return
        self._beat += 1
        self.store.set(f"beat/{self.index}", str(self._beat))
        if self._reported_ready != self.ready:
            ready = self.ready
            self.store.set(f"ready/{self.index}", json.dumps(asdict(ready)))
            self._reported_ready = ready
        if self.round is not None:
            self._exchange_ends(self.round)
        if self.leader is not None:
            self.leader.lead(self.index)
        self._read_decisions()

    def _announce(self) -> None:
        index = self.store.add("count", 1) - 1
        self.store.set(f"beat/{index}", "0")
        self.store.set(f"ready/{index}", json.dumps(asdict(self.ready)))
        self.me = replace(self.me, index=index)
        self.store.set(f"machine/{index}", json.dumps(asdict(self.me)))
        self.index = index

    def _exchange_ends(self, current: Round) -> None:
        reported = self.outbox
        if reported is not None:
            self.end = write_end(self.store, current.number, reported)
            self.outbox = None if self.outbox is reported else self.outbox  # the main thread may wait for this
        else:
            self.end = read_end(self.store, current.number)
        if self.finished and self._reported_done < current.number:
            self.store.add(f"done/{current.number}", 1)
            self._reported_done = current.number
        if self._reported_done == current.number:
            self.all_done = self.store.add(f"done/{current.number}", 0) >= len(current.peers)

    def _read_decisions(self) -> None:
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
        found = decode_round(self.store.get(f"round/{number}"))
        if any(peer.index == self.index for peer in found.peers):
            self.end, self.outbox, self.finished, self.all_done = None, None, False, False
            self.round = found
