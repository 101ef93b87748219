"""Each rank's order of actions: one function per schedule, given the numbers of ranks, micro-batches and stages.

Stages are placed in loops (rank r has stages r, r + ranks, ...) or in a V (rank r has stages r and 2 ranks - 1 - r):

    loops   rank 0: 0 4    V   rank 0: 0 7
            rank 1: 1 5        rank 1: 1 6
            rank 2: 2 6        rank 2: 2 5
            rank 3: 3 7        rank 3: 3 4
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardline.parallel.pipeline.timeline import Action

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
    """Run one forward pass for each later rank, then alternate forward and backward passes."""
    return [_depth_first(rank, ranks, microbatches, stages_per_rank, "B", 1) for rank in range(ranks)]


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Orders:
    """Depth first: micro-batches go through all of a rank's stages in rounds of about one micro-batch per rank.

    2 ranks, 4 micro-batches, stages 0 and 2 on rank 0
    forward   0F0 0F1  2F0 2F1  0F2 0F3  2F2 2F3     a round, another round
    backward  2B0 2B1  0B0 0B1  2B2 2B3  0B2 0B3
    """
    return [_depth_first(rank, ranks, microbatches, stages_per_rank, "B", 2) for rank in range(ranks)]


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Orders:
    """Interleaved with split backward passes: input gradients are sent at once, weight gradients fill the gaps.

    An input gradient takes half as long as a backward pass, so half as many warm-up forward passes are enough. A rank
    postpones as many weight gradients as there are ranks before it, and computes them at the end, while gradients
    travel to rank 0. All ranks then hold equally many activations.
    """
    return [
        _with_weight_gradients(_depth_first(rank, ranks, microbatches, stages_per_rank, "I", 1), postponed=rank)
        for rank in range(ranks)
    ]


def _depth_first(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int, backward: str, ahead: int
) -> list[Action]:
    """Run rounds of micro-batches through all stages, with `ahead` more warm-up forwards for each later rank."""
    own, groups = range(rank, ranks * stages_per_rank, ranks), rounds(ranks, microbatches)
    return _in_turn(
        [Action("F", stage, i) for group in groups for stage in own for i in group],
        [Action(backward, stage, i) for group in groups for stage in reversed(own) for i in group],
        (stages_per_rank - 1) * len(groups[0]) + ahead * (ranks - 1 - rank),
    )


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Return as many rounds as possible with a micro-batch for every rank; their sizes differ by at most one."""
    count = max(1, microbatches // ranks)
    edges = [-(-microbatches * i // count) for i in range(count + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Run `warmup` forwards, then alternate forwards and backwards, then run the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[steady:]]


def _with_weight_gradients(order: list[Action], postponed: int) -> list[Action]:
    """Add the weight gradients, each after its input gradient and `postponed` further input gradients."""
    done: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        done.append(action)
        if action.kind == "I":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > postponed:
                done.append(waiting.pop(0))
    return done + waiting


# ---- the V -----------------------------------------------------------------------------------------------------------
# Both schedules are lists of phases: a count, and the actions that are repeated that often. Stage 0 is the rank's stage
# on the way down the V, stage 1 the one on the way up. Micro-batches are numbered as they come. The phases are those of
# a full pipeline; with fewer micro-batches, the actions of the missing ones are left out.


def zero_bubble_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Orders:
    """Zero bubble on a V: rank 0 has both the first and the last stage, so no gradient waits at the end of the V.

    If F, I and W take the same time, a rank is idle only until its first input and after its last gradient.
    """
    count = max(microbatches, 2 * ranks - 1)
    made = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        phases = [
            (2 * behind + 1, "F0"),
            (rank, "F1 F0"),
            (behind + 1, "F1 I1 W1"),
            (count - 2 * ranks + 1 + rank, "F0 I0 W0 F1 I1 W1"),
            (behind, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        made.append(_spelled(phases, (rank, 2 * ranks - 1 - rank), microbatches))
    return made


def dual_pipe_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Orders:
    """Alternate forward passes of one arm of the V with backward passes of the other; only the ends split backward.

    In the middle, each forward pass is followed by a backward pass that does not depend on it.
    """
    count = max(microbatches, 2 * ranks)
    made = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        whole = (rank + 1) // 2  # pairs of the last `rank + 1`; the others are split, an odd one between its two stages
        phases = [
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W F1"),
            (count - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            (whole, "B1 B0"),
            (1 - rank % 2, "B1 I0"),
            (rank - whole + rank % 2, "I1 I0"),
            (behind, "W I0"),
            (rank + 1, "W"),
        ]
        made.append(_spelled(phases, (rank, 2 * ranks - 1 - rank), microbatches))
    return made


def _spelled(phases: Sequence[tuple[int, str]], stages: tuple[int, int], microbatches: int) -> list[Action]:
    """Expand phases into actions, and leave out those of micro-batches beyond the last."""
    actions = []
    counts = {"F": [0, 0], "B": [0, 0]}  # I and B count the same micro-batches
    owed: list[Action] = []  # weight gradients still to compute; a W without a stage takes the oldest
    for repeat, words in phases:
        for word in words.split() * repeat:
            kind, arm = word[0], int(word[1:] or -1)
            if kind == "W":
                action = next(one for one in owed if arm < 0 or one.stage == stages[arm])
                owed.remove(action)
            else:
                count = counts["F" if kind == "F" else "B"]
                action = Action(kind, stages[arm], count[arm])
                count[arm] += 1
            if kind == "I":
                owed.append(action._replace(kind="W"))
            if action.microbatch < microbatches:
                actions.append(action)
    return actions
