"""How long collectives take: a latency for each hop and a bandwidth for each level of links.

Of a group of n ranks that are `stride` apart, `inside` ranks share a node. A ring inside a node runs at the node's
bandwidth. Between nodes, each rank has the network's bandwidth, and the ranks of a node send in parallel.

    all-gather, reduce-scatter of S bytes    S (n - 1) / n over the slowest level that the ring crosses
    all-reduce                               both, one after the other; faster inside a node if its switches reduce
    all-to-all                               the part for other nodes over the network, the rest inside the node
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardline.config.layout import Layout
from shardline.plan.hardware import Hardware
from shardline.plan.work import expert_cut, expert_shards

START = 8e-6  # seconds until the first byte of any collective moves


class Group(NamedTuple):
    """The ranks of one axis: how many, and how many of them share a node."""

    ranks: int
    inside: int

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.inside)


def axis_group(layout: Layout, axis: str, per_node: int) -> Group:
    """Return the group of an axis; its ranks are as far apart as the axes inside it have ranks."""
    ranks, stride = _extent(layout, axis)
    inside = max(1, min(ranks, per_node // stride)) if stride < per_node else 1
    if layout.world_size <= per_node:
        inside = ranks
    return Group(ranks, inside)


def _extent(layout: Layout, axis: str) -> tuple[int, int]:
    tp, cp, shard, copies = layout.tp, layout.cp, layout.dp_shard, layout.dp_replicate
    return {
        "tp": (tp, 1),
        "cp": (cp, tp),
        "dp_shard": (shard * cp, tp),
        "dp_replicate": (copies, tp * cp * shard),
        "dp": (copies * shard * cp, tp),
        "pp": (layout.pp, tp * cp * shard * copies),
        "ep": (layout.ep, layout.etp),
        "expert_shard": (expert_shards(layout), expert_cut(layout)),
        "expert_dp": (expert_shards(layout) * copies, expert_cut(layout)),
    }[axis]


def seconds(
    hardware: Hardware, group: Group, kind: str, size: float, efficiency: float = 1.0, delay: float = 1.0
) -> float:
    """Return the time of one collective of `size` bytes (the whole tensor) if nothing else uses the links."""
    n, inside, nodes = group.ranks, group.inside, group.nodes
    if n == 1 or size <= 0:
        return 0.0
    node, net = hardware.node, hardware.network
    net = net._replace(latency=net.latency * delay) if delay != 1 else net
    speed = net.bandwidth * efficiency
    if kind == "send":
        return START + (net.latency + size / speed if nodes > 1 else node.latency + size / node.bandwidth)
    if kind == "all_to_all":
        away = (nodes - 1) / nodes
        hops = math.log2(n) * (net.latency if nodes > 1 else node.latency)
        return START + hops + max(size * away / speed, size * (n - 1) / n * (1 - away) / node.bandwidth)
    share = (n - 1) / n
    inner = size * share / node.bandwidth if inside > 1 else 0.0
    outer = size * (nodes - 1) / nodes / (inside * speed) if nodes > 1 else 0.0
    hops = (n - 1) * (net.latency if nodes > 1 else node.latency)
    if kind == "all_reduce":
        hops = 2 * math.log2(n) * (net.latency if nodes > 1 else node.latency) if n > 8 else 2 * hops
        faster = node.reduce if nodes == 1 and n > 2 else 1.0
        return START + hops + 2 * max(inner / faster, outer)
    return START + hops + max(inner, outer)
