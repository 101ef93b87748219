"""Adam and AdamW on a GPU, including clipping: every number is read and written once per step (kernels.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardline.models.dtensor import local
from shardline.models.products.narrow import narrow_copy
from shardline.optim.int8_moments import BLOCK as INT8_BLOCK
from shardline.optim.int8_moments import SCALES, SMALLEST, code_step, codes_follow
from shardline.optim.narrow_adam import adam_state, int8_state
from shardline.optim.norms import address_table, is_small, triton_type


class GPUAdam(torch.optim.Optimizer):
    """Takes parameter groups and options from one of torch's optimizers, which is not used any further.

    Parameters and moments are float32, gradients float32 or bfloat16; with `int8`, moments of matrices have 8 bits
    (int8_moments.py). `scale` is the clipping factor: it multiplies the gradients of each step until it is changed.
    """

    def __init__(self, pattern: torch.optim.Adam, int8: bool = False) -> None:
        super().__init__(pattern.param_groups, pattern.defaults)
        self.int8 = int8
        self.decoupled = isinstance(pattern, torch.optim.AdamW)
        self.scale = 1.0
        self.launched = 0  # number of kernels in the last step
        self._prepared: list[KernelLaunch] | None = None
        self._empty: list[Tensor] = []  # counters of parameters of which this rank holds nothing

    @staticmethod
    def serves(pattern: torch.optim.Adam) -> bool:
        """Whether the kernels support this optimizer: float32 parameters on a GPU, with Triton installed."""
        parameters = [parameter for group in pattern.param_groups for parameter in group["params"]]
        return all(p.is_cuda and p.dtype == torch.float32 for p in parameters) and find_spec("triton") is not None

    @staticmethod
    def serves_int8(pattern: torch.optim.Adam, momentum: float = 0.0) -> bool:
        """Whether they also support 8-bit moments: rows of whole blocks, and codes rounded to the nearest.

        `momentum` is the highest that a schedule gives.
        """
        groups = pattern.param_groups
        widths = [local(p).shape[-1] for group in groups for p in group["params"] if p.ndim > 1]
        whole = all(width % INT8_BLOCK == 0 for width in widths)
        betas = [(max(beta1, momentum), beta2) for beta1, beta2 in (group["betas"] for group in groups)]
        return whole and all(codes_follow(*both) for both in betas)

    def initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return int8_state(parameter) if self.int8 else adam_state(parameter)

    @torch.no_grad()
    def prepare(self) -> None:
        """Plan the next step's launches, which the host can do while gradients are still being computed."""
        self._empty = []
        self._prepared = [launch for group in self.param_groups for launch in self._launches(group)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._prepared is None:
            self.prepare()
        launches, self._prepared = self._prepared or [], None
        self.launched = len(launches)
        for group, updates, table in launches:
            if table is not None:
                self._step_many(group, updates, table)
            elif updates[0].scales is not None:
                self._step_int8(group, updates[0], updates[0].scales)
            else:
                self._step(group, updates[0])
        every = [update for launch in launches for update in launch.updates]
        # A rank that holds nothing of a parameter counts its steps too: a checkpoint takes the number from any rank.
        if counters := [*(update.counter for update in every), *self._empty]:
            torch._foreach_add_(counters, 1)
        if every:
            # Torch did not see the kernels write. A narrow copy is up to date, so its weight keeps its version.
            torch.autograd.graph.increment_version([update.weight for update in every if update.copy is None])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._prepared = None  # it refers to gradients
        super().zero_grad(set_to_none)

    def _launches(self, group: dict[str, Any]) -> Iterator[KernelLaunch]:
        """The kernels of a group's step: one for each large parameter, and one for all small parameters."""
        together: dict[tuple[int, torch.dtype, bool], list[Update]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not local(parameter).numel():
                self._empty.append(local(self._state_of(parameter)["step"]))
                continue
            update = self._update(parameter)
            if update.scales is None and is_small(update.weight, update.gradient):
                key = (update.steps, update.gradient.dtype, update.copy is not None)
                together.setdefault(key, []).append(update)
            else:
                yield KernelLaunch(group, [update], None)
        for updates in together.values():
            table = address_table([_row(update) for update in updates], updates[0].weight.device)
            yield KernelLaunch(group, updates, table)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter))
        return state

    def _update(self, parameter: nn.Parameter) -> Update:
        state = self._state_of(parameter)
        assert parameter.grad is not None
        held = {kind: local(tensor) for kind, tensor in state.items()}
        first, second, counter = held["exp_avg"], held["exp_avg_sq"], held["step"]
        scales = (held["exp_avg" + SCALES], held["exp_avg_sq" + SCALES]) if first.dtype == torch.int8 else None
        gradient, steps = local(parameter.grad).contiguous(), int(counter.item()) + 1
        copy = narrow_copy(parameter)
        return Update(local(parameter.detach()), gradient, first, second, copy, counter, steps, scales)

    def _numbers(self, group: dict[str, Any], steps: int) -> tuple[float, ...]:
        """The trailing scalar arguments, which all kernels share."""
        beta1, beta2 = group["betas"]
        step_size, root = group["lr"] / (1 - beta1**steps), math.sqrt(1 - beta2**steps)
        return (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], step_size, root, self.scale)

    def _step(self, group: dict[str, Any], of: Update) -> None:
        from shardline.optim.kernels import BLOCK, adam_kernel

        count = of.weight.numel()
        adam_kernel[(-(-count // BLOCK),)](
            *(of.weight, of.gradient, of.first, of.second, of.weight if of.copy is None else of.copy, count),
            *self._numbers(group, of.steps),
            DECOUPLED=self.decoupled,
            NARROW=of.copy is not None,
            BLOCK=BLOCK,
        )

    def _step_int8(self, group: dict[str, Any], of: Update, scales: tuple[Tensor, Tensor]) -> None:
        from shardline.optim.kernels import BLOCK, int8_adam_kernel

        blocks, together = scales[0].numel(), BLOCK // INT8_BLOCK
        moments = of.first, scales[0], of.second, scales[1]
        int8_adam_kernel[(-(-blocks // together),)](
            *(of.weight, of.gradient, *moments, of.weight if of.copy is None else of.copy, blocks),
            *self._numbers(group, of.steps),
            DECOUPLED=self.decoupled,
            NARROW=of.copy is not None,
            BLOCK=INT8_BLOCK,
            BLOCKS=together,
            STEP1=code_step(torch.int8),
            STEP2=code_step(torch.uint8),
            SMALLEST=SMALLEST,
        )

    def _step_many(self, group: dict[str, Any], updates: list[Update], table: Tensor) -> None:
        from shardline.optim.kernels import BLOCK, many_adam_kernel

        blocks = _blocks(tuple(-(-of.weight.numel() // BLOCK) for of in updates), table.device)
        many_adam_kernel[(len(blocks),)](
            *(table, blocks),
            *self._numbers(group, updates[0].steps),
            GRADIENT=triton_type(updates[0].gradient.dtype),
            DECOUPLED=self.decoupled,
            NARROW=updates[0].copy is not None,
            BLOCK=BLOCK,
        )


class Update(NamedTuple):
    """What the step of one parameter reads and writes."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    copy: Tensor | None
    counter: Tensor  # the number of finished steps
    steps: int  # including this one
    scales: tuple[Tensor, Tensor] | None  # for 8-bit moments


class KernelLaunch(NamedTuple):
    """A kernel launch of the step; `table` has the addresses of several small parameters, or is None for one."""

    group: dict[str, Any]
    updates: list[Update]
    table: Tensor | None


def _row(update: Update) -> tuple[int, ...]:
    tensors = update.weight, update.gradient, update.first, update.second, update.copy
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (*addresses, update.weight.numel())


@functools.lru_cache(maxsize=16)
def _blocks(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2): the row and the block of each program, if rows have these counts of blocks."""
    pairs = [(row, block) for row, count in enumerate(counts) for block in range(count)]
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
