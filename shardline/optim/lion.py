"""SGD and Lion: optimizers with one moment, whose update of an element depends only on that element.

    SGD   b = momentum b + (g + decay w)                w -= lr b                    (momentum is `optimizer.beta1`)
    Lion  u = sign(beta1 m + (1 - beta1) g)             w -= lr (u + decay w)        (Chen et al. 2023, algorithm 2)
          m = beta2 m + (1 - beta2) g

Shards step like full tensors. The gradients are overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardline.models.dtensor import local

Lists = tuple[list[Tensor], list[Tensor], list[Tensor]]


class OneMoment(torch.optim.Optimizer):
    """What SGD and Lion share: a tensor of zeros for each parameter, under the optimizer's name for it."""

    moment = ""

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {self.moment: torch.zeros_like(parameter, requires_grad=False)}

    def lists(self, group: dict[str, Any]) -> Lists:
        """Local weights, gradients and moments of the parameters that have a gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.initial_state(parameter)
        moments = [local(self.state[parameter][self.moment]) for parameter in parameters]
        return [local(p.detach()) for p in parameters], [local(p.grad) for p in parameters], moments


class Sgd(OneMoment):
    """SGD with momentum, like `torch.optim.SGD` without dampening."""

    moment = "momentum_buffer"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients, momentum = self.lists(group)
            if not weights:
                continue
            if group["weight_decay"]:
                torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])
            torch._foreach_mul_(momentum, group["momentum"])
            torch._foreach_add_(momentum, gradients)
            torch._foreach_add_(weights, momentum, alpha=-group["lr"])


class Lion(OneMoment):
    """Lion, with decoupled weight decay."""

    moment = "exp_avg"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients, moments = self.lists(group)
            if not weights:
                continue
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_lerp_(moments, gradients, 1 - beta2)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
