"""Point-to-point messages between pipeline stages: activations one way, their gradients the other.

There is a channel for every ordered pair of ranks that exchange messages. A rank sends messages in the order in which
it computes them. The receiver knows that order from the schedule and posts its receives in it, before it needs them:

    rank 0   0F0 -a0-> 0F1 -a1-> 0F2 -a2->            0B0                channel 0 -> 1: a0 a1 a2 ...
    rank 1            1F0       1F1       1B0 -g0->       1B1 -g1->      channel 1 -> 0: g0 g1 ...

A sent tensor is kept until it is known to have arrived, that is until the receiver has sent back something that it
computed after using the tensor.

An NCCL receive is a kernel that runs until the message is there. Two things must never wait for such a kernel. One is
the first launch of another kernel (CUDA may need an idle device to load it), so the messages of the first pass go
through host memory. The other is a second receive in the same stream, which can hold up other streams, so only one is
posted ahead.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.observe import Observed, runs_on_host
from shardline.comm.watchdog import pass_over
from shardline.parallel.pipeline.timeline import Action

pass_over(__file__)
AHEAD_ON_HOST, AHEAD_ON_DEVICE = 2, 1  # receives of one channel that are posted before they are needed


class Key(NamedTuple):
    """What is sent: the input ("activation") or the output's gradient ("gradient") of a stage, for a micro-batch."""

    what: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.what} for stage {self.stage}, micro-batch {self.microbatch}"


class Message(NamedTuple):
    """`made` and `used` are the positions of the actions in the orders of the sending and the receiving rank."""

    key: Key
    source: int
    target: int
    made: int
    used: int


def messages_of(orders: Sequence[Sequence[Action]], placement: Sequence[int]) -> list[Message]:
    """Return all messages between ranks, in each sender's order; a tensor that stays on its rank is not a message."""
    stages = len(placement)
    used = {needed_by(action, stages): place for order in orders for place, action in enumerate(order)}
    found = []
    for rank, order in enumerate(orders):
        for made, action in enumerate(order):
            key = sent_by(action, stages)
            if key is not None and placement[key.stage] != rank:
                found.append(Message(key, rank, placement[key.stage], made, used[key]))
    return found


def needed_by(action: Action, stages: int) -> Key | None:
    """Return the key of the input that an action needs from another stage, None if it needs none."""
    if action.kind == "F":
        return Key("activation", action.stage, action.microbatch) if action.stage > 0 else None
    ends = action.kind == "W" or action.stage + 1 == stages
    return None if ends else Key("gradient", action.stage, action.microbatch)


def sent_by(action: Action, stages: int) -> Key | None:
    """Return the key of the result that an action makes for another stage, None if it makes none."""
    if action.kind == "F" and action.stage + 1 < stages:
        return Key("activation", action.stage + 1, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Key("gradient", action.stage - 1, action.microbatch)
    return None


class Channel:
    """One direction between this rank and another rank of the pp axis."""

    def __init__(self, source: int, target: int, device: torch.device) -> None:
        up = collectives.axis("pp" if source < target else "pp_down")
        self.group, self.peer = up.group, source if up.rank == target else target
        ranks = dist.get_process_group_ranks(self.group)
        self.name = f"pp, rank {ranks[source]} to rank {ranks[target]}"
        job.members[self.name] = (ranks[source], ranks[target])
        self.device, self.always_on_host = device, runs_on_host(self.group, device)
        self.on_host = self.always_on_host  # whether messages pass through host memory; both sides must agree

    @property
    def staged(self) -> bool:
        """Whether tensors are copied to and from host memory; gloo sends from no other memory."""
        return self.on_host and self.device.type == "cuda"

    def open(self, sends: bool) -> None:
        """Connect now, both sides at once: later, one side may be busy when the other connects."""
        x = torch.zeros(1, device="cpu" if self.staged else self.device)
        work = self._isend(x) if sends else self._irecv(x)
        work.wait()

    def send(self, x: Tensor, what: object) -> PendingMessage:
        x = x.detach().contiguous()
        call = self._issue(what, x.shape, x.dtype, x.nbytes)
        x = x.to("cpu" if self.staged else self.device)  # with CPU offload, gradients are in host memory
        return PendingMessage(self, self._isend(x), x, call)

    def receive(self, what: object, shape: Sequence[int], dtype: torch.dtype) -> PendingMessage:
        """Post a receive."""
        x = torch.empty(tuple(shape), dtype=dtype, device="cpu" if self.staged else self.device, pin_memory=self.staged)
        call = self._issue(what, shape, dtype, None)
        return PendingMessage(self, self._irecv(x), x, call)

    def _isend(self, x: Tensor) -> Any:
        return dist.isend(x, group=self.group, group_dst=self.peer)

    def _irecv(self, x: Tensor) -> Any:
        return dist.irecv(x, group=self.group, group_src=self.peer)

    def _issue(self, what: object, shape: Sequence[int], dtype: torch.dtype, sent: int | None) -> Observed:
        tag = f"{what} ({self.name}), {tuple(shape)} {str(dtype).removeprefix('torch.')}"
        return Observed("pp", "send_receive", tag, sent, self.on_host, channel=self.name)


class PendingMessage(NamedTuple):
    """A message that was sent or whose receive was posted, until `wait` returns."""

    channel: Channel
    work: Any
    x: Tensor
    call: Observed

    def wait(self) -> Tensor:
        """Wait for the message and return the tensor that was sent or received."""
        with self.call:
            self.work.wait()
        return self.x

    def arrive(self) -> Tensor:
        """Wait for a received message and return it on the channel's device."""
        return self.wait().to(self.channel.device, non_blocking=True)


class Channels:
    """The channels of one rank, opened on all ranks of the axis in one order."""

    def __init__(self, pairs: set[tuple[int, int]], device: torch.device) -> None:
        self.rank = collectives.axis("pp").rank
        self.by_pair = {pair: Channel(*pair, device) for pair in sorted(pairs) if self.rank in pair}
        for (source, _), channel in self.by_pair.items():
            channel.open(sends=source == self.rank)

    @contextlib.contextmanager
    def through_host(self) -> Iterator[None]:
        """Inside this context, messages pass through host memory."""
        for channel in self.by_pair.values():
            channel.on_host = True
        try:
            yield
        finally:
            for channel in self.by_pair.values():
                channel.on_host = channel.always_on_host

    def swap(self, x: Tensor, peer: int, what: str) -> Tensor:
        """Send x to the peer and return the tensor of the same shape received from it, on the device of x."""
        coming = self.by_pair[peer, self.rank].receive(what, x.shape, x.dtype)
        sent = self.by_pair[self.rank, peer].send(x, what)
        received = coming.arrive()
        sent.wait()
        return received.to(x.device)


class Transfers:
    """The messages that one rank sends and receives in one run of a schedule.

    `shapes` has the shape and type of each micro-batch's activation, which are also those of its gradient.
    """

    def __init__(
        self,
        channels: Channels,
        messages: Sequence[Message],
        shapes: Sequence[tuple[Sequence[int], torch.dtype]],
    ) -> None:
        self.channels, self.shapes = channels, shapes
        rank = channels.rank
        self.outgoing = {message.key: message for message in messages if message.source == rank}
        self.incoming = {message.key: message for message in messages if message.target == rank}
        self.to_post: dict[int, deque[Message]] = {}
        for message in self.incoming.values():
            self.to_post.setdefault(message.source, deque()).append(message)
        self.posted: dict[int, dict[Key, PendingMessage]] = {source: {} for source in self.to_post}
        self.sent: list[tuple[Message, PendingMessage]] = []
        for source in self.to_post:
            self._post_ahead(source)

    def send(self, key: Key, x: Tensor) -> None:
        message = self.outgoing[key]
        channel = self.channels.by_pair[message.source, message.target]
        self.sent.append((message, channel.send(x, key)))

    def receive(self, key: Key) -> Tensor:
        message = self.incoming[key]
        posted = self.posted[message.source]
        while key not in posted:
            self._post(message.source)
        received = posted.pop(key).arrive()
        self._post_ahead(message.source)
        self._release(message)
        return received

    def finish(self) -> None:
        """Wait until everything is sent and its memory may be reused."""
        for _, sent in self.sent:
            sent.wait()
        self.sent.clear()

    def _post(self, source: int) -> None:
        message = self.to_post[source].popleft()
        channel = self.channels.by_pair[message.source, message.target]
        self.posted[source][message.key] = channel.receive(message.key, *self.shapes[message.key.microbatch])

    def _post_ahead(self, source: int) -> None:
        ahead = AHEAD_ON_HOST if self.channels.by_pair[source, self.channels.rank].on_host else AHEAD_ON_DEVICE
        while self.to_post[source] and len(self.posted[source]) < ahead:
            self._post(source)

    def _release(self, received: Message) -> None:
        """Free the messages that the sender of `received` had used before it made `received`."""
        kept = []
        for message, sent in self.sent:
            if message.target == received.source and message.used < received.made:
                sent.wait()  # returns at once
            else:
                kept.append((message, sent))
        self.sent = kept
