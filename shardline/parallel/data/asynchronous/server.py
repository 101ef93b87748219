"""One rank's part of the parameter server: global weights, the optimizer's state, and pending contributions.

The tensors at one place inside the workers (say stage 1, shard 0) are distributed over the ranks at this place, one in
each worker. A step is made when its last contribution arrives, in the thread that receives it:

    gradient = sum(targets * freshness * gradient) / sum(targets * freshness)       over the step's slots, in order
    rate     = the schedule's * sum(targets * freshness) / sum(targets)             freshness = 1 / (1 + stale)^power

So with SGD, staleness lowers the learning rate of each contribution by itself, and a step without stale contributions
equals the step of synchronous training.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardline.models.dtensor import local

# Moves the routers' biases by the sums of a step's contributions.
Balance = Callable[[Sequence[Tensor], list[float]], None]
# Sets the optimizer's learning rate: (steps made so far, share of the schedule's rate) -> the rate that it set.
SetRate = Callable[[int, float], float]


class Contribution(NamedTuple):
    """The report that comes with a contribution; `sums` are its losses, summed over its targets."""

    ticket: int
    worker: int
    version: int  # of the weights that it was computed with
    targets: float
    norm: float  # of its gradients, before clipping
    sums: tuple[float, ...]  # of the losses; those of a mixture of experts are followed by the tallies of its layers


@dataclass
class Made:
    """A completed step."""

    reports: list[Contribution]
    lr: float

    def staleness(self, workers: int) -> list[int]:
        return [report.ticket // workers - report.version for report in self.reports]


def freshness(stale: int, power: float) -> float:
    """Return the share of the learning rate that a contribution keeps when it is `stale` steps late."""
    return (1.0 + stale) ** -power


def weights_of(reports: Sequence[Contribution], workers: int, power: float) -> tuple[list[float], float]:
    """Return the share of each contribution in its step, and the share of the learning rate that remains."""
    fresh = [report.targets * freshness(report.ticket // workers - report.version, power) for report in reports]
    total, targets = sum(fresh), sum(report.targets for report in reports)
    if total == 0:
        return [0.0] * len(reports), 0.0
    return [one / total for one in fresh], total / targets


def totals(reports: Sequence[Contribution]) -> list[float]:
    """Return the sums over all contributions of a step."""
    return [sum(column) for column in zip(*(report.sums for report in reports), strict=True)]


def share_out(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Return the indices of the tensors that each worker's rank serves: the largest first, each to the least loaded."""
    loads, shares = [0] * workers, [[] for _ in range(workers)]  # type: tuple[list[int], list[list[int]]]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        loads[least] += sizes[index]
        shares[least].append(index)
    return [sorted(share) for share in shares]


class ParameterServer:
    """The tensors that this rank serves. All methods may be called from any thread."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, served: Sequence[nn.Parameter], workers: int, power: float, step: int
    ) -> None:
        """Start from the parameters' values and the optimizer's state, of which only the served ones' part is kept."""
        self.optimizer, self.workers, self.power, self.version = optimizer, workers, power, step
        self.served = list(served)
        self.values = [nn.Parameter(parameter.detach().clone()) for parameter in served]
        self.set_rate: SetRate = lambda step, share: 0.0
        self.biases: list[Tensor] = []  # of the routers: every rank moves all of them, by counts that all ranks receive
        self.balance: Balance = lambda biases, sums: None
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.made: dict[int, Made] = {}  # step number -> the completed step, until the caller takes it
        self._waiting: dict[int, dict[int, tuple[Contribution, list[Tensor]]]] = {}
        self._keep_state()

    def _keep_state(self) -> None:
        """Make the optimizer update the values here instead of the model's parameters."""
        twins = dict(zip(self.served, self.values, strict=True))
        for parameter in list(self.optimizer.state):
            if parameter not in twins:
                del self.optimizer.state[parameter]
        self._share_state(self.served, self.values)
        self._groups = [[p for p in group["params"] if p in twins] for group in self.optimizer.param_groups]
        self._twins = [[twins[parameter] for parameter in group] for group in self._groups]
        self._give(self._twins)

    def _give(self, groups: list[list[nn.Parameter]]) -> None:
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = parameters

    @contextlib.contextmanager
    def as_of_model(self) -> Iterator[None]:
        """Inside this context the optimizer refers to the model's parameters, as a checkpoint names them.

        No step may be under way.
        """
        self._give(self._groups)
        self._share_state(self.values, self.served)
        try:
            yield
        finally:
            self._share_state(self.served, self.values)
            self._give(self._twins)

    def _share_state(self, source: Sequence[nn.Parameter], other: Sequence[nn.Parameter]) -> None:
        """Share the state dicts of parameters: some optimizers make new ones in their first step."""
        for one, twin in zip(source, other, strict=True):
            self.optimizer.state[twin] = self.optimizer.state[one]

    # ---- contributions -----------------------------------------------------------------------------------------------

    def add(self, report: Contribution, gradients: list[Tensor]) -> None:
        """Accept a contribution, and make all steps that are now complete."""
        with self.changed:
            step, slot = divmod(report.ticket, self.workers)
            waiting = self._waiting.setdefault(step, {})
            if step < self.version or slot in waiting:
                raise RuntimeError(f"ticket {report.ticket} was contributed twice")
            waiting[slot] = report, gradients
            while len(self._waiting.get(self.version, ())) == self.workers:
                self._make(self._waiting.pop(self.version))
                self.changed.notify_all()

    @torch.no_grad()
    def _make(self, contributions: dict[int, tuple[Contribution, list[Tensor]]]) -> None:
        """Make a step from its contributions, in slot order, so that copies on other ranks get the same bits."""
        ordered = [contributions[slot] for slot in range(self.workers)]
        reports = [report for report, _ in ordered]
        shares, left = weights_of(reports, self.workers, self.power)
        lr = self.set_rate(self.version, left)
        if left > 0:
            for index, value in enumerate(self.values):
                total = torch.zeros_like(local(value))
                for share, (_, gradients) in zip(shares, ordered, strict=True):
                    total.add_(gradients[index].to(total), alpha=share)
                value.grad = torch.empty_like(value)
                local(value.grad).copy_(total)
            if self.values:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            self.balance(self.biases, totals(reports))
        self.version += 1
        self.made[self.version] = Made(reports, lr)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def wait(self, version: int, seconds: float | None = None) -> bool:
        """Wait until the weights have this version; return False if that takes longer than `seconds`."""
        with self.changed:
            there = self.changed.wait_for(lambda: self.version >= version or self.failure is not None, seconds)
            if self.failure is not None:
                raise RuntimeError(f"the parameter server lost a worker: {self.failure}") from self.failure
            return there

    def read(self, version: int, biases: bool = False) -> tuple[int, list[Tensor]]:
        """Wait for this version of the weights or a later one; return it and the weights, then the routers' biases."""
        self.wait(version)
        with self.changed:
            kept = self.biases if biases else []
            return self.version, [*(local(value.detach()).clone() for value in self.values), *map(torch.clone, kept)]

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()
