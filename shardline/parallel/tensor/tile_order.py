"""The order in which a fused kernel computes its tiles: plain arithmetic, which Triton compiles and tests can run.

A product of n ranks' rows has n shards of rows; each shard is cut into tiles. A gathering product begins with this
rank's shard and continues in the order in which the other shards arrive. A scattering product ends with its own shard,
so that tiles for other ranks are sent while it computes. No two ranks compute for the same rank at the same time:

    gathering, 4 ranks    rank 0: 0 3 2 1    rank 1: 1 0 3 2    rank 2: 2 1 0 3    rank 3: 3 2 1 0
    scattering            rank 0: 1 2 3 0    rank 1: 2 3 0 1    rank 2: 3 0 1 2    rank 3: 0 1 2 3

Within a shard, groups of `group` tile rows are walked column by column, so that consecutive tiles share their inputs.
"""

import contextlib

with contextlib.suppress(ImportError):
    import triton.language as tl  # noqa: F401 - its interpreter looks for it beside each function


def gathering_shard(turn, own, ranks):  # type: ignore[no-untyped-def]
    """Return the rank whose rows are multiplied at this turn."""
    return (own + ranks - turn) % ranks


def scattering_shard(turn, own, ranks):  # type: ignore[no-untyped-def]
    """Return the rank for which rows are multiplied at this turn."""
    return (own + turn + 1) % ranks


def row_of_tiles(index, rows, columns, group):  # type: ignore[no-untyped-def]
    """Return the row of the tile at `index` in this order, among `rows` x `columns` tiles."""
    first = index // (group * columns) * group
    return first + index % (group * columns) % min(rows - first, group)


def column_of_tiles(index, rows, columns, group):  # type: ignore[no-untyped-def]
    first = index // (group * columns) * group
    return index % (group * columns) // min(rows - first, group)
