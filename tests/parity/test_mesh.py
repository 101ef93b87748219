"""The groups of a mesh hold the ranks that its layout says."""

import pytest
import torch.distributed as dist

from shardline.comm import collectives
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.config.layout import AXES, EXPERT_AXES, Layout
from tests.parity.pool import Pool

EXPERTS = [
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(dp_shard=2, tp=2, ep=2, etp=2),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(dp_replicate=2, dp_shard=2, ep=2),
    Layout(pp=2, dp_shard=2, tp=2, ep=2),
]


def groups(layout: Layout) -> dict[str, list[int]]:
    """Ranks of each axis that this rank is on; a sum over each shows that it works."""
    import torch

    Mesh(layout, "cpu")
    found = {}
    for name, axis in job.axes.items():
        found[name] = dist.get_process_group_ranks(axis.group)
        assert collectives.sum_in_place(torch.ones(1), name).item() == axis.size == len(found[name])
        assert found[name][axis.rank] == dist.get_rank()
    return found


@pytest.mark.parametrize("layout", EXPERTS, ids=str)
def test_groups_hold_the_ranks_that_differ_on_their_axis_alone(pool: Pool, layout: Layout) -> None:
    for rank, found in enumerate(pool.run(layout.world_size, groups, layout)):
        for names, coordinates in (
            (AXES, layout.coordinates),
            (EXPERT_AXES, layout.expert_coordinates),
        ):
            for name in names:
                if getattr(layout, name) == 1:
                    alone = name == "expert_shard" and "fsdp" in found  # FSDP of experts, on one rank
                    assert found.get(name) == ([rank] if alone else None)
                    continue
                mine, replica = coordinates(rank), layout.dp_shard * layout.cp * layout.tp
                same = [
                    other
                    for other in range(layout.world_size)
                    if all(coordinates(other)[axis] == mine[axis] for axis in names if axis != name)
                    and (names is AXES or other // replica == rank // replica)
                ]
                assert found[name] == same, (rank, name)
