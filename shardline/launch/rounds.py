"""The rounds of a job, as recorded in the launchers' store. A round is one start of all ranks.

leader                who serves the store: its session, its last round, what it waits for, whether the job has ended
machine/I             a launcher that has arrived, by place: beats, the round it waits for, what it knows of the job
round/N               written by the leader: the machines of round N, in the order of their ranks
end/N                 why round N ended, written by whoever knows first; a failure replaces any other reason
refused/TOKEN         written by the leader: why that launcher must leave

All of it is signed with the job's secret: `leader` with a key of the job, the rest with one of the session, so that
what was written for another job, or before the leader was started again, does not count. Every launcher writes its own
record again in each period. So a record that a stranger has changed or deleted is restored a moment later. There are no
counters, because they cannot be signed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from shardline.comm.store import SignedStore
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
    """What the next round must know of the job. Every launcher keeps it, because any may be the last one left."""

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
class MachineRecord:
    """What a launcher writes in each period. `done` is the last round that its ranks have finished."""

    peer: Peer
    beat: int
    ready: JobHistory
    done: int = -1
    left: bool = False


@dataclass(frozen=True)
class LeaderRecord:
    """What the leader writes in each period. `done` is the last round that all machines have finished."""

    session: str
    latest: int = -1  # round
    done: int = -1
    waits: str = "the first machine"
    over: bool = False


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


decode_machine = TypeAdapter(MachineRecord).validate_python
decode_leader = TypeAdapter(LeaderRecord).validate_python
decode_round = TypeAdapter(Round).validate_python
decode_end = TypeAdapter(End).validate_python


def read_end(store: SignedStore, number: int) -> End | None:
    return store.read(f"end/{number}", decode_end)


def write_end(store: SignedStore, number: int, end: End) -> End:
    """Record why a round ended and return what counts: the first failure, or else the first reason."""
    standing = store.offer(
        f"end/{number}", asdict(end), decode_end, yields=lambda held: end.is_failure and not held.is_failure
    )
    return end if standing is None else standing
