"""The mesh: one object that owns every process group and its named axes.

    axes, outermost first    pp, dp_replicate, dp_shard, cp, tp
    derived                  fsdp = dp_shard x cp, over which parameters are sharded
                             loss = dp_replicate x dp_shard x cp, over which losses and targets are summed
                             world = all ranks
                             workers = dp_replicate again, with separate groups, if workers train independently
                             pp_down = pp again: activations go up in pp's groups, gradients down in these
                             ep, etp, expert_shard: another cut of dp_shard x cp x tp, for mixtures of experts

TP is innermost, so its ranks are neighbours. An axis of degree 1 has no group and no DTensor dimension, except dp_shard
with CPU offload: FSDP moves weights between host and device, and needs a mesh even if one rank holds them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardline.comm import symmetric_memory
from shardline.comm.job import Axis, job
from shardline.comm.store import backend_timeout, connect_store, ranks_from_environment, start_groups
from shardline.comm.watchdog import Watchdog
from shardline.config.layout import AXES, EXPERT_AXES, Layout
from shardline.errors import UserError

Result = TypeVar("Result")


class Mesh:
    """The groups of one layout. Every rank builds it after `start_process_group`, with the same `offload`.

    `apart`: the copies of the model are workers that train independently. Parameters then have no dp_replicate
    dimension.
    """

    def __init__(self, layout: Layout, device_type: str, offload: bool = False, apart: bool = False) -> None:
        self.layout, self.device_type, self.apart = layout, device_type, apart
        self.world_size = layout.world_size
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.coordinates = layout.coordinates(self.rank)
        self.root: DeviceMesh | None = None
        self.experts: DeviceMesh | None = None
        self._meshes: dict[str, DeviceMesh] = {}
        if self.world_size > 1 or offload:
            self._build(device_type, offload)
        else:
            job.set_axes({})  # an earlier run in this process may have had some

    def _build(self, device_type: str, offload: bool) -> None:
        degrees = dict(zip(AXES, self.layout.degrees, strict=True))
        shards = offload or (self.layout.ep > 1 and self.layout.expert_shard > 1)  # FSDP, perhaps only of experts
        used = tuple(axis for axis in AXES if degrees[axis] > 1 or (shards and axis == "dp_shard"))
        self.root = init_device_mesh(device_type, tuple(degrees[axis] for axis in used), mesh_dim_names=used)
        self._meshes = {axis: self.root[axis] for axis in used}
        self._flatten("fsdp", [axis for axis in ("dp_shard", "cp") if axis in used])
        self._flatten("loss", [axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in used])
        self._build_experts(device_type)
        axes = {
            name: Axis(name, mesh.get_group(), mesh.size(), mesh.get_local_rank())
            for name, mesh in self._meshes.items()
        }
        assert dist.group.WORLD is not None
        if self.layout.pp > 1:
            axes["pp_down"] = dataclasses.replace(axes["pp"], name="pp_down", group=_again(self.layout))
        if self.workers > 1:
            axes["workers"] = dataclasses.replace(axes["dp_replicate"], name="workers", group=_of_workers(self.layout))
        axes["world"] = Axis("world", dist.group.WORLD, self.world_size, self.rank)
        job.set_axes(axes)

    def _build_experts(self, device_type: str) -> None:
        """Build a second mesh of the same ranks, with the axes that experts need."""
        layout = self.layout
        if layout.ep == 1:
            return
        outer = (("stages", layout.pp), ("replicas", layout.dp_replicate))
        sizes = {name: size for name, size in outer if size > 1}
        wanted = ("expert_shard",) if "fsdp" in self._meshes else ()  # with FSDP, experts are sharded even on one rank
        sizes |= {axis: getattr(layout, axis) for axis in EXPERT_AXES if getattr(layout, axis) > 1 or axis in wanted}
        self.experts = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._meshes |= {axis: self.experts[axis] for axis in EXPERT_AXES if axis in sizes}

    def _flatten(self, name: str, parts: list[str]) -> None:
        """Join several axes into one; a single axis gets a second name."""
        assert self.root is not None
        if len(parts) == 1:
            self._meshes[name] = self._meshes[parts[0]]
        elif parts:
            self._meshes[name] = self.root[tuple(parts)]._flatten("_".join(parts))

    def axis(self, name: str) -> DeviceMesh | None:
        """Return the one-dimensional mesh of an axis, None if there is none."""
        return self._meshes.get(name)

    def joined(self, *names: str) -> DeviceMesh | None:
        """Return a mesh of the named axes that exist, in this order; None if none exists."""
        present = [name for name in names if name in self._meshes and not (self.apart and name == "dp_replicate")]
        if not present:
            return None
        assert self.root is not None
        if len(present) == 1:
            return self._meshes[present[0]]
        names_there = tuple(str(self._meshes[name].mesh_dim_names[0]) for name in present)  # type: ignore[index]
        return self.root[names_there]

    def of_experts(self, *names: str) -> DeviceMesh:
        """Return a mesh of the named axes that exist in the experts' mesh, in this order."""
        assert self.experts is not None
        held = [name for name in self.experts.mesh_dim_names or () if not (self.apart and name == "replicas")]
        present = tuple(name for name in names if name in held)
        return self.experts[present if len(present) > 1 else present[0]]

    def size(self, name: str) -> int:
        mesh = self._meshes.get(name)
        return 1 if mesh is None else mesh.size()

    def from_rank_0(self, decide: Callable[[], Result]) -> Result:
        """Run `decide` on rank 0 and return its result on every rank; a UserError there is raised on every rank."""
        if self.world_size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except UserError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        result: Result = answer[0]
        return result

    def from_everyone(self, value: Result) -> list[Result]:
        """Return the values of all ranks, by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def workers(self) -> int:
        """The number of model copies that train independently; 1 if all copies sum their gradients."""
        return self.layout.dp_replicate if self.apart else 1

    @property
    def worker(self) -> int:
        """The number of this rank's worker."""
        return self.coordinates["dp_replicate"] if self.apart else 0

    @property
    def has_plain_replicas(self) -> bool:
        """Whether copies of the whole model sum their gradients (DDP)."""
        return self.axis("dp_replicate") is not None and self.axis("fsdp") is None and not self.apart

    @property
    def data_rank(self) -> int:
        """The index of the share of the global batch that this rank reads."""
        return self.coordinates["dp_replicate"] * self.layout.dp_shard + self.coordinates["dp_shard"]


def _of_workers(layout: Layout) -> dist.ProcessGroup:
    """Make a second set of groups of dp_replicate's ranks, for a thread: the first may be the group of all ranks."""
    inside = layout.world_size // layout.pp // layout.dp_replicate
    starts = range(0, layout.world_size, inside * layout.dp_replicate)
    lists = [
        [start + first + worker * inside for worker in range(layout.dp_replicate)]
        for start in starts
        for first in range(inside)
    ]
    own, _ = dist.new_subgroups_by_enumeration(lists)
    assert own is not None
    return own


def _again(layout: Layout) -> dist.ProcessGroup:
    """Make a second set of groups of pp's ranks; pp is the outermost axis.

    A rank that sends one way may have to wait for a message the other way, which NCCL would queue behind the send.
    """
    stride = layout.world_size // layout.pp
    own, _ = dist.new_subgroups_by_enumeration(
        [[first + place * stride for place in range(layout.pp)] for first in range(stride)]
    )
    assert own is not None
    return own


def crossing_lines(layout: Layout, ranks_per_node: int) -> list[str]:
    """Return a log line if tensor-parallel ranks, whose collectives block every layer, do not share a node."""
    groups = [range(first, first + layout.tp) for first in range(0, layout.world_size, layout.tp)]
    crossing = [group for group in groups if group[0] // ranks_per_node != group[-1] // ranks_per_node]
    if not crossing:
        return []
    of = f"{len(crossing)} of {len(groups)} groups" if len(groups) > 1 else "its only group"
    return [
        f"tp {layout.tp} crosses nodes of {ranks_per_node} ranks: {of}, first ranks {crossing[0][0]} to"
        f" {crossing[0][-1]}; every layer waits for the network between them. A tensor_parallel_degree that divides"
        f" {ranks_per_node} stays inside a node"
    ]


def sharing_lines(device: torch.device) -> list[str]:
    """Return a log line if ranks share GPUs, which is slow and may not be intended."""
    if device.type != "cuda" or not symmetric_memory.share_a_gpu(1):
        return []
    ranks, seen = ranks_from_environment("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    return [
        f"{ranks} ranks of this machine share {seen} GPU{'s' if seen > 1 else ''}: they communicate by gloo, through"
        " host memory. If each rank has its own GPU but sees no other, make all GPUs visible to every rank"
        " (CUDA_VISIBLE_DEVICES; srun --gpus-per-node, not --gpus-per-task)"
    ]


def world_size() -> int:
    """Return the number of ranks of this job, from the launcher."""
    return ranks_from_environment("WORLD_SIZE", 1)


def start_process_group(device: torch.device, timeout_seconds: int, offload: bool = False) -> bool:
    """Join the other ranks, with NCCL if each has its own GPU, else gloo; return True if this call made the group.

    A single rank has no group, except with CPU offload: then it is alone in its group.
    """
    alone = world_size() == 1
    if dist.is_initialized() or (alone and not offload):
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not symmetric_memory.share_a_gpu(1) else "gloo"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        start_groups(backend, backend_timeout(timeout_seconds))
        Watchdog(connect_store(), dist.get_rank(), dist.get_world_size(), timeout_seconds).start()
    return True


def stop_process_group() -> None:
    """Leave the other ranks and forget the job; no error if they are already gone."""
    symmetric_memory.release()  # waits for the device: if that hangs, the watchdog ends it
    job.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
