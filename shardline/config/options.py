"""What `shardline train` is told besides the config: how to start, not what to train."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    words: tuple[str, ...] = field(
        default=(), compare=False
    )  # the command line after `train`: every rank is started with it
