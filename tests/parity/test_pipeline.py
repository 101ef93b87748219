"""Pipeline stages: what one process computes, nothing twice, and checkpoints that fit any number of stages."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardline.checkpoint import format as files
from shardline.comm.exposed_time import Moments
from shardline.config.load import load_config
from shardline.models import decoder
from shardline.models.dtensor import local
from shardline.models.products.linear import weight_queue
from shardline.parallel.data import stage_reduction as stage_sums
from shardline.parallel.pipeline import executor
from shardline.parallel.pipeline.schedules import build_schedule
from shardline.parallel.tensor import overlap
from tests.parity import cases
from tests.parity.cases import case, layers, schedule
from tests.parity.harness import _own_logging, compare, worst

MICRO_BATCHES = 4
UNCLIPPED = cases.UNCLIPPED  # the norm is added up in another order, and clipping would spread that last bit


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("GPipe", 4),
        ("1F1B", 4),
        ("Interleaved1F1B", 4),
        ("LoopedBFS", 4),
        pytest.param("Interleaved1F1B", 2, id="Interleaved1F1B-stages-without-layers"),
    ],
)
def test_stages_compute_bit_by_bit_what_one_process_does(harness, name, number):
    """The same micro-batches one after the other on one process: the same products and sums, in the same order."""
    alone = harness.run(case("x", layers(number), cases.SMALL_BATCHES, UNCLIPPED).overrides, 1)
    staged = harness.run(case("x", layers(number), schedule(name), UNCLIPPED, pp=2).overrides, 2)
    found = worst(alone, staged)
    assert (found["loss"], found["gradient"], found["parameter"]) == (0, 0, 0)
    assert found["grad_norm"] < 1e-6


def test_bytes_are_those_of_activations_and_their_gradients(harness):
    """Rank 0 sends an activation (1, 32, 64) of each of 8 micro-batches; with four stages two, and one gradient."""
    one = 32 * 64 * 4
    plain = harness.run(case("x", layers(4), pp=2).overrides, 2)
    assert {row["pp"] for row in plain.comm_bytes} == {8 * one}
    looped = harness.run(case("x", layers(4), cases.INTERLEAVED, pp=2).overrides, 2)
    assert {row["pp"] for row in looped.comm_bytes} == {3 * 8 * one}
    tied = harness.run(case("x", layers(4), cases.TIED, pp=2).overrides, 2)
    assert {row["pp"] for row in tied.comm_bytes} == {8 * one + 272 * 64 * 4}


@pytest.mark.parametrize(
    ("name", "sends"),  # of rank 0, for each micro-batch: to the next stage on another rank, in forward and in backward
    [
        pytest.param("GPipe", 1, marks=pytest.mark.slow),
        pytest.param("1F1B", 1, marks=pytest.mark.slow),
        pytest.param("LoopedBFS", 3, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 3, marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", 3, marks=pytest.mark.slow),
        ("ZBVZeroBubble", 2),
        pytest.param("DualPipeV", 2, marks=pytest.mark.slow),
    ],
)
def test_a_schedule_from_a_file_computes_what_one_process_does(harness, tmp_path, name, sends):
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(build_schedule(name, 2, 8).orders)
    given = {"parallelism.pipeline_parallel_schedule_csv": str(path)}
    one = case("from-a-file", layers(4), given, pp=2)
    found = harness.run(one.overrides, 2)
    compare(harness.reference(one.overrides), found, one.tolerances)
    assert {row["pp"] for row in found.comm_bytes} == {sends * 8 * 32 * 64 * 4}


# ---- nothing is computed twice ---------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts multiplications of matrix products."""

    def __init__(self):
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # below autograd `@` and F.linear are not yet taken apart; the last one is oneDNN's
        if name in ("mm", "matmul", "linear", "addmm", "addmm_", "_linear_pointwise"):
            left = args[1] if name.startswith("addmm") else args[0]
            self.multiplications += out.numel() * left.shape[-1]
        return out

    @contextlib.contextmanager
    def inside_ops(self):
        """What custom ops compute is hidden from modes, unless they are entered again in there."""

        def seen(plain):
            def function(*arguments):
                inside = self not in _get_current_dispatch_mode_stack()
                with self if inside else contextlib.nullcontext():
                    return plain(*arguments)

            return function

        with contextlib.ExitStack() as patches:
            for product in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear"):
                operation = getattr(overlap, product)
                for name in ("forward", "backward"):
                    patches.enter_context(patch.object(operation, name, seen(getattr(operation, name))))
            yield


def counted_step(settings):
    """One step of a rank: multiplications, runs of blocks' functions, weight gradients that waited and were done."""
    from shardline.training.trainer import Trainer

    runs, waited, done, plain = Counter(), Counter(), Counter(), decoder.block_function
    push = weight_queue.push

    def block_function(x, weights, *rest):
        runs["blocks"] += 1
        return plain(x, weights, *rest)

    def counted_push(weights, compute):
        waited["products"] += 1

        def counted():
            done["products"] += 1
            return compute()

        push(weights, counted)

    with _own_logging(), patch.object(decoder, "block_function", block_function):
        trainer = Trainer(load_config(overrides=settings))
        products = Products()
        with patch.object(weight_queue, "push", counted_push), products.inside_ops(), products:
            trainer.train()
        assert len(weight_queue) == 0
        return {
            "multiplications": products.multiplications,
            "blocks": runs["blocks"],
            "waited": waited["products"],
            "done": done["products"],
        }


def counts(harness, tmp_path, ranks, *changes, **degrees):
    """Of all ranks together, in one step of 4 micro-batches through 4 layers."""
    samples = MICRO_BATCHES * degrees.get("ddp", 1) * degrees.get("fsdp", 1)
    batch = {"training.local_batch_size": MICRO_BATCHES, "training.global_batch_size": samples, "training.steps": 1}
    overrides = case("x", layers(4), batch, *changes, **degrees).overrides
    settings = harness.settings(overrides, ranks) | {
        "job.dump_folder": str(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
    }
    found = harness.pool.run(ranks, counted_step, settings)
    return {key: sum(one[key] for one in found) for key in found[0]}


LAYOUTS = [
    pytest.param(2, (), {}, id="plain"),
    pytest.param(4, (), {"tp": 2}, id="tp"),
    pytest.param(4, (cases.NO_SEQUENCE,), {"tp": 2}, id="tp-no-sequence"),
    pytest.param(4, (cases.ASYNC,), {"tp": 2}, id="async"),
    pytest.param(4, (cases.ASYNC, cases.NO_SEQUENCE), {"tp": 2}, id="async-no-sequence"),
    pytest.param(4, (), {"fsdp": 2}, id="fsdp"),
    pytest.param(4, (cases.ALWAYS,), {"fsdp": 2}, id="fsdp-always"),
    pytest.param(4, (), {"ddp": 2}, id="ddp"),
]
RECOMPUTATION = [
    pytest.param({}, 1, id="none"),
    pytest.param(cases.FULL_AC, 2, id="full"),
    pytest.param(cases.OP_AC, 2, id="op"),
]


FAST = {
    "plain-op",
}
SPLIT = [
    pytest.param(*one.values, *ac.values, id=name, marks=[] if name in FAST else [pytest.mark.slow])
    for one in LAYOUTS
    for ac in RECOMPUTATION
    for name in [f"{one.id}-{ac.id}"]
]


@pytest.mark.parametrize(("ranks", "changes", "degrees", "ac", "runs"), SPLIT)
def test_splitting_backward_computes_nothing_twice(harness, tmp_path, ranks, changes, degrees, ac, runs):
    """As many multiplications as whole backward passes through the same stages, and every weight gradient waits."""
    whole = counts(harness, tmp_path, ranks, *changes, ac, cases.LOOPED, pp=2, **degrees)
    copies = ranks // 2
    blocks, products = 4 * MICRO_BATCHES * copies, 4
    for split in (cases.ZBV, cases.ZERO_BUBBLE, cases.DUAL_PIPE):
        found = counts(harness, tmp_path, ranks, *changes, ac, split, pp=2, **degrees)
        assert found["multiplications"] == whole["multiplications"] > 0
        assert found["blocks"] == whole["blocks"] == runs * blocks
        assert found["done"] == found["waited"] > 0
        assert (found["waited"] == products * blocks) == (split is not cases.DUAL_PIPE)  # which splits where it helps
    assert whole["waited"] == 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def run_to(settings):
    from shardline.training.trainer import Trainer

    with _own_logging():
        Trainer(load_config(overrides=settings)).train()


SAVED = {
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "checkpoint.last_save_model_only": False,
    "training.steps": 4,
    "lr_scheduler.total_steps": 4,
}


class Runs:
    """Runs of four steps that save at 2 and 4; `step` ends one earlier."""

    def __init__(self, harness, folder):
        self.harness, self.folder = harness, folder

    def run(self, name, *changes, step=4, **degrees):
        entry = case("x", layers(4), SAVED, *changes, {"training.steps": step}, **degrees)
        folder = {"job.dump_folder": str(self.folder / name)}
        self.harness.pool.run(entry.ranks, run_to, self.harness.settings(entry.overrides, entry.ranks) | folder)
        return dict(files.find_checkpoint(self.folder / name, step).tensors(""))


def difference(a, b):
    assert a.keys() == b.keys()
    return max(
        float((a[name].double() - b[name].double()).norm() / a[name].double().norm().clamp(min=1e-9)) for name in a
    )


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        pytest.param((), {"pp": 2}, marks=pytest.mark.slow),
        pytest.param((cases.TIED, cases.INTERLEAVED), {"pp": 2}, marks=pytest.mark.slow),
        ((cases.TIED, cases.ZBV), {"pp": 2, "fsdp": 2}),
        pytest.param((cases.TIED,), {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_of_stages_is_that_of_one_process_and_resumes_bitwise(harness, tmp_path, changes, degrees):
    runs = Runs(harness, tmp_path)
    whole = runs.run("whole", *changes, **degrees)
    of_model = tuple(change for change in changes if "model.overrides" in change)
    assert difference(runs.run("alone", *of_model), whole) < 1e-4
    runs.run("resumed", *changes, step=2, **degrees)
    again = runs.run("resumed", *changes, **degrees)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_checkpoints_go_from_stages_to_one_process_and_back(harness, tmp_path):
    runs = Runs(harness, tmp_path)
    whole = runs.run("whole", cases.TIED)
    runs.run("there", cases.TIED, step=2, pp=2)
    assert difference(runs.run("there", cases.TIED), whole) < 1e-4
    runs.run("back", cases.TIED, step=2)
    assert difference(runs.run("back", cases.TIED, cases.INTERLEAVED, pp=2), whole) < 1e-4


def test_a_hugging_face_folder_has_the_weights_of_all_stages(harness, tmp_path):
    runs = Runs(harness, tmp_path)
    weights = runs.run("whole", pp=2)
    entry = case(
        "x", layers(4), SAVED, {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}, pp=2
    )
    settings = harness.settings(entry.overrides, 2) | {"job.dump_folder": str(tmp_path / "hf")}
    harness.pool.run(2, run_to, settings)
    exported = load_file(tmp_path / "hf" / "checkpoint" / "step-4" / "model.safetensors")
    assert len(exported) == sum(name.startswith("model/") for name in weights)
    assert torch.equal(exported["model.norm.weight"], weights["model/norm.weight"])
    assert torch.equal(
        exported["model.layers.3.mlp.down_proj.weight"], weights["model/layers.3.feed_forward.w2.weight"]
    )


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def nonfinite_step(settings):
    from shardline.errors import UserError
    from shardline.training.trainer import Trainer

    with _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        if trainer.mesh.rank == 1:
            with torch.no_grad():
                local(trainer.model.block(3).attention.wo.weight).fill_(float("inf"))
        try:
            trainer.train()
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("degree", ["pp", "tp", "fsdp"])
def test_what_is_not_finite_is_named_wherever_it_is(harness, tmp_path, degree):
    """One rank holds it, and all stop: no later step would be better."""
    entry = case("x", layers(4), {"training.nonfinite": "skip"}, **{degree: 2})
    settings = harness.settings(entry.overrides, 2) | {"job.dump_folder": str(tmp_path / "run")}
    for said in harness.pool.run(2, nonfinite_step, settings):
        assert "not finite in the weights of layers.3.attention.wo.weight. No step can repair them" in said


def unequal_step(settings):
    from shardline.errors import UserError
    from shardline.training.trainer import Trainer

    with _own_logging():
        trainer = Trainer(load_config(overrides=settings))
        swap = trainer.stepper.passes.pipeline.channels.swap
        spoilt = (lambda *given: swap(*given) + 1e-3) if trainer.mesh.rank == 1 else swap
        trainer.stepper.passes.pipeline.channels.swap = spoilt
        try:
            trainer.train()
        except UserError as error:
            return str(error)
        return ""


def test_tied_copies_that_drift_apart_are_noticed(harness, tmp_path):
    entry = case("x", layers(4), cases.TIED, cases.CHECKED, pp=2)
    settings = harness.settings(entry.overrides, 2) | {"job.dump_folder": str(tmp_path / "run")}
    for said in harness.pool.run(2, unequal_step, settings):
        assert "tok_embeddings.weight between the first and the last pipeline stage of ranks 0-1" in said


# ---- what is measured ------------------------------------------------------------------------------------------------


def run_by_own_clock(settings):
    """A rank's clock advances whenever it is read: by 1 on rank 0, by 2 on rank 1."""
    ticks = itertools.count(step=1 + int(os.environ["RANK"]))

    class OwnMoments(Moments):
        def mark(self):
            return float(next(ticks))

    with patch.object(executor, "Moments", OwnMoments):
        run_to(settings)


@pytest.mark.parametrize(
    ("schedule", "actions", "promised"),
    [
        ("1F1B", 2 * 8, "11.1% by the schedule"),
        ("Interleaved1F1B", 4 * 8, "5.9% by the schedule; no less than 1F1B's 11.1%"),
    ],
)
def test_every_logged_step_has_its_bubble(harness, tmp_path, schedule, actions, promised):
    changes = {"training.steps": 2, "parallelism.pipeline_parallel_schedule": schedule}
    entry = case("x", layers(4), SAVED, changes, pp=2)
    settings = harness.settings(entry.overrides, 2) | {"job.dump_folder": str(tmp_path / "run")}
    harness.pool.run(2, run_by_own_clock, settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Forward and backward of each stage and micro-batch are one tick long, with one before the next.
    busy, span = actions * (1 + 2) / 2, (2 * actions - 1) * 2  # the mean of both ranks; the longer one
    assert [row["pp_bubble_fraction"] for row in rows] == pytest.approx([1 - busy / span] * 2)
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert f"{1 - busy / span:.1%} of the step, {promised}" in log


def test_too_few_micro_batches_are_a_warning_at_the_start(harness, tmp_path):
    one = {"training.steps": 1, "parallelism.pipeline_parallel_microbatch_size": 8}
    settings = harness.settings(case("x", layers(4), one, pp=2).overrides, 2)
    harness.pool.run(2, run_to, settings | {"job.dump_folder": str(tmp_path / "run")})
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert "WARNING 1F1B: with 1 micro-batch for 2 stages, ranks idle for 50% of a step" in log


def reductions(settings):
    """When FSDP reduced: the stages that were not yet through."""
    from shardline.training.trainer import Trainer

    seen = []
    with _own_logging(), contextlib.ExitStack() as patches:
        trainer = Trainer(load_config(overrides=settings))
        sums, plain = trainer.stepper.passes.sums, stage_sums.reduce_now

        def watched(module):
            seen.append(len(sums.left))
            plain(module)

        patches.enter_context(patch.object(stage_sums, "reduce_now", watched))
        trainer.train()
    return seen


def test_a_stage_is_reduced_as_soon_as_it_is_through(harness, tmp_path):
    """Two stages on each rank: the blocks of the first one that is through do not wait for the other."""
    entry = case("x", layers(4), cases.INTERLEAVED, {"training.steps": 1}, pp=2, fsdp=2)
    settings = harness.settings(entry.overrides, 4) | {"job.dump_folder": str(tmp_path / "run")}
    for seen in harness.pool.run(4, reductions, settings):
        assert sorted(seen) == [0, 0, 1] or sorted(seen) == [0, 1, 1]
