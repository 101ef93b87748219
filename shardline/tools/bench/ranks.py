"""Starts the ranks of a benchmark, or runs it as one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardline.config.layout import resolve_layout
from shardline.config.schema import Config
from shardline.launch.launch import nodes_of, start, started_ranks
from shardline.run.options import TrainOptions
from shardline.words import to_stderr

if TYPE_CHECKING:
    import torch

    from shardline.comm.mesh import Mesh


def rank_count(options: TrainOptions, wanted: int) -> int:
    """Return the ranks of all machines: those already running, those requested, or as many as the benchmark wants."""
    return started_ranks() or nodes_of(options.nnodes) * _processes(options, wanted)


def _processes(options: TrainOptions, wanted: int) -> int:
    return options.nproc or max(1, wanted // nodes_of(options.nnodes))


def on_ranks(
    command: str, config: Config, options: TrainOptions, wanted: int, work: Callable[[Mesh, torch.device], int]
) -> int:
    """Run `work` on every rank of the layout, by default on `wanted` ranks; return the exit code."""
    ranks = rank_count(options, wanted)
    layout = resolve_layout(config.parallelism, ranks)
    if ranks > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; ranks inherit it
    if ranks > 1 and not started_ranks():
        return start(command, config, replace(options, nproc=_processes(options, wanted)))
    from shardline.comm.mesh import Mesh, start_process_group, stop_process_group
    from shardline.run.device import choose_device
    from shardline.run.numa import prepare_rank

    lines = prepare_rank(config)  # before CUDA or NCCL are first used
    device = choose_device()
    owns_group = start_process_group(device, config.comm.init_timeout_seconds)
    try:
        mesh = Mesh(layout, device.type)
        if mesh.rank == 0:
            for line in lines:
                to_stderr(f"note: {line}")
        return work(mesh, device)
    finally:
        if owns_group:
            stop_process_group()
