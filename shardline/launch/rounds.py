"""The rounds of a job, as they stand in the launchers' store. A round is one start of all ranks.

count, machine/I      every launcher that has arrived, in the order of arrival
beat/I                grows as long as that launcher lives and reaches the store; "left" once it has gone
ready/I               the round that the launcher waits for, and what it knows of the job so far
latest, round/N       written by the leader: the machines of round N, in the order of their ranks
end/N                 why round N ended, written by whoever knows first; a failure replaces any other reason
done/N                how many machines have finished the round
waits, refused/I      written by the leader: what it waits for; why that launcher has to go
over                  written by the leader: the job has ended
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist
from pydantic import TypeAdapter

from shardline.report import Report

PERIOD = 0.25  # seconds between looks at the store
NO_FAILURE = ("regroup", "leave", "stop")


@dataclass(frozen=True)
class Terms:
    """The options that every machine must be started with alike."""

    least: int
    most: int
    job: str
    max_restarts: int

    @property
    def is_elastic(self) -> bool:
        """Whether there may be a second round."""
        return self.max_restarts > 0 or self.least < self.most

    @property
    def nodes(self) -> str:
        return f"{self.least}:{self.most}" if self.least < self.most else str(self.most)

    def difference(self, other: Terms) -> str:
        """The first option that differs, with this machine's value and the other's."""
        pairs = {
            "nnodes": (self.nodes, other.nodes),
            "rdzv-id": (self.job, other.job),
            "max-restarts": (self.max_restarts, other.max_restarts),
        }
        differing = [(name, *values) for name, values in pairs.items() if values[0] != values[1]]
        return "".join(f"--{name} differs: {own} here, {theirs}" for name, own, theirs in differing[:1])


@dataclass(frozen=True)
class JobHistory:
    """What the next round must know of the job. Every launcher keeps it, because any of them may be the one left."""

    round: int = 0  # the next one
    restarts: int = 0
    folder: str | None = None  # of the run
    begun: bool = False  # the run has its weights: from now on it is resumed


@dataclass(frozen=True)
class Peer:
    """A launcher, as it announces itself."""

    index: int
    host: str
    pid: int
    ranks: int
    number: int | None
    terms: Terms
    token: str  # random, one per launcher: in containers, several may have the same host name and pid


@dataclass(frozen=True)
class Round:
    number: int
    peers: tuple[Peer, ...]
    state: JobHistory

    @property
    def ranks(self) -> int:
        return sum(peer.ranks for peer in self.peers)

    def place(self, index: int) -> int:
        """The position of a launcher among the machines of the round."""
        return [peer.index for peer in self.peers].index(index)


@dataclass(frozen=True)
class End:
    """Why a round ended. `delay` is the time from the fault to this record, by the clock of the one machine."""

    report: Report
    delay: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.report.kind not in NO_FAILURE


decode_peer = TypeAdapter(Peer).validate_json
decode_round = TypeAdapter(Round).validate_json


def read_end(store: dist.Store, number: int) -> End | None:
    if not store.check([f"end/{number}"]):
        return None
    return _end_of(store.get(f"end/{number}"))


def write_end(store: dist.Store, number: int, end: End) -> End:
    """Record why a round ended and return what counts: the first failure, or else the first reason."""
    key, text = f"end/{number}", json.dumps(asdict(end))
    held = store.compare_set(key, "", text)
    if end.is_failure and not _end_of(held).is_failure:
        held = store.compare_set(key, held.decode(), text)
    return _end_of(held)


def _end_of(text: bytes) -> End:
    entry = json.loads(text)
    return End(Report(**entry["report"]), entry["delay"])
