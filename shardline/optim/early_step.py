"""The optimizer's step inside backward: each parameter is updated as soon as its gradient is complete, then freed.

    backward:  ... grad of layer 3 -> step layer 3 -> free | grad of layer 2 -> step layer 2 -> free | ...

At any time only the gradients of the current layer exist. With gradient accumulation, gradients have to wait for the
last micro-batch, so this saves memory only without accumulation.

Clipping needs the norm of all gradients before the first update. `two_pass` computes it exactly: forward and backward
run once to measure, discarding the gradients, and once more to step with the clipping factor. That costs a second
forward and backward, and keeps the promise that a step whose norm is not finite changes nothing. A single pass cannot
keep it: by the time the norm is known, the weights have already changed. It still measures the norm, so the run stops;
it has to continue from its last checkpoint. `training.nonfinite = "skip"` needs two passes.

One optimizer holds all state and steps one parameter at a time, so its saved state is that of an ordinary run. An
optimizer that keeps state in its groups rather than per parameter does not work this way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardline.models.dtensor import local
from shardline.models.gradient_hooks import when_gradient_arrives
from shardline.optim.norms import squared_sum


class EarlyStep:
    """Uses gradients in hooks, inside `using()`: adds up their squares, steps `optimizer` with them, and frees them.

    `enabled` is False for all micro-batches but the last. Parameters in `late` have no hook: their gradients are
    complete only after backward, and `finish` uses them. `share` is the fraction of a local squared sum that counts in
    the sum over all ranks: 1 / (ranks that hold the same shard). `prepare` may change gradients before they are used.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        late: Iterable[nn.Parameter] = (),
        share: Callable[[nn.Parameter], float] = lambda parameter: 1.0,
        prepare: Callable[[list[nn.Parameter]], None] = lambda parameters: None,
    ) -> None:
        self.enabled = True
        self.optimizer, self._prepare = optimizer, prepare
        self._groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self._order = {parameter: index for index, parameter in enumerate(self._groups)}
        self._shares = [share(parameter) for parameter in self._groups]
        # One place per parameter, so the sum does not depend on the order in which gradients arrive. The stream that
        # reduces gradients writes into memory of this stream, never the other way round.
        device = next(iter(self._groups)).device
        self._squares = torch.zeros(len(self._groups), dtype=torch.float32, device=device)
        self._steps = self._measures = False
        self._scale = 1.0
        waiting = set(late)
        for parameter in self._groups:
            if parameter not in waiting:
                when_gradient_arrives(parameter, self.use)

    @contextlib.contextmanager
    def using(self, *, steps: bool, scale: float | None = None) -> Iterator[None]:
        """Measure gradients, and step with them if `steps`; with a `scale` (second pass), scale, not measure."""
        self._steps, self._measures, self._scale = steps, scale is None, 1.0 if scale is None else scale
        if self._measures:
            self._squares.zero_()
        try:
            yield
        finally:
            self._steps = self._measures = False

    def use(self, parameter: Tensor) -> None:
        """Measure the complete gradient of `parameter`, step with it and free it. The hook calls this."""
        if self.enabled and parameter.grad is not None:
            _wait_for_copy(local(parameter.grad))
            self._use([parameter])

    def finish(self) -> None:
        """Use the gradients that remain after backward, those of `late` parameters, together."""
        self._use([parameter for parameter in self._groups if parameter.grad is not None])

    @torch.no_grad()
    def _use(self, parameters: list[Any]) -> None:
        if not parameters or not (self._steps or self._measures):
            return
        self._prepare(parameters)
        gradients = [local(parameter.grad) for parameter in parameters]
        if self._measures:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                index = self._order[parameter]
                self._squares[index].copy_(squared_sum(gradient) * self._shares[index])
        if self._steps:
            if self._scale != 1.0:
                torch._foreach_mul_(gradients, self._scale)
            self._step(parameters)
        for parameter in parameters:
            parameter.grad = None

    def norm_squared(self) -> Tensor:
        """0-d: this rank's share of the squared norm of all gradients, which is the sum over ranks."""
        return self._squares.sum()

    def _step(self, parameters: list[Any]) -> None:
        """Step the optimizer as if it had only these parameters, with the current options of their groups."""
        every = self.optimizer.param_groups
        groups = [{**group, "params": [p for p in parameters if self._groups[p] is group]} for group in every]
        self.optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = every


def step_early(
    early: EarlyStep, backward: Callable[[], Tensor], agree: Callable[[Tensor, Tensor], Any], max_norm: float
) -> tuple[Any, bool]:
    """Make one optimizer step; returns its outcome, and whether the weights were changed.

    `backward` runs forward and backward over all micro-batches and returns the loss. It runs once, or twice if a
    `max_norm` above 0 clips. `agree` combines the loss and the partial squared norm of every rank into the outcome,
    which has `loss` and `grad_norm`.
    """
    clips = 0 < max_norm < math.inf
    before = _random_states() if clips else None
    with early.using(steps=not clips):
        loss = backward()
        early.finish()
    result = agree(loss, early.norm_squared())
    if not clips:
        return result, True
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        return result, False
    if before is not None:
        _restore(before)  # dropout drops the same elements
    with early.using(steps=True, scale=min(1.0, max_norm / (result.grad_norm + 1e-6))):
        backward()
        early.finish()
    return result, True


def _random_states() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def _wait_for_copy(gradient: Tensor) -> None:
    """Wait for a gradient that, with CPU offload, is still being copied from the device into pinned memory."""
    if gradient.device.type == "cpu" and torch.cuda.is_available() and gradient.is_pinned():
        torch.cuda.current_stream().synchronize()
