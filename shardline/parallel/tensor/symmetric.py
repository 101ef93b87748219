"""Products on CUDA that copy rows through memory shared by the ranks while other rows are multiplied.

    gathering    side stream   my rows -> shared | rank 3's rows -> here | rank 2's | ...
                 multiplying   my rows           | rank 3's rows         | rank 2's ...       on two streams in turn
    scattering   multiplying   rows for rank 1   | for rank 2            | ... | my own | + what the others sent
                 side stream                     | to rank 1             | to rank 2 ...

cuBLAS computes one product for each rank's rows. When scattering, the products for other ranks are cut into `chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.symmetric_memory import READ, READY, Space, add_up, inside_product, pull, space
from shardline.comm.transfers import pieces
from shardline.parallel.tensor.serial_and_ring import CHUNKS, COLUMN, ROW, Arithmetic, GatherScatter, Tensors
from shardline.parallel.tensor.tile_order import gathering_shard, scattering_shard


class Symmetric(GatherScatter):
    name = "symmetric"
    regions = ("gather", "scatter")

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        scatters = (operation, direction) in ((ROW, "forward"), (COLUMN, "backward"))  # only scattered rows are cut
        return CHUNKS if scatters else super().counts(operation, direction)

    def gather(self, x: Tensor, weights: Tensors, by_rows: bool, axis: str) -> tuple[list[Tensor], Tensor]:
        how = self.arithmetic
        rights = [how.right(weight) if by_rows else how.right_back(weight) for weight in weights]
        widths = [weight.shape[0] if by_rows else weight.shape[1] for weight in weights]
        outs = [x.new_empty(collectives.axis_size(axis) * x.shape[0], width) for width in widths]
        return outs, _gather(how.rows(x, gradient=not by_rows), rights, outs, axis, how)

    def scatter(self, x: Tensor, weight: Tensor, by_rows: bool, axis: str, chunks: int) -> Tensor:
        how = self.arithmetic
        right = how.right(weight) if by_rows else how.right_back(weight)
        computed = x.new_empty(x.shape[0], weight.shape[0] if by_rows else weight.shape[1])
        return _scatter(how.rows(x, gradient=not by_rows), right, computed, axis, chunks, how)


def _gather(x: Tensor, rights: Sequence[Any], outs: Tensors, axis: str, how: Arithmetic) -> Tensor:
    """Write the rows of all ranks times each of `rights` to `outs`; return the gathered rows."""
    x, over, ranks = x.contiguous(), space(axis, x.device), collectives.axis_size(axis)
    own, t = collectives.axis(axis).rank, x.shape[0]
    full = x.new_empty(ranks * t, x.shape[1])
    here = torch.cuda.current_stream(x.device)
    with inside_product(axis, "all_gather", x, x.numel()):
        events: dict[int, torch.cuda.Event] = {}

        def arrived(source: int) -> None:
            events[source] = torch.cuda.Event()
            events[source].record()

        pull(x, full, over, arrived)
        streams = (here, over.second)
        over.second.wait_stream(here)
        for turn in range(ranks):
            source = gathering_shard(turn, own, ranks)
            rows = slice(source * t, (source + 1) * t)
            with torch.cuda.stream(streams[turn % 2]):
                if turn:
                    streams[turn % 2].wait_event(events[source])
                for out, right in zip(outs, rights, strict=True):
                    how.multiply(full[rows] if turn else x, right, out[rows])
        here.wait_stream(over.second)
        over.join()
    return full


def _scatter(x: Tensor, right: Any, computed: Tensor, axis: str, chunks: int, how: Arithmetic) -> Tensor:
    """Return this rank's rows of x times `right`, summed over ranks; `computed` is a buffer for the whole product."""
    over, ranks, own = space(axis, x.device), collectives.axis_size(axis), collectives.axis(axis).rank
    t, width = x.shape[0] // ranks, computed.shape[1]
    size = t * width * computed.element_size()
    region = over.region("scatter", ranks * size, credit=True)
    computed = computed.view(ranks, t, width)
    with inside_product(axis, "reduce_scatter", computed, t * width):
        for turn in range(ranks):
            owner = scattering_shard(turn, own, ranks)
            for rows in pieces(t, chunks if owner != own else 1):
                how.multiply(x[owner * t + rows.start : owner * t + rows.stop], right, computed[owner][rows])
                if owner == own:
                    continue
                over.fork()
                with torch.cuda.stream(over.side):
                    if rows.start == 0:
                        region.wait(owner, READ, over.side)
                    theirs = region.of(owner, (t, width), computed.dtype, own * size)
                    theirs[rows].copy_(computed[owner][rows])
            if owner != own:
                region.signal(owner, READY, over.side)
        return _sum(computed[own], over, own, ranks, size)


def _sum(mine: Tensor, over: Space, own: int, ranks: int, size: int) -> Tensor:
    region, here = over.regions["scatter"], torch.cuda.current_stream(mine.device)
    sources = [(own - distance) % ranks for distance in range(1, ranks)]
    for source in sources:
        region.wait(source, READY, here)
    parts = [region.of(own, mine.shape, mine.dtype, source * size) for source in sources]
    out = torch.empty_like(mine)
    add_up([mine, *parts], out)
    for source in sources:
        region.signal(source, READ, here)
    over.join()
    return out
