"""Asynchronous workers that stop, save or are killed, and go on: no sample is lost or read twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from shardline.config.load import load_config
from tests.faults.nursery import Job, job_of
from tests.parity.harness import GLOBAL_BATCH, complete

STEPS, PREEMPTED = 20, 75
PAUSES = (0.0, 0.05)  # rank 1 is slow: rank 0 is ahead of it when a signal comes


class Legs:
    """Starts of one run, one after the other, and the samples that each has read."""

    def __init__(self, nursery, folder: Path) -> None:
        self.nursery, self.folder, self.count = nursery, folder, 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def saved(self) -> list[int]:
        return saved_in(self.run)

    def start(self, end: str = "", rank: int = 0, at: int = 0) -> tuple[list[int], list[int]]:
        """Exit codes, and what both ranks read; `end` comes to a rank when it reads its first contribution of step `at`
        or a later one."""
        self.count += 1
        settings = complete({"training.steps": STEPS, "lr_scheduler.warmup_steps": STEPS}, 1) | {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_mode": "async",
            "training.local_batch_size": GLOBAL_BATCH // 2,
            "checkpoint.enable": True,
            "checkpoint.interval": 1000,
            "checkpoint.last_save_model_only": False,
            "checkpoint.preempted_exit_code": PREEMPTED,
            "metrics.log_freq": 1,
            "job.dump_folder": str(self.run),
        }
        place = self.folder / f"leg-{self.count}"
        words = (json.dumps([end, rank, at]),)
        entry = "tests.faults.test_asynchronous:train"
        job = Job(place, 2, settings, grace=0.0 if end == "SIGKILL" else 30.0, entry=entry, words=words)
        ended = self.nursery.run(job)
        assert not ended.hung, ended.output()
        lines = [line for rank in (0, 1) for line in (place / f"read-{rank}").read_text().splitlines()]
        return ended.codes, [sample for line in lines for sample in json.loads(line)]


def saved_in(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoint").glob("step-*[0-9]"))


def train(words: Sequence[str]) -> int:
    """What a rank does; the nursery calls it."""
    from shardline.run.stop import exit_code
    from shardline.training.trainer import Trainer

    job, own, (end, rank, at) = job_of(words[0]), int(words[1]), json.loads(words[3])
    config = load_config(overrides=job.settings)
    run, before = Path(job.settings["job.dump_folder"]), saved_in(Path(job.settings["job.dump_folder"]))
    trainer = Trainer(config)
    passes, read = trainer.stepper.passes, trainer.loader.read
    forward_backward, asked = passes.forward_backward, []

    def slowly(*arguments):
        time.sleep(PAUSES[own])
        return forward_backward(*arguments)

    def noting(first, place):
        batches = read(first, place)
        book.write(json.dumps([int(sample) for batch in batches for sample in batch.sample_ids]) + "\n")
        step = trainer.progress.step + 1
        if end and own == rank and step >= at and not asked:
            asked.append(step)
            os.kill(os.getpid(), getattr(signal, end))
        if end == "SIGUSR1" and own == 0 and saved_in(run) != before and step > saved_in(run)[-1] + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches

    with (
        (job.folder / f"read-{own}").open("w", buffering=1) as book,
        patch.object(passes, "forward_backward", slowly),
        patch.object(trainer.loader, "read", noting),
    ):
        return exit_code(trainer.train().stopped_by, config)


def numbers(first: int, last: int) -> list[int]:
    """The samples of the steps after `first`, up to `last`."""
    return list(range(first * GLOBAL_BATCH, last * GLOBAL_BATCH))


@pytest.mark.parametrize(("asked", "code", "rank"), [("SIGTERM", PREEMPTED, 0), ("SIGINT", 130, 1)])
def test_workers_that_are_stopped_save_and_go_on(nursery, tmp_path, asked, code, rank):
    """Whichever worker hears of it: nothing of a step after the save is read before, and nothing is left out."""
    legs = Legs(nursery, tmp_path)
    codes, read = legs.start(asked, rank, at=4)
    (step,) = legs.saved()
    assert codes == [code, code]
    assert 4 <= step < STEPS
    assert sorted(read) == numbers(0, step)
    codes, read = legs.start()
    assert codes == [0, 0]
    assert sorted(read) == numbers(step, STEPS)
    rows = [json.loads(line)["step"] for line in (legs.run / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, STEPS + 1))


def test_workers_save_when_they_are_asked_and_go_on_from_there(nursery, tmp_path):
    """A worker is killed a few steps later."""
    legs = Legs(nursery, tmp_path)
    codes, before = legs.start("SIGUSR1", 1, at=3)
    assert codes[0] == -signal.SIGKILL
    (step,) = legs.saved()
    assert sorted(sample for sample in before if sample < step * GLOBAL_BATCH) == numbers(0, step)
    codes, after = legs.start()
    assert codes == [0, 0]
    assert sorted(after) == numbers(step, STEPS)
