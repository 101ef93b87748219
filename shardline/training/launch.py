"""`shardline train`: refuse what cannot run, describe it (`--dry-run`), or run it and make its end an exit code."""

from __future__ import annotations

import signal
from pathlib import Path

from shardline.config.options import TrainOptions
from shardline.config.schema import Config
from shardline.errors import UserError


def train(config: Config, options: TrainOptions) -> int:
    """Exit code: 0 finished, 128 + signal number when a signal ended the run at a step boundary."""
    if options.dry_run:
        from shardline.training.dry_run import describe

        print(describe(config, options.world_size or 1))
        return 0
    if options.nproc > 1 or options.nnodes != "1":
        raise UserError("training on more than one rank is not built yet: leave out --nproc and --nnodes")
    from shardline.training.trainer import Trainer

    trainer = Trainer(config, options)
    if config.job.save_config_file:
        _save_config(config, Path(config.job.save_config_file))
    result = trainer.train()
    if result.stopped_by is not None:
        return 128 + int(signal.Signals[result.stopped_by])
    return 0


def _save_config(config: Config, path: Path) -> None:
    from shardline.config.write import to_toml

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config))
