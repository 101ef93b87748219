"""What a step does differently if the model's replicas are workers that train independently (`data_parallel_mode`).

A worker's gradients are those of the mean loss over its own batch, and only its own norm decides how they are clipped.
The few numbers that workers share travel in the all-reduce that ends each step anyway: the squared norm, the losses
weighted by targets, and the targets of every worker. So the logged loss is the mean over all targets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.parallel.data.average import average_over
from shardline.parallel.data.diloco import outer_loop

AXIS = "workers"


class Workers:
    """This rank's worker, and what it shares with the others."""

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, on_two_stages: Collection[nn.Parameter]) -> None:
        section, layers = config.fault_tolerance, model.arch.n_layers
        if section.num_fragments > layers:
            raise UserError(
                f"fault_tolerance.num_fragments = {section.num_fragments}: each fragment needs at least one of the"
                f" model's {layers} layers; set it to {layers} or less"
            )
        self.mesh = mesh
        code = section.quantized_dtype if section.should_quantize else None
        self.outer = outer_loop(config, model, layers, average_over(AXIS, code), list(on_two_stages))
        self.norm = 0.0  # the norm of this worker's gradients in the last step
        self._own = self._targets = torch.zeros(())

    def count(self, targets: Tensor) -> str:
        """Remember this rank's targets, which the caller sums in place over the returned axis: the worker's ranks."""
        self._own, self._targets = targets.clone(), targets
        return "fsdp"

    def spread(self, squares: Tensor) -> Tensor:
        """(workers,): this rank's share of the squared norm at its worker's index, 0 elsewhere."""
        places = squares.new_zeros(self.mesh.workers)
        places[self.mesh.worker] = squares[0]
        return places

    def weigh(self, sums: Tensor) -> Tensor:
        """Turn means over the worker's targets into sums, and append the number of this rank's own targets."""
        ranks = self.mesh.layout.tp * self.mesh.layout.pp  # ranks that read the same tokens
        return torch.cat([sums * self._targets.clamp(min=1), (self._own / ranks)[None].to(sums.dtype)])

    def means(self, sums: list[float]) -> list[float]:
        """Means over the targets of all workers."""
        *totals, targets = sums
        return [total / max(targets, 1.0) for total in totals]

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl says about synchronisations since this start; only on a CPU can the host time them."""
        row: dict[str, Any] = {"outer_steps": self.outer.synchronisations}
        if self.mesh.device_type == "cpu":
            row |= {"outer_comm_seconds": self.outer.seconds, "outer_exposed_seconds": self.outer.waited}
        return row
