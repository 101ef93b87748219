"""Sends rows between the memories of GPUs: a kernel writes each row directly to its place on its expert's rank.

    side stream   counts -> all ranks | rows -> their places                      | results -> their places
    main stream   half of the shared expert       | wait, copy out | experts      | the other half | wait, add up

Ranks exchange their counts through the same memory, so no transfer waits for the host. While rows are under way, the
host reads the sizes, to allocate the tensors that the rows are copied into. All of a rank's rows may go to one other
rank; the shared memory has room for that. There are two buffers for each direction, used in turn; a rank writes to a
buffer again when its previous rows there have been read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives, symmetric_memory
from shardline.comm.job import job
from shardline.comm.observe import Observed
from shardline.comm.symmetric_memory import READ, READY, Region, space
from shardline.comm.watchdog import pass_over
from shardline.models.experts.rows import add_up, power_of_two
from shardline.parallel.expert.all_to_all import AXIS, ROUTES

pass_over(__file__)
BLOCK, ROWS, WARPS = 1024, 8, 8  # a program writes BLOCK words of 4 bytes at a time, of each of ROWS rows
ROOM = 256  # the side begins at a multiple of this many bytes


class _Sent(NamedTuple):
    """Rows that are being written, and the region where rows for this rank arrive."""

    region: Region
    shape: tuple[int, ...]  # of the rows that fit there
    dtype: torch.dtype
    side: int  # numbers beside each row
    sent: list[int]  # rows sent to each rank, if known
    ended: Any  # event: this rank has written all of its rows
    kept: tuple[Any, ...]  # tensors that are read until then


class SharedMemory:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turns: dict[str, int] = {}
        self._counted: dict[int, tuple[Any, Tensor]] = {}  # address of sizes -> event when they are on the host

    def plan(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        from shardline.parallel.expert.row_transfer_kernels import routes_kernel, share_counts_kernel

        over, experts = space(AXIS, self.device), counts.shape[0]
        ranks = collectives.axis_size(AXIS)
        region = self._region("counts", ranks * experts * 8)
        table = counts.new_empty(ranks + ROUTES, experts)
        sizes = torch.empty(ranks, ranks, dtype=counts.dtype, pin_memory=True)
        arrived = torch.cuda.Event()
        over.fork()
        with torch.cuda.stream(over.side):
            _wait(region, READ, over.side)
            grid, block = (ranks,), power_of_two(experts)
            share_counts_kernel[grid](counts, region.addresses, region.rank, experts, BLOCK=block)
            _signal(region, READY, over.side)
            _wait(region, READY, over.side)
            table[:ranks].copy_(region.of(region.rank, (ranks, experts), counts.dtype))
            _signal(region, READ, over.side)
            sizes.copy_(table[:ranks].view(ranks, ranks, -1).sum(2), non_blocking=True)
            arrived.record()
            powers = {"RANKS": power_of_two(ranks), "EXPERTS": block}
            routes_kernel[(experts, 2)](table, region.rank, ranks, experts, **powers)
        self._counted[sizes.data_ptr()] = (arrived, counts)
        return table, sizes

    def send(self, rows: Tensor, side: Tensor | None, order: Tensor, k: int, table: Tensor, sizes: Tensor) -> object:
        ranks = collectives.axis_size(AXIS)
        room = ranks * rows.shape[0] * min(k, table.shape[1] // ranks)
        return self._send("there", rows, side, order, k, table, (order.shape[0], room), [])

    def landed(self, transfer: object, table: Tensor, sizes: Tensor) -> list[Tensor]:
        assert isinstance(transfer, _Sent)
        counted = self._counted.pop(sizes.data_ptr(), None)
        if counted is not None:
            counted[0].synchronize()
        of_ranks, own = sizes.tolist(), transfer.region.rank
        rows, *side = self._arrived(transfer, of_ranks[own], sum(line[own] for line in of_ranks))
        landed = [rows.clone(), *(one.clone() for one in side)]
        self._read(transfer)
        return landed

    def send_back(self, rows: Tensor, side: Tensor | None, table: Tensor, sizes: Tensor) -> object:
        of_ranks, own = sizes.tolist(), collectives.axis(AXIS).rank
        room = max(sum(line) for line in of_ranks)  # a rank gets back as many rows as it has sent
        return self._send("back", rows, side, None, 1, table, (rows.shape[0], room), [line[own] for line in of_ranks])

    def gathered(self, transfer: object, inverse: Tensor, k: int) -> list[Tensor]:
        assert isinstance(transfer, _Sent)
        rows, *side = self._arrived(transfer, transfer.sent, inverse.shape[0])
        gathered = [add_up(rows, inverse, k), *(one.index_select(0, inverse) for one in side)]
        self._read(transfer)
        return gathered

    def _send(
        self,
        way: str,
        rows: Tensor,
        side: Tensor | None,
        order: Tensor | None,
        k: int,
        table: Tensor,
        size: tuple[int, int],
        sent: list[int],
    ) -> _Sent:
        """Start to write `size[0]` rows; `size[1]` is the most that can arrive at a rank."""
        from shardline.parallel.expert.row_transfer_kernels import send_rows_kernel

        (count, room), experts, back = size, table.shape[1], way == "back"
        over, ranks = space(AXIS, self.device), collectives.axis_size(AXIS)
        words, numbers = rows.shape[1] * rows.element_size() // 4, 0 if side is None else side.shape[1]
        begins = -(-room * words * 4 // ROOM) * ROOM
        region = self._region(way, begins + room * numbers * 4)
        ended = torch.cuda.Event()
        over.fork()
        _wait(region, READ, over.side)
        over.join()  # wait here: otherwise the next product may leave the kernel no multiprocessor
        with torch.cuda.stream(over.side), job.row_clock.sending():
            if count:
                send_rows_kernel[(-(-count // ROWS),)](
                    rows.view(torch.int32),
                    rows if side is None else side,
                    rows if order is None else order,
                    table,
                    region.addresses,
                    begins,
                    words,
                    experts,
                    ranks,
                    count,
                    K=k,
                    SIDE=numbers,
                    BACK=back,
                    BLOCKS=power_of_two(experts),
                    BLOCK=min(BLOCK, power_of_two(words)),
                    ROWS=ROWS,
                    num_warps=WARPS,
                )
            _signal(region, READY, over.side)
            ended.record()
        return _Sent(region, (room, rows.shape[1]), rows.dtype, numbers, sent, ended, (rows, side, order, table))

    def _arrived(self, transfer: _Sent, sent: list[int], count: int) -> list[Tensor]:
        """Wait until all ranks have written; return views of the first `count` rows and of their side."""
        region, (room, width), kind = transfer.region, transfer.shape, transfer.dtype
        stream = torch.cuda.current_stream(self.device)
        size = (sum(sent) - sent[region.rank]) * (width * kind.itemsize + 4 * transfer.side)
        tag = f"rows over {AXIS} of ({count}, {width}) {str(kind).removeprefix('torch.')}"
        with Observed(AXIS, "all_to_all", tag, size, on_host=False), job.row_clock.waiting():
            _wait(region, READY, stream)
            stream.wait_event(transfer.ended)
        rows = region.of(region.rank, (room, width), kind)[:count]
        if not transfer.side:
            return [rows]
        begins = -(-room * width * kind.itemsize // ROOM) * ROOM
        return [rows, region.of(region.rank, (room, transfer.side), torch.float32, begins)[:count]]

    def _read(self, transfer: _Sent) -> None:
        _signal(transfer.region, READ, torch.cuda.current_stream(self.device))

    def _region(self, purpose: str, size: int) -> Region:
        turn = self._turns[purpose] = (self._turns.get(purpose, 1) + 1) % 2
        return space(AXIS, self.device).region(f"experts {purpose} {turn}", size, credit=True)


def _signal(region: Region, channel: int, stream: torch.cuda.Stream) -> None:
    for peer in region.peers:
        region.signal(peer, channel, stream)


def _wait(region: Region, channel: int, stream: torch.cuda.Stream) -> None:
    for peer in region.peers:
        region.wait(peer, channel, stream)


def unusable(device: torch.device) -> str | None:
    """Return why this carrier cannot be used here, None if it can; every rank gets the same answer."""
    reason = symmetric_memory.unusable(device, AXIS)
    if reason is not None:
        return reason

    def attempt() -> None:
        import shardline.parallel.expert.row_transfer_kernels  # noqa: F401

    return symmetric_memory.agreed_reason(attempt, AXIS)
