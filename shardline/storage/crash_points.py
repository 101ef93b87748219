"""The points of a save where a crash matters, for tests that crash there; without a listener nothing happens."""

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
    "shard-reported",  # rank 0 can know of the shard
    "reports-complete",  # from here on rank 0 alone
    "manifest-written",
    "before-rename",
    "renamed",
    "before-prune",
    "removing",  # once per folder, which has another name by now
    "pruned",  # the same
    "before-verdict",
)

listener: Callable[[str, Path | None], None] | None = None


def reach(point: str, path: Path | None = None) -> None:
    if listener is not None:
        listener(point, path)
