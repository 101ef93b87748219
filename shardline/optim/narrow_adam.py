"""Adam and AdamW whose moments are kept in bfloat16: 4 bytes per parameter instead of 8.

    bfloat16 moments --widen--> float32 scratch --torch's own Adam--> float32 --round--> bfloat16 moments

The scratch holds a few million elements at a time, so its size does not grow with the model. The step itself uses the
moments before they are rounded.

Rounding is stochastic: up or down with a probability that makes the mean right. Rounding to nearest would stop the
decay of `exp_avg_sq` for beta2 above 0.996, because each step then changes it by less than half a bfloat16 step. The
random bits depend only on the step and the position in a rank's shard of the parameter: replicas stay equal whatever
else their ranks hold, and a resumed run repeats them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from shardline.models.dtensor import local

SCRATCH = {"cuda": 16 << 20, "cpu": 1 << 20}  # elements of each moment that are in float32 at a time


def adam_state(
    parameter: Tensor, dtype: torch.dtype | None = None, counts_on: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """What the first step of any Adam would make; a fused one of torch's counts steps on the parameter's device."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counts_on),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
    }


class Segment(NamedTuple):
    """A flat piece of one parameter: views, except of a gradient that is not contiguous."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: int  # finished steps


class NarrowAdam(torch.optim.Optimizer):
    """Takes parameter groups and options, kernel included, from one of torch's optimizers, which then goes unused."""

    def __init__(self, pattern: torch.optim.Adam) -> None:
        super().__init__(pattern.param_groups, pattern.defaults)
        self.function: Any = adamw if isinstance(pattern, torch.optim.AdamW) else adam
        held = [local(parameter) for group in self.param_groups for parameter in group["params"]]
        self._longest = SCRATCH[held[0].device.type]
        if held[0].device.type == "cpu":  # there the beginning of a sequence does not depend on its length
            self._longest = min(max(part.numel() for part in held), self._longest)
        self._noise: tuple[tuple[int, torch.device], Tensor] | None = None

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return adam_state(parameter, torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            batch: list[Segment] = []
            for segment in (segment for parameter in parameters for segment in self._segments(parameter)):
                if batch and not _fits(batch, segment):
                    self._run(group, batch)
                    batch = []
                batch.append(segment)
            if batch:
                self._run(group, batch)
            for parameter in parameters:
                self.state[parameter]["step"] += 1

    def _segments(self, parameter: nn.Parameter) -> Iterator[Segment]:
        if not self.state[parameter]:
            self.state[parameter] = self.initial_state(parameter)
        state = self.state[parameter]
        assert parameter.grad is not None
        weight, gradient = local(parameter.detach()).view(-1), local(parameter.grad).reshape(-1)
        first, second = local(state["exp_avg"]).view(-1), local(state["exp_avg_sq"]).view(-1)
        length, count = SCRATCH[weight.device.type], int(state["step"].item())
        for start in range(0, len(weight), length):
            run = slice(start, start + length)
            yield Segment(weight[run], gradient[run], first[run], second[run], count)

    def _run(self, group: dict[str, Any], batch: list[Segment]) -> None:
        device, count, sizes = batch[0].weight.device, batch[0].step, [len(segment.weight) for segment in batch]
        scratch = torch.empty(2, sum(sizes), dtype=torch.float32, device=device)
        first, second = (list(row.split(sizes)) for row in scratch)
        torch._foreach_copy_(first, [segment.first for segment in batch])
        torch._foreach_copy_(second, [segment.second for segment in batch])
        beta1, beta2 = group["betas"]
        self.function(
            [segment.weight for segment in batch],
            [segment.gradient for segment in batch],
            first,
            second,
            [],
            list(torch.full((len(batch),), float(count), device=device if group["fused"] else "cpu").unbind()),
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        first, second = (list(row.split(sizes)) for row in self._rounded(scratch, sizes, count))
        torch._foreach_copy_([segment.first.view(torch.int16) for segment in batch], first)
        torch._foreach_copy_([segment.second.view(torch.int16) for segment in batch], second)

    def _rounded(self, scratch: Tensor, sizes: list[int], step: int) -> Tensor:
        """(2, total) float32, changed in place -> int16 bits of bfloat16, the upper halves of the float32 ones.

        Adding random bits to the lower half carries into the upper half with a probability equal to its value.
        """
        bits = self._random_bits(step, scratch.device)
        for row in scratch.view(torch.int32):
            torch._foreach_add_(list(row.split(sizes)), [bits[:size] for size in sizes])
        return scratch.view(torch.int16)[:, 1::2]

    def _random_bits(self, step: int, device: torch.device) -> Tensor:
        """Integers below 2^16, one sequence per step, as long as the longest segment."""
        key = (step, device)
        if self._noise is None or self._noise[0] != key:
            generator = torch.Generator(device).manual_seed(step)
            bits = torch.randint(1 << 16, (self._longest,), dtype=torch.int32, device=device, generator=generator)
            self._noise = (key, bits)
        return self._noise[1]


def _fits(batch: list[Segment], segment: Segment) -> bool:
    """Whether one call of Adam can take it too: it has one step count, one device and the scratch's size."""
    length = sum(len(held.weight) for held in (*batch, segment))
    same = batch[0].step == segment.step and batch[0].weight.device == segment.weight.device
    return same and length <= SCRATCH[segment.weight.device.type]
