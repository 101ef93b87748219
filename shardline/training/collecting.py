"""Saving with pipeline stages: the rank that writes gets every tensor, one at a time, from the stage that has it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardline.config.architecture import Architecture
from shardline.models.fused import logical_shapes
from shardline.parallel import comm
from shardline.parallel.channels import Channel
from shardline.training.tensor_file import Entry


class Described(NamedTuple):
    """An entry as its holder tells the others of it; `stored` is the type it is read in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype


def collected(entries: list[Entry], arch: Architecture, storage: torch.dtype) -> list[Entry]:
    """The entries of all stages in the order of the model, on every rank; all ranks must read all of them in turn.

    `storage` is the type of the parameters, `entries` those of this rank. What two stages have (a tied embedding) is
    there once. Only the first rank gets the tensors of other stages.
    """
    if comm.axis_size("pp") == 1:
        return entries
    axis, own = comm.axis("pp"), {entry.name: entry for entry in entries}
    mine = [Described(e.name, e.shape, e.dtype, storage if e.name.startswith("model/") else e.dtype) for e in entries]
    everyone: list[list[Described]] = [[] for _ in range(axis.size)]
    dist.all_gather_object(everyone, mine, group=axis.group)
    holders: dict[str, tuple[int, Described]] = {}
    for rank, described in enumerate(everyone):
        for one in described:
            holders.setdefault(one.name, (rank, one))
    places = {name: place for place, name in enumerate(logical_shapes(arch))}
    in_order = sorted(holders.values(), key=lambda held: (_prefix(held[1].name), places[_logical(held[1].name)]))
    return [
        Entry(one.name, one.shape, one.dtype, functools.partial(_read, one, holder, own.get(one.name)))
        for holder, one in in_order
    ]


def _prefix(name: str) -> int:
    """Weights first."""
    return 0 if name.startswith("model/") else 1


def _logical(name: str) -> str:
    return name.rsplit("/", 1)[1]


def _read(described: Described, holder: int, entry: Entry | None) -> torch.Tensor:
    axis = comm.axis("pp")
    tensor = torch.empty(0)
    if axis.rank == holder:
        assert entry is not None
        tensor = entry.read()
    if holder == 0 or 0 not in dist.get_process_group_ranks(axis.group) or axis.rank not in (0, holder):
        return tensor
    channel = Channel(holder, 0, torch.device("cpu"))  # every backend has a way for host memory
    if axis.rank == holder:
        channel.send(tensor.to("cpu"), described.name).wait()
        return tensor
    return channel.receive(described.name, described.shape, described.stored).wait()
