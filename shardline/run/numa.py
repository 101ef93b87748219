"""What a rank sets up before it touches a device: NCCL's variables, the GPU's allocator, the cores that it runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardline.config.schema import NCCL, Config
from shardline.words import numbered, ranges

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")
VARIABLES = {
    "algorithm": "NCCL_ALGO",
    "protocol": "NCCL_PROTO",
    "min_channels": "NCCL_MIN_NCHANNELS",
    "max_channels": "NCCL_MAX_NCHANNELS",
    "buffer_size": "NCCL_BUFFSIZE",
    "net_gdr_level": "NCCL_NET_GDR_LEVEL",
}

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # a user who sets one of these keeps that choice


def prepare_rank(config: Config) -> list[str]:
    """Set the rank up before its first use of a device or of threads, and return lines for the log."""
    lines = []
    variables = nccl_variables(config.comm.nccl)
    if variables:
        os.environ.update(variables)
        settings = ", ".join(f"{name}={value}" for name, value in variables.items())
        effect = "" if torch.cuda.is_available() else " (no effect: there is no GPU)"
        lines.append(f"NCCL settings: {settings}{effect}")
    if torch.cuda.is_available() and not any(os.environ.get(name) for name in ALLOCATOR):
        settle = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        settle("expandable_segments:True")  # fewer holes between allocations
    if config.comm.bind_cpus:
        lines.append(_bind())
    return lines


def nccl_variables(section: NCCL) -> dict[str, str]:
    """The variables that a `comm.nccl` section sets."""
    named = {variable: getattr(section, key) for key, variable in VARIABLES.items()}
    return {name: str(value) for name, value in named.items() if value is not None} | section.env


def _bind() -> str:
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    allowed = os.sched_getaffinity(0)
    nodes = {node: cores & allowed for node, cores in numa_nodes(NODES).items() if cores & allowed} or {0: allowed}
    share = share_cores(nodes, gpu_nodes(ranks), rank)
    os.sched_setaffinity(0, share)
    where = (node for node, cores in nodes.items() if cores & set(share))
    return f"bound to cores {ranges(share)} of {numbered('NUMA node', where)}"


def share_cores(nodes: Mapping[int, set[int]], wanted: Sequence[int | None], rank: int) -> list[int]:
    """The cores of one local rank. `wanted` is the NUMA node of each local rank's GPU, None where there is none.

    Ranks on one node divide its cores; ranks without a node divide all cores, node after node. More ranks than cores
    take turns.
    """
    if wanted[rank] in nodes:
        cores = sorted(nodes[wanted[rank]])  # type: ignore[index]
        neighbours = [other for other, node in enumerate(wanted) if node == wanted[rank]]
    else:
        cores = [core for node in sorted(nodes) for core in sorted(nodes[node])]
        neighbours = list(range(len(wanted)))
    place, count = neighbours.index(rank), len(neighbours)
    if count > len(cores):
        return [cores[place % len(cores)]]
    return cores[place * len(cores) // count : (place + 1) * len(cores) // count]


def numa_nodes(folder: Path) -> dict[int, set[int]]:
    """The cores of each NUMA node that has some; empty where the kernel has no such list."""
    lists = {int(path.parent.name.removeprefix("node")): path for path in folder.glob("node[0-9]*/cpulist")}
    nodes = {node: _cores(path.read_text()) for node, path in lists.items()}
    return {node: cores for node, cores in nodes.items() if cores}


def gpu_nodes(ranks: int) -> list[int | None]:
    """The NUMA node of each local rank's GPU."""
    count = torch.cuda.device_count()
    return [_gpu_node(rank % count) if count else None for rank in range(ranks)]


def _gpu_node(device: int) -> int | None:
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    if bus < 0:
        return None
    try:
        node = int((DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cores(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
