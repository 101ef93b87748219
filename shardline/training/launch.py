"""`shardline train`: refuse what cannot run, describe it (`--dry-run`), or run it and make its end an exit code."""

from __future__ import annotations

import os
import signal

from shardline.config.options import TrainOptions
from shardline.config.schema import Config
from shardline.errors import UserError


def train(config: Config, options: TrainOptions) -> int:
    """Exit code: 0 finished, 128 + signal number when a signal ended the run at a step boundary."""
    if options.dry_run:
        from shardline.training.dry_run import describe

        print(describe(config, options.world_size or 1))
        return 0
    ranks = max(options.nproc, int(os.environ.get("WORLD_SIZE", "1")))
    if ranks > 1 or options.nnodes != "1":
        raise UserError("training on more than one rank is not built yet: start one process on one machine")
    if options.max_restarts:
        raise UserError("--max-restarts is not built yet: leave it out")
    from shardline.training.trainer import Trainer

    result = Trainer(config, options).train()
    if result.stopped_by is not None:
        return 128 + int(signal.Signals[result.stopped_by])
    return 0
