"""Adam and AdamW on a GPU, clipping included: every number is read and written once a step (kernels.py)."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from shardline.models.products.narrow import narrow_copy
from shardline.optim.narrow_adam import adam_state


class GPUAdam(torch.optim.Optimizer):
    """Takes parameter groups and options from one of torch's optimizers, which then goes unused.

    Parameters and moments are float32, gradients float32 or bfloat16. `scale` multiplies the gradients of each step
    until it is changed: the clipping factor.
    """

    def __init__(self, pattern: torch.optim.Adam) -> None:
        super().__init__(pattern.param_groups, pattern.defaults)
        self.decoupled = isinstance(pattern, torch.optim.AdamW)
        self.scale = 1.0

    @staticmethod
    def serves(pattern: torch.optim.Adam) -> bool:
        """Whether the kernel can make this optimizer's steps: whole float32 parameters on a GPU, and Triton is there.

        Shards of several ranks keep torch's own kernel: ours has not run on more than one GPU.
        """
        parameters = [parameter for group in pattern.param_groups for parameter in group["params"]]
        if not all(p.is_cuda and p.dtype == torch.float32 and not hasattr(p, "to_local") for p in parameters):
            return False
        return find_spec("triton") is not None

    def initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return adam_state(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter)

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        from shardline.optim.kernels import BLOCK, adam_kernel

        state = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter))
        state["step"] += 1
        count, (beta1, beta2) = int(state["step"].item()), group["betas"]
        assert parameter.grad is not None
        weight, copy = parameter.detach(), narrow_copy(parameter)
        adam_kernel[(-(-weight.numel() // BLOCK),)](
            weight,
            parameter.grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            weight if copy is None else copy,
            weight.numel(),
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["lr"] / (1 - beta1**count),
            math.sqrt(1 - beta2**count),
            self.scale,
            DECOUPLED=self.decoupled,
            NARROW=copy is not None,
            BLOCK=BLOCK,
        )
        if copy is None:
            torch.autograd.graph.increment_version(parameter)  # the kernel wrote behind torch's back
