"""Workers that do not wait for each other, against synchronous training where they must be the same."""

from __future__ import annotations

import json
import shutil
import time
from unittest.mock import patch

import pytest
import torch

from shardline.config.load import load_config
from shardline.training.async_steps import AsyncSteps
from tests.parity import cases
from tests.parity.cases import case, layers, model
from tests.parity.harness import GLOBAL_BATCH, STEPS, _chosen_device, _own_logging
from tests.parity.test_checkpoint import SAVED, assert_same, losses, tensors
from tests.parity.test_diloco import Runs, simulate

ASYNC = {"parallelism.data_parallel_mode": "async"}
SYNCHRONOUS = ASYNC | {"fault_tolerance.async_staleness": 0}
EXPERTS_IN_STAGES = model(n_layers=4, **cases.EXPERTS["model.overrides"])
UNCLIPPED = cases.UNCLIPPED  # workers clip each by its own norm


@pytest.mark.parametrize("experts", [{}, cases.EXPERTS], ids=["dense", "experts"])
def test_one_worker_is_synchronous_training(harness, experts):
    """Clipped and scheduled, with validation; whatever the bound: nobody is late. Biases of routers move alike."""
    keys = {"validation.enable": True, "validation.freq": 4, "validation.steps": 2, "validation.seq_len": 32}
    keys |= experts
    alone, worker = harness.run(keys, 1), harness.run(ASYNC | keys, 1)
    assert worker.losses == alone.losses
    assert worker.validation_losses == alone.validation_losses
    assert worker.routers == alone.routers
    for name, value in alone.parameters.items():
        assert torch.equal(worker.parameters[name], value), name


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        (cases.DOCUMENTS, {"ddp": 2}),
        slow({"optimizer.name": "SGD", "optimizer.lr": 0.1}, {"ddp": 2}),
        slow({}, {"ddp": 2, "fsdp": 2}),
        slow({}, {"ddp": 2, "tp": 2}),
        slow(cases.RING, {"ddp": 2, "cp": 2}),
        slow(layers(4), {"ddp": 2, "pp": 2}),
        slow({"training.global_batch_size": 12}, {"ddp": 3}),
        slow({"training.local_batch_size": 2}, {"ddp": 2}),
        (cases.EXPERTS, {"ddp": 2}),
        slow(cases.EXPERTS | cases.ep(2), {"ddp": 2, "fsdp": 2}),
        slow(cases.EXPERTS | cases.ep(2), {"ddp": 2, "tp": 2}),
        slow(EXPERTS_IN_STAGES, {"ddp": 2, "pp": 2}),
    ],
    ids=[
        *("documents", "sgd", "fsdp", "tp", "cp", "pp", "three", "accumulation"),
        *("experts", "experts-fsdp-ep", "experts-tp-ep", "experts-pp"),
    ],
)
def test_without_staleness_workers_are_synchronous(harness, tmp_path, changes, degrees):
    """Weights and the state of the optimizer, as checkpoints have them."""
    cut = ("training.local_batch_size", *cases.ep(2))
    same = {key: value for key, value in changes.items() if key not in cut}
    alone = Runs(harness, tmp_path, UNCLIPPED | same, {}).train("alone")
    workers = Runs(harness, tmp_path, UNCLIPPED | SYNCHRONOUS | changes, degrees).train("workers")
    assert losses(workers) == pytest.approx(losses(alone), rel=1e-4)
    wanted, found = tensors(alone, 4), tensors(workers, 4)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        distance = (found[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert distance < 1e-3, (name, float(distance))


# ---- local steps -----------------------------------------------------------------------------------------------------

CONSTANT = {"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0, "training.local_batch_size": 4}
LOCAL = CONSTANT | {"training.global_batch_size": 2 * GLOBAL_BATCH, "fault_tolerance.async_steps": 2}


def in_turn(settings):
    """Train; each worker takes the slot of its number in every step: its optimizer sees the same samples each time."""
    from shardline.training.trainer import Trainer

    may_take = AsyncSteps._may_take

    def own(self, tickets, number):
        return tickets.next % self.workers == self.mesh.worker and may_take(self, tickets, number)

    with _chosen_device(), _own_logging(), patch.object(AsyncSteps, "_may_take", own):
        Trainer(load_config(overrides=settings)).train()


def train_in_turn(runs, name, more=None):
    runs.harness.pool.run(runs.case.ranks, in_turn, runs.settings(name, more or {}))
    return runs.folder / name / "checkpoint"


@pytest.mark.parametrize("degrees", [{"ddp": 2}, slow({"ddp": 2, "fsdp": 2}), slow({"ddp": 2, "tp": 2})], ids=str)
def test_without_staleness_local_steps_are_diloco(harness, tmp_path, degrees):
    """Against the plain simulation: two local steps on the samples of one step of the run, then an outer step."""
    batch = {"training.local_batch_size": 4 // degrees.get("fsdp", 1)}
    meeting = {"parallelism.data_parallel_mode": "diloco", "fault_tolerance.sync_steps": 2, "training.steps": 8}
    wanted = simulate(harness, CONSTANT | meeting | {"training.seq_len": SAVED["training.seq_len"]})
    folder = train_in_turn(Runs(harness, tmp_path, SYNCHRONOUS | LOCAL | batch, degrees), "workers")
    both = zip(wanted.losses[::2], wanted.losses[1::2], strict=True)
    assert losses(folder) == pytest.approx([(a + b) / 2 for a, b in both], rel=1e-4)
    found = tensors(folder, 4)
    for name, value in wanted.parameters.items():
        distance = (found[f"model/{name}"] - value).norm() / value.norm()
        assert distance < 1e-3, (name, float(distance))


@pytest.mark.parametrize("changes", [{}, slow(cases.EXPERTS)], ids=["dense", "experts"])
def test_local_steps_are_resumed(harness, tmp_path, changes):
    """Bit by bit: each worker has its own optimizer, and who serves a tensor has its momentum."""
    runs = Runs(harness, tmp_path, SYNCHRONOUS | LOCAL | changes, {"ddp": 2})
    whole = train_in_turn(runs, "whole")
    train_in_turn(runs, "resumed", {"training.steps": 2, "lr_scheduler.total_steps": 4})
    resumed = train_in_turn(runs, "resumed")
    assert losses(resumed) == losses(whole)
    kept = tensors(whole, 4)
    assert {name.split("/")[0] for name in kept} >= {"model", "optimizer", "workers", "outer"}
    assert_same(kept, tensors(resumed, 4), "resumed")


# ---- workers of different speed --------------------------------------------------------------------------------------


def at_own_pace(settings, pauses):
    """Train with a pause in each forward and backward of this rank; the samples that it read."""
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        passes, read, first = trainer.stepper.passes, [], trainer.loader.read
        run = passes.forward_backward

        def slowly(*arguments):
            time.sleep(pauses[trainer.mesh.rank])
            return run(*arguments)

        def noting(*place):
            batches = first(*place)
            read.extend(int(sample) for batch in batches for sample in batch.sample_ids)
            return batches

        with patch.object(passes, "forward_backward", slowly), patch.object(trainer.loader, "read", noting):
            trainer.train()
        return read


def paced(harness, folder, pauses, changes=None, **more):
    keys = {f"fault_tolerance.{name}": value for name, value in more.items()} | (changes or {})
    run = case("paced", ASYNC | keys, ddp=2)
    settings = harness.settings(run.overrides, 2) | {"job.dump_folder": str(folder)}
    read = harness.pool.run(2, at_own_pace, settings, pauses)
    return read, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", [{}, slow(cases.EXPERTS)], ids=["dense", "experts"])
def test_a_slow_worker_reads_less_and_no_sample_is_lost(harness, tmp_path, changes):
    """After their last step all have the same weights, and the same biases of routers."""
    changes = changes | {"debug.check_replicas_freq": STEPS}
    read, rows = paced(harness, tmp_path / "run", (0.0, 0.15), changes=changes)
    assert sorted(read[0] + read[1]) == list(range(STEPS * GLOBAL_BATCH))
    assert len(read[0]) > len(read[1]) > 0
    shares = [sum(row["contributions"][worker] for row in rows) for worker in "01"]
    assert [len(one) for one in read] == [share * GLOBAL_BATCH // 2 for share in shares]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["staleness"] for row in rows) <= 2
    assert sum(row["comm_bytes"]["workers"] for row in rows) > 0
    assert not any("dp_replicate" in row["comm_bytes"] for row in rows)
    waited = [exposed_to_others(tmp_path / "run", rank) for rank in (0, 1)]
    assert sum(waited[0]) > 0.15, "the fast one waits for the slow one, at the bound at least"
    assert [row["dp_exposed_seconds"] for row in rows] == pytest.approx(waited[0], abs=1e-5)


def exposed_to_others(folder, rank):
    """For how long a worker waited for others in each step."""
    rows = map(json.loads, (folder / "log" / f"telemetry-{rank}.jsonl").read_text().splitlines())
    steps = [row for row in rows if row["event"] == "step"]
    assert all(row["exposed"].get("workers", 0.0) <= row["seconds"] for row in steps)
    return [row["exposed"].get("workers", 0.0) for row in steps]


def test_what_a_late_worker_does_is_made_again_and_counts_once(harness, tmp_path):
    """Its samples are read twice and contributed once: the steps have all their contributions."""
    read, rows = paced(harness, tmp_path / "run", (0.0, 1.0), async_late="drop", async_late_seconds=0.1)
    assert sorted(set(read[0] + read[1])) == list(range(STEPS * GLOBAL_BATCH))
    assert len(read[0]) + len(read[1]) > STEPS * GLOBAL_BATCH
    assert all(sum(row["contributions"].values()) == 2 for row in rows)
    assert sum(row["contributions"]["0"] for row in rows) * GLOBAL_BATCH // 2 == len(read[0])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [{"ddp": 2}, pytest.param({"ddp": 2, "fsdp": 2}, marks=pytest.mark.slow)], ids=["ddp", "fsdp"]
)
def test_a_resumed_run_continues(harness, tmp_path, layout):
    """Without staleness bit by bit; the optimizer's state lies where it is served."""
    runs = Runs(harness, tmp_path, SYNCHRONOUS, layout)
    whole = runs.train("whole")
    runs.train("resumed", {"training.steps": 2, "lr_scheduler.total_steps": 4})
    resumed = runs.train("resumed")
    assert losses(resumed) == losses(whole)
    assert_same(tensors(whole, 4), tensors(resumed, 4), "resumed")


def test_a_run_is_resumed_after_a_step_that_was_late(harness, tmp_path):
    """Its learning rate was smaller than that of the schedule, which is what a resume compares."""
    for first in (0, 2):
        read, rows = paced(harness, tmp_path / "run", (0.0, 0.3), changes=SAVED | {"training.steps": 4})
        assert sorted(read[0] + read[1]) == list(range(first * GLOBAL_BATCH, 4 * GLOBAL_BATCH))
        assert rows[1]["staleness"] == 1
        shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-4")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_synchronous_run_resumes_what_workers_have_saved(harness, tmp_path):
    runs = Runs(harness, tmp_path, SYNCHRONOUS | UNCLIPPED, {"ddp": 2})
    whole = runs.train("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoint" / "step-4")
    sync = Runs(harness, tmp_path, UNCLIPPED, {"ddp": 2}).train("other")
    assert losses(sync) == pytest.approx(losses(whole), rel=1e-5)
    assert SAVED["checkpoint.interval"] == 2


def ready_later(settings):
    """Train, with a pause in rank 1 before it is ready."""
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging():
        built = AsyncSteps.start

        def late(self, *arguments):
            time.sleep(1.0 if self.mesh.rank == 1 else 0.0)
            built(self, *arguments)

        with patch.object(AsyncSteps, "start", late):
            Trainer(load_config(overrides=settings)).train()


def test_a_worker_that_is_ready_late_misses_no_step(harness, tmp_path):
    """The other may bring all of a step: it must not be made before this one knows its learning rate."""
    runs = Runs(harness, tmp_path, SYNCHRONOUS, {"ddp": 2})
    whole = runs.train("whole")
    harness.pool.run(2, ready_later, runs.settings("late", {}))
    late = tmp_path / "late" / "checkpoint"
    assert losses(late) == losses(whole)
    assert_same(tensors(whole, 4), tensors(late, 4), "late")
