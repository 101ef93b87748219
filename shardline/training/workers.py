"""What a step does otherwise where the copies of the model are workers that train apart (`data_parallel_mode`).

A worker's gradients are those of the mean loss over its own batch, and its norm alone decides how they are clipped. The
few numbers of all workers travel in the sum that ranks make anyway after each step: the squared norm of every worker,
losses weighted by the worker's targets, and targets. So the loss that is logged is the mean over all targets.
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
    """This rank's worker among the others, and what they have in common."""

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, on_two_stages: Collection[nn.Parameter]) -> None:
        section, layers = config.fault_tolerance, model.arch.n_layers
        if section.num_fragments > layers:
            raise UserError(
                f"fault_tolerance.num_fragments = {section.num_fragments}: the model has {layers} layers; a fragment"
                f" needs one at least, so give {layers} or less"
            )
        self.mesh = mesh
        code = section.quantized_dtype if section.should_quantize else None
        self.outer = outer_loop(config, model, layers, average_over(AXIS, code), list(on_two_stages))
        self.norm = 0.0  # of this worker's gradients in the last step
        self._own = self._targets = torch.zeros(())

    def count(self, targets: Tensor) -> str:
        """Take note of this rank's targets, which the caller sums in place; returns the axis: the worker's ranks."""
        self._own, self._targets = targets.clone(), targets
        return "fsdp"

    def spread(self, squares: Tensor) -> Tensor:
        """This rank's share of the squared norm in the place of its worker: (workers,)."""
        places = squares.new_zeros(self.mesh.workers)
        places[self.mesh.worker] = squares[0]
        return places

    def weigh(self, sums: Tensor) -> Tensor:
        """Means over the worker's targets as sums over them, and the number of this rank's own targets."""
        ranks = self.mesh.layout.tp * self.mesh.layout.pp  # that read the same tokens
        return torch.cat([sums * self._targets.clamp(min=1), (self._own / ranks)[None].to(sums.dtype)])

    def means(self, sums: list[float]) -> list[float]:
        """Means over the targets of all workers."""
        *totals, targets = sums
        return [total / max(targets, 1.0) for total in totals]

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl says of synchronisations since this start; the host sees how long they take on a CPU."""
        row: dict[str, Any] = {"outer_steps": self.outer.synchronisations}
        if self.mesh.device_type == "cpu":
            row |= {"outer_comm_seconds": self.outer.seconds, "outer_exposed_seconds": self.outer.waited}
        return row
