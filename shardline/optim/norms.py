"""Sums of squares in float32 that stay exact to a few parts in ten million, on a CPU as on a GPU.

On a GPU torch adds in the form of a tree. On a CPU its norms add one element after the other: once the sum is large,
small squares round to nothing, and the norm of 16 million normal numbers is 7e-4 too small. There we take norms of
short blocks, whose squares `sum` adds pairwise; this costs no more time than one norm of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 256  # elements that a CPU may add one after the other


def squared_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(number of tensors,) float32: the sum of squares of each, whatever the tensors' dtype."""
    if not tensors:
        return torch.zeros(0)
    device = tensors[0].device
    if all(tensor.device == device for tensor in tensors) and device.type == "cuda" and find_spec("triton"):
        return _squared_sums_by_kernel(tensors)
    return torch.stack([squared_sum(tensor).to(device) for tensor in tensors])


def _squared_sums_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    from shardline.optim.kernels import BLOCK, PARTS, squares_kernel

    sums = torch.zeros(len(tensors), PARTS, device=tensors[0].device)
    for row, tensor in zip(sums, tensors, strict=True):
        if tensor.numel():
            parts = min(PARTS, -(-tensor.numel() // BLOCK))
            squares_kernel[(parts,)](tensor.contiguous(), row, tensor.numel(), parts, BLOCK=BLOCK)
    return sums.sum(1)


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
