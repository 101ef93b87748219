"""How long pipeline ranks are idle, measured with the training executor, compared with the theory of their schedule.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --ranks 2 --microbatches 8 --schedules 1F1B ZBVZeroBubble

Two ranks compute matrix products, the same number in each stage, twice as many in backward as in forward. Four ranks
sleep for as long instead, because there may be fewer cores. The model has the same depth for any number of stages. One
JSON line each, with medians over all steps after the first two.

    theory, measured   the idle share of the ranks' time, by the schedule and by the clock
    off_by             |measured - theory| / theory
    step_seconds       of forward and backward of all micro-batches
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from shardline.comm.mesh import Mesh, stop_process_group
from shardline.config.layout import Layout
from shardline.config.names import SCHEDULES
from shardline.models.decoder import Stage
from shardline.models.products.linear import linear
from shardline.parallel.pipeline.executor import MicroBatch, Pipeline, busy_and_span, idle_share
from shardline.parallel.pipeline.schedules import build_schedule, theoretical_bubble
from shardline.parallel.pipeline.stages import PipelinePlan

WARM_UP = 2
DEPTH = 128  # products, or units of sleep, in the whole model
ROWS, WIDTH = 96, 768  # little to send compared with the computation
PIECE = 0.00125  # seconds of sleep in forward; twice that in backward
CPU = torch.device("cpu")


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--microbatches", type=int, help="default: twice the number of ranks")
    parser.add_argument("--schedules", nargs="*", default=["1F1B", "Interleaved1F1B"], choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    for ranks in options.ranks:
        for name in options.schedules:
            sleeps, microbatches = ranks > 2, options.microbatches or 2 * ranks
            if sleeps and build_schedule(name, ranks, microbatches).splits:
                print(f"note: {name} on {ranks} ranks is left out: sleep has no weight gradient", file=sys.stderr)
                continue
            with tempfile.TemporaryDirectory() as folder:
                arguments = (ranks, microbatches, name, options.steps, sleeps, f"{folder}/store")
                multiprocessing.spawn(work, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
    return 0


def work(rank: int, ranks: int, microbatches: int, name: str, steps: int, sleeps: bool, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    Mesh(Layout(pp=ranks), "cpu")
    schedule = build_schedule(name, ranks, microbatches)
    pieces = DEPTH // schedule.stages
    stages = tuple(
        Stage(tuple(range(i * pieces, (i + 1) * pieces)), i == 0, i == schedule.stages - 1)
        for i in range(schedule.stages)
    )
    rows, width = (8, 8) if sleeps else (ROWS, WIDTH)
    pipeline = Pipeline(PipelinePlan(schedule, stages, 1), CPU, lambda tokens: ((rows, width), torch.float32))
    weights = [torch.randn(width, width).div_(width**0.5).requires_grad_() for _ in range(DEPTH)]

    def forward(batch: MicroBatch, x: torch.Tensor | None, stage: Stage) -> torch.Tensor:
        x = batch.tokens.detach().requires_grad_() if x is None else x
        if sleeps:
            x = Sleep.apply(x, PIECE * len(stage.layers))
        else:
            for layer in stage.layers:
                x = linear(x, weights[layer], None)
        return x.sum() if stage.last else x

    batches = [MicroBatch(torch.randn(rows, width), torch.zeros(0), None) for _ in range(microbatches)]
    pipeline.clock.enabled = True
    measured = []
    for step in range(WARM_UP + steps):
        dist.barrier()
        pipeline.run(batches, forward, lambda stage: None)
        busy, span = busy_and_span(pipeline.clock.take())
        if step >= WARM_UP:
            measured.append((span, idle_share(busy, span, CPU)))
    if rank == 0:
        seconds, idle = (statistics.median(column) for column in zip(*measured, strict=True))
        theory = theoretical_bubble(schedule)
        row = {
            "schedule": name,
            "ranks": ranks,
            "stages": schedule.stages,
            "microbatches": microbatches,
            "stages_do": "sleep" if sleeps else "matrix products",
            "theory": round(theory, 4),
            "measured": round(idle, 4),
            "off_by": round(abs(idle - theory) / theory, 3),
            "step_seconds": round(seconds, 4),
        }
        print(json.dumps(row), flush=True)
    stop_process_group()


if __name__ == "__main__":
    sys.exit(main())
