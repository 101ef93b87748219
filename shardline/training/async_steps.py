"""Steps of workers that do not wait for each other: take a ticket, pull weights, forward and backward, push gradients.

    worker A   | ticket 0 | ticket 2 | ticket 3 |            each uses the newest weights at its start
    worker B   | ticket 1            | ticket 4 ...
    weights      version 0  1 (of 0, 1)         2 (of 2, 3)

With `fault_tolerance.async_steps` a contribution is not a gradient but the change of the weights after so many local
steps with the worker's own optimizer, each on an equal part of the contribution's samples. The server applies the
changes as DiLoCo's outer optimizer does. So a step of the run contains that many local steps of every worker.

A rank's loop counts the steps that the server has made, so all ranks count the same steps, whoever contributed. After a
step that is validated or saved, and after the last, ranks synchronise before any of them starts a later step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardline.checkpoint.shards import HeldTensor, held_state
from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.store import SignedStore, connect_store, rank_key
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.data.batch import Batch
from shardline.data.loader import Loader
from shardline.data.order import global_batch
from shardline.errors import UserError
from shardline.models.dtensor import local
from shardline.optim.clip import clip_, squared_norm
from shardline.optim.gpu_adam import GPUAdam
from shardline.optim.lr_schedule import set_lr
from shardline.parallel.data.asynchronous.exchange import A_DAY, AXIS, Peers, waiting
from shardline.parallel.data.asynchronous.server import Contribution, Made, ParameterServer, share_out, totals
from shardline.parallel.data.asynchronous.tickets import POLL_SECONDS, Tickets, may_take
from shardline.run.stop import Request, no_requests, request_of
from shardline.words import counted

if TYPE_CHECKING:
    from shardline.training.step import RequestNumbers, Stepper, StepResult

MADE = -1  # instead of a ticket: the step that this rank waits for has been made


class AsyncSteps:
    """This rank's part in its worker and in the parameter server."""

    def __init__(self, config: Config, mesh: Mesh, loader: Loader, stepper: Stepper) -> None:
        _refuse(config, stepper)
        self.config, self.mesh, self.loader, self.stepper = config, mesh, loader, stepper
        self.section, self.workers = config.fault_tolerance, mesh.workers
        self.local_steps = self.section.async_steps
        self.parameters = stepper.parameters
        self.tensors = [local(parameter.detach()) for parameter in self.parameters]
        self.shares = share_out([tensor.numel() for tensor in self.tensors], self.workers)
        self.places = [[self.tensors[index] for index in share] for share in self.shares]  # of what each rank serves
        self.biases = [local(bias.detach()) for bias in stepper.experts.biases.values()]  # of routers
        self.places[mesh.worker] += self.biases
        own = self.shares[mesh.worker] if self.local_steps > 1 else []
        self.momenta = [torch.zeros_like(self.parameters[index]) for index in own]  # of the outer steps made here
        self.inside = Inside(mesh.layout, mesh.worker)
        self.ends: Callable[[int], bool] = lambda step: False  # whether all ranks synchronise after this step
        self.tickets: Tickets | None = None  # only on the worker's first rank
        self.versions = [-1] * self.workers  # of the weights in the model that each worker serves
        self._targets = torch.zeros(())
        self._pending = list(no_requests())
        loader.take(None)  # samples are read for tickets, not for steps

    def begin(self, step: int, samples: int) -> None:
        """Start to serve the current weights, which all workers share after `step` steps and `samples` samples."""
        self.first_step, self.first_sample = step, samples
        served = [self.parameters[index] for index in self.shares[self.mesh.worker]]
        steps = self.stepper.optimizer if self.local_steps == 1 else self._outer(served)
        self.server = ParameterServer(steps, served, self.workers, self.section.async_lr_power, step)
        self.server.biases, self.server.balance = [bias.clone() for bias in self.biases], self._balance
        store: dist.Store = dist.HashStore() if self.mesh.world_size == 1 else connect_store()
        name = self.mesh.from_rank_0(lambda: f"async/{os.urandom(8).hex()}")  # a process may train twice
        if self.inside.rank == 0:
            self.tickets = Tickets(SignedStore(store, name, rank_key()), self.mesh.worker, self.workers, step)
        self.place = dist.PrefixStore(f"{name}/{self.inside.rank}", store)

    def close(self) -> None:
        if hasattr(self, "peers"):
            self.peers.close()

    def _outer(self, served: list[nn.Parameter]) -> torch.optim.Optimizer:
        """DiLoCo's, with the momenta that a checkpoint had."""
        lr, momentum = self.section.outer_lr, self.section.outer_momentum
        outer = torch.optim.SGD([{"params": served}], lr=lr, momentum=momentum, nesterov=momentum > 0)
        for parameter, buffer in zip(served, self.momenta, strict=True):
            outer.state[parameter]["momentum_buffer"] = buffer
        return outer

    def local_momenta(self) -> list[tuple[Tensor, Tensor]]:
        """The weights that this rank serves, and the momenta of their outer steps."""
        own = [self.tensors[index] for index in self.shares[self.mesh.worker]]
        return list(zip(own, map(local, self.momenta), strict=True))

    def held(self) -> list[HeldTensor]:
        """The optimizer state of the tensors that this rank serves, under its names in a checkpoint."""
        with self.server.as_of_model():
            return held_state(self.stepper.model, self.stepper.optimizer)

    def count(self, targets: Tensor) -> str:
        """Remember this rank's targets, which the caller sums in place over the returned axis: the worker's ranks."""
        self._targets = targets
        return "fsdp"

    # ---- a step of the run -------------------------------------------------------------------------------------------

    def start(self, rate: Callable[[int], tuple[float, float | None]], ends: Callable[[int], bool]) -> None:
        """Connect to the other workers. A connected worker may send contributions at once, so this comes last.

        `rate` returns the learning rate and momentum of the step after a number of steps; `ends` says after which steps
        all ranks synchronise.
        """

        def give(step: int, share: float) -> float:
            lr, momentum = rate(step)
            if self.local_steps > 1:
                set_lr(self.server.optimizer, self.section.outer_lr * share)
                return lr  # of the local steps, which a late contribution made with all of it
            set_lr(self.stepper.optimizer, lr * share, momentum)
            return lr * share

        self.server.set_rate, self.ends, self.rate = give, ends, rate
        shapes = [[self.tensors[index].shape for index in share] for share in self.shares]
        sums = len(self.stepper.passes.names) + self.stepper.experts.size
        self.peers = Peers(self.place, self.server, self.mesh.worker, shapes, sums)

    def step(self, number: int, requests: RequestNumbers) -> StepResult:
        """Contribute until the step with this number has been made."""
        while (ticket := self._next(number, requests)) != MADE:
            self._contribute(ticket)
        self.server.wait(number)
        made = self.server.made.pop(number)
        request = self._asked(number)
        if self.ends(number) or request != Request():
            self._meet(number)
        job.traffic.add(AXIS, self.peers.take_bytes())
        return self._result(made, request)

    def _result(self, made: Made, request: Request) -> StepResult:
        from shardline.training.step import StepResult

        targets, names = max(1.0, sum(report.targets for report in made.reports)), self.stepper.passes.names
        sums, experts = totals(made.reports), self.stepper.experts
        means = [total / targets for total in sums[: len(names)]]
        of_workers = {str(worker): 0 for worker in range(self.workers)}
        for report in made.reports:
            of_workers[str(report.worker)] += 1
        more: dict[str, Any] = {"staleness": max(made.staleness(self.workers)), "contributions": of_workers}
        more |= dict(zip(names[1:], means[1:], strict=True))
        more |= experts.row(experts.summary(torch.tensor(sums[len(names) :])).tolist())
        norm = sum(report.norm for report in made.reports) / len(made.reports)
        return StepResult(means[0], norm, made.lr, request, more)

    def _balance(self, biases: Sequence[Tensor], sums: list[float]) -> None:
        tallies = torch.tensor(sums[len(self.stepper.passes.names) :], device=self.stepper.experts.device)
        self.stepper.experts.balance_copies(biases, tallies)

    def _asked(self, number: int) -> Request:
        """Return the requests that came with the tickets of a step, the same on all ranks."""
        sums = list(no_requests())
        if self.tickets is not None:
            self.tickets.look()
            sums = self.tickets.asked.pop(number - 1, sums)
        return request_of(self.inside.sum(sums))

    def _meet(self, number: int) -> None:
        """Synchronise: all ranks get the weights of this step, and none runs ahead."""
        self._pull(number)
        if self.mesh.world_size > 1:
            collectives.sum_in_place(torch.zeros(1, device=self.mesh.device_type), "world")

    # ---- a ticket ----------------------------------------------------------------------------------------------------

    def _next(self, number: int, requests: RequestNumbers) -> int:
        """Return the worker's next ticket, or MADE if the step needs none; all ranks of the worker call this."""
        asked = self.inside.sum(requests())
        self._pending = [a + b for a, b in zip(self._pending, asked, strict=True)] if asked else self._pending
        with waiting("ticket"):
            found = 0 if self.tickets is None else self._decide(self.tickets, number)
            return int(self.inside.sum([float(found)])[0])

    def _decide(self, tickets: Tickets, number: int) -> int:
        began = time.monotonic()
        while self.server.version < number:
            tickets.look()
            if self._may_take(tickets, number):
                ticket = tickets.take(self._pending)
                if ticket is not None:
                    self._pending = list(no_requests())
                    return ticket
                continue
            if self.section.async_late == "drop" and time.monotonic() - began > self.section.async_late_seconds:
                late = self._late(tickets)
                if late is not None:
                    return late
            self.server.wait(min(number, self.server.version + 1), POLL_SECONDS)
        return MADE

    def _may_take(self, tickets: Tickets, number: int) -> bool:
        def ends(step: int) -> bool:
            return self.ends(step) or step - 1 in tickets.asked

        return may_take(tickets.step, self.server.version, number - 1, self.section.async_staleness, ends)

    def _late(self, tickets: Tickets) -> int | None:
        """Take over the ticket of a late worker in the step that all wait for."""
        first = self.server.version * self.workers
        for ticket in range(first, min(first + self.workers, tickets.next)):
            if not tickets.is_through(ticket) and tickets.take_again(ticket):
                return ticket
        return None

    def _contribute(self, ticket: int) -> None:
        """Compute gradients for the ticket's samples on the newest weights, and push them to the servers."""
        stepper, (step, slot) = self.stepper, divmod(ticket, self.workers)
        version = self._pull(step - self.section.async_staleness)
        first = self.first_sample + (step - self.first_step) * self.loader.global_batch_size
        place = slot * self.mesh.layout.dp_shard + self.mesh.coordinates["dp_shard"]
        batches = self.loader.read(first, place)
        before = [tensor.clone() for tensor in self.tensors] if self.local_steps > 1 else []
        size, targets, norms = len(batches) // self.local_steps, 0.0, []
        found: list[float] = []
        for part in range(self.local_steps):
            norm, sums = self._gradients(batches[part * size : (part + 1) * size])
            found = [a + b for a, b in zip(found, sums, strict=True)] if found else sums
            norms.append(norm)
            if not (math.isfinite(norm) and all(map(math.isfinite, sums))):
                found, targets = self._nonfinite(ticket, found, norm), 0.0
                break
            targets += float(self._targets)
            clip_(self.parameters, norm, self.config.training.max_norm)
            if self.local_steps > 1:
                set_lr(stepper.optimizer, *self.rate(step))
                stepper.optimizer.step()
                stepper.optimizer.zero_grad(set_to_none=True)
        if self._counts(ticket):
            norm = sum(norms) / len(norms) if targets else 0.0
            report = Contribution(ticket, self.mesh.worker, version, targets, norm, tuple(found))
            self.peers.push(report, [[self._change(i, targets, before) for i in share] for share in self.shares])
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self, batches: list[Batch]) -> tuple[float, list[float]]:
        """Forward and backward of some batches; their norm, and the sums that a contribution reports."""
        stepper = self.stepper
        loss = stepper.forward_backward(batches)
        ranks = self.inside.size // self.mesh.layout.pp
        squares = squared_norm(self.parameters, ranks, stepper.passes.on_two_stages)
        sums = loss * stepper.passes.share * self._targets.clamp(min=1)
        tallies = stepper.experts.tallies().tolist()
        square, *found = self.inside.sum([float(squares), *sums.tolist(), *tallies])
        return math.sqrt(square) if square >= 0 else math.nan, found

    def _change(self, index: int, targets: float, before: Sequence[Tensor]) -> Tensor:
        """What is pushed of a tensor: its gradient, or what local steps took from it."""
        if before and targets:
            return before[index] - self.tensors[index]
        gradient = self.parameters[index].grad
        return torch.zeros_like(self.tensors[index]) if gradient is None or not targets else local(gradient)

    def _counts(self, ticket: int) -> bool:
        """Whether this worker is the first to finish the ticket; always, if late workers are waited for."""
        if self.section.async_late == "wait":
            return True
        first = self.tickets is not None and self.tickets.is_first(ticket)
        return self.inside.sum([float(first)])[0] > 0

    def _nonfinite(self, ticket: int, sums: Sequence[float], norm: float) -> list[float]:
        """Stop, or give the contribution no weight."""
        text = f"step {ticket // self.workers + 1}, worker {self.mesh.worker}: loss {sums[0]}, gradient norm {norm}"
        if self.config.training.nonfinite == "stop":
            raise UserError(f'{text}. Lower optimizer.lr, or set training.nonfinite = "skip"')
        return [0.0] * len(sums)

    @torch.no_grad()
    def _pull(self, version: int) -> int:
        """Bring the model to this version or a later one, the same on all ranks of the worker; returns the version."""
        needed = max(version, self.first_step)
        behind = list(range(self.workers))
        while True:
            with waiting("pull"):
                pulled = self.peers.pull(needed, behind)
            for worker, (found, values) in pulled.items():
                for place, value in zip(self.places[worker], values, strict=True):
                    place.copy_(value)
                self.versions[worker] = found
            needed = int(self.inside.highest(float(max(self.versions))))
            behind = [worker for worker, found in enumerate(self.versions) if found < needed]
            if self.inside.highest(float(len(behind))) == 0:
                return needed


class Inside:
    """The ranks of one worker, which make its contributions together and exchange numbers over gloo on the host."""

    def __init__(self, layout: Layout, worker: int) -> None:
        lists: list[list[int]] = [[] for _ in range(layout.dp_replicate)]
        for rank in range(layout.world_size):
            lists[layout.coordinates(rank)["dp_replicate"]].append(rank)
        self.size, self.rank, self.group = len(lists[worker]), 0, None
        if self.size > 1:
            for number, ranks in enumerate(lists):
                group = dist.new_group(ranks, backend="gloo", timeout=A_DAY)
                self.group = group if number == worker else self.group
            self.rank = lists[worker].index(dist.get_rank())

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def highest(self, number: float) -> float:
        return self._reduced([number], dist.ReduceOp.MAX)[0]

    def _reduced(self, numbers: Sequence[float], how: Any) -> list[float]:
        if self.group is None:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(tensor, op=how, group=self.group)
        found: list[float] = tensor.tolist()
        return found


def _refuse(config: Config, stepper: Stepper) -> None:
    """Refuse what only the built model or its optimizer reveals."""
    mode = 'parallelism.data_parallel_mode = "async"'
    ranks, steps = stepper.mesh.layout.data_ranks, config.fault_tolerance.async_steps
    batches = global_batch(config.training, ranks) // (config.training.local_batch_size * ranks)
    if batches % steps:
        raise UserError(
            f"fault_tolerance.async_steps = {steps}: a contribution has {counted(batches, 'micro-batch')}, which"
            " is no multiple of it; change training.global_batch_size or training.local_batch_size"
        )
    if stepper.frozen_rows.places:
        raise UserError(f"{mode}: weights that are trained in part are not built yet; use sync or diloco")
    if isinstance(stepper.optimizer, GPUAdam):
        raise UserError(f'{mode}: set optimizer.implementation = "foreach", since the fused kernel steps on one stream')
    if stepper.model.compute_dtype == torch.float16:
        raise UserError(f"{mode}: float16 needs one loss scale for all workers; train in bfloat16")
