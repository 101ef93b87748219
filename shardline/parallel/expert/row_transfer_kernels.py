"""Triton kernels that write rows of experts, and how many there are, into the memories of other ranks."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share_counts_kernel(counts, addresses, own, experts, BLOCK: tl.constexpr):
    """Program r writes this rank's counts into line `own` of rank r's table (ranks, experts)."""
    columns = tl.arange(0, BLOCK)
    here = columns < experts
    table = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    tl.store(table + own * experts + columns, tl.load(counts + columns, mask=here), mask=here)


@triton.jit
def routes_kernel(
    table, starts, places, own, ranks, experts, BACK: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Where each block of rows starts here, and its place on the rank it is sent to.

    A block has the rows that one rank has for one expert. They lie in two orders: with the rank, by expert; with the
    expert's rank, by expert and then by source. Block b is expert b of this rank, or, on the way back, the rows of rank
    b % ranks for the (b / ranks)-th expert of this one.
    """
    block = tl.program_id(0)
    of_a_rank = experts // ranks
    source, expert = own, block
    if BACK:
        source, expert = block % ranks, own * of_a_rank + block // ranks
    rank, column = tl.arange(0, RANKS)[:, None], tl.arange(0, EXPERTS)[None, :]
    counts = tl.load(table + rank * experts + column, mask=(rank < ranks) & (column < experts), other=0)
    first = expert // of_a_rank * of_a_rank
    with_source = tl.sum(tl.where((rank == source) & (column < expert), counts, 0))
    sooner = ((column >= first) & (column < expert)) | ((column == expert) & (rank < source))
    with_expert = tl.sum(tl.where(sooner, counts, 0))
    if BACK:
        tl.store(starts + block, with_expert)
        tl.store(places + block, with_source)
    else:
        tl.store(starts + block, with_source)
        tl.store(places + block, with_expert)


@triton.jit
def send_rows_kernel(
    rows, side, order, starts, places, addresses, side_begins, words, blocks, of_a_rank, ranks,
    K: tl.constexpr, SIDE: tl.constexpr, BACK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i writes row i, `words` of 4 bytes, to its place on its rank, and the SIDE numbers beside it.

    Rows that go to experts are taken in the given order, each token K times; those on the way back as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    known = tl.arange(0, BLOCKS)
    begun = tl.load(starts + known, mask=known < blocks, other=1 << 62) <= row
    block = tl.sum(begun.to(tl.int32)) - 1
    target = tl.load(places + block) + row - tl.load(starts + block)
    choice = row
    if BACK:
        memory = tl.load(addresses + block % ranks)
        token = row
    else:
        memory = tl.load(addresses + block // of_a_rank)
        choice = tl.load(order + row)
        token = choice // K
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < words
    there = memory.to(tl.pointer_type(tl.int32)) + target * words
    tl.store(there + columns, tl.load(rows + token * words + columns, mask=here), mask=here)
    beside = (memory + side_begins).to(tl.pointer_type(tl.float32)) + target * SIDE
    for i in tl.static_range(SIDE):
        tl.store(beside + i, tl.load(side + choice * SIDE + i), mask=tl.program_id(1) == 0)
