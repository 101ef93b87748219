"""Initial weights, a function of (seed, logical name) alone.

Each logical tensor is drawn in blocks of 256 rows, each block from a generator of its own, on the CPU: a rank can draw
just the rows it holds, and neither device, threads, fused layout nor the number of ranks changes a value.

    matrices and embeddings   normal, std `init_std`, cut at 3 std
    wo and w2                 the same with std `init_std` / sqrt(2 n_layers): they write into the residual stream,
                              and the sum over 2 n_layers of them then keeps its size whatever the depth
    norms                     1
    biases                    0
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from shardline.config.architecture import Architecture
from shardline.models.dtensor import copy_into
from shardline.models.fused_weights import fuse, logical_names, logical_shapes

BLOCK_ROWS = 256
IN_FLIGHT_BYTES = 4 << 30  # drawn but not yet copied into the model


def initial_std(arch: Architecture, name: str) -> float | None:
    """The standard deviation of a logical tensor; None for those that start as a constant."""
    if name.endswith(("norm.weight", ".bias")):
        return None
    if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
        return arch.init_std / math.sqrt(2 * arch.n_layers)
    return arch.init_std


def draw_rows(seed: int, name: str, shape: tuple[int, ...], start: int, stop: int, std: float) -> Tensor:
    """Rows [start, stop) of the logical tensor `name`, float32 on the CPU: what slicing the whole would give."""
    rows = torch.empty(stop - start, *shape[1:], device="cpu", dtype=torch.float32)
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        _draw_block(rows, seed, name, shape, start, block, std)
    return rows


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a `Decoder` that has its memory already."""
    arch: Architecture = model.arch  # type: ignore[assignment]
    with torch.no_grad(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting: deque[tuple[str, nn.Parameter, dict[str, Tensor], list[Future[None]]]] = deque()
        in_flight = 0
        for name, parameter in model.named_parameters():
            parts, futures = _start(pool, arch, seed, name)
            waiting.append((name, parameter, parts, futures))
            in_flight += 4 * parameter.numel()
            while in_flight > IN_FLIGHT_BYTES and len(waiting) > 1:
                in_flight -= _finish(arch, *waiting.popleft())
        while waiting:
            _finish(arch, *waiting.popleft())


def _start(
    pool: ThreadPoolExecutor, arch: Architecture, seed: int, name: str
) -> tuple[dict[str, Tensor], list[Future[None]]]:
    """Make the logical tensors of one parameter and queue the drawing of their blocks."""
    shapes = logical_shapes(arch)
    parts: dict[str, Tensor] = {}
    futures = []
    for part in logical_names(arch, name):
        shape, std = shapes[part], initial_std(arch, part)
        if std is None:
            value = 0.0 if part.endswith(".bias") else 1.0
            parts[part] = torch.full(shape, value, device="cpu", dtype=torch.float32)
            continue
        parts[part] = whole = torch.empty(shape, device="cpu", dtype=torch.float32)
        for block in range(-(-shape[0] // BLOCK_ROWS)):
            futures.append(pool.submit(_draw_block, whole, seed, part, shape, 0, block, std))
    return parts, futures


def _finish(
    arch: Architecture, name: str, parameter: nn.Parameter, parts: dict[str, Tensor], futures: list[Future[None]]
) -> int:
    for future in futures:
        future.result()
    copy_into(parameter, fuse(arch, name, parts))
    return 4 * parameter.numel()


def _draw_block(
    out: Tensor, seed: int, name: str, shape: tuple[int, ...], out_start: int, block: int, std: float
) -> None:
    """Draw one whole block and keep the rows that `out`, whose first row is `out_start`, has place for."""
    first, last = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, shape[0])
    low, high = max(first, out_start), min(last, out_start + out.shape[0])
    target = out[low - out_start : high - out_start]
    whole = target if high - low == last - first else torch.empty(last - first, *shape[1:], device="cpu")
    generator = torch.Generator("cpu").manual_seed(_block_seed(seed, name, block))
    whole.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
    if whole is not target:
        target.copy_(whole[low - first : high - first])


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}\0{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # generators take 63 bits everywhere
