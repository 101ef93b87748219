"""Which rank writes which part: each once, and ranks that hold the same share the work."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardline.checkpoint.shards import Part
from shardline.comm import collectives

Held = list[tuple[int, int]]  # (key, bytes) of a rank's parts


def share_out(held: list[Held]) -> list[set[int]]:
    """The keys that each rank writes. Largest first, each to the holder that has the least so far.

    rank 0 holds a b c     rank 1 holds a b d     a is 6 bytes, b 3, c 2, d 5    ->   rank 0: a c, rank 1: b d
    """
    sizes: dict[int, int] = {}
    holders: dict[int, list[int]] = {}
    for rank, parts in enumerate(held):
        for key, size in parts:
            sizes[key] = size
            holders.setdefault(key, []).append(rank)
    load, owned = [0] * len(held), [set[int]() for _ in held]
    # What one rank alone holds is settled: the others are shared out around it.
    for key in sorted(sizes, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner] += sizes[key]
        owned[owner].add(key)
    return owned


class Owners:
    """This rank's share, agreed on by all ranks once and again when some rank holds something else than before."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._known: dict[str, tuple[Held, set[int]]] = {}

    def of(self, kind: str, parts: list[Part]) -> list[Part]:
        """The parts this rank writes of a save of this kind; every rank must ask."""
        if self.world_size == 1:
            return parts
        held = [(part.key, part.bytes) for part in parts]
        known, mine = self._known.get(kind, ([], set()))
        changed = torch.tensor([float(held != known or not known)])  # on the host: the device may be busy
        collectives.max_in_place(changed, "world")
        if changed.item():
            everyone: list[Held] = [[] for _ in range(self.world_size)]
            dist.all_gather_object(everyone, held)
            mine = share_out(everyone)[self.rank]
            self._known[kind] = (held, mine)
        return [part for part in parts if part.key in mine]
