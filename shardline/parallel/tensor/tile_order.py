"""The order in which a fused kernel works on tiles: plain arithmetic, which Triton compiles and tests can run.

A product of n ranks' rows is n shards of rows; each shard is cut into tiles. A gathering product begins with this
rank's shard and continues in the order in which the others arrive. A scattering one ends with its own, so that the
tiles of other ranks travel while it computes, and no two ranks work for the same one at a time:

    gathering, 4 ranks    rank 0: 0 3 2 1    rank 1: 1 0 3 2    rank 2: 2 1 0 3    rank 3: 3 2 1 0
    scattering            rank 0: 1 2 3 0    rank 1: 2 3 0 1    rank 2: 3 0 1 2    rank 3: 0 1 2 3

Within a shard, `group` rows of tiles are walked column by column, so that neighbours in time share what they read.
"""

import contextlib

with contextlib.suppress(ImportError):
    import triton.language as tl  # noqa: F401 - its interpreter looks for it beside each function


def gathering_shard(turn, own, ranks):  # type: ignore[no-untyped-def]
    """The rank whose rows are multiplied at this turn."""
    return (own + ranks - turn) % ranks


def scattering_shard(turn, own, ranks):  # type: ignore[no-untyped-def]
    """The rank for which rows are multiplied at this turn."""
    return (own + turn + 1) % ranks


def row_of_tiles(index, rows, columns, group):  # type: ignore[no-untyped-def]
    """The row of the tile at `index` in the order of work, among `rows` x `columns` tiles."""
    first = index // (group * columns) * group
    return first + index % (group * columns) % min(rows - first, group)


def column_of_tiles(index, rows, columns, group):  # type: ignore[no-untyped-def]
    first = index // (group * columns) * group
    return index % (group * columns) // min(rows - first, group)
