"""Files of a checkpoint are damaged after a good end, disks fill up or stop answering: see test_checkpoint_faults."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.nursery import Fault
from tests.faults.trials import LAYOUTS, REFUSED, RESUMED, SAID, SEED, SETTINGS, STEPS, Trial, short

OTHER_MODEL = {"model.overrides": {**SETTINGS["model.overrides"], "rope_theta": 1000.0}}


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, start: int, end: int, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    position, bit = chance.randrange(start, end), chance.randrange(8)
    if path.suffix == ".json" and bit == 5:  # 1e-05 and 1E-05 are the same number
        bit = 4
    content[position] ^= 1 << bit
    path.write_bytes(content)


def a_shard(step: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(step.glob("shard-*")))


def in_shard(change):
    """Damage to one shard."""

    def do(step, chance):
        shard = a_shard(step, chance)
        change(shard, chance)
        return shard.name

    return do


def in_manifest(change):
    def do(step, chance):
        change(step / "manifest.json", chance)
        return "manifest.json"

    return do


def cut(path, length):
    os.truncate(path, length)


def size(path):
    return path.stat().st_size


def of_step_before(path):
    return path.parent.with_name(f"step-{int(path.parent.name[5:]) - 1}") / path.name


def exchange_shards(step, chance):
    """The files of two ranks, each under the other's name; of one rank, half of its file twice."""
    shards = sorted(step.glob("shard-*"))
    if len(shards) == 2:
        shards[0].rename(step / "x")
        shards[1].rename(shards[0])
        (step / "x").rename(shards[1])
    else:
        content = shards[0].read_bytes()
        shards[0].write_bytes(content[len(content) // 2 :] + content[: len(content) // 2])
    return r"shard-0000\d"


# What is done to step-3, and returns the name of the file that must be named; step-2 stays good.
DAMAGE = {
    "torn shard": in_shard(lambda path, chance: cut(path, chance.randrange(1, size(path)))),
    "shard without its last byte": in_shard(lambda path, chance: cut(path, size(path) - 1)),
    "empty shard": in_shard(lambda path, chance: cut(path, 0)),
    "longer shard": in_shard(lambda path, chance: path.write_bytes(path.read_bytes() + b"\0")),
    "bit in a shard's header": in_shard(lambda path, chance: flip(path, 0, 200, chance)),
    "bit in a shard's data": in_shard(lambda path, chance: flip(path, size(path) // 2, size(path), chance)),
    "bit in a shard's last block": in_shard(lambda path, chance: flip(path, size(path) - 50, size(path), chance)),
    "zeros in a shard": in_shard(lambda path, chance: path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))),
    "missing shard": in_shard(lambda path, chance: path.unlink()),
    "shard of another step": in_shard(lambda path, chance: shutil.copy(of_step_before(path), path)),
    "exchanged shards": exchange_shards,
    "bit in manifest": in_manifest(lambda path, chance: flip(path, 0, size(path), chance)),
    "bit in manifest's last line": in_manifest(
        lambda path, chance: flip(path, size(path) - 24, size(path) - 3, chance)
    ),
    "torn manifest": in_manifest(lambda path, chance: cut(path, chance.randrange(1, size(path) - 1))),
    "empty manifest": in_manifest(lambda path, chance: cut(path, 0)),
    "missing manifest": in_manifest(lambda path, chance: path.unlink()),
    "manifest of another step": in_manifest(lambda path, chance: shutil.copy(of_step_before(path), path)),
}


@dataclass(frozen=True)
class Damage:
    kind: str
    layout: str
    mode: str
    on: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}-on-{self.on}-{self.number}"


def damages() -> list[Damage]:
    chance, found = random.Random(SEED), []
    for number, kind in enumerate(DAMAGE):
        for turn in range(8 if kind == "bit in manifest" else 3):
            layout = list(LAYOUTS)[(number + turn * 2) % len(LAYOUTS)]
            on = layout if turn == 0 else chance.choice(list(LAYOUTS))
            found.append(Damage(kind, layout, chance.choice(("disabled", "async")), on, turn))
    return found


DAMAGES = damages()


@pytest.mark.parametrize("case", short(DAMAGES, DAMAGES[1::20]))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(lab, case):
    chance = random.Random(f"{SEED} {case}")
    trial = lab.clean(case.layout, case.mode)
    name = DAMAGE[case.kind](trial.checkpoints / "step-3", chance)
    trial.resume(case.on, 2)
    assert re.search(f"skipping a damaged checkpoint: {trial.checkpoints}/step-3.*{name}", trial.log), trial.log
    lab.count("on disk", case.kind, RESUMED)


REFUSALS = [
    Damage(kind, layout, "disabled", on, number)
    for number, (kind, layout, on) in enumerate(
        (
            ("bit in a shard's data", "one", "one"),
            ("bit in a shard's data", "fsdp", "fsdp"),
            ("torn shard", "ddp", "one"),
            ("missing shard", "tp", "pp"),
            ("missing manifest", "one", "fsdp"),
            ("bit in manifest", "pp", "pp"),
            ("empty manifest", "one", "one"),
        )
    )
]


@pytest.mark.parametrize("case", short(REFUSALS, REFUSALS[1:2]))
def test_without_a_good_checkpoint_the_start_is_refused_and_the_file_named(lab, case):
    """Never a fresh start; and where the user asked for a step, never another one."""
    chance = random.Random(f"{SEED} {case}")
    trial = lab.clean(case.layout)
    name = DAMAGE[case.kind](trial.checkpoints / "step-3", chance)
    before = trial.names()
    ended = trial.start(case.on, **{"checkpoint.load_step": 3})
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert re.search(f"{trial.checkpoints}/step-3.*{name}", ended.reports[0]), ended.reports
    assert trial.names() == before
    lab.count("on disk", f"{case.kind}, load_step given", REFUSED)
    name = DAMAGE[case.kind](trial.checkpoints / "step-2", chance)
    ended = trial.start(case.on)
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert re.search(f"{trial.checkpoints}/step-[23].*{name}", ended.reports[0]), ended.reports
    assert not trial.rows[-1]
    lab.count("on disk", f"{case.kind}, in every step", REFUSED)


@pytest.mark.parametrize("layout", short(["one", "fsdp"], ["one"]))
def test_a_manifest_of_another_model_is_refused(lab, layout):
    trial, other = lab.clean(layout), lab.trial(layout, **OTHER_MODEL)
    assert set(other.start(**{"training.steps": 3}).codes) == {0}
    shutil.copy(other.checkpoints / "step-3" / "manifest.json", trial.checkpoints / "step-3" / "manifest.json")
    ended = trial.start()
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert f"{trial.checkpoints}/step-3 is of another model (rope_theta: 1000.0 -> 500000.0)" in ended.reports[0]
    assert not trial.rows[-1]
    lab.count("on disk", "manifest of another model", REFUSED)
    # behind one that is damaged, where it is met only when that has been given up
    trial = lab.clean(layout)
    shutil.copy(other.checkpoints / "step-2" / "manifest.json", trial.checkpoints / "step-2" / "manifest.json")
    DAMAGE["bit in a shard's data"](trial.checkpoints / "step-3", random.Random(SEED))
    ended = trial.start()
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert f"{trial.checkpoints}/step-2 is of another model (rope_theta" in ended.reports[0]
    lab.count("on disk", "manifest of another model behind a damaged one", REFUSED)


def test_without_any_checkpoint_folder_the_start_is_refused(lab):
    trial = lab.clean("one")
    shutil.rmtree(trial.checkpoints)
    ended = trial.start()
    assert ended.codes == [2]
    assert f"{trial.run} already holds a run (metrics.jsonl) and it has no good checkpoint" in ended.reports[0]
    assert not trial.rows[-1]
    lab.count("on disk", "missing folder", REFUSED)


def leave_partial(folder):
    """A later save that a crash cut short, though all of its files are there."""
    shutil.copytree(folder / "step-3", folder / "step-4.partial")


def leave_replaced(folder):
    """A crash between the two renames that replace a checkpoint."""
    shutil.copytree(folder / "step-3", folder / "step-3.partial")
    (folder / "step-3").rename(folder / "step-3.replaced")


def leave_torn_replaced(folder):
    """A crash while the one that was replaced is removed, by an earlier release."""
    shutil.copytree(folder / "step-2", folder / "step-3.replaced")
    a_shard(folder / "step-3.replaced", random.Random(0)).unlink()


def leave_removed(folder):
    shutil.copytree(folder / "step-2", folder / "step-1.removed")
    (folder / "step-1.removed" / "manifest.json").unlink()


LEFT = {
    "a partial save": leave_partial,
    "a replaced one, its place not taken yet": leave_replaced,
    "half of a replaced one": leave_torn_replaced,
    "half of a removed one": leave_removed,
}
LEFTOVERS = [(name, layout) for name in LEFT for layout in ("one", "fsdp", "pp")]


@pytest.mark.parametrize("case", short(LEFTOVERS, LEFTOVERS[3:4]))
def test_what_a_crash_leaves_behind_misleads_nobody(lab, case):
    name, layout = case
    trial = lab.clean(layout)
    LEFT[name](trial.checkpoints)
    trial.resume(layout, 3)
    lab.count("on disk", f"left behind: {name}", RESUMED)


# ---- disks -----------------------------------------------------------------------------------------------------------


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs")


class Disk:
    """A small file system of its own, in a trial's folder."""

    path = Path()

    def mount(self, trial: Trial, size: int) -> Path:
        self.path = trial.folder / "disk"
        self.path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.path)], check=True)
        return self.path

    def change(self, *options: str) -> None:
        subprocess.run(["mount", "-o", ",".join(("remount", *options)), str(self.path)], check=True)

    def close(self) -> None:
        if self.path.is_mount():
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.close()


def bytes_of(step: Path) -> int:
    """What a folder takes of a tmpfs."""
    return sum(-(-size(path) // 4096) * 4096 for path in step.iterdir())


FULL = [
    (layout, mode, share)
    for layout, mode in (("one", "disabled"), ("one", "async"), ("fsdp", "async"), ("pp", "disabled"))
    for share in (0.02, 0.4, 0.8, 0.97)
]


@needs_root
@pytest.mark.parametrize("case", short(FULL, FULL[1:2]))
def test_a_full_disk(lab, disk, case):
    """Room for two checkpoints and a share of the third, which is written before the first is removed."""
    layout, mode, share = case
    one = bytes_of(lab.reference(layout).checkpoints / f"step-{STEPS}")
    trial = lab.trial(layout, **{"checkpoint.async_mode": mode})
    trial.save_in(disk.mount(trial, 2 * one + 4096 * max(1, int(share * one / 4096))) / "checkpoint")
    ended = trial.start()
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert f"{trial.checkpoints}/step-3 was not saved: No space left on device (" in ended.reports[0]
    assert trial.check_saved(least=2) == 2
    assert trial.names() == ["step-1", "step-2"]
    disk.change(f"size={4 * one}")
    trial.resume(layout, 2)
    lab.count("disk", "full", SAID)


WHOLE = [("one", "disabled"), ("one", "async"), ("ddp", "disabled")]


@needs_root
@pytest.mark.parametrize("case", short(WHOLE, WHOLE[:1]))
def test_a_full_disk_that_holds_the_log_and_the_metrics_too(lab, disk, case):
    layout, mode = case
    one = bytes_of(lab.reference(layout).checkpoints / f"step-{STEPS}")
    trial = lab.trial(layout, **{"checkpoint.async_mode": mode})
    trial.run = disk.mount(trial, 3 * one) / "run"
    trial.save_in(trial.run / "checkpoint")
    ended = trial.start()
    assert ended.codes == [2] * len(ended.codes), (ended.reports, ended.output())
    assert "No space left on device" in ended.reports[0]
    assert trial.check_saved(least=2) == 2
    disk.change(f"size={5 * one}")
    trial.resume(layout, 2)
    lab.count("disk", "full, with log and metrics", SAID)


READ_ONLY = [("one", "disabled"), ("one", "async"), ("tp", "async"), ("fsdp", "disabled")]


@needs_root
@pytest.mark.parametrize("case", short(READ_ONLY, READ_ONLY[:1]))
def test_a_disk_that_becomes_read_only(lab, disk, case):
    layout, mode = case
    trial = lab.trial(layout, **{"checkpoint.async_mode": mode})
    trial.save_in(disk.mount(trial, 64 << 20) / "checkpoint")
    ended = trial.start(fault=Fault("staged", "read-only", 0, 3))
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert f"{trial.checkpoints}/step-3 was not saved: Read-only file system" in ended.reports[0]
    assert trial.check_saved(least=2) == 2
    lab.count("disk", "becomes read-only", SAID)
    ended = trial.start()  # still so
    assert ended.codes == [2] * len(ended.codes), ended.reports
    assert f"checkpoint.folder: cannot write {trial.checkpoints}: Read-only file system" in ended.reports[0]
    assert not trial.rows[-1]
    lab.count("disk", "is read-only", REFUSED)
    disk.change("rw")
    trial.resume(layout, 2)


# ---- file systems that are slow or hang ------------------------------------------------------------------------------

SAVES = {"checkpoint.interval": 2, "checkpoint.enable_first_step_checkpoint": True}  # steps 1, 2, 4 and 5
HANGS = [("one", 0), ("fsdp", 0), ("fsdp", 1), ("pp", 1)]


@pytest.mark.parametrize("case", short(HANGS, HANGS[:1]))
def test_a_file_system_that_hangs_is_named_when_the_next_save_needs_it(lab, case):
    layout, rank = case
    trial = lab.trial(layout, **{"checkpoint.async_mode": "async", **SAVES})
    limit = {"checkpoint.save_timeout_seconds": 3}
    ended = trial.start(fault=Fault("shard-synced", "hang", rank, 2), **limit)
    assert ended.codes == [2] * len(ended.codes), ended.reports
    steps = [row.step for row in trial.rows[0]]
    assert steps == [1, 2, 3, 4][: len(steps)]
    assert layout != "one" or len(steps) == 4  # of two, rank 0 may see first that the shard of the other is late
    assert f"shard-{rank:05d}-of-{len(ended.codes):05d}.safetensors" in ended.reports[0]
    assert f"{trial.checkpoints}/step-2" in ended.reports[0]
    assert "earlier ones are intact" in ended.reports[0]
    assert trial.check_saved(least=1) == 1
    trial.resume(layout, 1)
    lab.count("shard-synced", "hang", SAID)


@pytest.mark.slow
def test_a_file_system_that_hangs_in_a_save_that_is_waited_for_is_named(lab):
    trial = lab.trial("one", **SAVES)
    limit = {"checkpoint.save_timeout_seconds": 1}
    ended = trial.start(fault=Fault("shard-synced", "hang", 0, 2), **limit)
    assert ended.codes == [2], ended.reports
    assert f"{trial.checkpoints}/step-2.partial/shard-00000-of-00001.safetensors" in ended.reports[0]
    assert "checkpoint.save_timeout_seconds allows more" in ended.reports[0]
    trial.resume("one", 1)
    lab.count("shard-synced", "hang", SAID)


@pytest.mark.parametrize("layout", short(["one", "fsdp"], ["one"]))
def test_a_slow_file_system_is_named_and_costs_nothing_else(lab, layout):
    """The save of step 2 ends when the log speaks of the wait for it, which the save of step 4 is the first to do."""
    trial = lab.trial(layout, **{"checkpoint.async_mode": "async", **SAVES})
    ended = trial.start(fault=Fault("shard-synced", "slow", 0, 2), patience=0.1)
    assert ended.codes == [0] * len(ended.codes), ended.reports
    assert ended.fired is not None
    shard = f"{trial.checkpoints}/step-2.partial/shard-00000-of-{len(ended.codes):05d}.safetensors"
    wait = re.search(f"waiting for the save of {trial.checkpoints}/step-2, which is at: .* {shard}", trial.log)
    assert wait, trial.log
    waited = wait.start()
    assert trial.log.index("step 4/5") < waited < trial.log.index(f"saved {trial.checkpoints}/step-2")
    trial.check_whole()
    lab.count("shard-synced", "slow", "named; the run went on and lost nothing")
