"""Decides from the published status of a job's ranks whether the job hangs, and which ranks are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from shardline.words import numbered

MOST_NAMED = 8
LONG_SILENCE = 15.0  # seconds: a rank that publishes nothing for this long is stopped, not computing


@dataclass(frozen=True)
class Wait:
    """The collective that a rank, or its device, waits in."""

    axis: str
    sequence: int
    tag: str
    seconds: float
    members: tuple[int, ...] | None = None  # None: all ranks
    presumed: bool = False  # the collective was issued, and nothing has happened since


@dataclass(frozen=True)
class Status:
    """What a rank publishes about itself."""

    rank: int
    host: str
    pid: int
    beat: int  # grows as long as the rank is alive
    step: int = 0
    idle: float = 0.0  # seconds since anything was reported to the watchdog
    place: str = ""
    busy: str = ""  # its current work, if that may take long
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)  # axis -> last sequence number and tag
    wait: Wait | None = None

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def doing(self) -> str:
        step = f"in step {self.step}, " if self.step else ""
        place = f", at {self.place}" if self.place else ""
        if self.wait is not None and not self.wait.presumed:
            return f"{step}in {named(self.wait)}{place}"
        last = max(self.counts.values(), default=(0, ""))[1]
        return f"{step}in no collective for {self.idle:.0f} s{place}" + (f"; its last was {last}" if last else "")


decode_status = TypeAdapter(Status).validate_python


@dataclass(frozen=True)
class View:
    """One rank's view of all ranks. `silent`: seconds for which each rank has published nothing new."""

    statuses: Mapping[int, Status]
    silent: Mapping[int, float]
    world_size: int
    limit: float
    silent_limit: float

    def hang(self) -> str | None:
        """Return the message that ends the job, or None if no rank has waited too long for another."""
        alive = [status for rank, status in self.statuses.items() if not self._is_gone(rank)]
        if any(status.busy for status in alive):
            return None
        waits = {status.rank: status.wait for status in alive if status.wait is not None}
        late = {rank: wait for rank, wait in waits.items() if wait.seconds > self.limit}
        found = [(wait, missing) for rank, wait in late.items() if (missing := self._missing(rank, wait))]
        if found:
            # A rank that waits elsewhere is itself held up: name the ranks that wait for nobody.
            wait, missing = next((one for one in found if any(map(self._is_idle, one[1]))), found[0])
            return self._missing_message(wait, missing)
        return self._stuck(late) or self._silence(alive)

    def _is_gone(self, rank: int) -> bool:
        return self.silent.get(rank, 0.0) >= self.silent_limit

    def _is_idle(self, rank: int) -> bool:
        """Whether a rank waits for nobody, as far as is known."""
        wait = self.statuses[rank].wait if rank in self.statuses else None
        return wait is None or wait.presumed or self._is_gone(rank)

    def _members(self, wait: Wait) -> Iterable[int]:
        return range(self.world_size) if wait.members is None else wait.members

    def _missing(self, waiter: int, wait: Wait) -> list[int]:
        return [rank for rank in self._members(wait) if rank != waiter and self._lacks(rank, wait)]

    def _lacks(self, rank: int, wait: Wait) -> bool:
        """Whether a rank has not arrived in a collective that another rank waits in."""
        other = self.statuses.get(rank)
        if other is None or self._is_gone(rank):
            return True
        sequence, tag = other.counts.get(wait.axis, (0, ""))
        return sequence < wait.sequence or (sequence == wait.sequence and tag != wait.tag)

    def _missing_message(self, wait: Wait, missing: list[int]) -> str:
        arrived = [rank for rank in self._members(wait) if rank not in missing]
        verb = "wait" if len(arrived) > 1 else "waits"
        head = (
            f"no progress for {wait.seconds:.0f} s: {numbered('rank', arrived)} {verb} in {named(wait)},"
            f" where {numbered('rank', missing)} did not arrive:"
        )
        return "\n".join([head, *self._about(missing)])

    def _stuck(self, late: Mapping[int, Wait]) -> str | None:
        """Return the message if all ranks arrived in a collective that does not end."""
        calls = {rank: (wait.axis, wait.sequence) for rank, wait in late.items() if not wait.presumed}
        for rank, call in calls.items():
            wait = late[rank]
            members = list(self._members(wait))
            if all(calls.get(member) == call for member in members):
                return (
                    f"no progress for {wait.seconds:.0f} s: {numbered('rank', members)} all arrived in {named(wait)},"
                    f" but it does not end: the network between them, or a device, is stuck"
                )
        return None

    def _silence(self, alive: list[Status]) -> str | None:
        """Return the message if no rank waits in a watched collective, but some are idle and others publish nothing."""
        enough = max(self.silent_limit, min(self.limit, LONG_SILENCE))
        gone = [rank for rank in self.statuses if self.silent.get(rank, 0.0) >= enough]
        idle = max((status.idle for status in alive), default=0.0)
        if not gone or idle <= self.limit:
            return None
        return "\n".join([f"no progress for {idle:.0f} s:", *self._about(gone)])

    def _about(self, missing: list[int]) -> list[str]:
        lines = []
        for rank in missing[:MOST_NAMED]:
            status = self.statuses.get(rank)
            if status is None:
                lines.append(f"  rank {rank} never reported")
            elif self._is_gone(rank):
                lines.append(
                    f"  {status.who} has not been heard of for {self.silent[rank]:.0f} s or more: it is stopped, or its"
                    f" host is out of reach; last seen {status.doing()}"
                )
            else:
                lines.append(f"  {status.who} is {status.doing()}")
        return lines + ([f"  and {len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else [])


def named(wait: Wait) -> str:
    return f"{wait.tag} (call {wait.sequence})"
