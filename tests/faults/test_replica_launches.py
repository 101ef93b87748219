"""Launched replica groups: of sharded, tensor-parallel and pipelined ranks, and on two hosts whose link is cut."""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import processes
from tests.faults.replica_groups import GLOBAL_BATCH, STEPS, Life
from tests.faults.test_ranks import wait_until
from tests.faults.test_replica_groups import FAULT_TOLERANT, FLOAT32, Lab, serve_lighthouse
from tests.hosts import two_hosts

ROOT = Path(__file__).parents[2]
PARALLEL = "parallelism.{}_parallel_"


@pytest.fixture(scope="module")
def lab(nursery, tmp_path_factory):
    return Lab(nursery, tmp_path_factory.mktemp("replicas"))


def written(value):
    return str(value).lower() if isinstance(value, bool) else value


class Launch:
    """`shardline train` for one life of a group."""

    def __init__(self, lab, folder, number, count, life, lighthouse, ranks, settings, start=processes.start):
        self.log = folder / f"said-{number}-{count}"
        settings = (
            lab.settings(**FAULT_TOLERANT)
            | settings
            | {
                "fault_tolerance.replica_id": number,
                "job.dump_folder": str(folder / f"group-{number}-{count}"),
                "experimental.custom_import": "tests.faults.replica_hooks",
            }
        )
        overrides = settings.pop("model.overrides")
        settings |= {f"model.overrides.{name}": value for name, value in overrides.items()}
        words = [f"--{key}={written(value)}" for key, value in settings.items()]
        env = {**os.environ, "REPLICAS_FOLDER": str(folder), "REPLICAS_LIFE": json.dumps(asdict(life)),
               "REPLICAS_COUNT": str(count), "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1",
               "CUDA_VISIBLE_DEVICES": "", "SHARDLINE_JOB_SECRET": "a secret of many letters"}  # fmt: skip
        command = [sys.executable, "-m", "shardline", "train", *words, *(["--nproc", str(ranks)] if ranks > 1 else [])]
        with self.log.open("w") as log:
            self.process = start(command, env=env, stdout=log, stderr=log, cwd=ROOT)

    def ends(self, seconds=120):
        try:
            return self.process.wait(seconds)
        finally:
            processes.end(self.process)

    def said(self):
        return self.log.read_text()[-4000:]


def read(folder):
    return [json.loads(line) for file in sorted(folder.glob("ledger-*")) for line in file.read_text().splitlines()]


def check(lab, rows):
    """Each step of each history has read every sample once, and has the loss and gradient norm of one process."""
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    assert len({row["history"] for row in rows if row["step"] == STEPS}) == 1
    for history in {row["history"] for row in rows}:
        same = [row for row in rows if row["history"] == history]
        step, participants = same[0]["step"], same[0]["participants"]
        samples = range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
        shares = {}
        for row in same:
            assert (row["step"], row["participants"]) == (step, participants)
            share = shares.setdefault((row["name"], row["data_rank"]), row["read"])
            assert row["read"] == share, "ranks that share their samples have read different ones"
            assert row["loss"] == pytest.approx(lab.rows[step]["loss"], rel=FLOAT32.loss), f"step {step}"
            assert row["grad_norm"] == pytest.approx(lab.rows[step]["grad_norm"], rel=FLOAT32.gradient), f"step {step}"
        numbers = sorted(number for share in shares.values() for number, _ in share)
        assert len(numbers) == len(set(numbers)), f"step {step}"
        assert set(numbers) <= set(samples)
        if set(participants) <= {row["name"] for row in same}:
            assert numbers == list(samples), f"step {step}"


LAYOUTS = {
    "fsdp": {PARALLEL.format("data") + "shard_degree": 2, "training.local_batch_size": 2},
    "tp": {PARALLEL.format("tensor") + "degree": 2},
    "pp": {PARALLEL.format("pipeline") + "degree": 2, PARALLEL.format("pipeline") + "schedule": "1F1B",
           "training.local_batch_size": 4},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "all_reduce"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_of_two_ranks_loses_one_and_comes_back(lab, tmp_path, layout, phase):
    """Rank 1 of group 1 is killed in step 4, which ends the group; its next life heals, each rank from its own peer."""
    server, lighthouse = serve_lighthouse()
    again = [f"ready-1-1-{rank}" for rank in (0, 1)]
    stays = Life(gate=8, until=again[0], seconds=0.3)
    made = (lighthouse, 2, LAYOUTS[layout])
    first = Launch(lab, tmp_path, 0, 0, stays, *made)
    lost = Launch(lab, tmp_path, 1, 0, Life(4, phase), *made)
    assert lost.ends() == 1, lost.said()
    back = Launch(lab, tmp_path, 1, 1, Life(), *made)
    codes = [first.ends(), back.ends()]
    processes.end(server)
    assert codes == [0, 0], first.said() + back.said()
    rows = read(tmp_path)
    check(lab, rows)
    assert {row["name"].split(":")[0] for row in rows if row["step"] == STEPS} == {"0", "1"}
    logged = [json.loads(line) for line in (tmp_path / "group-1-1" / "metrics.jsonl").read_text().splitlines()]
    assert (logged[0]["replica_heals"], logged[0]["replica_place"]) == (1, -1)
    assert {row["life"] for row in rows if row["name"].startswith("1:") and row["step"] == STEPS} == {1}


@pytest.mark.slow
def test_the_link_between_two_groups_is_cut_and_mended(lab, tmp_path):
    """The group beside the lighthouse goes on; the other waits, and heals when it is heard of again. None restarts."""
    with two_hosts() as (a, b):
        words = ["lighthouse", "--bind", f"{a.address}:29510", "--join-timeout", "4", "--heartbeat-timeout", "1.5"]
        server = a.start([sys.executable, "-m", "shardline", *words], stdout=(tmp_path / "lighthouse").open("w"))
        wait_until(lambda: "http" in (tmp_path / "lighthouse").read_text(), 30)
        made = (f"http://{a.address}:29510", 1, {})
        first = Launch(lab, tmp_path, 0, 0, Life(gate=8, until="again", seconds=0.5), *made, start=a.start)
        second = Launch(lab, tmp_path, 1, 0, Life(seconds=0.5), *made, start=b.start)

        def made_step(number, step):
            return any(row["step"] >= step for row in read(tmp_path) if row["name"].startswith(f"{number}:"))

        wait_until(lambda: made_step(0, 3) and made_step(1, 3), 60)
        cut = time.monotonic()
        b.cut()
        wait_until(lambda: made_step(0, 6), 60)  # more than the one under way: alone
        b.mend()
        time.sleep(time.monotonic() - cut + 1)  # until TCP has sent again what it had no answer for
        (tmp_path / "again").touch()
        codes = [first.ends(), second.ends()]
        processes.end(server)
    assert codes == [0, 0], first.said() + second.said()
    rows = read(tmp_path)
    check(lab, rows)
    assert any(len(row["participants"]) == 1 and row["step"] > 3 for row in rows)
    assert len({row["name"] for row in rows if row["step"] == STEPS}) == 2
    logged = [json.loads(line) for line in (tmp_path / "group-1-0" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["replica_heals"] >= 1
