"""`shardline train`: refuse what cannot run, describe it (`--dry-run`), start ranks, or be one of them."""

from __future__ import annotations

import os
import signal
import sys

from shardline.config.layout import resolve_layout
from shardline.config.options import TrainOptions
from shardline.config.schema import Config
from shardline.errors import UserError

BACKENDS = ("static", "c10d")


def train(config: Config, options: TrainOptions) -> int:
    """Exit code: 0 finished, 128 + signal number when a signal ended the run at a step boundary."""
    nodes = _nodes(options.nnodes)
    if options.dry_run:
        from shardline.training.dry_run import describe

        ranks = nodes * options.nproc
        known = options.world_size or (ranks if ranks > 1 else None)
        print(describe(config, known, options.nproc if nodes > 1 else None))
        return 0
    if options.max_restarts:
        raise UserError("--max-restarts is not built yet: leave it out")
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # started by us, by torchrun or by another launcher
    world_size = int(os.environ["WORLD_SIZE"]) if is_rank else nodes * options.nproc
    resolve_layout(config.parallelism, world_size)
    if not is_rank and nodes == 1:
        _note_idle(options)
    return _start(config, options, nodes) if world_size > 1 and not is_rank else _run(config, options)


def _run(config: Config, options: TrainOptions) -> int:
    from shardline.training.trainer import Trainer

    result = Trainer(config, options).train()
    if result.stopped_by is not None:
        return 128 + int(signal.Signals[result.stopped_by])
    return 0


def _start(config: Config, options: TrainOptions, nodes: int) -> int:
    """Start this machine's ranks, each with the same command line."""
    if nodes > 1:
        _check_meeting(options, nodes)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; the ranks get it too
    from shardline.training.ranks import Launch, start_ranks

    return start_ranks(
        Launch(
            entry="shardline.cli:dispatch",
            words=("train", *options.words),
            nproc=options.nproc,
            nnodes=nodes,
            node_rank=options.node_rank,
            rdzv_id=options.rdzv_id,
            rdzv_backend=options.rdzv_backend,
            rdzv_endpoint=options.rdzv_endpoint,
            stop_timeout_seconds=config.comm.stop_timeout_seconds,
            debug=options.debug,
        )
    )


def _nodes(text: str) -> int:
    """`2`, or `2:2`; a range in which machines come and go is not built."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise UserError(f"--nnodes: expected N or MIN:MAX, whole numbers from 1 on, got {text!r}")
    if int(low) != int(high or low):
        raise UserError(f"--nnodes {text}: a changing number of machines is not built yet: give one number")
    return int(low)


def _check_meeting(options: TrainOptions, nodes: int) -> None:
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, an address of the first machine,"
            f" got {options.rdzv_endpoint!r}"
        )
    if options.rdzv_backend not in BACKENDS:
        raise UserError(f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, got {options.rdzv_backend!r}")
    if options.node_rank >= nodes:
        raise UserError(f"--node-rank {options.node_rank}: with --nnodes {nodes} it is below {nodes}")


def _note_idle(options: TrainOptions) -> None:
    names = ("node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(TrainOptions, name)]
    if given:
        print(f"note: no effect on one machine: {', '.join(given)}", file=sys.stderr)
