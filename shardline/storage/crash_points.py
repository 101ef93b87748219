"""The points in a save at which tests simulate a crash; without a listener nothing happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

POINTS = (
    "staging",  # before the state is copied
    "staged",
    "shard-opened",
    "tensor-written",  # once per piece
    "shard-written",
    "shard-synced",
    "shard-reported",  # rank 0 may know of the shard
    "reports-complete",  # from here on, only rank 0 acts
    "manifest-written",
    "before-rename",
    "renamed",
    "before-prune",
    "removing",  # once per folder, which has been renamed by now
    "pruned",  # once per folder
    "before-verdict",
)

listener: Callable[[str, Path | None], None] | None = None


def reach(point: str, path: Path | None = None) -> None:
    if listener is not None:
        listener(point, path)
