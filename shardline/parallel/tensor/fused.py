"""Products on CUDA, each by one persistent kernel whose tiles wait for rows or send them (fused_kernels.py).

All ranks together measure a few tile shapes for each product, once, and use the fastest. Ranks must agree, since the
place of a tile in memory depends on its shape.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.symmetric_memory import Space, agreed_reason, inside_product, pull, share_a_gpu, space, write_word
from shardline.parallel.tensor.serial_and_ring import PLAIN, GatherScatter, Tensors

PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
FLAG_BYTES = 4
ALIGNED = 16  # elements


class Tiles(NamedTuple):
    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    group: int = 8  # rows of tiles that are computed together
    pieces: int = 2  # a tile is stored in this many pieces: fewer need more shared memory besides the stages

    def in_all(self, rows: int, columns: int) -> int:
        return rows // self.rows * -(-columns // self.columns)


NARROW = (  # for types of two bytes
    Tiles(128, 256, 64, 3, 8, 8, 1),
    Tiles(128, 256, 64, 4, 8, 8, 2),
    Tiles(128, 256, 64, 3, 8, 16, 1),
    Tiles(128, 256, 64, 4, 8, 16, 2),
    Tiles(64, 128, 64, 4, 4),
)
WIDE = (Tiles(64, 64, 32, 8, 4),)  # for float32; with so many stages, no two programs share a multiprocessor
MIN_SIDE = 64  # of a tile
LEAST_ROUNDS, MOST_ROUNDS, MOMENT, IN_A_ROW = 4, 24, 0.15, 4  # rounds of tuning: as many as fit into MOMENT seconds
FOR_OTHERS = 4  # multiprocessors left free for the collectives of other axes
TURNS = 6  # a program ends after this many tiles if others need its place
REGISTERS = 65_536  # of a multiprocessor
MOST_REGISTERS = {"gather": 60_000, "scatter": REGISTERS}  # copies of rows need some of them
NOTING_WARPS, NOTING_REGISTERS = 8, 232  # warps of a gathering program that records times; registers of its threads
SHARED_BESIDES = 1024  # bytes of shared memory that a program takes beyond its own


def _kernels() -> Any:
    """Return the kernels, and set the allocator for their descriptors in this thread: backward runs in another one."""
    import triton  # not included in CPU builds of torch

    from shardline.parallel.tensor import fused_kernels

    triton.set_allocator(_scratch)
    return fused_kernels


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, device="cuda", dtype=torch.int8)


class Right(NamedTuple):
    """A right factor (K, N), stored as it is or, with `by_rows`, as its transpose (N, K)."""

    tensor: Tensor
    by_rows: bool

    @property
    def width(self) -> int:
        return self.tensor.shape[0 if self.by_rows else 1]


class Fused(GatherScatter):
    name = "fused"
    regions = ("gather", "parts", "flags")

    def counts(self, operation: str, direction: str) -> tuple[int, ...]:
        return super().counts(operation, direction) if self.arithmetic is PLAIN else ()  # the kernels support no float8

    def gather(self, x: Tensor, weights: Tensors, by_rows: bool, axis: str) -> tuple[list[Tensor], Tensor]:
        return _gather(x, [Right(weight.contiguous(), by_rows) for weight in weights], axis)

    def scatter(self, x: Tensor, weight: Tensor, by_rows: bool, axis: str, chunks: int) -> Tensor:
        return _scatter(x, Right(weight.contiguous(), by_rows), axis)


def _gather(x: Tensor, rights: Sequence[Right], axis: str, tiles: Sequence[Tiles] = ()) -> tuple[list[Tensor], Tensor]:
    x, over, ranks, t = x.contiguous(), space(axis, x.device), collectives.axis_size(axis), x.shape[0]
    tiles = tiles or [_tuned("gather", x, right, t, ranks, axis) for right in rights]
    full = x.new_empty(ranks * t, x.shape[1])
    outs = [x.new_empty(ranks * t, right.width) for right in rights]
    state = _state(over)
    with inside_product(axis, "all_gather", x, x.numel()):
        pull(x, full, over, lambda source: state.set_arrived(source, over.side))
        own = collectives.axis(axis).rank
        for number, (right, out, of) in enumerate(zip(rights, outs, tiles, strict=True), start=1):
            _launch_gather(x, full, right, out, state, of, own, ranks, last=number == len(rights))
        over.join()
    return outs, full


def _scatter(x: Tensor, right: Right, axis: str, tiles: Tiles | None = None) -> Tensor:
    x, over, ranks = x.contiguous(), space(axis, x.device), collectives.axis_size(axis)
    t, width = x.shape[0] // ranks, right.width
    tiles = tiles or _tuned("scatter", x, right, t, ranks, axis)
    out = x.new_empty(t, width)
    slots = 2 * ranks
    parts = over.region("parts", slots * _aligned(t * width) * x.element_size())
    flags = over.region("flags", slots * tiles.in_all(t, width) * FLAG_BYTES)
    elements = parts.size // slots // x.element_size() // ALIGNED * ALIGNED
    room = Room(parts.addresses, flags.addresses, elements, flags.size // slots // FLAG_BYTES)
    with inside_product(axis, "reduce_scatter", x, t * width):
        _launch_scatter(x, right, out, room, _state(over), tiles, collectives.axis(axis).rank, ranks)
    return out


class Room(NamedTuple):
    """The memory in which ranks write for each other: addresses by rank, and each writer's share of each half."""

    parts: Tensor
    flags: Tensor
    elements: int
    tiles: int
    memory: tuple[Tensor, ...] = ()  # kept alive while its addresses are in use


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNED) * ALIGNED


def _launch_scatter(
    x: Tensor, right: Right, out: Tensor, room: Room, state: State, tiles: Tiles, own: int, ranks: int
) -> Any:
    own_tiles = tiles.in_all(x.shape[0] // ranks, right.width)
    division = _division(x.device, ranks, ranks * own_tiles)
    programs = division.programs((ranks - 1) * own_tiles) + division.programs(own_tiles)
    clock = job.clock.words("matmul_scatter", x.device, min(programs, division.abreast))
    return _kernels().matmul_scatter[(programs,)](
        x, right.tensor, out, room.parts, room.flags, state.scattered, state.scattered if clock is None else clock,
        x.shape[0] // ranks, right.width, x.shape[1], own, room.elements, room.tiles,
        tiles.group, division.abreast, division.turns,
        **_fixed(tiles, right, x, ranks), TIMED=clock is not None,
    )  # fmt: skip


def _launch_gather(
    x: Tensor, full: Tensor, right: Right, out: Tensor, state: State, tiles: Tiles, own: int, ranks: int, last: bool
) -> Any:
    in_all = tiles.in_all(ranks * x.shape[0], right.width)
    division = _division(x.device, ranks, in_all)
    programs = division.programs(in_all)
    # A kernel that records times takes more registers: use it only where a limit leaves enough for the copies of rows.
    may_note = tiles.warps == NOTING_WARPS
    clock = job.clock.words("gather_matmul", x.device, min(programs, division.abreast)) if may_note else None
    noting = {} if clock is None else {"TIMED": True, "maxnreg": NOTING_REGISTERS}
    return _kernels().gather_matmul[(programs,)](
        x, full, right.tensor, out, state.arrived, state.gathered, state.gathered if clock is None else clock,
        x.shape[0], right.width, x.shape[1], own, int(last),
        tiles.group, division.abreast, division.turns,
        **_fixed(tiles, right, x, ranks), **noting,
    )  # fmt: skip


def _fixed(tiles: Tiles, right: Right, x: Tensor, ranks: int) -> dict[str, Any]:
    return {
        "RANKS": ranks,
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "PIECES": tiles.pieces,
        "ROWS": right.by_rows,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_stages": tiles.stages,
        "num_warps": tiles.warps,
    }


class Division(NamedTuple):
    """How the programs of a kernel divide its tiles: see `_share` in fused_kernels.py."""

    abreast: int
    turns: int

    def programs(self, tiles: int) -> int:
        """Return the number of programs for so many tiles."""
        return -(-tiles // (self.abreast * self.turns)) * self.abreast


def _division(device: torch.device, ranks: int, tiles: int) -> Division:
    """Return the fewest programs abreast that need no more turns than one program per multiprocessor would.

    Ranks that share a GPU under MPS have overlapping parts of it, and with other axes NCCL's kernels take
    multiprocessors. Programs then end after a few turns, so that others find a place; a program that starts late then
    delays few tiles.

    With other axes, some multiprocessors are left free: an NCCL kernel must be able to run beside this one, since
    another rank may wait for that kernel before it reaches the product in which this rank waits.
    """
    others = collectives.axis_size("world") > ranks
    most = _multiprocessors(device) - (FOR_OTHERS if others else 0)
    in_all = -(-tiles // most)
    abreast = -(-tiles // in_all)
    turns = min(in_all, TURNS) if others or share_a_gpu(ranks) else in_all
    return Division(abreast, turns)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- flags and counters of an axis -----------------------------------------------------------------------------------


class State:
    """`arrived` has a flag for each rank's rows; `gathered` and `scattered` are the state words of the two kernels."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.arrived = torch.zeros(ranks, dtype=torch.int32, device=device)
        self.gathered, self.scattered = (
            torch.zeros(_kernels().WORDS, dtype=torch.int32, device=device) for _ in range(2)
        )

    def set_arrived(self, source: int, stream: torch.cuda.Stream) -> None:
        """Set the flag of `source`, in the stream that has copied its rows."""
        write_word(stream, self.arrived.data_ptr() + source * FLAG_BYTES, 1)


def _state(over: Space) -> State:
    if over.state is None:
        over.state = State(over.device, collectives.axis_size(over.axis))
    state: State = over.state
    return state


# ---- tiles -----------------------------------------------------------------------------------------------------------

_chosen: dict[Any, Tiles] = {}


def _tuned(kind: str, x: Tensor, right: Right, t: int, ranks: int, axis: str) -> Tiles:
    """Return the fastest tiles for a product with its communication; every rank gets the same."""
    key = (kind, t, ranks, x.shape[1], right.width, right.by_rows, x.dtype, x.device)
    if key not in _chosen:
        _chosen[key] = _tune(kind, x, right, t, ranks, axis)
    return _chosen[key]


def _tune(kind: str, x: Tensor, right: Right, t: int, ranks: int, axis: str) -> Tiles:
    tried = list(_usable(kind, x, right, t, ranks, axis))
    if len(tried) == 1:
        return tried[0]

    def run(tiles: Tiles) -> None:
        if kind == "gather":
            _gather(x, [right], axis, [tiles])
        else:
            _scatter(x, right, axis, tiles)

    def slowest(rounds: int) -> list[float]:
        """Return the slowest rank's seconds."""
        times = torch.tensor(_seconds(run, tried, rounds), dtype=torch.float64, device=x.device)
        agreed: list[float] = collectives.max_in_place(times, axis).tolist()
        return agreed

    with job.traffic.uncounted():
        for tiles in tried:  # the first run allocates the shared memory
            run(tiles)
        a_round = IN_A_ROW * sum(slowest(2))
        times = slowest(min(max(int(MOMENT / a_round), LEAST_ROUNDS), MOST_ROUNDS))
    return tried[times.index(min(times))]


def _usable(kind: str, x: Tensor, right: Right, t: int, ranks: int, axis: str) -> Iterator[Tiles]:
    """Yield the tiles that suit a product and fit the GPUs of all ranks; small ones only if no large one fits."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{str(x.dtype).removeprefix('torch.')} is not a type that these kernels support")
    suited = [tiles for tiles in (WIDE if x.dtype == torch.float32 else NARROW) if t % tiles.rows == 0]
    item = x.element_size()
    if not suited:
        raise ValueError(f"{t} rows of a rank are not a multiple of a tile's rows")
    if x.shape[1] * item % 16 or right.width * item % 16:
        raise ValueError(f"rows of {x.shape[1]} and {right.width} elements are not aligned to 16 bytes")
    if t * right.width >= 2**31:
        raise ValueError(f"{t} x {right.width} elements of a rank are too many for 32-bit offsets")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a product that has not run before cannot run in a CUDA graph")
    source = torch.Generator(x.device).manual_seed(0)  # the run's own generator must not depend on what is tried
    rows = torch.randn(ranks * t, x.shape[1], device=x.device, dtype=x.dtype, generator=source)
    alone = (_gathering_alone if kind == "gather" else _scattering_alone)(rows, right, ranks)
    for _, group in itertools.groupby(suited, lambda tiles: tiles.rows):
        found = False
        for tiles in group:
            refused = torch.tensor([not _fits(alone, tiles, MOST_REGISTERS[kind])], dtype=torch.int32, device=x.device)
            if not collectives.max_in_place(refused, axis).item():
                found = True
                yield tiles
        if found:
            return
    raise RuntimeError("no tile of the kernel fits this GPU")


Launch = Callable[[Tiles], Any]  # a product with these tiles and without its communication


def _gathering_alone(rows: Tensor, right: Right, ranks: int) -> Launch:
    """Return a launch of a product whose rows have all arrived."""
    t, out, state = rows.shape[0] // ranks, rows.new_empty(rows.shape[0], right.width), State(rows.device, ranks)
    state.arrived.fill_(1)
    return lambda tiles: _launch_gather(rows[:t], rows, right, out, state, tiles, 0, ranks, last=False)


def _scattering_alone(rows: Tensor, right: Right, ranks: int, out: Tensor | None = None) -> Launch:
    """Return a launch of rank 0's product, with all shared memory its own: it waits for the tiles that it sends."""
    t, width = rows.shape[0] // ranks, right.width
    out = rows.new_empty(t, width) if out is None else out
    elements, flags_each = _aligned(t * width), -(-t // MIN_SIDE) * -(-width // MIN_SIDE)
    parts = rows.new_empty(2 * ranks * elements)
    flags = torch.zeros(2 * ranks * flags_each, dtype=torch.int32, device=rows.device)
    places = [
        torch.tensor([memory.data_ptr() + rank * step * memory.element_size() for rank in range(ranks)])
        for memory, step in ((parts, elements), (flags, flags_each))
    ]
    room = Room(places[0].to(rows.device), places[1].to(rows.device), elements, flags_each, (parts, flags))
    state = State(rows.device, ranks)
    return lambda tiles: _launch_scatter(rows, right, out, room, state, tiles, 0, ranks)


def _seconds(run: Callable[[Tiles], None], tried: Sequence[Tiles], rounds: int) -> list[float]:
    """Return median seconds of rounds in which tiles take turns so that none always follows the same other tiles."""
    samples: dict[Tiles, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {tiles: [] for tiles in tried}
    for turn in range(rounds):
        first = turn % len(tried)
        for tiles in (*tried[first:], *tried[:first]):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(IN_A_ROW):
                run(tiles)
            end.record()
            samples[tiles].append((begin, end))
    torch.cuda.synchronize()
    return [
        statistics.median(begin.elapsed_time(end) / 1e3 / IN_A_ROW for begin, end in samples[tiles]) for tiles in tried
    ]


def _fits(alone: Launch, tiles: Tiles, most_registers: int) -> bool:
    """Whether tiles fit this GPU and concurrent programs leave registers for the copies that they wait for."""
    from triton.runtime.errors import OutOfResources

    try:
        compiled = alone(tiles)
    except OutOfResources:
        return False
    in_all = torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor
    return registers_taken(compiled.n_regs, tiles.warps, compiled.metadata.shared, in_all) <= most_registers


def registers_taken(of_a_thread: int, warps: int, shared: int, shared_in_all: int) -> int:
    """Return the registers that all programs of a multiprocessor take; a thread's are allocated in units of eight."""
    of_a_program = -(-of_a_thread // 8) * 8 * 32 * warps
    return of_a_program * min(REGISTERS // of_a_program, shared_in_all // (shared + SHARED_BESIDES))


# ---- whether it works here -------------------------------------------------------------------------------------------


def unusable(device: torch.device, axis: str = "tp") -> str | None:
    """Return why these kernels cannot be used here, or None if trial runs of both gave correct results on all ranks."""
    return agreed_reason(lambda: _try_out(device, axis))


def _try_out(device: torch.device, axis: str) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise RuntimeError("it needs a GPU of compute capability 9.0 or more")
    ranks, own = collectives.axis_size(axis), collectives.axis(axis).rank
    if share_a_gpu(ranks) and float(os.environ.get(PART, 100)) * ranks > 100:
        raise RuntimeError(f"ranks share a GPU, and {PART} does not give each a part of its own")
    source = torch.Generator(device).manual_seed(0)
    t, k, n = 2048, 200, 5128  # several tiles for each program, and partial tiles at the edges
    everything = torch.randn(ranks * t, k, device=device, dtype=torch.bfloat16, generator=source)
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16, generator=source) for _ in range(ranks)]
    wanted = everything.float() @ weights[own].float().t()
    summed = everything[own * t : (own + 1) * t].float() @ torch.stack(weights).float().sum(0).t()
    mine = everything[own * t : (own + 1) * t]
    for number, by_rows in enumerate((True, False, True, False)):
        if number == 2:  # stale memory of earlier runs must not pass for new results
            for tensor in (everything, wanted, summed):
                tensor.neg_()
        right = Right(weights[own] if by_rows else weights[own].t().contiguous(), by_rows)
        # Use the first usable tiles; each real product tries its own tiles when it is measured.
        for_gather = next(_usable("gather", mine, right, t, ranks, axis))
        (product,), full = _gather(mine, [right], axis, [for_gather])
        _check(product, wanted, "gathering")
        if not torch.equal(full, everything):
            raise RuntimeError("the gathered rows are not the rows of all ranks")
        for_scatter = next(_usable("scatter", everything, right, t, ranks, axis))
        _check(_scatter(everything, right, axis, for_scatter), summed, "scattering")


def _check(found: Tensor, wanted: Tensor, what: str) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm())
    if not error < 0.02:
        raise RuntimeError(f"{what}: the product is off by {error:.1%}")
