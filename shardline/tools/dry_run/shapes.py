"""The model of a dry run, built on the meta device as selected ranks would build it, and each rank's shards."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardline.comm.fake import fake_group
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.schema import Config
from shardline.models.dtensor import local
from shardline.models.fused_weights import layers_name
from shardline.parallel.apply import make_model
from shardline.plan.memory import Memory
from shardline.precision.mixed import Precision
from shardline.training.memory_need import MemoryNeed, memory_need
from shardline.words import numbered

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that differ only in their layer. `cuts` are (axis, dimension), in the order of their application."""

    name: str
    whole: Shape
    cuts: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float32
    trained: bool = True

    def region(self, layout: Layout, coordinates: dict[str, int]) -> tuple[range, ...]:
        """Return the rank's range of each dimension: shards are equal, with smaller or empty ones at the end."""
        held = [range(size) for size in self.whole]
        for axis, dimension in self.cuts:
            degree, place = _place(axis, layout, coordinates)
            each = -(-len(held[dimension]) // degree)
            held[dimension] = held[dimension][place * each : (place + 1) * each]
        return tuple(held)

    def shard(self, layout: Layout, coordinates: dict[str, int]) -> Shape:
        return tuple(map(len, self.region(layout, coordinates)))

    def copies(self, layout: Layout) -> int:
        """Return how many ranks of a pipeline stage hold the same shard."""
        degrees = [_place(axis, layout, coordinates_of(layout, 0))[0] for axis, _ in self.cuts]
        return layout.world_size // layout.pp // math.prod(degrees)

    @property
    def placement(self) -> str:
        return ", ".join(f"{self.dimensions[number]} over {axis}" for axis, number in self.cuts) or "whole"

    @property
    def dimensions(self) -> list[str]:
        """The names of the dimensions."""
        if ".experts." in self.name:
            return ["experts", *(["halves"] if ".w13." in self.name else []), "rows", "columns"]
        return ["rows", "columns"]


@dataclass(frozen=True)
class Built:
    """What one rank built: how many parameters of each kind, and the shapes of their shards."""

    rank: int
    counts: dict[ParameterKind, int]
    shards: dict[ParameterKind, Shape]
    indices: tuple[int, ...]  # the numbers of its layers
    need: MemoryNeed  # on a GPU

    @property
    def layers(self) -> str:
        """`layers 0-3`, or `layers 0-1, 4-5` with several stages."""
        return numbered("layer", self.indices) if self.indices else "no layers"

    @property
    def elements(self) -> int:
        return sum(count * math.prod(self.shards[kind]) for kind, count in self.counts.items())


def build_rank(
    arch: Architecture,
    config: Config,
    layout: Layout,
    precision: Precision,
    rank: int,
    planned: Memory | None = None,
) -> Built:
    """Build one rank's model. `planned` is the planner's memory estimate; without it, activations are unknown."""
    with fake_group(rank, layout.world_size):
        model, _ = make_model(
            arch, config, Mesh(layout, "cpu", apart=config.parallelism.data_parallel_mode != "sync"), precision
        )
        counts: Counter[ParameterKind] = Counter()
        shards = {}
        any_layer = re.compile(rf"^({re.escape(layers_name(arch))})\.\d+")
        for name, parameter in model.named_parameters():
            about = (tuple(parameter.shape), _cuts(parameter), parameter.dtype, parameter.requires_grad)
            kind = ParameterKind(any_layer.sub(r"\1.*", name), *about)
            counts[kind] += 1
            shards[kind] = tuple(local(parameter).shape)
        indices = tuple(int(layer) for layer in model.layers)
        need = memory_need(model, config, layout, precision, "cuda", planned)
    return Built(rank, dict(counts), shards, indices, need)


def _cuts(parameter: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """Return the cuts of a parameter: tensor and expert parallelism first, then data parallelism."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    found = [
        (axis, placement.dim)
        for axis, placement in zip(names, parameter.placements, strict=True)
        if hasattr(placement, "dim") and parameter.device_mesh[axis].size() > 1
    ]
    return tuple(sorted(found, key=lambda cut: cut[0] not in ("tp", "ep", "etp")))


def _place(axis: str, layout: Layout, coordinates: dict[str, int]) -> tuple[int, int]:
    """Return the degree of an axis and a rank's position on it; `dp_shard_cp` joins two axes."""
    degree, place = 1, 0
    for part in ("dp_shard", "cp") if axis == "dp_shard_cp" else (axis,):
        size = getattr(layout, part)
        degree, place = degree * size, place * size + coordinates[part]
    return degree, place


def coordinates_of(layout: Layout, rank: int) -> dict[str, int]:
    return layout.coordinates(rank) | layout.expert_coordinates(rank)


def shapes(kinds: list[ParameterKind], layout: Layout, rank: int) -> tuple[Shape, ...]:
    coordinates = coordinates_of(layout, rank)
    return tuple(kind.shard(layout, coordinates) for kind in kinds)


def stage_ranks(layout: Layout, place: int) -> range:
    """Return the ranks at one position of the pipeline, which hold the same layers."""
    count = layout.world_size // layout.pp
    return range(place * count, (place + 1) * count)


def same_shapes(first: Built, layout: Layout) -> dict[tuple[Shape, ...], list[int]]:
    """Return the ranks with the same layers as `first`, grouped by the shapes of their shards."""
    kinds = list(first.counts)
    by_place: dict[tuple[int, int, int], tuple[Shape, ...]] = {}
    found: dict[tuple[Shape, ...], list[int]] = {}
    for rank in stage_ranks(layout, layout.coordinates(first.rank)["pp"]):
        coordinates = layout.coordinates(rank)
        place = (coordinates["dp_shard"], coordinates["cp"], coordinates["tp"])
        if place not in by_place:
            by_place[place] = shapes(kinds, layout, rank)
        found.setdefault(by_place[place], []).append(rank)
    return found


def chosen_ranks(alike: dict[tuple[Shape, ...], list[int]], most: int) -> list[int]:
    """Return the first and the last rank, and the first one of each group with equal shapes, up to `most`."""
    firsts = [ranks[0] for ranks in alike.values()]
    last = max(ranks[-1] for ranks in alike.values())
    return sorted(dict.fromkeys([min(firsts), last, *firsts][: max(most, 2)]))


def held(built: Built, layout: Layout, alike: dict[tuple[Shape, ...], list[int]]) -> tuple[int, int]:
    """Return the elements on all ranks with the same layers, and the same with copies counted once."""
    total, once = 0, 0
    for position, (kind, count) in enumerate(built.counts.items()):
        of_kind = count * sum(len(ranks) * math.prod(shards[position]) for shards, ranks in alike.items())
        total += of_kind
        once += of_kind // kind.copies(layout)
    return total, once
