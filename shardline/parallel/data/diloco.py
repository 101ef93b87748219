"""Workers that train independently and average their changes now and then: DiLoCo, streaming DiLoCo, local SGD.

A worker is one index of dp_replicate, with any layout inside. It keeps the global weights beside its own, sharded the
same way, in float32 or the parameters' type. Every `steps` steps, for one fragment (consecutive layers) after another:

    step             ... 97                     98, 99              100
    fragment 0       change = global - own  |   it is averaged  |   outer step on global; own = global
                     sent in the background |   over workers    |   (or partly own: `own_share`)

The outer step applies Nesterov momentum to the averaged change; local SGD is a plain average: rate 1, no momentum. What
a worker learns between sending and applying goes into the next change, as far as `own_share` keeps it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardline.config.schema import Config
from shardline.models.dtensor import local
from shardline.parallel.tensor.tensor import is_whole

EMBEDDING, LAYERS = "tok_embeddings.", "layers."


class SentChanges(Protocol):
    """Tensors whose average is under way."""

    seconds: float  # duration of the exchange; 0 until it is known

    def wait(self) -> list[Tensor]:
        """Return the averages, in the shapes of the sent tensors; the same tensors on every call."""


# Starts averaging tensors over the workers. All workers call it in the same order.
Average = Callable[[Sequence[Tensor]], SentChanges]


@dataclass
class Arrived:
    """Averages that have already arrived."""

    averages: list[Tensor]
    seconds: float = 0.0

    def wait(self) -> list[Tensor]:
        return self.averages


class OuterStep(NamedTuple):
    """How the averaged change updates the global weights."""

    lr: float
    momentum: float

    @torch.no_grad()
    def take(self, values: list[Tensor], momenta: list[Tensor], changes: list[Tensor]) -> None:
        """Make one step of SGD with Nesterov momentum, as torch.optim.SGD does."""
        if not values:
            return
        if self.momentum:
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, changes)
            changes = list(torch._foreach_add(changes, momenta, alpha=self.momentum))
        torch._foreach_add_(values, changes, alpha=-self.lr)


class Rhythm(NamedTuple):
    """After which step each fragment is sent and applied: each once in `steps` steps, evenly spaced."""

    steps: int
    fragments: int
    delay: int

    def sent_after(self, step: int) -> int | None:
        return self.applied_after(step + self.delay)

    def applied_after(self, step: int) -> int | None:
        between = self.steps // self.fragments
        return None if step % between else (step // between - 1) % self.fragments


@dataclass
class Fragment:
    """This rank's parameters that are sent together, a fragment or a part of one: the worker's own and global ones."""

    number: int
    names: list[str]
    own: list[Tensor]
    values: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    sent: SentChanges | None = None
    applied_at: int = -1  # the step after which it was last applied


class OuterLoop:
    """Synchronises workers after their own steps; `average` exchanges the changes between them."""

    def __init__(
        self, fragments: list[Fragment], rhythm: Rhythm, outer: OuterStep, own_share: float, average: Average
    ) -> None:
        self.fragments, self.rhythm, self.outer, self.own_share, self.average = (
            fragments,
            rhythm,
            outer,
            own_share,
            average,
        )
        self.synchronisations = 0  # fragments applied since the start of this process
        self.seconds = 0.0  # duration of their exchanges
        self.waited = 0.0  # seconds for which this rank waited for them
        for fragment in fragments:
            fragment.values = [torch.empty_like(tensor) for tensor in fragment.own]
            fragment.momenta = [torch.zeros_like(tensor) for tensor in fragment.own]

    @torch.no_grad()
    def begin(self) -> None:
        """Use the current weights, which are the same on all workers, as the global weights."""
        for fragment in self.fragments:
            torch._foreach_copy_(fragment.values, fragment.own) if fragment.own else None
            torch._foreach_zero_(fragment.momenta) if fragment.own else None
            fragment.sent, fragment.applied_at = None, -1

    def after_step(self, step: int, last: bool = False) -> None:
        """Call after each step of the worker: sends and applies what is due; after the `last` step, everything."""
        for fragment in self._of(self.rhythm.sent_after(step)):
            self._apply(fragment, step)  # it is still under way only if the rhythm has changed
            self._send(fragment)
        for fragment in self._of(self.rhythm.applied_after(step)):
            self._apply(fragment, step)
        if last:
            self._end(step)

    def _end(self, step: int) -> None:
        """Average what workers have learned since; then all of them use the global weights."""
        late = [fragment for fragment in self.fragments if fragment.sent is None and fragment.applied_at != step]
        for fragment in self.fragments:
            self._apply(fragment, step)
        for fragment in late:
            self._send(fragment)
        for fragment in late:
            self._apply(fragment, step)
        for fragment in self.fragments:
            _copy(fragment.own, fragment.values)

    def _of(self, number: int | None) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.number == number]

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        if fragment.own:
            fragment.sent = self.average(
                [value - own for value, own in zip(fragment.values, fragment.own, strict=True)]
            )

    @torch.no_grad()
    def _apply(self, fragment: Fragment, step: int) -> None:
        """Wait for the average of a sent fragment, and make the outer step with it."""
        if fragment.sent is None:
            return
        started = time.perf_counter()
        averages = fragment.sent.wait()
        self.waited += time.perf_counter() - started
        changes = [average.to(value.dtype) for average, value in zip(averages, fragment.values, strict=True)]
        if fragment is self._of(fragment.number)[0]:  # a fragment may be sent in several parts
            self.synchronisations += 1
        self.seconds += fragment.sent.seconds
        fragment.sent, fragment.applied_at = None, step
        self.outer.take(fragment.values, fragment.momenta, changes)
        for own, value in zip(fragment.own, fragment.values, strict=True):
            own.copy_(value if self.own_share == 0 else torch.lerp(value, own, self.own_share))

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside this context the model has the global weights, for validation."""
        kept = [[own.clone() for own in fragment.own] for fragment in self.fragments]
        for fragment in self.fragments:
            _copy(fragment.own, fragment.values)
        try:
            yield
        finally:
            for fragment, own in zip(self.fragments, kept, strict=True):
                _copy(fragment.own, own)


@torch.no_grad()
def _copy(into: list[Tensor], source: list[Tensor]) -> None:
    for one, other in zip(into, source, strict=True):
        one.copy_(other)


# ---- from the config -------------------------------------------------------------------------------------------------


def outer_loop(
    config: Config, model: nn.Module, layers: int, average: Average, alone: Sequence[nn.Parameter] = ()
) -> OuterLoop:
    """Build the outer loop that a config describes, for this rank's part of a model with `layers` layers.

    In 8 bits, a number's rounding depends on its neighbours, and copies of a parameter must get the same bits. So each
    of those in `alone`, which two pipeline ranks hold, is sent by itself, and those that all tensor-parallel ranks hold
    are sent without shards.
    """
    section = config.fault_tolerance
    plain = section.semi_sync_method == "local_sgd"
    outer = OuterStep(1.0, 0.0) if plain else OuterStep(section.outer_lr, section.outer_momentum)
    count, apart = section.num_fragments, {id(parameter) for parameter in alone}
    groups: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = name if id(parameter) in apart else "whole" if is_whole(parameter) else ""
            group = fragment_of(name, layers, count), kind
            groups.setdefault(group, {})[name] = local(parameter.detach())
    fragments = [Fragment(number, list(held), list(held.values())) for (number, _), held in sorted_groups(groups)]
    rhythm = Rhythm(section.sync_steps, count, section.fragment_sync_delay)
    return OuterLoop(fragments, rhythm, outer, section.fragment_update_alpha, average)


def sorted_groups(
    groups: Mapping[tuple[int, str], dict[str, Tensor]],
) -> list[tuple[tuple[int, str], dict[str, Tensor]]]:
    """Sort groups by the number of their fragment; within a fragment, parameters that are sent apart come last."""
    return sorted(groups.items(), key=lambda item: item[0])


def fragment_of(name: str, layers: int, fragments: int) -> int:
    """Return a parameter's fragment: layers are distributed evenly; what precedes and follows them is at the ends."""
    if name.startswith(EMBEDDING):
        return 0
    if not name.startswith(LAYERS):
        return fragments - 1
    return int(name.split(".")[1]) * fragments // layers
