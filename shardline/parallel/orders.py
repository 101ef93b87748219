"""Who computes what when: one function per schedule, from numbers to the order of each rank.

Stages lie on ranks in loops (rank r has stages r, r + ranks, ...) or in a V (rank r has stages r and 2 ranks - 1 - r):

    loops   rank 0: 0 4    V   rank 0: 0 7
            rank 1: 1 5        rank 1: 1 6
            rank 2: 2 6        rank 2: 2 5
            rank 3: 3 7        rank 3: 3 4
"""

from __future__ import annotations

from shardline.parallel.timeline import Action

Orders = list[list[Action]]


def loops(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return tuple(range(ranks)) * stages_per_rank


def v_shape(ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Orders:
    """All forward passes, then all backward; a stage runs all micro-batches before the rank's next stage starts.

    With one stage per rank, this is GPipe.
    """
    stages = [range(rank, ranks * stages_per_rank, ranks) for rank in range(ranks)]
    return [
        [Action("F", stage, i) for stage in own for i in range(microbatches)]
        + [Action("B", stage, i) for stage in reversed(own) for i in range(microbatches)]
        for own in stages
    ]


def one_forward_one_backward(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Orders:
    """As many forward passes as there are ranks behind, then one forward and one backward in turn."""
    return [
        _in_turn(
            [Action("F", rank, i) for i in range(microbatches)],
            [Action("B", rank, i) for i in range(microbatches)],
            ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Orders:
    """Depth first: micro-batches go through all of a rank's stages in rounds of about as many as there are ranks.

    2 ranks, 4 micro-batches, stages 0 and 2 on rank 0
    forward   0F0 0F1  2F0 2F1  0F2 0F3  2F2 2F3     a round, another round
    backward  2B0 2B1  0B0 0B1  2B2 2B3  0B2 0B3
    """
    groups = rounds(ranks, microbatches)
    return [
        _in_turn(
            [Action("F", stage, i) for group in groups for stage in own for i in group],
            [Action("B", stage, i) for group in groups for stage in reversed(own) for i in group],
            (stages_per_rank - 1) * len(groups[0]) + 2 * (ranks - 1 - rank),
        )
        for rank, own in enumerate(range(rank, ranks * stages_per_rank, ranks) for rank in range(ranks))
    ]


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches in as many rounds as have a micro-batch for each rank; their sizes differ by one at most."""
    count = max(1, microbatches // ranks)
    edges = [-(-microbatches * i // count) for i in range(count + 1)]
    return [range(low, high) for low, high in zip(edges, edges[1:], strict=False)]


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then what is left of the backwards."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[steady:]]
