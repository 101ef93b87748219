"""Products over shared memory of GPUs against collective-then-multiply: values, delays, CUDA graphs, many repetitions.

Ranks may share one GPU:

    benchmarks/one_gpu.sh 2 python -m pytest tests/parity/test_fused_gpu.py -m "not slow"
    benchmarks/one_gpu.sh 4 python -m pytest tests/parity/test_fused_gpu.py -m slow
"""

import random
from unittest.mock import patch

import pytest
import torch

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.symmetric_memory import Direct
from shardline.parallel.tensor import fused
from shardline.parallel.tensor.async_tp import usable_backends
from shardline.parallel.tensor.autotune import COLUMN, ROW, Product, Shape, Trial, _tensors
from shardline.parallel.tensor.backend_table import Choice
from tests.parity.pool import Pool
from tests.parity.test_overlap import join_tp

pytestmark = pytest.mark.gpu
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
NAMES = ("symmetric", "fused")
SIZES = [(256, 512, 768), (128, 192, 328), (640, 1024, 272), (2048, 200, 4104)]  # rows of a rank, K, N
LARGE, DEEP, _, _, SMALL = fused.NARROW
TILES = [LARGE, DEEP, SMALL, LARGE]  # for each of them, as compiling takes long
OPERATIONS = [(operation, direction) for operation in (COLUMN, ROW) for direction in ("forward", "backward")]


def joined() -> tuple[int, int, torch.device]:
    rank, ranks = join_tp()
    device = torch.device("cuda", torch.cuda.current_device())
    lines: list[str] = []
    allowed = usable_backends("auto", device, lines)
    assert set(NAMES) <= set(allowed), lines
    return rank, ranks, device


def trial(
    operation: str, direction: str, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Trial:
    rows, depth, width = size
    several = operation == COLUMN
    widths = (width, width + 16) if several else (width,)
    product = Product(operation, direction, rows * collectives.axis_size("tp"), depth, sum(widths), dtype, "tp")
    return Trial(Shape(product, widths), device)


def values(dtype: torch.dtype) -> int:
    """How many results were compared."""
    _, _, device = joined()
    allowed, done = 1e-5 if dtype == torch.float32 else 6e-3, 0
    for size, tiles in zip(SIZES, TILES, strict=True):
        with patch.object(fused, "NARROW", (tiles,)), patch.dict(fused._chosen, clear=True):
            for operation, direction in OPERATIONS:
                one = trial(operation, direction, size, dtype, device)
                wanted = _tensors(one.run(Choice("serial")))
                for choice in (Choice("symmetric"), Choice("symmetric", 3), Choice("fused")):
                    for sign in (1, 1, -1, -1):  # in memory of two halves nothing passes that is from a run before
                        if sign < 0:
                            one.turn()
                        seen = _tensors(one.run(choice))
                        if sign < 0:
                            one.turn()
                        for a, b in zip(wanted, seen, strict=True):
                            error = float((a.float() * sign - b.float()).norm() / a.float().norm())
                            assert error < allowed, (choice, operation, direction, size, sign, error)
                    done += 1
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", RANKS)
def test_values_are_those_of_serial(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    assert pool.run(ranks, values, dtype) == [len(OPERATIONS) * len(SIZES) * 3] * ranks


def crowded() -> None:
    """Many more programs than find a place at a time, with a turn or two each."""
    _, _, device = joined()
    usual = fused._division
    try:
        for number, size in enumerate(((2048, 200, 4104), (1024, 14336, 512), (128, 192, 328))):
            fused._division = lambda device, ranks, tiles, turns=1 + number % 2: fused.Division(20, turns)
            for which in OPERATIONS:
                one = trial(*which, size, torch.bfloat16, device)
                wanted = _tensors(one.run(Choice("serial")))
                for _ in range(20):
                    seen = _tensors(one.run(Choice("fused")))
                for a, b in zip(wanted, seen, strict=True):
                    assert float((a.float() - b.float()).norm() / a.float().norm()) < 6e-3, (which, size)
    finally:
        fused._division = usual


@pytest.mark.parametrize("ranks", RANKS)
def test_programs_may_wait_for_a_place(pool: Pool, ranks: int) -> None:
    pool.run(ranks, crowded)


def refusals() -> list[str]:
    _, _, device = joined()
    said = []
    for size, dtype in (
        ((100, 64, 64), torch.bfloat16),
        ((128, 60, 64), torch.bfloat16),
        ((128, 64, 64), torch.float64),
    ):
        with pytest.raises(ValueError) as error:
            trial(ROW, "forward", size, dtype, device).run(Choice("fused"))
        said.append(str(error.value))
    return said


def test_what_the_kernel_cannot_do_is_refused(pool: Pool) -> None:
    for said in pool.run(2, refusals):
        assert said == [
            "100 rows of a rank are not a multiple of a tile's rows",
            "rows of 60 and 64 elements are not aligned to 16 bytes",
            "float64 is not a type that these kernels support",
        ]


def repeated(name: str, times: int, seed: int) -> float:
    """Products in a row, with delays at random places on the device; how many results were not those of the first.

    Signs change at random, so that what lies in memory from a product before is wrong.
    """
    rank, _, device = joined()
    late, turns = random.Random(100 * seed + rank), random.Random(seed)
    trials = [trial(*which, SIZES[0], torch.bfloat16, device) for which in OPERATIONS]
    firsts = [[tensor.clone() for tensor in _tensors(one.run(Choice(name)))] for one in trials]
    wrong, signs = torch.zeros((), device=device), [1] * len(trials)
    for number in range(times):
        at = number % len(trials)
        if late.random() < 0.02:
            torch.cuda._sleep(int(late.random() * 1_000_000))
        if turns.random() < 0.5:
            trials[at].turn()
            signs[at] = -signs[at]
        for a, b in zip(firsts[at], _tensors(trials[at].run(Choice(name))), strict=True):
            wrong += (a * signs[at] != b).any()
    return float(wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_ten_thousand_with_delays_give_the_same_bits(pool: Pool, ranks: int, name: str) -> None:
    assert pool.run(ranks, repeated, name, 10_000, ranks) == [0.0] * ranks


def replayed(name: str) -> float:
    """A CUDA graph with an odd number of each product, replayed with other numbers in between."""
    _, _, device = joined()
    trials = [trial(*which, SIZES[0], torch.bfloat16, device) for which in OPERATIONS] * 3
    for one in trials:
        one.run(Choice(name))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [_tensors(one.run(Choice(name))) for one in trials]
    wrong = torch.zeros((), device=device)
    for number in range(50):
        for one in trials[: len(OPERATIONS)]:
            for tensor in one.gradients or [one.x]:
                tensor.normal_(generator=torch.Generator(device).manual_seed(number))
        graph.replay()
        for one, seen in zip(trials, results, strict=True):
            for a, b in zip(_tensors(one.run(Choice(name))), seen, strict=True):
                wrong += (a != b).any()
    return float(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_can_be_replayed(pool: Pool, name: str) -> None:
    assert pool.run(2, replayed, name) == [0.0] * 2


def waits(late: float) -> list[tuple[float, float]]:
    """Seconds that each kernel ran and waited on this rank, where rank 1 begins each product `late` seconds later."""
    rank, _, device = joined()
    found = []
    with patch.object(fused, "NARROW", fused.NARROW[:1]), patch.dict(fused._chosen, clear=True):
        for operation, direction in ((COLUMN, "forward"), (ROW, "forward")):
            one = trial(operation, direction, (2048, 2048, 2048), torch.bfloat16, device)
            for _ in range(2):  # the first run compiles
                job.clock.traced = []
                one.run(Choice("fused"))
                torch.cuda.synchronize()
                torch.distributed.barrier()
                job.clock.traced = []
                if rank == 1:
                    torch.cuda._sleep(int(late * 1.9e9))
                one.run(Choice("fused"))
                torch.cuda.synchronize()
            times = [kernel.times() for kernel in job.clock.traced]
            found.append((sum(one.lasted for one in times), sum(one.waited for one in times)))
    job.clock.traced = None
    return found


def test_kernels_note_how_long_they_waited_for_a_late_rank(pool: Pool) -> None:
    late = 0.05
    prompt, other = pool.run(2, waits, late)
    for lasted, waited in prompt:
        assert waited == pytest.approx(late, rel=0.3)
        assert lasted >= 0.9 * waited
    assert all(waited < 0.1 * late and lasted < 0.5 * late for lasted, waited in other)


def sums_and_peaks() -> int:
    """Sums by copies between memories that ranks share, in turn with a scatter in the same memory, which grows."""
    rank, ranks, device = joined()
    job.direct["tp"] = Direct()
    done = 0
    try:
        for number in range(20):
            source = torch.Generator().manual_seed(number)
            drawn = torch.randint(-99, 99, (ranks, ranks * (1 + 997 * number), 7), generator=source)
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                large = 2**40 if dtype == torch.int64 else 1
                mine = drawn[rank].mul(large).to(dtype)
                summed = collectives.sum_in_place(mine.to(device), "tp").cpu()
                part = collectives.scatter_rows(mine.to(device), "tp").cpu()
                peak = collectives.max_in_place(mine.to(device), "tp").cpu()
                wanted = drawn.sum(0).mul(large).to(dtype)
                assert summed.equal(wanted), (dtype, number)
                assert part.equal(wanted.chunk(ranks)[rank]), (dtype, number)
                assert peak.equal(drawn.amax(0).mul(large).to(dtype)), (dtype, number)
                done += 3
    finally:
        del job.direct["tp"]
    return done


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_and_peaks_over_shared_memory_are_exact(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, sums_and_peaks) == [180] * ranks
