"""PyTorch's own fused products, for comparisons: shards are copied from peers' memory while others are multiplied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.symmetric_memory import inside_product, torch_workspace
from shardline.parallel.tensor.serial_and_ring import COLUMN, ROW, Needs, Serial, joined, weight_gradients


class TorchFused(Serial):
    name = "torch"

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        return (1,) if operation in (COLUMN, ROW) else ()

    def gather_linear(
        self, x: Tensor, weights: Sequence[Tensor], axis: str, chunks: int
    ) -> tuple[list[Tensor], Tensor]:
        torch_workspace(axis, x.numel() * x.element_size())
        with inside_product(axis, "all_gather", x, x.numel()):
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(
                x.contiguous(), [weight.t() for weight in weights], 0, collectives.axis(axis).group.group_name
            )
        return list(products), full

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return self._scatter(x, weight.t(), axis)

    def gather_linear_backward(
        self, gradients: Sequence[Tensor], full: Tensor, weights: Sequence[Tensor], axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = self._scatter(*joined(gradients, weights), axis) if needs.x else None
        return dx, weight_gradients(gradients, full) if needs.weights else None

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        torch_workspace(axis, gradient.numel() * gradient.element_size())
        with inside_product(axis, "all_gather", gradient, gradient.numel()):
            full, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(
                gradient.contiguous(), [weight], 0, collectives.axis(axis).group.group_name
            )
        return dx, full.t() @ x if needs.weights else None, full

    def _scatter(self, x: Tensor, columns: Tensor, axis: str) -> Tensor:
        torch_workspace(axis, x.shape[0] * columns.shape[1] * x.element_size())
        with inside_product(axis, "reduce_scatter", x, x.shape[0] // collectives.axis_size(axis) * columns.shape[1]):
            out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                x.contiguous(), columns, "sum", 0, collectives.axis(axis).group.group_name
            )
        return out
