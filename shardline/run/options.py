"""What commands that start ranks are told besides the config: how to start, what to measure; not what to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardline.errors import UserError

if TYPE_CHECKING:
    from shardline.config.schema import Config


@dataclass(frozen=True)
class TrainOptions:
    resume: bool = False  # insist on a checkpoint to go on from
    overwrite: bool = False  # replace a run that is already in the folder
    dry_run: bool = False  # build and report, do not train
    world_size: int | None = None  # ranks to build for in a dry run
    nproc: int = 1  # processes on this machine
    nnodes: str = "1"  # "N" or "MIN:MAX"
    node_rank: int = 0
    rdzv_id: str = "none"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    max_restarts: int = 0
    debug: bool = False  # show tracebacks of user errors
    words: tuple[str, ...] = field(default=(), compare=False)  # the command line, with which every rank is started


@dataclass(frozen=True)
class CommOptions:
    """`shardline bench comm`; the config tells the layout."""

    config: Config
    start: TrainOptions  # nproc 0: as many as the layout needs
    sizes: str = "1M:64M"
    ops: str = "all_reduce,all_gather,reduce_scatter,all_to_all,p2p"
    dim: str = "world"
    dtype: str = "float32"
    iterations: int | None = None  # unset: as many as fit into a moment
    json: bool = False


@dataclass(frozen=True)
class OverlapOptions:
    """`shardline bench overlap`; the config tells the model and the layout."""

    config: Config
    start: TrainOptions  # nproc 0: one per tensor-parallel rank
    seq: int = 8192
    batch: int = 1
    backend: str | None = None  # unset: every one that can run
    dtype: str | None = None  # unset: bfloat16 on a GPU, float32 on a CPU
    iterations: int | None = None  # unset: as many as fit into a moment
    json: bool = False


def node_range(text: str) -> tuple[int, int]:
    """`2`, or `1:4`: the least and the most machines."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise UserError(f"--nnodes: expected N or MIN:MAX, whole numbers from 1 on, got {text!r}")
    return int(low), int(high or low)
