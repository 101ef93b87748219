"""Rounds of a job that restarts, as they stand in the store.

count, machine/I      every launcher that ever came, by the order of arrival
beat/I                grows as long as that launcher lives and is not cut off; "left" when it went
ready/I               the round that it waits for, and what it knows of the rounds before
latest, round/N       the leader's: the machines of round N, in the order of their ranks
end/N                 why round N ended; whoever knows it writes it, a failure may replace what is none
done/N                how many machines have finished it
waits, refused/I      the leader's: what is waited for; why that launcher must go
over                  the leader's: the job has ended
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist

from shardline.report import Report

PERIOD = 0.25  # seconds between looks at the store
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
