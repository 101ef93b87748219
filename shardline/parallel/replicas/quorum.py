"""Who takes part in a step: a pure function of what the groups have told the lighthouse.

    members of the quorum     0 at step 7    1 at step 7    2 at step 5, it has just come back
    participants              0 and 1, which share the micro-batches of step 8
    healing                   2 gets the state after step 7 from 0, reads nothing, and makes step 8 with the others

Every group computes the same from the same quorum. Who reads what is therefore known without another message, and the
samples of a step that is made are each read once, whichever groups there are.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardline.errors import UserError


@dataclass(frozen=True)
class Member:
    """What a group says of itself when it asks for a quorum."""

    name: str  # its number, and what tells this start of it from earlier ones
    number: int  # fault_tolerance.replica_id
    step: int  # that its weights have made
    history: str  # of the quorums that made these steps: equal weights have equal histories
    store: str  # host:port of its store
    attempt: int  # steps that failed here
    link: str  # name of the connection between groups that it has; empty: none
    same: Mapping[str, Any] = field(default_factory=dict)  # what must be equal in all groups
    position: Mapping[str, Any] = field(default_factory=dict)  # of its run

    def message(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One step, as one of the groups sees it."""

    own: Member
    members: tuple[Member, ...]  # by number: the ranks of the connection between groups
    participants: tuple[Member, ...]  # those whose weights are as far as any
    sources: Mapping[str, Member]  # healing member -> the participant that sends it the state
    link: str  # name of the connection for this step
    connects: bool  # it has to be made first

    @property
    def rank(self) -> int:
        return self.members.index(self.own)

    @property
    def step(self) -> int:
        """The last step that was made."""
        return self.participants[0].step

    @property
    def share(self) -> tuple[int, int] | None:
        """This group's place among those that share the global batch, and their number; None: it reads nothing."""
        return (self.participants.index(self.own), len(self.participants)) if self.own in self.participants else None

    @property
    def source(self) -> Member | None:
        """Who sends this group the state, where it heals."""
        return self.sources.get(self.own.name)

    @property
    def patients(self) -> list[Member]:
        """The groups to which this one sends the state."""
        return [member for member in self.members if self.sources.get(member.name) == self.own]

    def history(self) -> str:
        """The history of weights that have made the step, too."""
        words = [self.participants[0].history, self.step + 1, [member.name for member in self.participants]]
        return _digest(words)


def plan_step(own: str, members: Sequence[Member]) -> Plan:
    """The step of the group named `own` in a quorum."""
    ordered = tuple(sorted(members, key=lambda member: (member.number, member.name)))
    farthest = max(member.step for member in ordered)
    counts = Counter(member.history for member in ordered if member.step == farthest)
    # Two histories of equal length come from groups that were apart. The one that most have goes on.
    history = min(counts, key=lambda name: (-counts[name], name))
    participants = tuple(one for one in ordered if one.step == farthest and one.history == history)
    healing = [member for member in ordered if member not in participants]
    sources = {one.name: participants[place % len(participants)] for place, one in enumerate(healing)}
    links, who = {member.link for member in ordered}, _digest([member.name for member in ordered])
    connects = len(links) > 1 or not max(links).startswith(who)
    # Steps and failures make the name of a new connection one that the store of its first member has never seen.
    moment = [[one.step, one.history, one.attempt, one.link] for one in ordered]
    link = f"{who}-{_digest(moment)}" if connects else ordered[0].link
    return Plan(next(one for one in ordered if one.name == own), ordered, participants, sources, link, connects)


def check_same(own: Member, members: Sequence[Member]) -> None:
    """Refuse to train with groups that were started differently; `own` ends where it differs from the first."""
    first = min(members, key=lambda member: (-member.step, member.number, member.name))
    for key, value in first.same.items():
        if own.same.get(key) != value:
            raise UserError(
                f"{key} = {json.dumps(own.same.get(key))} here, {json.dumps(value)} in replica group {first.number}:"
                " groups differ in fault_tolerance.replica_id alone; start them with the same config"
            )


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]
