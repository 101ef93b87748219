"""What tests derive from a layout."""

from shardline.config.layout import EXPERT_AXES, Layout


def expert_coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank is on the experts' axes."""
    rank %= layout.dp_shard * layout.cp * layout.tp
    found = {}
    for axis in reversed(EXPERT_AXES):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return found
