"""Muon: the matrices of the blocks take orthogonal steps with momentum; everything else takes AdamW steps.

    b = momentum b + (1 - momentum) g      u = momentum b + (1 - momentum) g         Nesterov
    w = w - lr decay w - lr a O(u)         a = sqrt(max(1, rows / columns))          muon_adjust_lr = "original"
                                           a = 0.2 sqrt(max(rows, columns))          "match_rms_adamw"

O(u) is close to the orthogonal matrix nearest to u: Newton-Schulz brings its singular values near 1. Formulas,
defaults, coefficients and results are those of torch.optim.Muon, applied to logical matrices: wq, wk and wv, gate and
up, and those of each expert are separate matrices. O needs a full matrix, so matrices.py brings each to one rank.
Momentum is sharded like its parameter. The gradients are overwritten with u.

On a GPU, u is sent and O computed in bfloat16, which torch's Muon uses everywhere. On a CPU both use float32: rounding
to bfloat16 would amplify small differences between layouts, and CPUs are where layouts are compared.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from shardline.models.dtensor import local
from shardline.optim.matrices import Coordinates, Matrix, MatrixExchange
from shardline.optim.narrow_adam import adam_state

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
TYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # for orthogonalisation
ADJUSTMENTS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """(m, n) -> (m, n): x = a x + (b x xT + c (x xT)^2) x, `steps` times; a tall matrix is transposed first."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)  # now no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """`rest` is AdamW over all other parameters; it shares its groups and state with this optimizer."""

    def __init__(self, matrices: list[Matrix], options: dict[str, Any], rest: torch.optim.Adam | None) -> None:
        self.matrices, self.rest = matrices, rest
        own = list(dict.fromkeys(matrix.parameter for matrix in matrices))
        groups = [{"params": own, **options}] if own else []
        super().__init__([*groups, *(rest.param_groups if rest is not None else [])], {})
        self._orthogonal = set(own)
        self._planned: tuple[set[nn.Parameter], list[MatrixExchange]] = (set(), [])
        if rest is not None:
            rest.state = self.state

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter in self._orthogonal:
            return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
        fused = self.rest is not None and self.rest.defaults["fused"]
        return adam_state(parameter, counts_on=parameter.device if fused else "cpu")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._orthogonal:
            self._step(self.param_groups[0])
        if self.rest is not None:
            self.rest.step()

    def _step(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.initial_state(parameter)
        if not parameters:
            return
        updates = [local(parameter.grad) for parameter in parameters]
        momentum = [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(momentum, updates, 1 - group["momentum"])
        torch._foreach_lerp_(updates, momentum, group["momentum"])
        rate = group["lr"] * group["lr_factor"]
        torch._foreach_mul_([local(parameter.detach()) for parameter in parameters], 1 - rate * group["weight_decay"])
        change = functools.partial(orthogonalised, steps=group["ns_steps"])
        put = functools.partial(_subtract, rate=rate, adjust=ADJUSTMENTS[group["adjust_lr"]])
        for exchange in self._plan(set(parameters)):
            exchange.run(_update_of, change, put, TYPES[exchange.device.type])

    def _plan(self, parameters: set[nn.Parameter]) -> list[MatrixExchange]:
        """Plan one exchange for each mesh; plan again if other parameters have gradients than before."""
        if self._planned[0] != parameters:
            by_mesh: dict[Any, list[Matrix]] = {}
            for matrix in self.matrices:
                if matrix.parameter in parameters:
                    by_mesh.setdefault(getattr(matrix.parameter, "device_mesh", None), []).append(matrix)
            self._planned = parameters, [MatrixExchange(of_mesh, mesh) for mesh, of_mesh in by_mesh.items()]
        return self._planned[1]


def _update_of(matrix: Matrix, at: Coordinates) -> Tensor:
    assert matrix.parameter.grad is not None
    part, rows = matrix.within(local(matrix.parameter.grad), at)
    return part if rows is None else part.index_select(0, rows)


def _subtract(matrix: Matrix, at: Coordinates, update: Tensor, rate: float, adjust: Any) -> None:
    part, rows = matrix.within(local(matrix.parameter.detach()), at)
    update, step = update.to(part.device), rate * adjust(*matrix.shape)
    if rows is None:
        part.sub_(update, alpha=step)
    else:
        part.index_copy_(0, rows, part.index_select(0, rows).sub_(update, alpha=step))
