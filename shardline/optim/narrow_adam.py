"""Adam and AdamW with moments stored in bfloat16 or in 8 bits: 4 or 2 bytes per parameter instead of 8.

    narrow moments --widen--> float32 scratch --torch's own Adam--> float32 --round--> narrow moments

The scratch holds a few million elements at a time, so its size does not grow with the model. The step itself uses the
moments before they are rounded.

Rounding is stochastic: up or down with a probability that makes the mean right. Rounding to nearest would stop the
decay of `exp_avg_sq` for beta2 above 0.996, because each step then changes it by less than half a bfloat16 step. The
random bits depend only on the step and the position in a rank's shard of the parameter: replicas stay equal whatever
else their ranks hold, and a resumed run repeats them.

int8_moments.py describes how 8 bits hold a moment, and when they are rounded stochastically. With 8 bits, norm weights
and biases, a thousandth of a model, keep float32 moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from shardline.models.dtensor import local
from shardline.optim.int8_moments import SCALES, Coded, block_of, codes_follow, int8_moment

SCRATCH = {"cuda": 16 << 20, "cpu": 1 << 20}  # elements of each moment that are widened to float32 at a time


def adam_state(
    parameter: Tensor, dtype: torch.dtype | None = None, counts_on: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The state that the first step of any Adam would create; torch's fused Adam counts steps on the device."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counts_on),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, requires_grad=False),
    }


def int8_state(parameter: Tensor) -> dict[str, Tensor]:
    """The state of `adam_state`, with codes and block scales in place of a matrix's moments."""
    if parameter.ndim < 2:
        return adam_state(parameter)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for kind, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[kind], state[kind + SCALES] = int8_moment(parameter, dtype)
    return state


Moment = Tensor | Coded


class Segment(NamedTuple):
    """A flat piece of one parameter: views, except for a gradient that is not contiguous."""

    weight: Tensor
    gradient: Tensor
    first: Moment
    second: Moment
    step: int  # number of finished steps


class NarrowAdam(torch.optim.Optimizer):
    """Takes parameter groups, options and kernel from one of torch's optimizers, which is not used any further."""

    def __init__(self, pattern: torch.optim.Adam, dtype: torch.dtype) -> None:
        """`dtype` is bfloat16 or int8."""
        super().__init__(pattern.param_groups, pattern.defaults)
        self.dtype = dtype
        self.function: Any = adamw if isinstance(pattern, torch.optim.AdamW) else adam
        held = [local(parameter) for group in self.param_groups for parameter in group["params"]]
        self._longest = SCRATCH[held[0].device.type]
        if held[0].device.type == "cpu":  # on a CPU, the start of a random sequence does not depend on its length
            self._longest = min(max(part.numel() for part in held), self._longest)
        self._noise: tuple[tuple[int, torch.device], Tensor] | None = None

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return int8_state(parameter) if self.dtype == torch.int8 else adam_state(parameter, self.dtype)

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
        unit = local(parameter).shape[-1] if "exp_avg" + SCALES in state else 1  # blocks lie within rows
        length, count = max(1, SCRATCH[weight.device.type] // unit), int(state["step"].item())
        for start in range(0, weight.numel(), length * unit):
            run = slice(start, start + length * unit)
            first, second = (_piece(parameter, state, kind, run) for kind in ("exp_avg", "exp_avg_sq"))
            yield Segment(weight[run], gradient[run], first, second, count)

    def _run(self, group: dict[str, Any], batch: list[Segment]) -> None:
        device, count = batch[0].weight.device, batch[0].step
        kept = [[segment.first for segment in batch], [segment.second for segment in batch]]
        first, second = wide = [_widened(moments) for moments in kept]
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
        for moments, values in zip(kept, wide, strict=True):
            self._keep(moments, values, count, codes_follow(beta1, beta2))

    def _keep(self, moments: list[Any], values: list[Tensor], step: int, nearest: bool) -> None:
        """Round float32 values, which may be overwritten, to the stored moments; float32 moments are already updated.

        bfloat16 is the upper half of float32: adding random bits to the lower half carries into the upper half with a
        probability proportional to the lower half's value.
        """
        if moments[0].dtype == torch.float32:
            return
        bits = self._random_bits(step, values[0].device)
        if isinstance(moments[0], Coded):
            for coded, value in zip(moments, values, strict=True):
                chance = bits[: value.numel()].view(coded.codes.shape).float() / (1 << 16)
                coded.keep(value, None if nearest else chance)
            return
        torch._foreach_add_([value.view(torch.int32) for value in values], [bits[: len(value)] for value in values])
        torch._foreach_copy_(
            [moment.view(torch.int16) for moment in moments], [value.view(torch.int16)[1::2] for value in values]
        )

    def _random_bits(self, step: int, device: torch.device) -> Tensor:
        """Integers below 2^16, one sequence per step, as long as the longest segment."""
        key = (step, device)
        if self._noise is None or self._noise[0] != key:
            generator = torch.Generator(device).manual_seed(step)
            bits = torch.randint(1 << 16, (self._longest,), dtype=torch.int32, device=device, generator=generator)
            self._noise = (key, bits)
        return self._noise[1]


def _piece(parameter: nn.Parameter, state: dict[str, Tensor], kind: str, run: slice) -> Moment:
    """A view of elements of this rank's shard of a moment; for codes, of whole rows."""
    held = local(state[kind])
    if kind + SCALES not in state:
        return held.view(-1)[run]
    width, scales = held.shape[-1], local(state[kind + SCALES])
    rows, block = slice(run.start // width, run.stop // width), block_of(width, parameter.shape[-1])
    return Coded(held.view(-1, width)[rows], scales.view(-1, scales.shape[-1])[rows], block)


def keep_moment(parameter: nn.Parameter, state: dict[str, Tensor], kind: str, values: Tensor) -> None:
    """Encode float32 values in the shape of this rank's shard, rounded to the nearest code, a few rows at a time."""
    width, flat = values.shape[-1], values.view(-1)
    length = max(1, SCRATCH[values.device.type] // max(1, width)) * width
    for start in range(0, len(flat), max(1, length)):
        moment = _piece(parameter, state, kind, slice(start, start + length))
        assert isinstance(moment, Coded)
        moment.keep(flat[start : start + length])


def _widened(moments: list[Any]) -> list[Tensor]:
    """Flat float32 moments: copies of narrow ones, float32 ones themselves."""
    if moments[0].dtype == torch.float32:
        return moments
    if isinstance(moments[0], Coded):
        return [coded.values().view(-1) for coded in moments]
    sizes = [len(moment) for moment in moments]
    scratch = torch.empty(sum(sizes), dtype=torch.float32, device=moments[0].device)
    values = list(scratch.split(sizes))
    torch._foreach_copy_(values, moments)
    return values


def _fits(batch: list[Segment], segment: Segment) -> bool:
    """Whether the same call of Adam can include the segment: same step, device and type, and it fits the scratch."""
    length = sum(len(held.weight) for held in (*batch, segment))
    same = batch[0].step == segment.step and batch[0].weight.device == segment.weight.device
    same = same and batch[0].first.dtype == segment.first.dtype
    return same and length <= SCRATCH[segment.weight.device.type]
