"""Balancing the experts without a loss: after each step, the bias of an expert that got too few tokens rises.

The counts are those of the whole global batch, over all micro-batches and ranks: every layout moves the biases alike,
and all ranks that hold a layer hold the same biases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.models.decoder import Block, Decoder
from shardline.models.dtensor import local
from shardline.parallel.expert.expert import routes_together


class ExpertLoad:
    """The tokens of each expert in the last step, and the biases that follow from them."""

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        self.blocks: dict[int, Block] = {
            int(layer): block  # type: ignore[misc]
            for layer, block in model.layers.items()
            if block.moe is not None
        }
        shares_tokens = mesh.layout.tp > 1 and not routes_together(mesh.layout)
        self.axes = [axis for axis in ("loss", *(["tp"] if shares_tokens else [])) if mesh.size(axis) > 1]

    def take(self) -> Tensor | None:
        """(layers here, experts) of the whole global batch since the last call; None without experts."""
        loads = [block.load for block in self.blocks.values()]
        if not loads:
            return None
        assert all(load is not None for load in loads)
        total = torch.stack([load for load in loads if load is not None])
        for axis in self.axes:
            collectives.sum_in_place(total, axis)
        for block in self.blocks.values():
            block.load = None
        return total

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        """Move each layer's biases by its coefficient towards equal loads; their mean stays."""
        for load, block in zip(loads, self.blocks.values(), strict=True):
            assert block.moe is not None
            if block.moe.router.balance is not None:
                step = (load.mean() - load).sign() * block.moe.spec.balance_coeff
                local(block.moe.router.balance).add_(step - step.mean())


def largest_over_mean(loads: Tensor) -> list[float]:
    """For each layer, how many times the mean its most used expert has."""
    return (loads.amax(-1) / loads.mean(-1)).tolist()
