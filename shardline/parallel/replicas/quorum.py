"""Decides which groups take part in a step: a pure function of what the groups have told the lighthouse.

    members of the quorum     0 at step 7    1 at step 7    2 at step 5, it has just come back
    participants              0 and 1, which share the micro-batches of step 8
    healing                   2 gets the state after step 7 from 0, reads nothing, and makes step 8 with the others

Every group computes the same plan from the same quorum. So all know without another message which group reads what,
and each sample of a completed step is read exactly once, whichever groups there are.
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
    """What a group reports about itself when it requests a quorum."""

    name: str  # its number and an id that is new with each start
    number: int  # fault_tolerance.replica_id
    step: int  # the last step of its weights
    history: str  # hash of the quorums that made these steps: equal weights have equal histories
    store: str  # host:port of its store
    attempt: int  # number of failed steps
    link: str  # name of its connection to the other groups; empty if it has none
    same: Mapping[str, Any] = field(default_factory=dict)  # settings that must be equal in all groups
    position: Mapping[str, Any] = field(default_factory=dict)  # the position of its run

    def message(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One step, as one of the groups sees it."""

    own: Member
    members: tuple[Member, ...]  # sorted by number; the index is the rank in the connection between groups
    participants: tuple[Member, ...]  # the members with the most advanced weights
    sources: Mapping[str, Member]  # healing member -> the participant that sends it the state
    link: str  # name of the connection for this step
    connects: bool  # whether that connection has to be made first

    @property
    def rank(self) -> int:
        return self.members.index(self.own)

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.participants[0].step

    @property
    def share(self) -> tuple[int, int] | None:
        """This group's index among the participants, and their number; None if this group reads nothing."""
        return (self.participants.index(self.own), len(self.participants)) if self.own in self.participants else None

    @property
    def source(self) -> Member | None:
        """The participant that sends this group the state, if it heals."""
        return self.sources.get(self.own.name)

    @property
    def patients(self) -> list[Member]:
        """The groups to which this one sends the state."""
        return [member for member in self.members if self.sources.get(member.name) == self.own]

    def history(self) -> str:
        """Return the history of the weights after this step."""
        words = [self.participants[0].history, self.step + 1, [member.name for member in self.participants]]
        return _digest(words)


def plan_step(own: str, members: Sequence[Member]) -> Plan:
    """Plan the next step of the group named `own` in a quorum."""
    ordered = tuple(sorted(members, key=lambda member: (member.number, member.name)))
    farthest = max(member.step for member in ordered)
    counts = Counter(member.history for member in ordered if member.step == farthest)
    # Groups that lost contact have different histories of equal length. Training continues the most common one.
    history = min(counts, key=lambda name: (-counts[name], name))
    participants = tuple(one for one in ordered if one.step == farthest and one.history == history)
    healing = [member for member in ordered if member not in participants]
    sources = {one.name: participants[place % len(participants)] for place, one in enumerate(healing)}
    links, who = {member.link for member in ordered}, _digest([member.name for member in ordered])
    connects = len(links) > 1 or not max(links).startswith(who)
    # Steps and failures go into the name of a new connection, so that the first member's store has never seen it.
    moment = [[one.step, one.history, one.attempt, one.link] for one in ordered]
    link = f"{who}-{_digest(moment)}" if connects else ordered[0].link
    return Plan(next(one for one in ordered if one.name == own), ordered, participants, sources, link, connects)


def check_same(own: Member, members: Sequence[Member]) -> None:
    """Raise if `own` was started with other settings than the first group."""
    first = min(members, key=lambda member: (-member.step, member.number, member.name))
    for key, value in first.same.items():
        if own.same.get(key) != value:
            raise UserError(
                f"{key} = {json.dumps(own.same.get(key))} here, {json.dumps(value)} in replica group {first.number}:"
                " groups may differ only in fault_tolerance.replica_id; start them with the same config"
            )


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]
