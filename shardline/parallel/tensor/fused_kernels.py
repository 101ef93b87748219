"""Persistent Triton kernels: one launch multiplies all tiles, and each tile waits only for the rows that it needs.

    gathering    tiles of this rank's rows come first; tiles of another rank's rows wait for that rank's flag, which is
                 set when a copy engine has brought the rows
    scattering   finished tiles for another rank are stored in that rank's memory, together with their flag; a tile of
                 this rank's own rows waits for the other ranks' tiles at the same place and adds them

The memory that other ranks write to has two halves, used in turn: a rank may be one product ahead of another, but never
two, since its own tiles need all others' tiles. The program that waits for a flag clears it, so that a recorded CUDA
graph can be replayed. For the same reason, the half in use is counted on the device.

With TIMED, a kernel also notes in `clock` when its first program began and its last one ended, how long programs waited
for rows and for their own sends to complete, and from when to when it sent (by the GPU's timer, in nanoseconds).

Each program takes a share of the tiles; programs that start earlier take earlier tiles. When scattering, the first
programs only send, and so end without waiting for anything. The programs after them wait only for tiles that such
programs of other ranks have sent. So any number of programs may be resident on the GPU at a time, even one.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from shardline.parallel.tensor import tile_order

gathering_shard = triton.jit(tile_order.gathering_shard)
scattering_shard = triton.jit(tile_order.scattering_shard)
row_of_tiles = triton.jit(tile_order.row_of_tiles)
column_of_tiles = triton.jit(tile_order.column_of_tiles)

# The words of a kernel's state: all but the first are zero while no kernel runs.
HALF, ENTERED, LEFT = (tl.constexpr(word) for word in range(3))
WORDS = 3
# The words of `clock`, initially zero: sums over all programs, and moments, of which the earliest (as its distance from
# LATE) or the latest is kept. comm/kernel_clock.py reads them.
BEGAN, ENDED, WAITED, STALLED, SENT_FROM, SENT_TO = (tl.constexpr(word) for word in range(6))
LATE = tl.constexpr(1 << 62)


@triton.jit
def _product(
    left, right, row, column, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile in float32; `right` is (N, K) with ROWS, else (K, N)."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        a = left.load([row, k])
        if ROWS:
            total = tl.dot(a, right.load([column, k]).T, total, input_precision=PRECISION)
        else:
            total = tl.dot(a, right.load([k, column]), total, input_precision=PRECISION)
    return total


@triton.jit
def _do(ASSEMBLY: tl.constexpr):
    """Make every thread execute an instruction, in order with loads and stores."""
    tl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _note(clock, FROM: tl.constexpr, TO: tl.constexpr, began):
    """Note that something lasted from `began` until now."""
    tl.atomic_max(clock + FROM, LATE - began, sem="relaxed", scope="gpu")
    tl.atomic_max(clock + TO, _now(), sem="relaxed", scope="gpu")


@triton.jit
def _pause(ON_GPU: tl.constexpr):
    """Pause between two reads of a flag: reads take bandwidth that others need."""
    if ON_GPU:
        _do("nanosleep.u32 100; mov.u32 $0, 0;")


@triton.jit
def _enter(state):
    """Return the number of this program: how many began before it."""
    return tl.atomic_add(state + ENTERED, 1, sem="relaxed", scope="gpu")


@triton.jit
def _leave(state, tiles, abreast, turns):
    """Return True in the last program to end, which clears the counters; `tiles` counts all places for tiles."""
    programs = tl.cdiv(tiles, abreast * turns) * abreast
    tl.debug_barrier()
    last = tl.atomic_add(state + LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(state + ENTERED, 0)
        tl.store(state + LEFT, 0)
    return last


@triton.jit
def _share(number, abreast, turns, begin, end):
    """Return this program's first tile between `begin` and `end`, and where its tiles end, in steps of `abreast`.

    `abreast` programs take a tile each, `turns` times; then the next `abreast` programs follow.
    """
    start = number // abreast * abreast * turns
    first = start + number % abreast
    first += tl.cdiv(max(begin - first, 0), abreast) * abreast
    return first, max(first, min(end, start + abreast * turns))


@triton.jit
def _wait_until_set(flag, clock, TIMED: tl.constexpr, ON_GPU: tl.constexpr):
    if TIMED:
        began = _now()
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        _pause(ON_GPU)
    if ON_GPU:  # bulk loads then read the rows
        _do("fence.proxy.async; mov.u32 $0, 0;")
    if TIMED:
        tl.atomic_add(clock + WAITED, _now() - began, sem="relaxed", scope="gpu")


@triton.jit
def _take_all(flags, apart, own, clock, RANKS: tl.constexpr, TIMED: tl.constexpr, ON_GPU: tl.constexpr):
    """Wait for the flag of every other rank and clear it."""
    if TIMED:
        began = _now()
    if RANKS == 2:
        while tl.atomic_cas(flags + (1 - own) * apart, 1, 0, sem="acquire", scope="sys") == 0:
            _pause(ON_GPU)
    else:
        rank = tl.arange(0, triton.next_power_of_2(RANKS))
        other = (rank < RANKS) & (rank != own)
        waiting = RANKS - 1
        while waiting > 0:
            seen = tl.atomic_add(flags + rank * apart, 0, mask=other, sem="acquire", scope="sys")
            waiting = RANKS - 1 - tl.sum(tl.where(other, seen, 0))
            if waiting > 0:
                _pause(ON_GPU)
        tl.store(flags + rank * apart, 0, mask=other)
    if TIMED:
        tl.atomic_add(clock + WAITED, _now() - began, sem="relaxed", scope="gpu")


@triton.jit
def _set(flag, clock, TIMED: tl.constexpr, ON_GPU: tl.constexpr):
    """Set a flag once everything that this program has stored is visible.

    (Triton does not pipeline a loop that contains its own `debug_barrier`.)
    """
    if TIMED:
        began = _now()
    if ON_GPU:
        _do("cp.async.bulk.wait_group 0; bar.sync 0; mov.u32 $0, 0;")
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    if TIMED:
        tl.atomic_add(clock + STALLED, _now() - began, sem="relaxed", scope="gpu")
        _note(clock, SENT_FROM, SENT_TO, began)


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """Split a tile into its left and right columns: registers must hold the tile and the part that is being stored."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _put(tile, result, row, column, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):
    if PIECES == 1:
        result.store([row, column], tile.to(result.dtype))
    else:
        left, right = _halves(tile, BM, BN)
        result.store([row, column], left.to(result.dtype))
        result.store([row, column + BN // 2], right.to(result.dtype))


@triton.jit
def _sent(sent, row, column, T, N, own, RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sum what the other ranks have sent for a tile, always in the same order."""
    EACH: tl.constexpr = 128 // sent.dtype.element_ty.primitive_bitwidth
    width = N // EACH * EACH  # equals N, as rows are aligned; this form lets the compiler load 16 bytes at a time
    across = column + tl.arange(0, BN)[None, :]
    offsets = (row + tl.arange(0, BM)[:, None]) * width + across
    first = sent + ((own + 1) % RANKS).to(tl.int64) * T * N
    total = tl.load(tl.multiple_of(first, 16) + offsets, mask=across < width, other=0.0, cache_modifier=".cg")
    if RANKS > 2:
        total = total.to(tl.float32)
        for turn in tl.static_range(2, RANKS):
            place = sent + ((own + turn) % RANKS).to(tl.int64) * T * N
            total += tl.load(tl.multiple_of(place, 16) + offsets, mask=across < width, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    tile, sent, result, row, column, T, N, own,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Add what the other ranks have sent, and store the sum in twice as many pieces, as registers must hold both.

    The next piece is loaded while one is added.
    """
    left, right = _halves(tile, BM, BN)
    PART: tl.constexpr = BN // (2 * PIECES)
    if PIECES == 1:
        sent0 = _sent(sent, row, column, T, N, own, RANKS, BM, PART)
        sent1 = _sent(sent, row, column + PART, T, N, own, RANKS, BM, PART)
        result.store([row, column], (left + sent0).to(result.dtype))
        result.store([row, column + PART], (right + sent1).to(result.dtype))
    else:
        part0, part1 = _halves(left, BM, BN // 2)
        part2, part3 = _halves(right, BM, BN // 2)
        sent0 = _sent(sent, row, column, T, N, own, RANKS, BM, PART)
        sent1 = _sent(sent, row, column + PART, T, N, own, RANKS, BM, PART)
        result.store([row, column], (part0 + sent0).to(result.dtype))
        sent2 = _sent(sent, row, column + 2 * PART, T, N, own, RANKS, BM, PART)
        result.store([row, column + PART], (part1 + sent1).to(result.dtype))
        sent3 = _sent(sent, row, column + 3 * PART, T, N, own, RANKS, BM, PART)
        result.store([row, column + 2 * PART], (part2 + sent2).to(result.dtype))
        result.store([row, column + 3 * PART], (part3 + sent3).to(result.dtype))


@triton.jit(do_not_specialize=["own", "last", "group", "abreast", "turns"])
def gather_matmul(
    x, full, weight, out, flags, state, clock, T, N, K, own, last, group, abreast, turns,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    TIMED: tl.constexpr = False, ON_GPU: tl.constexpr = True,
):  # fmt: skip
    """out (RANKS T, N) = rows of all ranks times weight; x (T, K) has this rank's rows, `full` receives the others'.

    T is a multiple of BM. `flags` has a flag for each rank; the `last` product of these rows clears them.
    """
    mine = tl.make_tensor_descriptor(x, shape=[T, K], strides=[K, 1], block_shape=[BM, BK])
    theirs = tl.make_tensor_descriptor(full, shape=[RANKS * T, K], strides=[K, 1], block_shape=[BM, BK])
    if ROWS:
        right = tl.make_tensor_descriptor(weight, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    else:
        right = tl.make_tensor_descriptor(weight, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    result = tl.make_tensor_descriptor(out, shape=[RANKS * T, N], strides=[N, 1], block_shape=[BM, BN // PIECES])
    rows, columns = T // BM, tl.cdiv(N, BN)
    tiles = rows * columns
    if TIMED:
        entered = _now()
    number = _enter(state)
    first, end = _share(number, abreast, turns, 0, tiles)
    for tile in tl.range(first, end, abreast, flatten=True):
        row = row_of_tiles(tile, rows, columns, group) * BM
        column = column_of_tiles(tile, rows, columns, group) * BN
        total = _product(mine, right, row, column, K, BM, BN, BK, ROWS, PRECISION)
        _put(total, result, own * T + row, column, BM, BN, PIECES)
    for turn in range(1, RANKS):
        shard = gathering_shard(turn, own, RANKS)
        first, end = _share(number, abreast, turns, turn * tiles, (turn + 1) * tiles)
        if first < end:
            _wait_until_set(flags + shard, clock, TIMED, ON_GPU)
        for index in tl.range(first, end, abreast, flatten=True):
            tile = index - turn * tiles
            row = shard * T + row_of_tiles(tile, rows, columns, group) * BM
            column = column_of_tiles(tile, rows, columns, group) * BN
            total = _product(theirs, right, row, column, K, BM, BN, BK, ROWS, PRECISION)
            _put(total, result, row, column, BM, BN, PIECES)
    if TIMED:
        _note(clock, BEGAN, ENDED, entered)
    ended = _leave(state, RANKS * tiles, abreast, turns)
    if ended & (last == 1):
        for rank in range(RANKS):
            tl.store(flags + rank, 0)


@triton.jit(do_not_specialize=["own", "group", "abreast", "turns"])
def matmul_scatter(
    x, weight, out, parts, flags, state, clock, T, N, K, own, room, most_tiles, group, abreast, turns,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    TIMED: tl.constexpr = False, ON_GPU: tl.constexpr = True,
):  # fmt: skip
    """out (T, N) = this rank's rows of x (RANKS T, K) times weight, summed over ranks.

    `parts` and `flags` are tables of addresses: for each rank, the start of the memory that others write to. For each
    half and each writer, this memory has `room` elements and `most_tiles` flags. T is a multiple of BM.
    """
    left = tl.make_tensor_descriptor(x, shape=[RANKS * T, K], strides=[K, 1], block_shape=[BM, BK])
    if ROWS:
        right = tl.make_tensor_descriptor(weight, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    else:
        right = tl.make_tensor_descriptor(weight, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    rows, columns = T // BM, tl.cdiv(N, BN)
    tiles = rows * columns
    if TIMED:
        entered = _now()
    number = _enter(state)
    half = tl.load(state + HALF) % 2
    slots = half * RANKS
    begins = slots.to(tl.int64) * room  # where this half begins
    kind: tl.constexpr = out.dtype
    for turn in range(RANKS - 1):
        shard = scattering_shard(turn, own, RANKS)
        place = tl.multiple_of(tl.load(parts + shard).to(kind) + begins, 16)
        theirs = tl.make_tensor_descriptor(place, shape=[RANKS * T, N], strides=[N, 1], block_shape=[BM, BN // PIECES])
        there = tl.load(flags + shard).to(tl.pointer_type(tl.int32)) + (slots + own) * most_tiles
        first, end = _share(number, abreast, turns, turn * tiles, (turn + 1) * tiles)
        # A flag is set one tile later, when the stores have long ended. (Its address is recomputed: in a flattened
        # loop, Triton 3.6 gives a loop-carried variable the value of the current tile.)
        for index in tl.range(first, end, abreast, flatten=True):
            tile = index - turn * tiles
            row = row_of_tiles(tile, rows, columns, group) * BM
            column = column_of_tiles(tile, rows, columns, group) * BN
            total = _product(left, right, shard * T + row, column, K, BM, BN, BK, ROWS, PRECISION)
            if index > first:
                _set(there + tile - abreast, clock, TIMED, ON_GPU)
            _put(total, theirs, own * T + row, column, BM, BN, PIECES)
        if first < end:
            _set(there + first - turn * tiles + (end - 1 - first) // abreast * abreast, clock, TIMED, ON_GPU)
    sent = tl.load(parts + own).to(kind) + begins
    here = tl.load(flags + own).to(tl.pointer_type(tl.int32))
    result = tl.make_tensor_descriptor(out, shape=[T, N], strides=[N, 1], block_shape=[BM, BN // (2 * PIECES)])
    others = tl.cdiv(tiles * (RANKS - 1), abreast * turns) * abreast * turns  # so no program both sends and waits
    first, end = _share(number, abreast, turns, others, others + tiles)
    for index in tl.range(first, end, abreast, flatten=True):
        tile = index - others
        row = row_of_tiles(tile, rows, columns, group) * BM
        column = column_of_tiles(tile, rows, columns, group) * BN
        total = _product(left, right, own * T + row, column, K, BM, BN, BK, ROWS, PRECISION)
        _take_all(here + slots * most_tiles + tile, most_tiles, own, clock, RANKS, TIMED, ON_GPU)
        _finish(total, sent, result, row, column, T, N, own, RANKS, BM, BN, PIECES)
    if TIMED:
        _note(clock, BEGAN, ENDED, entered)
    if _leave(state, others + tiles, abreast, turns):
        tl.store(state + HALF, 1 - half)
