"""Checks that ranks that must hold the same weights hold exactly the same bits.

Each rank hashes its shard of every parameter and sends only the hashes. A parameter is compared over dp_replicate and
over tp if its placement there is `Replicate`; a tied embedding is also compared between the pipeline ranks that have
the first and the last stage. A single flipped bit always changes the hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardline.comm import collectives
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local
from shardline.words import listed, numbered

AXES = ("dp_replicate", "tp")
OF_EXPERTS = {"replicas": "dp_replicate", "etp": "tp"}  # names of the same ranks in the experts' mesh
TIED = "tok_embeddings.weight"
CHUNK = 2**22  # numbers hashed at a time: the copy as int64 stays small
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number -> type of the same size
MOST_NAMED = 8


def check_replicas(model: Decoder, step: int) -> None:
    """Raise UserError on every rank if copies differ, naming parameters and ranks. Every rank must call this."""
    axes = [axis for axis in AXES if collectives.axis_size(axis) > 1]
    tied = collectives.axis_size("pp") > 1 and model.arch.tie_word_embeddings
    if not axes and not tied:
        return
    shared = {axis: replicated(model, axis) for axis in axes}
    wanted = {name for names in shared.values() for name in names} | ({TIED} if tied else set())
    hashes = {name: fingerprint(local(p)) for name, p in model.named_parameters() if name in wanted}
    differs = torch.zeros(1, dtype=torch.int64, device=local(next(model.parameters())).device)
    for axis, names in shared.items():
        if names:
            mine = torch.stack([hashes[name] for name in names])
            differs |= _differ(torch.stack([mine, ~mine]), axis)
    between_stages = torch.zeros_like(differs)
    if tied:  # pipeline ranks without the embedding do not count
        nothing = torch.full((2,), torch.iinfo(torch.int64).min, dtype=torch.int64, device=differs.device)
        between_stages |= _differ(torch.stack([hashes[TIED], ~hashes[TIED]]) if TIED in hashes else nothing, "pp")
    differs |= between_stages
    collectives.max_in_place(differs, "world")
    if differs.item():
        raise UserError(_report(hashes, shared, step, bool(between_stages.item())))


def replicated(model: nn.Module, axis: str) -> list[str]:
    """Return the names of the parameters that must be equal on all ranks of this axis."""
    found = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            axes = [OF_EXPERTS.get(dim, dim) for dim in parameter.device_mesh.mesh_dim_names or ()]
            if any(dim == axis and cut == Replicate() for dim, cut in zip(axes, parameter.placements, strict=True)):
                found.append(name)
    return found


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum, modulo 2^64, of each number's bits times an odd factor that depends on its index, as an int64."""
    bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * (places * 0x5851F42D4C957F2D * 2 + 1)).sum()
    return total


def _differ(extremes: Tensor, axis: str) -> Tensor:
    """Return 1 if ranks of the axis have different hashes, else 0.

    `extremes` has this rank's hashes and their complements, so that one all-reduce finds both maximum and minimum.
    """
    collectives.max_in_place(extremes, axis)
    return (extremes[0] != ~extremes[1]).any().to(torch.int64)


def _report(hashes: dict[str, Tensor], shared: dict[str, list[str]], step: int, between_stages: bool) -> str:
    """Return the message that all ranks raise: the differences that any rank sees in its groups."""
    seen = [line for axis, names in shared.items() if names for line in _differences(hashes, names, axis)]
    if between_stages:
        ranks = numbered("rank", dist.get_process_group_ranks(collectives.axis("pp").group))
        seen.append(f"{TIED} between the first and the last pipeline stage of {ranks}")
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, seen)
    lines = sorted({line for found in everyone for line in found})
    return (
        f"step {step}: copies of the model differ: {listed(lines, MOST_NAMED, '; ')}."
        " Continue from an earlier checkpoint, and test the machines of these ranks"
    )


def _differences(hashes: dict[str, Tensor], names: list[str], axis: str) -> Iterator[str]:
    """Yield for each parameter that differs the ranks outside the majority; without a majority, the whole group."""
    mine = torch.stack([hashes[name] for name in names])
    gathered = mine.new_empty(collectives.axis_size(axis) * len(names))
    collectives.gather_into(gathered, mine, axis)
    ranks = dist.get_process_group_ranks(collectives.axis(axis).group)
    for name, values in zip(names, gathered.view(-1, len(names)).T.tolist(), strict=True):
        usual, count = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        if odd and 2 * count > len(ranks):
            yield f"{name} on {numbered('rank', odd)}"
        elif odd:
            yield f"{name} between {numbered('rank', ranks)}"
