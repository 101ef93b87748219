"""Freezes parts of fused weights while other parts are trained: queries without keys, gate without up.

    wqkv     | q q k v | q q k v |        gradients of frozen rows are set to zero before anything uses them (norm,
    gradient | g g 0 0 | g g 0 0 |        clipping, moments), and a step leaves these rows unchanged, even if the
                                          optimizer changes weights without a gradient (weight decay)

Gradients and optimizer state have all rows of such a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import is_halved, logical_names, logical_rows

Index = tuple[Any, ...]  # selects a part of this rank's shard of a parameter


class FrozenRows:
    """The parameters of a model that are trained in part; optimizer steps leave their frozen rows unchanged."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
        self.places = {
            parameter: _places(model, name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and any(part in model.frozen for part in logical_names(model.arch, name))
        }
        self._kept: list[tuple[Tensor, Index, Tensor]] = []
        if self.places:
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._keep(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._restore())

    @torch.no_grad()
    def clear(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Set the gradients of frozen rows to zero, in these parameters or in all."""
        for parameter in self.places if parameters is None else parameters:
            gradient = parameter.grad
            if gradient is not None:
                for place in self.places.get(parameter, ()):
                    local(gradient)[place] = 0

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the frozen rows of the parameters that a step is about to change."""
        changing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in changing & self.places.keys():
            held = local(parameter.detach())
            self._kept += [(held, place, held[place].clone()) for place in self.places[parameter]]

    def _restore(self) -> None:
        for held, place, values in self._kept:
            held[place] = values
        self._kept.clear()


def _places(model: Decoder, name: str, parameter: nn.Parameter) -> list[Index]:
    """Where the frozen parts of a parameter are in this rank's shard."""
    if is_halved(name):  # gate and up of experts
        halves = enumerate(logical_names(model.arch, name))
        return [(slice(None), number) for number, part in halves if part in model.frozen]
    parts = logical_rows(model.arch, name, parameter.shape[0], local_slices(parameter)[0])
    frozen = [part.places.to(local(parameter).device) for part in parts if part.name in model.frozen]
    return [(rows,) for rows in frozen if len(rows)]
