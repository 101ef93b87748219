"""Times products of experts: all at once, one dense product of the same size, and a loop over the experts.

    python benchmarks/grouped.py   # 64 experts, top 6, several numbers of tokens; 128 experts, top 8; tiny on CPU

Prints one JSON line for each size and each load: the milliseconds of the first product, of the gradient of
its rows and of that of its weights.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.models.experts.grouped import multiply, row_gradient, weight_gradient


class Size(NamedTuple):
    experts: int
    top_k: int
    dim: int
    width: int  # of gate and up together
    tokens: int


ON_GPU = torch.cuda.is_available()
SIZES = (
    [Size(64, 6, 2048, 2816, tokens) for tokens in (2048, 4096, 8192, 16384, 43691)] + [Size(128, 8, 2048, 1536, 16384)]
    if ON_GPU
    else [Size(8, 2, 64, 96, 512), Size(16, 2, 64, 48, 512)]
)


def milliseconds(run: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        run()
    if ON_GPU:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    if ON_GPU:
        torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - begun) / times, 4)


def counts(size: Size, even: bool) -> Tensor:
    """Return the number of tokens per expert: equal, or drawn so that some have many."""
    rows = size.tokens * size.top_k
    if even:
        return torch.full((size.experts,), rows // size.experts)
    shares = torch.rand(size.experts, generator=torch.Generator().manual_seed(0)) ** 2 + 0.1
    drawn = (shares / shares.sum() * rows).long()
    drawn[0] += rows - drawn.sum()
    return drawn


def measured(size: Size, even: bool) -> dict[str, float]:
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    of_experts = counts(size, even)
    ends, each = of_experts.cumsum(0).to(torch.int32).to(device), of_experts.tolist()
    rows = torch.randn(sum(each), size.dim, device=device, dtype=dtype)
    weight = torch.randn(size.experts, size.width, size.dim, device=device, dtype=dtype)
    gradient = torch.randn(sum(each), size.width, device=device, dtype=dtype)

    def loop() -> None:
        for part, matrix in zip(rows.split(each), weight, strict=True):
            torch.mm(part, matrix.t())

    return {
        "load": round(float(of_experts.max() / of_experts.double().mean()), 2),
        "grouped_ms": milliseconds(lambda: multiply(rows, weight.transpose(1, 2), ends)),
        "rows_gradient_ms": milliseconds(lambda: row_gradient(gradient, weight, ends)),
        "weight_gradient_ms": milliseconds(lambda: weight_gradient(gradient, rows, ends, dtype)),
        "dense_ms": milliseconds(lambda: torch.mm(rows, weight[0].t())),
        "loop_ms": milliseconds(loop),
    }


def main() -> None:
    device = torch.cuda.get_device_name() if ON_GPU else platform.processor()
    about = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    for size in SIZES:
        for even in (True, False):
            print(json.dumps({"benchmark": "grouped", **size._asdict(), **measured(size, even), **about}), flush=True)


if __name__ == "__main__":
    main()
