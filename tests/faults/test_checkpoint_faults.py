"""Ranks are killed, or calls to the file system fail, at every place of a save: nothing that was saved is lost.

Each case ends in one of three ways, which a table shows at the end (SHARDLINE_FAULT_TABLE names a file for it):
the run goes on from the last good step, a start is refused and the file named, or a save fails and says so.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass

import pytest

from shardline.storage.crash_points import POINTS
from tests.faults.nursery import Fault
from tests.faults.trials import LAYOUTS, RESUMED, SAID, SEED, STEPS, short

ON_RANK_0 = POINTS[POINTS.index("reports-complete") :]
RENAMED = POINTS[POINTS.index("renamed") :]
WITH_FILES = ("shard-opened", "tensor-written", "shard-written", "shard-synced", "manifest-written", "before-rename")
TWO_RANKS = tuple(name for name, (ranks, _) in LAYOUTS.items() if ranks == 2)


@dataclass(frozen=True)
class Kill:
    """A kill in a save."""

    fault: Fault
    layout: str
    mode: str
    on: str  # the layout that resumes
    grace: float = 0.0
    keep: int = 2
    last: str = "full"  # what the last save is to be

    def __str__(self) -> str:
        fault = self.fault
        where = f"rank{fault.rank}-step{fault.step}" + (f"-time{fault.nth + 1}" if fault.nth else "")
        return f"{fault.point}-{fault.action}-{where}-{self.mode}-{self.layout}-on-{self.on}-{self.last}"


LAST = {
    "full": {},
    "model": {"checkpoint.last_save_model_only": True},
    "hf": {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True},
}


def kills() -> list[Kill]:
    """Every point on every layout; action, mode and the rest take turns, from a seed."""
    chance, found = random.Random(SEED), []
    for number, point in enumerate(POINTS):
        for turn, layout in enumerate(("one", "one", *TWO_RANKS, *TWO_RANKS)):
            ranks = LAYOUTS[layout][0]
            first = 3 if point in ("removing", "pruned") else 2
            fault = Fault(
                point,
                "kill-all" if ranks == 1 or (turn + number) % 3 == 0 else "kill-rank",
                0 if point in ON_RANK_0 else chance.randrange(ranks),
                chance.randint(first, STEPS),
                chance.randrange(4) if point == "tensor-written" else 0,
            )
            mode = ("disabled", "async")[(turn + number + turn // 6) % 2]
            on = layout if chance.random() < 0.5 else chance.choice([name for name in LAYOUTS if name != layout])
            found.append(Kill(fault, layout, mode, on, chance.choice((0.0, 0.1, 0.3)), chance.choice((1, 2))))
    return found


def last_kills() -> list[Kill]:
    """The last save, where it has weights only."""
    points = ("staged", "tensor-written", "shard-synced", "reports-complete", "manifest-written", "renamed", "removing")
    chance, found = random.Random(SEED), []
    for number, point in enumerate(points):
        for turn, last in enumerate(("model", "hf")):
            layout = list(LAYOUTS)[(2 * number + turn) % len(LAYOUTS)]
            rank = 0 if point in ON_RANK_0 else chance.randrange(LAYOUTS[layout][0])
            fault = Fault(point, "kill-all" if LAYOUTS[layout][0] == 1 else "kill-rank", rank, STEPS)
            found.append(Kill(fault, layout, "async", chance.choice(list(LAYOUTS)), last=last))
    return found


KILLS = [*kills(), *last_kills()]
TURNS = {0: 0, 2: 3, 3: 1, 5: 5, 7: 0, 8: 7, 9: 1, 10: 8, 12: 0, 14: 1, 15: 3}  # of which points which case
FEW_KILLS = [KILLS[10 * number + turn] for number, turn in TURNS.items()]


@pytest.mark.parametrize("case", short(KILLS, FEW_KILLS))
def test_a_kill_in_a_save(lab, case):
    fault = case.fault
    settings = {"checkpoint.async_mode": case.mode, "checkpoint.keep_latest_k": case.keep}
    trial = lab.trial(case.layout, **settings, **LAST[case.last])
    ended = trial.start(fault=fault, grace=case.grace)
    assert ended.fired is not None, ended.output()
    assert -9 in ended.codes
    newest = trial.check_saved(least=fault.step - 1)
    if fault.point in RENAMED:
        assert newest == fault.step
    elif not (
        fault.point == "shard-reported" and fault.action == "kill-rank" and fault.rank == 1
    ):  # rank 0 may finish it
        assert newest == fault.step - 1
    trial.resume(case.on, newest)
    lab.count(str(fault.point), fault.action, RESUMED)


# ---- errors of the file system ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A call to the file system fails."""

    fault: Fault
    layout: str
    mode: str

    def __str__(self) -> str:
        fault = self.fault
        return f"{fault.point}-{fault.action}-rank{fault.rank}-step{fault.step}-{self.mode}-{self.layout}"


def broken() -> list[Broken]:
    chance, found = random.Random(SEED), []
    for number, point in enumerate((*WITH_FILES, "renamed", "before-prune", "pruned")):
        for turn, layout in enumerate(("one", "one", *TWO_RANKS)):
            rank = 0 if point in ON_RANK_0 else chance.randrange(LAYOUTS[layout][0])
            error = ("ENOSPC", "EIO", "EROFS")[(turn + number) % 3]
            fault = Fault(point, error, rank, chance.randint(3, STEPS))
            found.append(Broken(fault, layout, ("disabled", "async")[(turn + number // 3) % 2]))
    return found


BROKEN = broken()


@pytest.mark.parametrize("case", short(BROKEN, BROKEN[1::18]))
def test_an_error_of_the_file_system_in_a_save(lab, case):
    fault = case.fault
    trial = lab.trial(case.layout, **{"checkpoint.async_mode": case.mode})
    ended = trial.start(fault=fault)
    assert ended.fired is not None, ended.output()
    words = os.strerror(getattr(errno, fault.action))
    if fault.point in ("before-prune", "pruned"):  # the step is saved: the run goes on
        assert ended.codes == [0] * len(ended.codes), ended.reports
        assert f"older checkpoints of {trial.checkpoints} were not removed: {words}" in trial.log
        trial.check_whole(allowed="removed" if fault.step == STEPS else "")
        lab.count(str(fault.point), fault.action, "saved, run goes on and says what it could not remove")
        return
    check_failed_save(ended, trial, fault, words)
    newest = trial.check_saved(least=fault.step - 1)
    assert newest == (fault.step if fault.point == "renamed" else fault.step - 1)
    assert not [name for name in trial.names() if "." in name]
    trial.resume(case.layout, newest)
    lab.count(str(fault.point), fault.action, SAID)


def check_failed_save(ended, trial, fault, words):
    """Every rank ends by itself, with the same error, which names the file."""
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert len(set(ended.reports.values())) == 1
    file = "manifest.json" if fault.point in ON_RANK_0 else f"shard-{fault.rank:05d}-of-{len(ended.codes):05d}"
    said = ended.reports[0]
    assert said.startswith(f"checkpoint {trial.checkpoints}/step-{fault.step} was not saved: {words} ({file}"), said
    assert said.endswith("; earlier ones are intact")
    assert "ended after step" in trial.log


# ---- kills at random times, again and again, on changing layouts -----------------------------------------------------


RANDOM = [f"random-{number}" for number in range(24)]


@pytest.mark.parametrize("case", short(RANDOM, RANDOM[1:2]))
def test_kills_at_random_times_and_changing_layouts(lab, case):
    chance, newest = random.Random(f"{SEED} {case}"), 0
    trial = lab.trial("one", **{"checkpoint.async_mode": chance.choice(("disabled", "async"))})
    survived = []
    for _ in range(3):
        layout = chance.choice(list(LAYOUTS))
        rank, since = chance.randrange(LAYOUTS[layout][0]), chance.choice(("first step", "start"))
        after = chance.uniform(0, lab.seconds(layout, whole=since == "start"))
        fault = Fault(None, chance.choice(("kill-rank", "kill-all")), rank, after=after, since=since)
        ended = trial.start(layout, fault, grace=chance.choice((0.0, 0.2)))
        if -9 not in ended.codes:  # it was faster
            assert ended.codes == [0] * len(ended.codes), ended.reports
            trial.check_whole()
            break
        survived.append((f"any time after the {since}", fault.action))
        newest = trial.check_saved(newest)
        if newest == 0 and trial.has_results():
            came_to = trial.last_logged_step()
            ended = trial.start(layout)
            if came_to < 2 and ended.codes == [0] * len(ended.codes):  # cut off in its first save, at step 1
                trial.check_whole()
                lab.count(*survived.pop(), "began again: it had nothing to lose")
                break
            assert ended.codes == [2] * len(ended.codes)
            assert f"{trial.run} already holds a run" in ended.reports[0]
            assert "no good checkpoint to resume from: --overwrite" in ended.reports[0]
            lab.count(*survived.pop(), "refused, folder named: nothing was saved yet")
            break
        if newest == STEPS:
            break
    if -9 in ended.codes:
        trial.resume(chance.choice(list(LAYOUTS)), newest)
    for one in survived:
        lab.count(*one, RESUMED)
