"""Replica groups: separate jobs that make every step together and continue when some of the groups fail.

    meet            ask the lighthouse which groups are there; plan the step; reconnect if the groups have changed
    sum_targets     sum the targets of the global batch over the groups
    sum_gradients   rank r sums its gradients with rank r of the other groups
    ready           wait until state transfers to or from a returning group have ended
    commit, fail    count the step, or repeat it with the groups that are there by then

A step counts in a group when all of its ranks have the sums. A group may thus complete a step that others have to
repeat; at the next meeting these get its state, like a group that was away. torchft's Manager counts steps the same
way, but its batch shrinks with the number of groups: here the global batch is fixed and redistributed (quorum.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from shardline.comm import collectives, watchdog
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.schema import FaultTolerance
from shardline.models.dtensor import local
from shardline.parallel.replicas import link
from shardline.parallel.replicas.lighthouse import DEFAULT, VARIABLE, Lighthouse, groups_key, own_address
from shardline.parallel.replicas.quorum import Member, Plan, check_same, plan_step
from shardline.words import listed

log = logging.getLogger("shardline")

AXIS = "replica_groups"  # the key in comm_bytes
State = Callable[[], Mapping[str, Tensor]]


class ReplicaGroups:
    """One rank's view of the groups. `state` returns the tensors that a step changes, by name."""

    def __init__(self, section: FaultTolerance, mesh: Mesh, same: Mapping[str, Any], state: State) -> None:
        self.section, self.mesh, self.same, self.state = section, mesh, same, state
        self.timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        lighthouse = os.environ.get(VARIABLE, DEFAULT)
        self.address = own_address(lighthouse)
        name = f"{section.replica_id}:{uuid.uuid4()}" if mesh.rank == 0 else ""
        self.name = mesh.from_rank_0(lambda: name)
        self.lighthouse: Lighthouse | None = None
        self.store, self.place = None, ""
        if mesh.rank == 0:
            self.lighthouse = Lighthouse(lighthouse, self.name, groups_key())
            self.store, self.place = link.serve_store(self.address)
        self.plan: Plan | None = None
        self.group: Any = None  # the connection to the other groups; None if there is none or it broke
        self.linked = ""  # the name of that connection
        self.broken = False  # whether communication failed in this step
        self.commits = self.heals = self.attempt = 0
        self.repeats = 0  # of the current step
        self.sent_bytes = 0
        self._threads: list[threading.Thread] = []
        self._tensors: list[Tensor] = []
        self._received: list[Tensor] | None = None
        self._heal_error = ""

    # ---- before a step -----------------------------------------------------------------------------------------------

    def meet(self, step: int, history: str, position: Mapping[str, Any], stop: Callable[[], bool]) -> Plan | None:
        """Return the plan of the next step, or None if the group is asked to stop while it waits. All ranks call it."""
        while True:
            if self.mesh.world_size == 1:
                members = self._ask(step, history, position, stop)
            else:
                with watchdog.patiently("waiting for replica groups"):
                    members = self.mesh.from_rank_0(lambda: self._ask(step, history, position, stop))
            if members is None:
                return None
            plan = plan_step(self.name, members)
            self._tell(plan)
            self.plan, self.broken = plan, False
            if plan.connects:
                self._connect(plan)
            if not self.failed_anywhere():
                self.linked = plan.link
                self._start_healing(plan)
                return plan
            self.fail()

    def _ask(
        self, step: int, history: str, position: Mapping[str, Any], stop: Callable[[], bool]
    ) -> list[Member] | None:
        """Wait on rank 0 for a quorum that is large enough, and return its members."""
        assert self.lighthouse is not None
        own = Member(
            name=self.name,
            number=self.section.replica_id,
            step=step,
            history=history,
            store=self.place,
            attempt=self.attempt,
            link=self.linked,
            same=self.same,
            position=position,
        )
        while True:
            members = self.lighthouse.quorum(own, stop)
            if members is None:
                return None
            check_same(own, members)
            if len(members) >= self.section.min_replica_size:
                return members
            time.sleep(0.2)

    def _tell(self, plan: Plan) -> None:
        """Log which groups take part, if that has changed."""
        names = [member.name for member in plan.members]
        if self.plan is None or names != [member.name for member in self.plan.members]:
            text = listed([str(member.number) for member in plan.members], most=16)
            log.info("step %d: replica groups %s take part", plan.step + 1, text)
        for name, source in plan.sources.items():
            log.info("step %d: group %s gets its state from group %d", plan.step + 1, name.split(":")[0], source.number)

    def _connect(self, plan: Plan) -> None:
        self._leave()
        if len(plan.members) > 1:
            prefix = f"{plan.link}/{self.mesh.rank}"
            try:
                size = len(plan.members)
                self.group = link.connect(plan.members[0].store, prefix, self.address, plan.rank, size, self.timeout)
            except Exception as error:  # a member of the quorum has already failed
                self._break("connecting", error)

    # ---- inside a step -----------------------------------------------------------------------------------------------

    @property
    def participants(self) -> int:
        return 0 if self.plan is None else len(self.plan.participants)

    def sum_targets(self, targets: Tensor) -> None:
        """Sum this group's targets with those of the other groups, in place."""
        self.sent_bytes = 0
        self._sum([targets], "counting targets")

    def sum_gradients(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> None:
        """Sum gradients and `numbers` over the groups, in place. A group that has read nothing adds zeros.

        A parameter without a gradient in any group keeps None, which an optimizer does not treat like zeros.
        """
        if self.group is None:
            return
        there = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        self._sum([*gradients, numbers, there], "adding up gradients")
        for parameter, count in zip(parameters, there.tolist(), strict=True):
            if count == 0:
                parameter.grad = None

    def _sum(self, tensors: Sequence[Tensor], what: str) -> None:
        if self.group is None or self.broken:
            return
        try:
            sent = link.sum_over(self.group, tensors)
        except Exception as error:  # from gloo: a group is gone, or too slow
            self._break(what, error)
            return
        self.sent_bytes += sent
        job.traffic.add(AXIS, sent)

    def _break(self, what: str, error: BaseException) -> None:
        """Mark the step as failed and disconnect, so that groups that wait for this one fail at once."""
        self.broken = True
        lines = str(error).splitlines() or [type(error).__name__]
        log.warning("%s with the other replica groups failed: %.200s", what, lines[0])
        self._leave()

    def _leave(self) -> None:
        if self.group is not None:
            link.leave(self.group)
        self.group, self.linked = None, ""

    # ---- healing -----------------------------------------------------------------------------------------------------

    def _start_healing(self, plan: Plan) -> None:
        """Start to send or receive the state of the last step in the background: it changes only when the step ends."""
        self._received, self._heal_error, self._threads = None, "", []
        if plan.sources:  # here and not in a thread: while FSDP computes, parameters are different tensors
            self._tensors = [local(tensor) for tensor in self.state().values()]
        if plan.source is not None:
            self._run(self._receive, plan, plan.source)
        for patient in plan.patients:
            self._run(self._send, plan, patient)

    def _run(self, work: Callable[[Plan, Member], None], plan: Plan, other: Member) -> None:
        self._threads.append(threading.Thread(target=work, args=(plan, other), name="shardline-heal", daemon=True))
        self._threads[-1].start()

    def _meet_one(self, plan: Plan, patient: Member, rank: int) -> Any:
        prefix = f"{plan.link}/{plan.step}/{patient.name}/{self.mesh.rank}"
        return link.connect(plan.members[0].store, prefix, self.address, rank, 2, self.timeout)

    def _send(self, plan: Plan, patient: Member) -> None:
        try:
            pair = self._meet_one(plan, patient, 0)
            link.send_state(pair, self._tensors)
            link.leave(pair)
        except Exception as error:  # the step fails in that group, not in this one
            log.warning("sending the state to group %d failed: %.200s", patient.number, error)

    def _receive(self, plan: Plan, source: Member) -> None:
        try:
            pair = self._meet_one(plan, plan.own, 1)
            self._received = link.receive_state(pair, self._tensors)
            link.leave(pair)
        except Exception as error:
            self._heal_error = f"receiving the state from group {source.number} failed: {error}"

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Wait for state transfers to end; return whether the step succeeded as far as this rank knows."""
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._heal_error:
            log.warning("%.200s", self._heal_error)
            self._heal_error, self.broken = "", True
        return not self.broken

    def failed_anywhere(self) -> bool:
        """Whether the step failed on some rank of this group."""
        if self.mesh.world_size == 1:
            return self.broken
        flag = torch.tensor([float(self.broken)], device=self.mesh.device_type)
        return bool(collectives.sum_in_place(flag, "world").item() > 0)

    @torch.no_grad()
    def commit(self) -> None:
        """Count the step, which succeeded on all ranks; copy received state into place before the update."""
        if self._received is not None:
            for tensor, new in zip(self._tensors, self._received, strict=True):
                tensor.copy_(new)
            self._received = None
            self.heals += 1
        self.commits += 1

    def fail(self) -> None:
        """Discard the step and disconnect, so that all groups connect again."""
        self._leave()
        self.ready()
        self._received = None
        self.attempt += 1
        self.repeats += 1

    def row(self) -> dict[str, int]:
        """Return the keys of metrics.jsonl that describe the groups in a step."""
        assert self.plan is not None
        share = self.plan.share
        repeats, self.repeats = self.repeats, 0
        return {
            "replica_groups": self.participants,
            "replica_place": -1 if share is None else share[0],
            "replica_commits": self.commits,
            "replica_heals": self.heals,
            "replica_repeats": repeats,
        }

    def engaged(self) -> dict[str, int]:
        """Return what engaged.json says about the groups."""
        return {"participants": self.participants, "summed_bytes": self.sent_bytes}

    def close(self) -> None:
        if self.lighthouse is not None:
            self.lighthouse.close()
        self._leave()
