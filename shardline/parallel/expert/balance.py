"""The load of the experts, its report, and balancing without an auxiliary loss.

After each step, the bias of an expert that got too few tokens increases. The counts cover the whole global batch, all
micro-batches and ranks: every layout changes the biases equally, and all ranks with a layer have the same biases.
Counts and losses of the routers are part of an all-reduce that every step makes anyway, so they cost no extra wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.models.decoder import Block, Decoder
from shardline.models.dtensor import local


class ExpertLoad:
    """The tallies of the last step, for all layers with experts, on this or another pipeline rank."""

    def __init__(self, model: Decoder, device: torch.device, batches: int = 1) -> None:
        """With several `batches` in a step, each of a worker, router losses are means over one of these."""
        moe = model.arch.moe
        self.device, self.batches = device, batches
        self.layers = [] if moe is None else [layer for layer in range(model.arch.n_layers) if moe.holds(layer)]
        self.n_experts, self.losses = (0, {}) if moe is None else (moe.n_experts, moe.losses)
        here = {layer: model.block(layer) for layer in self.layers if str(layer) in model.layers}
        self.blocks: dict[int, Block] = here
        biases = {layer: block.moe.router.balance for layer, block in here.items() if block.moe is not None}
        frozen = model.adaptation is not None
        fixed = {layer for layer in biases if frozen or f"layers.{layer}.moe.router.balance" in model.frozen}
        self.biases = {layer: bias for layer, bias in biases.items() if bias is not None and layer not in fixed}
        self.coefficient = 0.0 if moe is None else moe.balance_coeff
        self.loads = torch.empty(0)  # (layers, experts) of the last step

    def begin(self) -> None:
        """Clear the tallies."""
        for block in self.blocks.values():
            block.tally = None

    def tallies(self) -> Tensor:
        """Return this rank's part of all layers' tallies since `begin`, flat; the sum over all ranks is the total."""
        elsewhere = torch.zeros(self.n_experts + len(self.losses), device=self.device)
        parts = [self.blocks[layer].tally if layer in self.blocks else elsewhere for layer in self.layers]
        return torch.cat([elsewhere[:0], *(part for part in parts if part is not None)])

    def summary(self, total: Tensor) -> Tensor:
        """Keep the loads of the whole step, and return the few numbers that `row` reports."""
        if not self.layers:
            return total
        self.loads, losses = self._split(total)
        return torch.cat([self.loads.amax(1) / self.loads.mean(1), losses.mean(0) / self.batches])

    def _split(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return loads and losses, one row for each layer."""
        loads, losses = total.view(len(self.layers), -1).split((self.n_experts, len(self.losses)), dim=1)
        return loads.round(), losses  # ranks that route the same tokens each added a fraction

    @property
    def size(self) -> int:
        """The count of numbers in the tallies of all layers."""
        return len(self.layers) * (self.n_experts + len(self.losses))

    def row(self, summary: list[float]) -> dict[str, Any]:
        """Return the keys of metrics.jsonl: each layer's maximum over mean, the largest of these, and mean losses."""
        if not self.layers:
            return {}
        loads = dict(zip(map(str, self.layers), summary, strict=False))
        losses = dict(zip(self.losses, summary[len(self.layers) :], strict=True))
        return {"expert_load": max(loads.values()), "expert_load_layers": loads, **losses}

    def balance(self) -> None:
        """Move each layer's biases by the coefficient towards equal loads; their mean does not change."""
        if self.biases:
            self._move([local(bias) for bias in self.biases.values()], self.loads)

    def balance_copies(self, biases: Sequence[Tensor], total: Tensor) -> None:
        """Move these copies of the biases by the tallies of any step, not only the last one."""
        if biases:
            self._move(biases, self._split(total)[0])

    @torch.no_grad()
    def _move(self, biases: Sequence[Tensor], loads: Tensor) -> None:
        steps = (loads.mean(1, keepdim=True) - loads).sign() * self.coefficient
        steps -= steps.mean(1, keepdim=True)
        rows = dict(zip(self.layers, steps.unbind(), strict=True))
        torch._foreach_add_(list(biases), [rows[layer] for layer in self.biases])
