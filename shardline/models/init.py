"""Initial weights, a function of (seed, logical name) alone.

Each logical tensor is drawn in blocks of 256 rows, each block from its own generator, on the CPU. A rank draws only the
blocks of which it holds rows, and neither device, threads, fused layout nor the number of ranks changes a value.

    matrices and embeddings   normal, std `init_std`, clamped at 3 std
    wo and w2                 the same with std `init_std` / sqrt(2 n_layers): they write into the residual stream,
                              and the sum over 2 n_layers of them then keeps its size whatever the depth
    norms                     1; 0 where 1 is added to them
    biases                    0

In a model of transformers, every matrix has std `init_std` (its initializer_range); vectors and other small tensors
keep the values that the model's own code gives them, where these are not random.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.config.architecture import Architecture
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import logical_rows, logical_shapes, views
from shardline.models.state import Parameters

BLOCK_ROWS = 256
MOST_THREADS = 32  # each holds one block: 54 MiB in the largest weight of a 405B model


def initial_std(arch: Architecture, name: str) -> float | None:
    """The standard deviation of a logical tensor; None for those that start as a constant."""
    if arch.foreign is not None:
        return arch.init_std
    if name.endswith(("norm.weight", ".bias", ".balance")):
        return None
    if name.endswith((".wo.weight", ".w2.weight")):
        return arch.init_std / math.sqrt(2 * arch.n_layers)
    return arch.init_std


def init_weights(model: Parameters, seed: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Fill every parameter of a `Decoder` whose memory is allocated; of a DTensor, this rank's shard.

    This thread calls `meanwhile` while others draw.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        filled = pool.map(lambda block: block.fill(seed), _blocks(model.arch, model))
        meanwhile()
        for _ in filled:
            pass


def draw_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """A whole logical tensor, float32 on the CPU."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        blocks = range(-(-shape[0] // block_rows(shape)))
        return torch.cat(list(pool.map(lambda block: draw_block(seed, name, shape, block, std), blocks)))


def draw_block(seed: int, name: str, shape: tuple[int, ...], block: int, std: float) -> Tensor:
    """One block of the logical tensor `name` of this shape: float32 (BLOCK_ROWS, or the rest, ...) on the CPU."""
    each = block_rows(shape)
    rows = min(each, shape[0] - block * each)
    generator = torch.Generator("cpu").manual_seed(block_seed(seed, name, block))
    values = torch.empty(rows, *shape[1:], device="cpu", dtype=torch.float32)
    return values.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)


def block_rows(shape: tuple[int, ...]) -> int:
    """Rows per block: 256 of a matrix; as many experts as have about 256 rows together, but at least one."""
    return BLOCK_ROWS if len(shape) < 3 else max(1, BLOCK_ROWS // shape[1])


class _HeldBlock(NamedTuple):
    """A block of which this rank holds rows (or parts of rows, if ranks share columns), and where these go."""

    name: str
    shape: tuple[int, ...]
    block: int
    std: float
    held: tuple[slice, ...]  # the part of the block that is held
    target: Tensor  # this rank's shard of the parameter
    places: Tensor  # the rows of `target` that are filled

    def fill(self, seed: int) -> None:
        values = draw_block(seed, self.name, self.shape, self.block, self.std)[self.held]
        self.target.index_copy_(0, self.places.to(self.target.device), values.to(self.target))


def _blocks(arch: Architecture, model: Parameters) -> Iterator[_HeldBlock]:
    """Yield the blocks that this rank draws; fill parameters that start as a constant along the way."""
    shapes = logical_shapes(arch)
    constants: Mapping[str, Tensor] = getattr(model, "constants", {})  # of a model of transformers
    for whole_name, parameter in model.named_parameters():
        slices = local_slices(parameter)
        if whole_name in constants:
            local(parameter.detach()).copy_(constants[whole_name][slices])
            continue
        for name, target in views(whole_name, local(parameter.detach())).items():
            rows, *columns = slices if name == whole_name else (slices[0], *slices[2:])
            for part in logical_rows(arch, name, parameter.shape[0], rows):
                std = initial_std(arch, part.name)
                if std is None:
                    ones = name.endswith("norm.weight") and arch.norm_kind != "rms_plus_one"
                    target.fill_(1.0 if ones else 0.0)
                    continue
                each = block_rows(shapes[part.name])
                for block in range(part.start // each, -(-part.stop // each)):
                    first = block * each
                    start, stop = max(part.start, first), min(part.stop, first + each)
                    held = (slice(start - first, stop - first), *columns)
                    places = part.places[start - part.start : stop - part.start]
                    yield _HeldBlock(part.name, shapes[part.name], block, std, held, target, places)


def block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}\0{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # generators take 63 bits everywhere
