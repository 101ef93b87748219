"""Products and collectives on CUDA by symmetric memory: ranks read each other's GPU memory directly.

Private APIs of torch (`torch.distributed._symmetric_memory`, `torch.ops.symm_mem`) are used here alone; where they are
missing or fail, `unusable` says so and other backends run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.parallel import comm
from shardline.parallel.exchange import distances
from shardline.parallel.products import Needs, Serial, weight_gradients
from shardline.parallel.spans import labelled

SHARED_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def unusable(device: torch.device, axis: str = "tp") -> str | None:
    """Why symmetric memory cannot be used over an axis, None where it can; every rank gets the same answer."""
    if device.type != "cuda":
        return "it needs CUDA"
    reason = ""
    try:
        _try_out(device, axis)
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    said: list[str] = [""] * comm.axis("world").size
    dist.all_gather_object(said, reason)
    return next((text for text in said if text), None)


def _try_out(device: torch.device, axis: str) -> None:
    """Share a little memory with the peers of an axis; raises where that is not possible."""
    import torch.distributed._symmetric_memory as memory

    group = comm.axis(axis).group
    if comm.axis_size(axis) > torch.cuda.device_count() and os.environ.get(SHARED_DEVICE) != "1":
        raise RuntimeError(f"ranks share a GPU and {SHARED_DEVICE} is not 1")
    memory.enable_symm_mem_for_group(group.group_name)
    memory.get_symm_mem_workspace(group.group_name, min_size=1024)


def shared_gib() -> float:
    """Memory that is shared with peers: the allocator of ordinary tensors does not count it."""
    return sum(_shared_bytes.values()) / 2**30


def release() -> None:
    """Give the shared memory back, at the end of a run."""
    if _shared_bytes:
        import torch.distributed._symmetric_memory as memory

        for name in _shared_bytes:
            getattr(memory, "_group_name_to_workspace_tensor", {}).pop(name, None)
    _shared_bytes.clear()


_shared_bytes: dict[str, int] = {}


def _workspace(axis: str, size: int) -> Any:
    """The memory of an axis that its ranks share, with at least `size` bytes each; it grows on demand."""
    import torch.distributed._symmetric_memory as memory

    name = comm.axis(axis).group.group_name
    _shared_bytes[name] = max(_shared_bytes.get(name, 0), size)
    return memory.get_symm_mem_workspace(name, min_size=size)


class Direct:
    """Collectives by copies between GPUs' memories: for ranks that share a GPU, where NCCL does not run."""

    def gather_into(self, out: Tensor, x: Tensor, axis: str) -> None:
        over = comm.axis(axis)
        shared = _workspace(axis, x.numel() * x.element_size())
        shared.get_buffer(over.rank, x.shape, x.dtype).copy_(x)
        shared.barrier(channel=0)
        blocks = out.view(over.size, *x.shape)
        for distance in (0, *distances(over.size)):
            source = (over.rank - distance) % over.size
            blocks[source].copy_(shared.get_buffer(source, x.shape, x.dtype))
        shared.barrier(channel=0)  # nobody writes there again before everybody has read

    def scatter_sum_into(self, out: Tensor, x: Tensor, axis: str) -> None:
        over = comm.axis(axis)
        shared = _workspace(axis, x.numel() * x.element_size())
        shared.get_buffer(over.rank, x.shape, x.dtype).copy_(x)
        shared.barrier(channel=0)
        first = over.rank * out.numel()
        parts = [shared.get_buffer(rank, out.shape, x.dtype, first) for rank in range(over.size)]
        if over.size == 2:
            torch.add(parts[0], parts[1], out=out)
        else:
            total = parts[0].float() if x.dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
            for part in parts[1:]:
                total += part
            out.copy_(total)
        shared.barrier(channel=0)


class Symmetric(Serial):
    """PyTorch's fused products: shards are copied from the peers' memory while others are multiplied."""

    name = "symmetric"
    cuts = False  # it has no chunks to choose

    def gather_linear(
        self, x: Tensor, weights: Sequence[Tensor], axis: str, chunks: int
    ) -> tuple[list[Tensor], Tensor]:
        _count(axis, x)
        _workspace(axis, x.numel() * x.element_size())
        with labelled(axis, "all_gather", copies_only=True):
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(
                x.contiguous(), [weight.t() for weight in weights], 0, comm.axis(axis).group.group_name
            )
        return list(products), full

    def linear_scatter(self, x: Tensor, weight: Tensor, axis: str, chunks: int) -> Tensor:
        return self._scatter(x, weight.t(), axis)

    def gather_linear_backward(
        self, gradients: Sequence[Tensor], full: Tensor, weights: Sequence[Tensor], axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        dx = None
        if needs.x:
            joined = len(weights) > 1
            gradient = torch.cat(list(gradients), 1) if joined else gradients[0]
            dx = self._scatter(gradient, torch.cat(list(weights)) if joined else weights[0], axis)
        return dx, weight_gradients(gradients, full) if needs.weights else None

    def linear_scatter_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, axis: str, chunks: int, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        _count(axis, gradient)
        _workspace(axis, gradient.numel() * gradient.element_size())
        with labelled(axis, "all_gather", copies_only=True):
            full, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(
                gradient.contiguous(), [weight], 0, comm.axis(axis).group.group_name
            )
        return dx, full.t() @ x if needs.weights else None, full

    def _scatter(self, x: Tensor, columns: Tensor, axis: str) -> Tensor:
        n = comm.axis_size(axis)
        comm.traffic.add(axis, (n - 1) * x.shape[0] // n * columns.shape[1] * x.element_size())
        _workspace(axis, x.shape[0] * columns.shape[1] * x.element_size())
        with labelled(axis, "reduce_scatter", copies_only=True):
            out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                x.contiguous(), columns, "sum", 0, comm.axis(axis).group.group_name
            )
        return out


def _count(axis: str, x: Tensor) -> None:
    comm.traffic.add(axis, (comm.axis_size(axis) - 1) * x.numel() * x.element_size())


class TorchFused(Symmetric):
    """PyTorch's own fused products, for comparisons whatever `symmetric` becomes."""

    name = "torch"
