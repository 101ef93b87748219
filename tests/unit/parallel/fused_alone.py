"""The kernels of parallel/tensor/fused_kernels.py on a GPU, in one process that is all ranks: for compute-sanitizer.

    python -m tests.unit.parallel.fused_alone [PROGRAMS]

Gathering, all rows have arrived. Scattering, a rank's memory of another is its own: what it sends is what it waits for.
With PROGRAMS, so many share the tiles and each multiplies two; else as many as in a run. Ends with 0 where every result
is right.
"""

import sys

import torch

from shardline.parallel.tensor import fused

SIZES = ((128, 128, 256), (256, 200, 520))  # rows of a rank, K, N


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def check(tiles: fused.Tiles, dtype: torch.dtype, ranks: int, size: tuple[int, int, int], by_rows: bool) -> None:
    t, k, n = size
    source = torch.Generator("cuda").manual_seed(0)
    rows, weight = (
        torch.randn(shape, generator=source, device="cuda", dtype=dtype) for shape in ((ranks * t, k), (n, k))
    )
    right = fused.Right(weight if by_rows else weight.t().contiguous(), by_rows)
    wanted = rows.float() @ weight.float().t()
    allowed = 1e-5 if dtype == torch.float32 else 6e-3
    out, state = rows.new_empty(ranks * t, n), fused.State(rows.device, ranks)
    state.arrived.fill_(1)
    for last in (False, True):
        fused._launch_gather(rows[:t], rows, right, out, state, tiles, 0, ranks, last=last)
    assert error(out, wanted) < allowed, ("gather", tiles, dtype, ranks, size)
    assert not state.arrived.any()
    scattered = rows.new_empty(t, n)
    launch = fused._scattering_alone(rows, right, ranks, scattered)
    for _ in range(3):  # both halves, and the first again
        launch(tiles)
    assert error(scattered, wanted.view(ranks, t, n).sum(0)) < allowed, ("scatter", tiles, dtype, ranks, size)


def main(abreast: int = 0) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if abreast:
        fused._division = lambda device, ranks, tiles: fused.Division(abreast, 2)
    done = 0
    for dtype, shapes in ((torch.float32, fused.WIDE), (torch.bfloat16, (*fused.NARROW[:2], fused.NARROW[4]))):
        for tiles in shapes:
            for ranks, size, by_rows in ((2, SIZES[0], True), (2, SIZES[1], False), (4, SIZES[0], False)):
                check(tiles, dtype, ranks, size, by_rows)
                done += 1
    torch.cuda.synchronize()
    print(f"{done} right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
