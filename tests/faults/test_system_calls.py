"""System calls fail in real runs, and the wall clock jumps: nothing that was reported as saved is lost.

A library that is loaded before libc (system_calls.c) lets a counted call below the run folder fail, before it has done
anything or halfway; the trainer knows nothing of it. The clock jumps on one rank alone or on all of them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.nursery import Nursery
from tests.faults.trials import SAID, Lab, short

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: no system call is made to fail"
)
STEP = 3


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A laboratory whose ranks run behind the library."""
    folder = tmp_path_factory.mktemp("calls")
    library = folder / "system_calls.so"
    source = Path(__file__).with_name("system_calls.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    nursery = Nursery(LD_PRELOAD=str(library))
    lab = Lab(nursery, folder)
    yield lab
    nursery.close()


def words(variables: dict[int, dict[str, str]]) -> dict[str, object]:
    """What a job needs, with these variables in these ranks."""
    return {
        "entry": "tests.faults.system_calls:train",
        "words": (json.dumps({str(rank): these for rank, these in variables.items()}),),
    }


@dataclass(frozen=True)
class Call:
    """A call of one rank on a file of the save of step 3."""

    name: str
    file: str
    how: str
    error: str
    layout: str
    mode: str = "disabled"
    nth: int = 1
    saved: bool = False  # the step is there nevertheless

    def __str__(self) -> str:
        return f"{self.name}-{self.nth}-{self.how}-{self.error}-{self.file or 'folder'}-{self.layout}-{self.mode}"

    @property
    def rank(self) -> int:
        return int(self.file[6:11]) if self.file.startswith("shard") else 0

    def variables(self, trial, fired: Path) -> dict[int, dict[str, str]]:
        place = f"{trial.checkpoints}/step-{STEP}.partial"
        these = {
            "CALL_NAME": self.name,
            "CALL_UNDER": f"{place}/{self.file}" if self.file else place,
            "CALL_NTH": str(self.nth),
            "CALL_HOW": self.how,
            "CALL_ERRNO": str(getattr(errno, self.error)),
            "CALL_FIRED": str(fired),
        }
        return {self.rank: these}


CALLS = [
    Call("write", "shard-00001", "half", "ENOSPC", "fsdp"),
    Call("write", "shard-00000", "half", "ENOSPC", "fsdp", "async", 2),
    Call("write", "shard-00003", "half", "ENOSPC", "hsdp", "async"),
    Call("write", "shard-00001", "half", "EDQUOT", "fsdp-cp"),
    Call("write", "manifest.json", "half", "ENOSPC", "hsdp"),
    Call("write", "shard-00000", "error", "EIO", "one", "async"),
    Call("fsync", "shard-00001", "error", "EIO", "fsdp", "async"),
    Call("fsync", "shard-00002", "error", "EIO", "fsdp-cp", "async"),
    Call("fsync", "shard-00001", "error", "EIO", "hsdp"),
    Call("fsync", "shard-00001", "error", "EIO", "cp"),
    Call("fsync", "manifest.json", "error", "EIO", "cp", "async"),
    Call("fsync", "manifest.json", "error", "ENOSPC", "hsdp"),
    Call("rename", "", "error", "EIO", "fsdp"),
    Call("rename", "", "error", "ENOSPC", "hsdp", "async"),
    Call("rename", "", "error", "EACCES", "cp"),
    Call("rename", "", "error", "EROFS", "one", "async"),
]
FEW = [CALLS[0], CALLS[12]]


@pytest.mark.parametrize("case", short(CALLS, FEW))
def test_a_system_call_fails_in_a_save(behind, case):
    trial = behind.trial(case.layout, **{"checkpoint.async_mode": case.mode})
    fired = trial.folder / "fired"
    trial.folder.mkdir()
    ended = trial.start(**words(case.variables(trial, fired)))
    assert fired.exists(), ended.output()
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert len(set(ended.reports.values())) == 1
    said = ended.reports[0]
    reason = os.strerror(getattr(errno, case.error))
    assert said.startswith(f"checkpoint {trial.checkpoints}/step-{STEP} was not saved: {reason}"), said
    assert case.file in said
    assert said.endswith("; earlier ones are intact")
    assert trial.check_saved(least=STEP - 1) == STEP - 1
    trial.resume(case.layout, STEP - 1)
    behind.count(f"{case.name} of {case.file or 'the folder'}", f"{case.how} {case.error}", SAID)


SHORT = [
    Call("write", "shard-00001", "short", "EIO", "fsdp", nth=1),
    Call("write", "shard-00002", "short", "EIO", "hsdp", "async", 2),
    Call("write", "manifest.json", "short", "EIO", "cp"),
]


@pytest.mark.parametrize("case", short(SHORT, []))
def test_a_short_write_is_continued(behind, case):
    """The kernel may write less than it was given, and that is no error."""
    trial = behind.trial(case.layout, **{"checkpoint.async_mode": case.mode})
    fired = trial.folder / "fired"
    trial.folder.mkdir()
    ended = trial.start(**words(case.variables(trial, fired)))
    assert fired.exists(), ended.output()
    assert ended.codes == [0] * len(ended.codes), ended.reports
    trial.check_whole()
    behind.count(f"write of {case.file}", "short", "goes on")


@pytest.mark.slow
@pytest.mark.parametrize("jumps", ["40:86400", "40:-86400", "30:86400 60:-3600 90:0"])
@pytest.mark.parametrize("where", ["all ranks", "rank 1"])
def test_the_wall_clock_jumps(behind, jumps, where):
    """Neither the limit of the run, nor its lock, nor what it waits for takes an hour for one that has passed."""
    trial = behind.trial("fsdp", **{"checkpoint.save_before": "20m", "checkpoint.async_mode": "async"})
    variables = {"CLOCK_JUMPS": jumps}
    ended = trial.start(**words(dict.fromkeys((0, 1) if where == "all ranks" else (1,), variables)))
    assert ended.codes == [0, 0], ended.reports
    assert "stopping after this step" not in trial.log
    trial.check_whole()
    for line in (trial.run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert 0 < row["step_seconds"] < 60
        assert row["tokens_per_second"] > 0
    behind.count("at any time", f"clock jumps {jumps}", "goes on")
