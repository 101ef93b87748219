"""Sums of squares in float32 that are exact to a few parts in ten million, both on a CPU and on a GPU.

On a GPU, torch adds in a tree. On a CPU, its norms add one element after another: once the sum is large, small squares
round to nothing, and the norm of 16 million normal numbers is 7e-4 too small. There we take norms of short blocks and
let `sum` add their squares pairwise, which takes no more time than one norm of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements that a CPU may add one after another


def squared_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(number of tensors,) float32: the sum of squares of each, whatever the tensors' dtype."""
    if not tensors:
        return torch.zeros(0)
    device = tensors[0].device
    if all(tensor.device == device for tensor in tensors) and device.type == "cuda" and find_spec("triton"):
        return _squared_sums_by_kernel(tensors)
    return torch.stack([squared_sum(tensor).to(device) for tensor in tensors])


def _squared_sums_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    kinds: dict[torch.dtype | None, list[int]] = {}  # indices of small tensors by type; of large ones under None
    for place, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype if is_small(tensor) else None, []).append(place)
    found = []
    for kind, places in kinds.items():
        sums = _sums_of_each if kind is None else _sums_of_many
        found.append(sums([tensors[place] for place in places]))
    if len(found) == 1:
        return found[0]
    order = torch.tensor([place for places in kinds.values() for place in places]).argsort()
    return torch.cat(found).index_select(0, order.to(tensors[0].device, non_blocking=True))


def _sums_of_each(tensors: list[Tensor]) -> Tensor:
    """Squared sums of large tensors, one launch each."""
    from shardline.optim.kernels import BLOCK, PARTS, squares_kernel

    sums = torch.zeros(len(tensors), PARTS, device=tensors[0].device)
    for row, tensor in zip(sums, tensors, strict=True):
        if tensor.numel():
            parts = min(PARTS, -(-tensor.numel() // BLOCK))
            squares_kernel[(parts,)](tensor.contiguous(), row, tensor.numel(), parts, BLOCK=BLOCK)
    return sums.sum(1)


def _sums_of_many(tensors: list[Tensor]) -> Tensor:
    """Squared sums of small tensors of one type, in one launch."""
    from shardline.optim.kernels import BLOCK, SMALL_PARTS, many_squares_kernel

    device = tensors[0].device
    table = address_table([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], device)
    sums = torch.empty(len(tensors), SMALL_PARTS, device=device)
    many_squares_kernel[(len(tensors), SMALL_PARTS)](
        *(table, sums), DTYPE=triton_type(tensors[0].dtype), PARTS=SMALL_PARTS, BLOCK=BLOCK
    )
    return sums.sum(1)


def is_small(*tensors: Tensor) -> bool:
    """Whether tensors of one size can share a kernel launch with others, which reads them by aligned address."""
    from shardline.optim.kernels import SMALL

    fit = all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return fit and tensors[0].numel() <= SMALL


def address_table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Copy rows of addresses and counts to the device, without waiting for it."""
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def triton_type(dtype: torch.dtype) -> Any:
    """Triton's type for a gradient's dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def squared_sum(tensor: Tensor) -> Tensor:
    """0-d float32: the sum of squares of all elements."""
    if tensor.is_cuda or tensor.numel() <= BLOCK:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()
    flat = tensor.reshape(-1)
    end = flat.numel() // BLOCK * BLOCK
    blocks = torch.linalg.vector_norm(flat[:end].view(-1, BLOCK), dim=1, dtype=torch.float32)
    return blocks.square().sum() + squared_sum(flat[end:])


def squared_row_sums(matrix: Tensor) -> Tensor:
    """(rows,) float32: the sum of squares of each row."""
    if matrix.is_cuda:
        return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32).square()
    blocks = [torch.linalg.vector_norm(block, dim=1, dtype=torch.float32) for block in matrix.split(BLOCK, dim=1)]
    return torch.stack(blocks, dim=1).square().sum(1)
