"""The initial values of what LoRA trains: a function of (seed, logical name), like those of all weights.

a            uniform between -1/sqrt(columns) and 1/sqrt(columns), as `peft` draws it; 0 for embeddings
b            0, so that a run starts from the unchanged model; normal for embeddings
magnitude    the norm of each row of the weight, set once the weight is loaded
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.adapted.low_rank import initial_bound
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.fused_weights import embedding_name, is_low_rank, is_transposed, low_rank_name, upright
from shardline.models.init import block_seed
from shardline.storage.safetensors import LazyTensors


def draw_matrices(model: Decoder, seed: int) -> None:
    """Fill this rank's matrices, but not the magnitudes."""
    for name, parameter in model.named_parameters():
        if is_low_rank(name) and not name.endswith(".magnitude"):
            logical, held = low_rank_name(name), local_slices(parameter)
            with torch.no_grad():
                embeds = logical.startswith(f"{embedding_name(model.arch)}.lora.")
                local(parameter).copy_(_drawn(seed, logical, tuple(parameter.shape), held, embeds))


def _drawn(seed: int, name: str, shape: tuple[int, ...], held: tuple[slice, ...], embeds: bool) -> Tensor:
    """Draw this rank's part of a matrix; every expert has its own random numbers."""
    if name.endswith(".b") != embeds:
        return torch.zeros([part.stop - part.start for part in held])
    if len(shape) == 2:
        return _matrix(seed, name, 0, shape, embeds)[held]
    experts = range(shape[0])[held[0]]
    drawn = [_matrix(seed, name, expert, shape[1:], embeds)[held[1:]] for expert in experts]
    return torch.stack(drawn) if drawn else torch.zeros([part.stop - part.start for part in held])


def _matrix(seed: int, name: str, expert: int, shape: tuple[int, ...], normal: bool) -> Tensor:
    source = torch.Generator("cpu").manual_seed(block_seed(seed, name, expert))
    values = torch.empty(shape, device="cpu", dtype=torch.float32)
    if normal:
        return values.normal_(generator=source)
    bound = initial_bound(shape[-1])
    return values.uniform_(-bound, bound, generator=source)


def set_magnitudes(model: Decoder, weights: LazyTensors) -> None:
    """Set every magnitude to the norm of its row of the frozen weight, for the first step.

    Rows are read from `weights`, because a rank's shard of the weight may have other rows, or only columns.
    """
    found = [(name, one) for name, one in model.named_parameters() if is_low_rank(name) and name.endswith(".magnitude")]
    for name, parameter in found:
        module = low_rank_name(name).removesuffix(".lora.magnitude")
        place = (local_slices(parameter)[0], slice(None))
        place = place[::-1] if is_transposed(model.arch, module) else place
        rows = upright(model.arch, module, weights.part(f"{module}.weight", place))
        frozen = rows.to(model.compute_dtype or rows.dtype).float()
        with torch.no_grad():
            local(parameter).copy_(torch.linalg.vector_norm(frozen, dim=1))
