"""What a run notices of itself: ranks that others wait for, losses that jump, and its heartbeat."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import time
from unittest.mock import patch

import pytest
import torch

from shardline.config.layout import Layout
from shardline.data.loader import Loader
from shardline.errors import UserError
from shardline.run.folder import RunFolder
from shardline.run.options import TrainOptions
from shardline.telemetry.heartbeat import Heartbeat
from shardline.telemetry.loss_watch import LEAST, REMEMBERED, LossWatch
from shardline.telemetry.slow_ranks import OWN, ROWS, SlowRanks, parts_of
from shardline.training.trainer import Trainer
from tests.e2e.tiny import run, tiny_config
from tests.parity.harness import _own_logging
from tests.parity.pool import Pool

# ---- slow ranks ------------------------------------------------------------------------------------------------------


def table(layout, seconds=1.0, **of_rank):
    """The slots of all ranks: each computes for half a second, unless `rN` says otherwise."""
    slots = []
    for rank in range(layout.world_size):
        slots += of_rank.get(f"r{rank}", (0.01, 0.5, 0.05))
    return seconds, slots


def test_a_slow_rank_is_named_once_with_its_phase_and_again_when_it_is_not():
    ranks, layout = SlowRanks(Layout(dp_shard=4), 0), Layout(dp_shard=4)
    slow = table(layout, r2=(0.01, 0.8, 0.05))
    found = [ranks.add(*slow) for _ in range(ROWS + 4)]
    assert [number for number, lines in enumerate(found) if lines] == [ROWS]  # the first row never counts
    ((rank, line),) = found[ROWS]
    assert rank == 2
    assert line.startswith("is slow in forward and backward: 0.8 s against 0.5 s of others, in 5 logged steps in a row")
    assert "waits 0.3 s for it" in line
    assert ranks.add(*table(layout)) == [(2, "is as fast as the others again")]
    assert ranks.add(*table(layout)) == []


@pytest.mark.parametrize(("phase", "words"), [(0, "loading data"), (2, "the optimizer's update")])
def test_the_phase_is_the_one_that_costs_most(phase, words):
    layout = Layout(dp_shard=2)
    ranks, parts = SlowRanks(layout, 0), [0.01, 0.5, 0.05]
    parts[phase] += 0.3
    lines = [line for _ in range(ROWS + 1) for line in ranks.add(*table(layout, r1=parts))]
    assert [(rank, line.split(":")[0]) for rank, line in lines] == [(1, f"is slow in {words}")]


def test_ranks_of_other_stages_and_single_slow_steps_are_no_slow_ranks():
    layout = Layout(pp=2, dp_shard=2)
    ranks = SlowRanks(layout, 0)
    longer = table(layout, r0=(0.01, 0.9, 0.05), r1=(0.01, 0.9, 0.05))  # the first stage has more layers
    assert [ranks.add(*longer) for _ in range(3 * ROWS)] == [[]] * (3 * ROWS)
    for number in range(4 * ROWS):
        once = table(layout, r3=(0.01, 0.9 if number % ROWS else 0.5, 0.05))
        assert ranks.add(*once) == []


def test_less_than_a_millisecond_makes_no_slow_rank():
    layout = Layout(dp_shard=2)
    ranks, short = SlowRanks(layout, 0), {"r0": (0.0, 1e-3, 0.0), "r1": (0.0, 1.9e-3, 0.0)}
    assert [ranks.add(*table(layout, 2e-3, **short)) for _ in range(3 * ROWS)] == [[]] * (3 * ROWS)


def test_what_a_pipeline_waits_for_is_idle_time():
    row = {"seconds": 1.0, "data": 0.0, "idle": 0.2, "comm": {"pp": 0.3}}
    parts = parts_of({**row, "exposed": {"pp": 0.05, "other": 0.1, "tp": 0.02}})
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    assert parts == pytest.approx({"idle": 0.3, "exposed tp": 0.02, "hidden pp": 0.25, "compute": 0.43})


def test_slots_of_ranks_add_up_to_one_table():
    layout = Layout(dp_shard=2)
    row = {"seconds": 1.0, "data": 0.1, "optimizer": 0.2, "comm": {"dp_shard": 0.3}, "exposed": {"dp_shard": 0.25}}
    first, second = (SlowRanks(layout, rank).slots(row) for rank in (0, 1))
    assert first[len(OWN) :] == second[: len(OWN)] == [0.0] * len(OWN)
    assert first[: len(OWN)] == pytest.approx([0.1, 0.45, 0.2]) == second[len(OWN) :]


def test_the_machine_of_a_rank_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.host_words(1) == ""
    folder.write_ranks([{"rank": 0, "host": "node0", "pid": 1}, {"rank": 1, "host": "node1", "pid": 2}])
    assert [folder.host_words(rank) for rank in (1, 2)] == [" on node1", ""]


def steps_of_two_ranks(folder):
    """Warnings of a run in which rank 1 waits long for its data, and what it shows to Prometheus."""
    messages = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_logging())
        trainer = Trainer(tiny_config(folder, training__steps=ROWS + 2, parallelism__data_parallel_shard_degree=2))
        load = Loader.step

        def late(self):
            if self is trainer.loader and trainer.mesh.rank == 1:
                time.sleep(0.6)
            return load(self)

        stack.enter_context(patch.object(Loader, "step", late))
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("shardline").addHandler(handler)
        trainer.train()
        logging.getLogger("shardline").removeHandler(handler)
    return messages, trainer.telemetry.exporter.text().splitlines()


def test_a_run_names_the_rank_whose_data_comes_late(tmp_path):
    pool = Pool()
    (messages, shown), (other, _) = pool.run(2, steps_of_two_ranks, tmp_path / "run")
    pool.close()
    (line,) = (message for message in messages if "is slow" in message)
    before, _, after = line.partition(" is slow in loading data: ")
    assert before == f"step {ROWS + 1}: rank 1"
    assert float(after.split()[0]) >= 0.6
    assert not [message for message in other if "is slow" in message]
    waited = [line.split()[1] for line in shown if line.startswith('shardline_rank_seconds{rank="1",phase="data"}')]
    assert [float(one) >= 0.6 for one in waited] == [True]
    assert any(line.startswith("shardline_run_info{") and 'layout="dp_shard 2"' in line for line in shown)
    warned = [json.loads(row) for row in (tmp_path / "run" / "log" / "telemetry-0.jsonl").read_text().splitlines()]
    assert [row["text"] for row in warned if row["event"] == "warning"] == [line]


# ---- jumps of the loss -----------------------------------------------------------------------------------------------


def watched(losses, **options):
    watch = LossWatch(**options)
    return [line for step, loss in enumerate(losses, start=1) if (line := watch.add(step, loss, 9.0))]


def noisy(count, level, noise=0.1):
    draw = random.Random(1)
    return [level + draw.gauss(0, noise) for _ in range(count)]


def test_a_spike_is_named_with_its_step_and_its_end():
    lines = watched([*noisy(40, 2.5), 6.5, 5.0, *noisy(5, 2.5)])
    assert len(lines) == 2
    assert lines[0].startswith("step 41: the loss jumped to 6.5, from a median of 2.5")
    assert lines[0].endswith("(gradient norm 9); the run goes on, training.max_loss would end it")
    assert lines[1].startswith("step 43: the loss is 2.")
    assert lines[1].endswith("2 steps after its spike")
    assert "above 4 it ends" in watched([*noisy(40, 2.5), 6.5], max_loss=4.0)[0]


def test_a_loss_that_stays_high_is_said_once_and_is_then_the_usual_one():
    lines = watched([*noisy(40, 2.5), *noisy(3 * REMEMBERED, 7.0)])
    assert len(lines) == 2
    assert lines[1].startswith(f"step {41 + REMEMBERED}: the loss has stayed at ")
    assert "since step 41" in lines[1]


@pytest.mark.parametrize(
    "losses",
    [
        [11.0 * math.exp(-step / 50) + 2 for step in range(300)],  # falls
        noisy(500, 2.5, 0.3),
        noisy(500, 0.01, 0.0005),
        [2.0] * 100 + [2.1] * 5 + [2.0] * 50,  # hardly varies, and moves by less than a fifth
        [2.0] * (LEAST - 1) + [9.0],  # too early to tell
        [2.0] * 50 + [math.nan, math.inf, 2.0],  # the step itself says so
    ],
    ids=["falling", "noisy", "small", "steady", "early", "not finite"],
)
def test_what_is_no_spike(losses):
    assert watched(losses) == []


def test_a_run_tells_of_a_jump(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=LEAST + 3))
    step = trainer.stepper.step

    def jumps(batches, lr, number, *rest, **more):
        result = step(batches, lr, number, *rest, **more)
        return result._replace(loss=99.0) if number == LEAST + 2 else result

    with patch.object(trainer.stepper, "step", jumps):
        trainer.train()
    text = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert f"WARNING step {LEAST + 2}: the loss jumped to 99" in text
    assert f"step {LEAST + 3}: the loss is" in text


def test_a_loss_that_is_no_number_is_named_with_what_is_done(tmp_path):
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=3))
    broken = torch.tensor([math.nan])
    with patch.object(trainer.stepper, "forward_backward", lambda batches: broken):
        with pytest.raises(UserError, match=r'step 1: loss nan.*parameters were not changed.*nonfinite = "skip"'):
            trainer.train()
    assert beat(tmp_path / "run")["doing"] == "failed"


# ---- the heartbeat ---------------------------------------------------------------------------------------------------


def beat(folder):
    return json.loads((folder / "log" / "heartbeat.json").read_text())


def test_the_heartbeat_says_what_a_run_does(tmp_path):
    seen = []
    trainer = Trainer(
        tiny_config(
            tmp_path / "run",
            training__steps=2,
            checkpoint__enable=True,
            validation__enable=True,
            validation__freq=2,
            validation__steps=1,
        )
    )
    written = trainer.telemetry.heartbeat.beat

    def noting(doing, **facts):
        written(doing, **facts)
        seen.append(beat(tmp_path / "run")["doing"])

    with patch.object(trainer.telemetry.heartbeat, "beat", noting):
        trainer.train()
    order = [doing for doing, before in zip(seen, [None, *seen[:-1]], strict=True) if doing != before]
    assert order == ["training", "validating", "training", "validating", "training", "saving", "training", "ended"]
    last = beat(tmp_path / "run")
    assert (last["step"], last["last_step"], last["stopped_by"]) == (2, 2, None)
    assert last["loss"] > 0


def test_a_beat_a_second_and_none_of_other_ranks(tmp_path):
    clock = [100.0]
    heart = Heartbeat(tmp_path, 0, lambda: clock[0])
    for step in range(1, 25):
        clock[0] += 0.125
        heart.beat("training", step=step)
        assert beat(tmp_path)["step"] in (1, 9, 17)
    Heartbeat(tmp_path / "other", 1).beat("training")
    assert not (tmp_path / "other").exists()


def test_a_heartbeat_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "log").write_text("a file")
    heart = Heartbeat(tmp_path, 0)
    with caplog.at_level(logging.WARNING, "shardline"), heart.running(0, 5, lambda: None):
        heart.beat("training", now=True)
    assert caplog.text.count("is no longer written") == 1


def test_overwrite_moves_the_heartbeat_aside(tmp_path):
    run(tmp_path / "run", training__steps=1)
    run(tmp_path / "run", TrainOptions(overwrite=True), training__steps=2)
    (aside,) = (tmp_path / "run").glob("replaced-*")
    assert (beat(aside)["step"], beat(tmp_path / "run")["step"]) == (1, 2)
