"""PyTorch's fused products, for comparison: they copy shards from peers' memory while they multiply others."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.symmetric_memory import inside_product, torch_workspace
from shardline.parallel.tensor.serial_and_ring import GatherScatter, Tensors


class TorchFused(GatherScatter):
    name = "torch"

    def gather(self, x: Tensor, weights: Tensors, by_rows: bool, axis: str) -> tuple[list[Tensor], Tensor]:
        columns = [weight.t() if by_rows else weight for weight in weights]
        torch_workspace(axis, x.numel() * x.element_size())
        with inside_product(axis, "all_gather", x, x.numel()):
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(
                x.contiguous(), columns, 0, collectives.axis(axis).group.group_name
            )
        return list(products), full

    def scatter(self, x: Tensor, weight: Tensor, by_rows: bool, axis: str, chunks: int) -> Tensor:
        columns = weight.t() if by_rows else weight
        torch_workspace(axis, x.shape[0] * columns.shape[1] * x.element_size())
        with inside_product(axis, "reduce_scatter", x, x.shape[0] // collectives.axis_size(axis) * columns.shape[1]):
            out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                x.contiguous(), columns, "sum", 0, collectives.axis(axis).group.group_name
            )
        return out
