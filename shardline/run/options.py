"""The options of commands that start ranks, besides the config: how to start, not what to train."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardline.errors import UserError


@dataclass(frozen=True)
class TrainOptions:
    resume: bool = False  # insist on a checkpoint to go on from
    overwrite: bool = False  # replace a run that is already in the folder
    measure_again: bool = False  # do not trust choices of earlier runs
    dry_run: bool = False  # build and report, do not train
    world_size: int | None = None  # ranks to build for in a dry run
    nproc: int = 1  # processes on this machine
    nnodes: str = "1"  # "N" or "MIN:MAX"
    node_rank: int = 0
    rdzv_id: str = "none"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_secret_file: str = ""
    max_restarts: int = 0
    surroundings: str = ""  # the scheduler that said how machines meet, where the command line does not
    debug: bool = False  # show tracebacks of user errors
    words: tuple[str, ...] = field(default=(), compare=False)  # the command line, with which every rank is started


def node_range(text: str) -> tuple[int, int]:
    """The least and the most machines of `2`, or `1:4`."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise UserError(f"--nnodes: expected N or MIN:MAX, whole numbers, 1 or more, got {text!r}")
    return int(low), int(high or low)
