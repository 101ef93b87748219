"""Triton kernels that write rows for experts, and their counts, into the memories of other ranks."""
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
def routes_kernel(table, own, ranks, experts, RANKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Compute where each block of rows starts here, and its place on the target rank, in four lines after the counts.

    A block has the rows that one rank has for one expert. The source rank has blocks in the order of experts; the
    expert's rank has them by expert and then by source. On the way there, block b is this rank's rows for expert b. On
    the way back, it is the rows of rank b % ranks for the (b / ranks)-th expert of this rank.
    """
    block, back = tl.program_id(0), tl.program_id(1)
    of_a_rank = experts // ranks
    source = tl.where(back == 1, block % ranks, own)
    expert = tl.where(back == 1, own * of_a_rank + block // ranks, block)
    rank, column = tl.arange(0, RANKS)[:, None], tl.arange(0, EXPERTS)[None, :]
    counts = tl.load(table + rank * experts + column, mask=(rank < ranks) & (column < experts), other=0)
    first = expert // of_a_rank * of_a_rank
    with_source = tl.sum(tl.where((rank == source) & (column < expert), counts, 0))
    sooner = ((column >= first) & (column < expert)) | ((column == expert) & (rank < source))
    with_expert = tl.sum(tl.where(sooner, counts, 0))
    lines = table + (ranks + 2 * back) * experts + block
    tl.store(lines, tl.where(back == 1, with_expert, with_source))
    tl.store(lines + experts, tl.where(back == 1, with_source, with_expert))


@triton.jit
def send_rows_kernel(
    rows, side, order, table, addresses, side_begins, words, experts, ranks, count,
    K: tl.constexpr, SIDE: tl.constexpr, BACK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program i writes ROWS of the `count` rows, of `words` 4-byte words each, to their places on their ranks.

    It also writes the SIDE numbers beside each row. Rows to experts are read in the given order, each token K times;
    rows on the way back are read in sequence.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < count
    starts = table + (ranks + 2 * BACK) * experts
    known = tl.arange(0, BLOCKS)[None, :]
    begun = tl.load(starts + known, mask=known < experts, other=1 << 62) <= row[:, None]
    block = tl.sum(begun.to(tl.int32), 1) - 1
    target = tl.load(starts + experts + block) + row - tl.load(starts + block)
    choice = row
    if BACK:
        memory = tl.load(addresses + block % ranks)
        token = row
    else:
        memory = tl.load(addresses + block // (experts // ranks))
        choice = tl.load(order + row, mask=real, other=0)
        token = choice // K
    there = memory.to(tl.pointer_type(tl.int32)) + target * words
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, words, BLOCK):
        here = real[:, None] & (start + columns < words)
        one = tl.load(rows + token[:, None] * words + start + columns, mask=here)
        tl.store(there[:, None] + start + columns, one, mask=here)
    beside = (memory + side_begins).to(tl.pointer_type(tl.float32)) + target * SIDE
    for i in tl.static_range(SIDE):
        tl.store(beside + i, tl.load(side + choice * SIDE + i, mask=real), mask=real)
