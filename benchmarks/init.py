"""Time and memory of drawing the initial weights, on one of several ranks that share the model's rows.

    python benchmarks/init.py                           # Llama 3 70B cut to 1 layer, rank 0 of 8
    python benchmarks/init.py --layers 4 --ranks 64
    python benchmarks/init.py --flavor 8B --threads 2   # number of drawing threads

Two ways, each in its own process; one JSON line per result:

    held    what Shardline does: the rank draws only the blocks of which it holds rows, directly into place
    whole   every tensor is drawn whole, fused and split; the rank keeps its rows

`peak_gib` is the growth of resident memory while the weights are drawn, including the rank's weights (`shard_gib`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch

from shardline.comm.fake import fake_group
from shardline.comm.mesh import Mesh
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models import init
from shardline.models.decoder import Decoder
from shardline.models.dtensor import local, local_slices
from shardline.models.flavors import resolve
from shardline.models.fused_weights import fuse, logical_names, logical_shapes
from shardline.precision.mixed import choose_precision
from shardline.training.setup import build_model

GIB = 2**30


def draw_whole(model: Decoder, seed: int) -> None:
    """Draw each parameter whole, one after the other, and keep the rank's shard."""
    shapes = logical_shapes(model.arch)

    def drawn(name: str, pool: ThreadPoolExecutor) -> torch.Tensor:
        shape, std = shapes[name], init.initial_std(model.arch, name)
        if std is None:
            return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0)
        whole = torch.empty(shape)

        def fill(block: int) -> None:
            first = block * init.BLOCK_ROWS
            whole[first : first + init.BLOCK_ROWS] = init.draw_block(seed, name, shape, block, std)

        list(pool.map(fill, range(-(-shape[0] // init.BLOCK_ROWS))))
        return whole

    with ThreadPoolExecutor(init.MOST_THREADS) as pool:
        for name, parameter in model.named_parameters():
            parts = {part: drawn(part, pool) for part in logical_names(model.arch, name)}
            local(parameter).copy_(fuse(model.arch, name, parts)[local_slices(parameter)])


WAYS: dict[str, Callable[[Decoder, int], None]] = {"held": init.init_weights, "whole": draw_whole}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    changes = {"model.overrides": {"n_layers": options.layers}, "training.mixed_precision_param": "float32"}
    config = load_config(overrides={"model.name": "llama3", "model.flavor": options.flavor, **changes})
    config = config.replace({"parallelism.data_parallel_shard_degree": options.ranks})
    cpu = torch.device("cpu")
    with fake_group(0, options.ranks), patch.object(init, "MOST_THREADS", options.threads):
        mesh = Mesh(Layout(dp_shard=options.ranks), "cpu")
        model, _ = build_model(resolve(config.model), cpu, choose_precision(config, cpu, True), mesh, config)
        shard = sum(local(parameter.detach()).nbytes for parameter in model.parameters())
        before, started = resident(), time.perf_counter()
        WAYS[way](model, 0)
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": round(seconds, 2), "peak_gib": round(peak / GIB, 2), "shard_gib": round(shard / GIB, 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="70B")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=min(len(os.sched_getaffinity(0)), init.MOST_THREADS))
    parser.add_argument("--way", choices=WAYS, help="one way, in this process")
    options = parser.parse_args()
    if options.way is None:
        for way in WAYS:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], check=True)
        return
    size = {"flavor": options.flavor, "layers": options.layers, "ranks": options.ranks, "threads": options.threads}
    about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    line = {"benchmark": "init", "way": options.way, **measure(options.way, options), **size, **about}
    print(json.dumps({**line, "python": platform.python_version()}), flush=True)


if __name__ == "__main__":
    main()
