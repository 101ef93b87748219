"""Ranks are killed, disks fill up and files are damaged, at every place of a save: nothing that was saved is lost.

Each case ends in one of three ways, which a table shows at the end (SHARDLINE_FAULT_TABLE names a file for it):
the run goes on from the last good step, a start is refused and the file named, or a save fails and says so.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardline.training.save_points import POINTS
from tests.faults.nursery import Fault, Nursery
from tests.faults.trials import LAYOUTS, STEPS, Lab

SEED = int(os.environ.get("SHARDLINE_FAULT_SEED", "6"))
ON_RANK_0 = POINTS[POINTS.index("parts-complete") :]
RENAMED = POINTS[POINTS.index("renamed") :]
WITH_FILES = ("shard-opened", "tensor-written", "shard-written", "shard-synced", "manifest-written", "before-rename")
TWO_RANKS = tuple(name for name, (ranks, _) in LAYOUTS.items() if ranks == 2)
RESUMED, REFUSED, SAID = "resumed at the last good step", "refused, file named", "save failed and said so"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, request):
    nursery = Nursery()
    lab = Lab(nursery, tmp_path_factory.mktemp("faults"))
    yield lab
    nursery.close()
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        for line in ("", f"seed {SEED} (SHARDLINE_FAULT_SEED)", *lab.lines()):
            plugins.get_plugin("terminalreporter").write_line(line)
    place = os.environ.get("SHARDLINE_FAULT_TABLE")
    if place:
        names = ("point", "action", "outcome", "count")
        rows = [dict(zip(names, (*key, count), strict=True)) for key, count in sorted(lab.table.items())]
        Path(place).write_text(json.dumps({"seed": SEED, "rows": rows}, indent=1) + "\n")


@dataclass(frozen=True)
class Kill:
    """A kill in a save."""

    fault: Fault
    layout: str
    mode: str
    on: str  # the layout that resumes
    grace: float = 0.0

    def __str__(self) -> str:
        fault = self.fault
        where = f"rank{fault.rank}-step{fault.step}" + (f"-time{fault.nth + 1}" if fault.nth else "")
        return f"{fault.point}-{fault.action}-{where}-{self.mode}-{self.layout}-on-{self.on}"


def kills() -> list[Kill]:
    """Every point on every layout; action, mode and the rest take turns, from a seed."""
    chance, found = random.Random(SEED), []
    for number, point in enumerate(POINTS):
        for turn, layout in enumerate(("one", "one", *TWO_RANKS, *TWO_RANKS)):
            ranks = LAYOUTS[layout][0]
            first = 3 if point == "pruned" else 2
            fault = Fault(
                point,
                "kill-all" if ranks == 1 or (turn + number) % 3 == 0 else "kill-rank",
                0 if point in ON_RANK_0 else chance.randrange(ranks),
                chance.randint(first, STEPS),
                chance.randrange(4) if point == "tensor-written" else 0,
            )
            mode = ("disabled", "async")[(turn + number + turn // 6) % 2]
            on = layout if chance.random() < 0.5 else chance.choice([name for name in LAYOUTS if name != layout])
            found.append(Kill(fault, layout, mode, on, chance.choice((0.0, 0.1, 0.3))))
    return found


KILLS = kills()
FEW_KILLS = [KILLS[10 * number + turn] for number, turn in enumerate((0, 2, 3, 1, 4, 5, 6, 0, 7, 8, 9, 2, 1, 3))]


def short(cases, few):
    """The whole list; all but a few only in `make test-all`."""
    return [pytest.param(case, id=str(case), marks=[] if case in few else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", short(KILLS, FEW_KILLS))
def test_a_kill_in_a_save(lab, case):
    fault = case.fault
    trial = lab.trial(case.layout, **{"checkpoint.async_mode": case.mode})
    ended = trial.start(fault=fault, grace=case.grace)
    assert ended.fired is not None, ended.output()
    assert -9 in ended.codes
    newest = trial.check_saved(least=fault.step - 1)
    if fault.point in RENAMED:
        assert newest == fault.step
    elif not (fault.point == "part-told" and fault.action == "kill-rank" and fault.rank == 1):  # rank 0 may finish it
        assert newest == fault.step - 1
    ended = trial.start(case.on)
    assert ended.codes == [0] * len(ended.codes), ended.reports
    if newest == STEPS:
        assert "already finished" in trial.log
        trial.started[-1] = STEPS
    else:
        assert trial.resumed == newest
    trial.check_whole(allowed="partial|removed" if newest == STEPS else "damaged")
    lab.count(str(fault.point), fault.action, RESUMED)
