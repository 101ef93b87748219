"""Pipeline parallelism: ranks hold consecutive layers, and micro-batches go through them one after the other.

    rank 0   0F0 0F1 0F2 0F3         0B0     0B1     0B2     0B3        stage, F forward or B backward, micro-batch
    rank 1       1F0 1B0     1F1 1B1     1F2 1B2     1F3 1B3            blanks: the bubble

A rank runs its actions in the order of its schedule. Forward keeps the input (a leaf) and the graph edge of the
output. Backward starts from that edge with the gradient received from the next stage, and sends the gradient of the
input to the previous one. Where the schedule splits backward, I puts the weight gradients of its stage and micro-batch
into the queue of models/linear.py and takes them out; W computes exactly these.

All ranks of the pipeline read the tokens and so know the shapes: no trial step is needed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardline.comm import collectives
from shardline.comm.exposed_time import Moments
from shardline.models.decoder import Stage
from shardline.models.products.linear import Waiting, accumulate, weight_queue
from shardline.parallel.pipeline.channels import Channels, Key, Message, Transfers, messages_of, needed_by, sent_by
from shardline.parallel.pipeline.stages import PipelinePlan
from shardline.parallel.pipeline.timeline import Action, TimedAction


class MicroBatch(NamedTuple):
    tokens: Tensor  # (B, S)
    labels: Tensor
    documents: Tensor | None
    noise: Tensor | None = None  # keys of the noise added to the embeddings


# (micro-batch, input or None, stage) -> output: hidden states, the loss from the last stage
Forward = Callable[[MicroBatch, Tensor | None, Stage], Tensor]


class SavedForward(NamedTuple):
    """What backward needs from a forward pass."""

    x: Tensor | None
    output: Any  # a graph edge; in the last stage the loss itself


Made = tuple[Key, Tensor]  # an action's result for another stage


class Pipeline:
    """One rank's stages, and their messages to and from the stages of other ranks.

    `describe` returns the shape and type of the residual stream for tokens (B, S).
    """

    def __init__(
        self,
        plan: PipelinePlan,
        device: torch.device,
        describe: Callable[[Tensor], tuple[Sequence[int], torch.dtype]],
    ) -> None:
        self.plan, self.schedule, self.device, self.describe = plan, plan.schedule, device, describe
        self.messages = messages_of(self.schedule.orders, self.schedule.placement)
        pairs = {(message.source, message.target) for message in self.messages}
        first, last = plan.ends
        if first != last:
            pairs |= {(first, last), (last, first)}
        self.channels = Channels(pairs, device)
        self.rank = self.channels.rank
        self._walked: set[str] = set()  # kinds of passes that have loaded all their kernels
        self.clock = ActionClock(device)

    # ---- training ----------------------------------------------------------------------------------------------------

    def run(self, batches: Sequence[MicroBatch], forward: Forward, done: Callable[[int], None]) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of the losses, 0 without the last stage.

        `done(stage)` is called when a stage has all its gradients.
        """
        order = self.schedule.orders[self.rank]
        left = Counter(action.stage for action in order if action.kind != "F")
        with self._walk("training"), weight_queue.offering() if self.schedule.splits else contextlib.nullcontext():
            run = _Run(self, batches, forward, self.messages)
            for action in order:
                run.receive(action)
                with self.clock.around(action):
                    made = run.compute(action)
                    if action.kind != "F":
                        left[action.stage] -= 1
                        if not left[action.stage]:
                            done(action.stage)
                run.send(made)
                del made  # its memory is free once it is sent
            run.transfers.finish()
        return run.total

    # ---- validation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def losses(self, batches: Sequence[MicroBatch], forward: Forward) -> Tensor:
        """Run forward of all micro-batches; return the sum of the losses, 0 on ranks without the last stage."""
        orders = [
            [Action("F", stage, number) for stage in self.schedule.stages_of(rank) for number in range(len(batches))]
            for rank in range(self.schedule.ranks)
        ]
        with self._walk("validation"):
            run = _Run(self, batches, forward, messages_of(orders, self.schedule.placement), trains=False)
            for action in orders[self.rank]:
                run.receive(action)
                run.send(run.compute(action))
            run.transfers.finish()
        return run.total

    def _walk(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Send messages through the host in the first pass of a kind: while it loads its kernels, nothing on the device
        may wait for a message.
        """
        first = kind not in self._walked
        self._walked.add(kind)
        return self.channels.through_host() if first else contextlib.nullcontext()


class _Run:
    """One pass of this rank through its actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[MicroBatch],
        forward: Forward,
        messages: Sequence[Message],
        trains: bool = True,
    ) -> None:
        self.stages, self.placement = pipeline.plan.stages, pipeline.schedule.placement
        self.rank, self.batches, self.forward, self.trains = pipeline.rank, batches, forward, trains
        shapes = [pipeline.describe(batch.tokens) for batch in batches]
        self.transfers = Transfers(pipeline.channels, messages, shapes)
        self.saved: dict[tuple[int, int], SavedForward] = {}
        self.waiting: dict[tuple[int, int], list[Waiting]] = {}
        self.here: dict[Key, Tensor] = {}  # received from another rank, or from another stage of this rank
        self.total = torch.zeros((), device=pipeline.device)

    def receive(self, action: Action) -> None:
        """Wait for the input of an action, if it comes from another rank."""
        key = needed_by(action, len(self.stages))
        if key is not None and key not in self.here:
            self.here[key] = self.transfers.receive(key)

    def send(self, made: Made | None) -> None:
        """Pass the result of an action to another rank, or to another stage of this one."""
        if made is None:
            return
        key, x = made
        if self.placement[key.stage] == self.rank:
            self.here[key] = x
        else:
            self.transfers.send(key, x)

    def compute(self, action: Action) -> Made | None:
        """Run an action; return its result for another stage, if any."""
        place = (action.stage, action.microbatch)
        if action.kind == "F":
            return self._forward(action)
        if action.kind == "B":
            return self._backward(action)
        if action.kind == "I":
            with weight_queue.deferring():
                made = self._backward(action)
            self.waiting[place] = weight_queue.take()
            return made
        accumulate(self.waiting.pop(place))
        return None

    def _forward(self, action: Action) -> Made | None:
        stage, key = self.stages[action.stage], needed_by(action, len(self.stages))
        x = None if key is None else self.here.pop(key).detach().requires_grad_(self.trains)
        out = self.forward(self.batches[action.microbatch], x, stage)
        if stage.last:
            self.total += out.detach()
        if self.trains:
            # Keep only the edge: the output's memory is free once it is sent.
            self.saved[action.stage, action.microbatch] = SavedForward(x, out if stage.last else get_gradient_edge(out))
        key = sent_by(action, len(self.stages))
        return None if key is None else (key, out.detach())

    def _backward(self, action: Action) -> Made | None:
        saved, key = self.saved.pop((action.stage, action.microbatch)), needed_by(action, len(self.stages))
        torch.autograd.backward([saved.output], None if key is None else [self.here.pop(key)])
        if saved.x is None:
            return None
        key = sent_by(action, len(self.stages))
        assert key is not None
        assert saved.x.grad is not None
        return key, saved.x.grad


# ---- the bubble ------------------------------------------------------------------------------------------------------


def idle_share(busy: float, span: float, device: torch.device) -> float:
    """Return the share of a step in which ranks were idle, averaged over all ranks, from `busy_and_span` of each.

    A pipeline step lasts as long as the longest time from a rank's first action to its last: the rank with the first
    stage begins and ends it. Clocks of different hosts or devices are never compared.
    """
    numbers = torch.tensor([busy, span], dtype=torch.float64, device=device)
    longest = collectives.max_in_place(numbers[1:].clone(), "world")
    working = collectives.sum_in_place(numbers[:1].clone(), "world") / collectives.axis_size("world")
    return float((1 - working / longest).clamp(min=0)) if float(longest) > 0 else 0.0


class ActionClock:
    """Records when each action of a step begins and ends, while it is `enabled`."""

    def __init__(self, device: torch.device) -> None:
        self.moments = Moments(device)
        self.enabled = False
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        """Start recording a step; a replica group's last one may have failed, and is now repeated."""
        self.enabled, self._marks = True, []

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        start = self.moments.mark()
        yield
        self._marks.append((action, start, self.moments.mark()))

    def take(self) -> list[TimedAction]:
        """Return the actions since the last call, in order; times are seconds since 1970."""
        marks, self._marks = self._marks, []
        times = iter(self.moments.unix([moment for _, *both in marks for moment in both]))
        return [TimedAction(action, next(times), next(times)) for action, _, _ in marks]


def busy_and_span(actions: Sequence[TimedAction]) -> tuple[float, float]:
    """Return (seconds in actions, seconds from the start of the first action to the end of the last)."""
    if not actions:
        return 0.0, 0.0
    return sum(end - start for _, start, end in actions), actions[-1].end - actions[0].start
