"""metrics.jsonl, TensorBoard, W&B and the rates in them."""

import json
import logging
import math
import os
import sys
import types
from unittest.mock import patch

import pytest
import torch

from shardline.comm.hidden_time import Sampler, Times
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.run.folder import RunFolder
from shardline.telemetry.metrics import KEYS, Meter, MetricsLog, move_rows_after
from shardline.telemetry.serial_steps import SerialComparison
from shardline.training.trainer import Trainer
from tests.e2e.tiny import tiny_config
from tests.parity.harness import _own_logging
from tests.parity.pool import Pool


def make_row(step: int, **changes):
    row = dict.fromkeys(KEYS, 1.5) | {"step": step, "tokens": step * 100, "mfu": None, "comm_bytes": {}}
    return row | changes


def make_config(**options) -> Config:
    return Config.model_validate({"metrics": options})


def make_folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir(exist_ok=True)
    return RunFolder(tmp_path / "run")


def strict_rows(path):
    def refuse(word):
        raise ValueError(f"not JSON: {word}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def test_rows_have_the_keys_of_the_contract(tmp_path):
    folder = RunFolder(tmp_path)
    metrics = MetricsLog(make_config(), folder)
    metrics.log(dict(reversed(make_row(1, comm_bytes={"dp_shard": 12}).items())))
    metrics.log_validation(1, {"loss": 2.25})
    # No close: every line is in the file once the call has returned.
    first, second = strict_rows(folder.metrics_path)
    assert list(first) == list(KEYS)
    assert first["comm_bytes"] == {"dp_shard": 12}
    assert first["mfu"] is None
    assert second == {"step": 1, "validation_loss": 2.25}
    metrics.close()


@pytest.mark.parametrize("change", [{"extra": 1}, None])
def test_row_that_breaks_the_contract_is_an_error(tmp_path, change):
    row = make_row(1, **change) if change else {key: value for key, value in make_row(1).items() if key != "lr"}
    metrics = MetricsLog(make_config(), RunFolder(tmp_path))
    with pytest.raises(ValueError, match="extra" if change else "lr"):
        metrics.log(row)
    metrics.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_json_has_no_word_for_become_null_and_are_said(tmp_path, caplog, value):
    folder = RunFolder(tmp_path)
    metrics = MetricsLog(make_config(), folder)
    with caplog.at_level(logging.WARNING, "shardline"):
        metrics.log(make_row(7, loss=value, grad_norm=value))
    metrics.close()
    (row,) = strict_rows(folder.metrics_path)
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["lr"] == 1.5
    assert f"step 7: loss {value}, grad_norm {value}" in caplog.text


def test_only_rank_0_writes_the_file(tmp_path):
    metrics = MetricsLog(make_config(), RunFolder(tmp_path), rank=1)
    metrics.log(make_row(1))
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_ends_with_a_message(tmp_path):
    metrics = MetricsLog(make_config(), RunFolder(tmp_path))
    metrics.file.close()
    metrics.file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left"):
        metrics.log(make_row(1))
    metrics.close()


# ---- resume ----------------------------------------------------------------------------------------------------------


class AlmostFull:
    """A disk with room for `room` more bytes: a write beyond it is cut short, as the kernel does."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_row_that_does_not_fit_leaves_no_part(tmp_path):
    folder = RunFolder(tmp_path)
    metrics = MetricsLog(make_config(), folder)
    metrics.log_validation(1, {"loss": 2.25})
    metrics.file = AlmostFull(metrics.file, 10)
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: No space left"):
        metrics.log_validation(2, {"loss": 2.5})
    assert strict_rows(folder.metrics_path) == [{"step": 1, "validation_loss": 2.25}]
    metrics.close()


def test_a_sink_that_fails_is_left_out_and_the_rows_go_on(tmp_path, caplog):
    class Broken:
        def write(self, step, scalars):
            raise OSError(28, "No space left on device")

        def close(self):
            raise AssertionError("closed although it was given up")

    folder = RunFolder(tmp_path)
    metrics = MetricsLog(make_config(), folder)
    metrics.sinks = [Broken()]
    with caplog.at_level(logging.WARNING, "shardline"):
        metrics.log_validation(1, {"loss": 2.25})
        metrics.log_validation(2, {"loss": 2.5})
    assert [row["step"] for row in strict_rows(folder.metrics_path)] == [1, 2]
    assert caplog.text.count("Broken is no longer written") == 1
    metrics.close()


def write_rows(path, steps, tail=""):
    path.write_text("".join(json.dumps({"step": step, "loss": 1}) + "\n" for step in steps) + tail)


def steps_in(path):
    return [row["step"] for row in strict_rows(path)]


def test_resume_moves_later_rows_in_order_behind_earlier_ones(tmp_path):
    folder = RunFolder(tmp_path, resume_step=5)
    write_rows(folder.metrics_path, [1, 5, 5, 6, 10])
    write_rows(folder.moved_metrics_path, [8, 9])
    metrics = MetricsLog(make_config(), folder, start_step=5)
    metrics.log(make_row(6))
    metrics.close()
    assert steps_in(folder.metrics_path) == [1, 5, 5, 6]
    assert steps_in(folder.moved_metrics_path) == [8, 9, 6, 10]


def test_resume_at_the_last_row_moves_nothing(tmp_path):
    folder = RunFolder(tmp_path, resume_step=5)
    write_rows(folder.metrics_path, [1, 5])
    MetricsLog(make_config(), folder, start_step=5).close()
    assert steps_in(folder.metrics_path) == [1, 5]
    assert not folder.moved_metrics_path.exists()


def test_resume_from_step_0_moves_everything(tmp_path):
    folder = RunFolder(tmp_path, resume_step=0)
    write_rows(folder.metrics_path, [1, 5])
    MetricsLog(make_config(), folder, start_step=0).close()
    assert folder.metrics_path.read_text() == ""
    assert steps_in(folder.moved_metrics_path) == [1, 5]


@pytest.mark.parametrize("torn", ['{"step": 7, "lo', '{"step": ', "7", "\x00\x00", '{"loss": 3}'])
def test_torn_last_line_is_left_out(tmp_path, caplog, torn):
    folder = RunFolder(tmp_path, resume_step=5)
    write_rows(folder.metrics_path, [1, 5, 6], torn)
    with caplog.at_level(logging.WARNING, "shardline"):
        metrics = MetricsLog(make_config(), folder, start_step=5)
    metrics.log(make_row(6))
    metrics.close()
    assert steps_in(folder.metrics_path) == [1, 5, 6]
    assert steps_in(folder.moved_metrics_path) == [6]
    assert "line 4 is incomplete" in caplog.text


def test_crash_while_moving_loses_no_row(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, resume_step=1)
    write_rows(folder.metrics_path, [1, 2, 3])

    def crash(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shardline.telemetry.metrics.write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            move_rows_after(folder.metrics_path, 1)
    assert steps_in(folder.metrics_path) == [1, 2, 3]
    assert steps_in(folder.moved_metrics_path) == [2, 3]


def test_resume_without_a_metrics_file(tmp_path):
    MetricsLog(make_config(), RunFolder(tmp_path, resume_step=5), start_step=5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def a_sample(step: int, text: str = " of\u2028ice\n"):
    return {"step": step, "prompt": "A sea", "text": text, "tokens": [3, 4], "seconds": 0.1}


def test_samples_have_a_file_of_their_own(tmp_path):
    folder = make_folder(tmp_path)
    metrics = MetricsLog(make_config(), folder)
    metrics.log_samples([a_sample(1), a_sample(1, "é")])
    metrics.log_samples([a_sample(5)])
    metrics.close()
    other = MetricsLog(make_config(), folder, rank=1)
    other.log_samples([a_sample(9)])
    other.close()
    text = folder.samples_path.read_text()
    assert [json.loads(line) for line in text.split("\n")[:-1]] == [a_sample(1), a_sample(1, "é"), a_sample(5)]


def test_samples_of_steps_that_are_trained_again_move(tmp_path):
    folder = RunFolder(tmp_path, resume_step=5)
    first = MetricsLog(make_config(), RunFolder(tmp_path))
    for step in (1, 5, 6):
        first.log_samples([a_sample(step)])
    first.close()
    MetricsLog(make_config(), folder, start_step=5).close()
    assert [json.loads(line)["step"] for line in folder.samples_path.read_text().split("\n")[:-1]] == [1, 5]
    moved = (tmp_path / "samples.before-resume.jsonl").read_text()
    assert [json.loads(line)["step"] for line in moved.split("\n")[:-1]] == [6]


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def scalars_in(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_number(tmp_path):
    metrics = MetricsLog(make_config(enable_tensorboard=True, save_tb_folder="board"), RunFolder(tmp_path))
    metrics.log(make_row(1, comm_bytes={"dp": 8}))
    metrics.log(make_row(2, loss=0.5, mfu=0.25))
    metrics.log_validation(2, {"loss": 0.75})
    metrics.close()
    scalars = scalars_in(tmp_path / "board")
    assert scalars["loss"] == [(1, 1.5), (2, 0.5)]
    assert scalars["mfu"] == [(2, 0.25)]
    assert scalars["comm_bytes/dp"] == [(1, 8.0)]
    assert scalars["validation_loss"] == [(2, 0.75)]
    assert "step" not in scalars


def test_tensorboard_gets_the_text_of_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsLog(make_config(enable_tensorboard=True), make_folder(tmp_path))
    metrics.log_samples([a_sample(3, " is wide")])
    metrics.close()
    events = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    (event,) = events.Tensors("sample/1/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (3, b"A sea is wide")


def test_tensorboard_hides_what_a_resume_repeats(tmp_path):
    config = make_config(enable_tensorboard=True)
    metrics = MetricsLog(config, RunFolder(tmp_path))
    for step in (1, 2, 3):
        metrics.log(make_row(step))
    metrics.close()
    metrics = MetricsLog(config, RunFolder(tmp_path, resume_step=1), start_step=1)
    metrics.log(make_row(2, loss=9.0))
    metrics.close()
    assert scalars_in(tmp_path / "tb")["loss"] == [(1, 1.5), (2, 9.0)]


def test_save_for_all_ranks_gives_each_rank_a_folder(tmp_path):
    for rank in (0, 1):
        options = {"enable_tensorboard": True, "save_for_all_ranks": True}
        metrics = MetricsLog(make_config(**options), RunFolder(tmp_path), rank=rank)
        metrics.log(make_row(1, loss=float(rank)))
        metrics.close()
    assert scalars_in(tmp_path / "tb" / "rank_0")["loss"] == [(1, 0.0)]
    assert scalars_in(tmp_path / "tb" / "rank_1")["loss"] == [(1, 1.0)]
    assert len(strict_rows(tmp_path / "metrics.jsonl")) == 1


def test_other_ranks_write_no_tensorboard_by_default(tmp_path):
    MetricsLog(make_config(enable_tensorboard=True), RunFolder(tmp_path), rank=1).close()
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [
        ("enable_tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("enable_wandb", "wandb", "wandb"),
    ],
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, option, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"metrics\.{option} .*pip install 'shardline\[{extra}\]'"):
        MetricsLog(make_config(**{option: True}), RunFolder(tmp_path))


# ---- W&B -------------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, options):
        self.options, self.rows, self.defined, self.finished = options, [], [], False
        self.id = options["id"] or "new-id"

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch):
    """A stand-in for the wandb module; the runs it was asked to start."""
    for name in ("NAME", "RUN_NAME", "PROJECT", "ENTITY", "TEAM", "RUN_ID", "RUN_GROUP"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    runs = []

    def init(**options):
        runs.append(FakeRun(options))
        return runs[-1]

    table = lambda columns, data: (columns, data)  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Table=table))
    return runs


def test_wandb_gets_config_and_rows(tmp_path, wandb_runs):
    metrics = MetricsLog(make_config(enable_wandb=True), make_folder(tmp_path))
    metrics.log(make_row(3, comm_bytes={"dp": 8}))
    metrics.log_validation(3, {"loss": 2.0})
    metrics.log_samples([a_sample(3, " is")])
    metrics.close()
    (run,) = wandb_runs
    assert run.rows[2] == {"step": 3, "samples": (["step", "prompt", "text"], [[3, "A sea", " is"]])}
    assert run.options["project"] == "shardline"
    assert run.options["name"] == "run"
    assert run.options["config"]["metrics"]["enable_wandb"] is True
    assert run.defined == [("*", "step")]
    assert run.rows[0]["step"] == 3
    assert run.rows[0]["comm_bytes/dp"] == 8
    assert "mfu" not in run.rows[0]
    assert run.rows[1] == {"step": 3, "validation_loss": 2.0}
    assert run.finished


def test_wandb_reads_its_environment(tmp_path, wandb_runs, monkeypatch):
    for name, value in {"PROJECT": "p", "TEAM": "t", "RUN_NAME": "n", "RUN_ID": "i"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    MetricsLog(make_config(enable_wandb=True), RunFolder(tmp_path)).close()
    options = wandb_runs[0].options
    assert (options["project"], options["entity"], options["name"], options["id"]) == ("p", "t", "n", "i")


def test_wandb_keys_take_precedence_over_its_environment(tmp_path, wandb_runs, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "other")
    names = ("project", "entity", "name", "run_id", "group")
    keys = {f"wandb_{name}": name for name in names} | {"wandb_tags": ["a"], "wandb_mode": "offline"}
    MetricsLog(make_config(enable_wandb=True, **keys), RunFolder(tmp_path)).close()
    options = wandb_runs[0].options
    assert [options["id" if name == "run_id" else name] for name in names] == list(names)
    assert (options["tags"], options["mode"]) == (["a"], "offline")


def test_resumed_run_continues_its_wandb_run(tmp_path, wandb_runs):
    config = make_config(enable_wandb=True)
    MetricsLog(config, RunFolder(tmp_path)).close()
    MetricsLog(config, RunFolder(tmp_path, resume_step=5), start_step=5).close()
    assert [run.options["id"] for run in wandb_runs] == [None, "new-id"]


def test_every_rank_has_a_wandb_run_of_one_group(tmp_path, wandb_runs):
    for rank in (0, 1):
        options = {"enable_wandb": True, "save_for_all_ranks": True}
        MetricsLog(make_config(**options), make_folder(tmp_path), rank=rank).close()
    assert [(run.options["name"], run.options["group"]) for run in wandb_runs] == [
        ("run-rank0", "run"),
        ("run-rank1", "run"),
    ]


def test_wandb_that_does_not_start_names_the_offline_mode(tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError("no API key\nand many more lines")

    table = lambda columns, data: (columns, data)  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Table=table))
    with pytest.raises(UserError, match=r"W&B did not start: no API key \(metrics.wandb_mode = 'offline'"):
        MetricsLog(make_config(enable_wandb=True), RunFolder(tmp_path))


# ---- rates -----------------------------------------------------------------------------------------------------------

ARCH = Architecture(dim=8, n_layers=1, n_heads=2, ffn_dim=16, vocab_size=32)


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def test_meter_counts_steps_and_not_pauses():
    clock = Clock()
    meter = Meter(ARCH, 16, torch.device("cpu"), torch.float32, devices=4, clock=clock)
    for _ in range(2):
        meter.fetched(0.25)
        clock.now += 1.0
        meter.stepped(400)
        with meter.paused():
            clock.now += 100.0
    assert meter.rates() == {
        "tokens_per_second": 400.0,
        "tokens_per_second_per_device": 100.0,
        "step_seconds": 1.0,
        "data_seconds": 0.25,
        "mfu": None,
    }


def test_meter_starts_anew_after_each_row():
    clock = Clock()
    meter = Meter(ARCH, 16, torch.device("cpu"), torch.float32, clock=clock)
    clock.now += 10.0
    meter.stepped(100)
    meter.rates()
    clock.now += 2.0
    meter.stepped(100)
    assert meter.rates()["tokens_per_second"] == 50.0


def test_pause_that_fails_is_still_not_counted():
    clock = Clock()
    meter = Meter(ARCH, 16, torch.device("cpu"), torch.float32, clock=clock)
    clock.now += 1.0

    def fail():
        clock.now += 5.0
        raise KeyError

    with pytest.raises(KeyError), meter.paused():
        fail()
    meter.stepped(10)
    assert meter.rates()["step_seconds"] == 1.0


def test_mfu_is_model_flops_over_peak(monkeypatch):
    monkeypatch.setattr("shardline.telemetry.metrics.peak_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr("shardline.telemetry.metrics.flops_per_token", lambda arch, seq_len: 5e3)
    clock = Clock()
    meter = Meter(ARCH, 16, torch.device("cpu"), torch.bfloat16, devices=2, clock=clock)
    clock.now += 1.0
    meter.stepped(200)
    assert meter.rates()["mfu"] == pytest.approx(100 * 5e3 / 1e6)


# ---- the numbers of several ranks ------------------------------------------------------------------------------------


def rows_of_two_ranks(folder, changes):
    """Two steps; each rank measures seconds, GiB and bytes that follow from its number. Returns limits for waits."""
    rank, limits = int(os.environ["RANK"]), []
    brief = patch.multiple("shardline.parallel.tensor.autotune", LEAST_ROUNDS=1, MOST_ROUNDS=1)
    with (
        _own_logging(),
        brief,
        patch("shardline.telemetry.telemetry.exposed.take", lambda: 1.0 + rank),
        patch("shardline.telemetry.telemetry.peak_memory_gib", lambda device: 2.0 + rank),
        patch("shardline.memory.offload.Offload.take", lambda self: 300 + rank),
        patch.object(
            Sampler, "end", lambda self: {axis: Times(2.0 + 2 * rank, 0.5 + rank / 2) for axis in self.by_host}
        ),
        patch.object(SerialComparison, "seconds", lambda self: 5.0 + rank),
        patch("shardline.telemetry.telemetry.watchdog.set_timeouts", limits.append),
    ):
        Trainer(tiny_config(folder, training__steps=2, training__cache_folder=f"{folder}-cache", **changes)).train()
    return limits


@pytest.fixture(scope="module")
def two_ranks():
    pool = Pool()

    def rows(folder, **changes):
        limits = pool.run(2, rows_of_two_ranks, folder, changes)
        assert limits == [[100], [100]], "comm.train_timeout_seconds, once the first step is made"
        return strict_rows(folder / "metrics.jsonl")

    yield rows
    pool.close()


def test_a_row_has_the_numbers_of_the_slower_rank_and_every_token_once(tmp_path, two_ranks):
    offload = {"activation_checkpoint__mode": "offload"}
    rows = two_ranks(tmp_path / "run", parallelism__data_parallel_shard_degree=2, **offload)
    for step, row in enumerate(rows, start=1):
        assert (row["dp_exposed_seconds"], row["memory_gib"], row["offloaded_bytes"]) == (2.0, 3.0, 301)
        assert row["tokens"] == step * 2 * 4 * 32
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(2 * 4 * 32)
        assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)


def test_communication_with_experts_is_that_of_the_slower_rank(tmp_path, two_ranks):
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "ffn_dim": 32, "vocab_size": 272}
    experts = {"moe": {"n_experts": 4, "top_k": 2, "expert_dim": 16}}
    for row in two_ranks(tmp_path / "run", model__overrides=sizes | experts, parallelism__expert_parallel_degree=2):
        seen = [row[f"ep_{name}"] for name in ("comm_seconds", "exposed_seconds", "hidden_fraction")]
        assert seen == [4.0, 1.0, 0.75]


def test_times_with_async_tp_are_those_of_the_slower_rank(tmp_path, two_ranks):
    """The second logged step runs serially, and communication alone is what hidden time is compared with."""
    keys = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True, "async_tensor_parallel_backend": "ring"}
    changes = {f"parallelism__{key}": value for key, value in keys.items()}
    first, second = two_ranks(tmp_path / "run", parallelism__data_parallel_shard_degree=1, **changes)
    of_step = {name: value for name, value in first.items() if name.startswith("tp_")}
    hidden = {"tp_comm_seconds": 4.0, "tp_exposed_seconds": 1.0, "tp_hidden_fraction": 0.75}
    assert of_step == hidden | {"tp_overlapped_step_seconds": 6.0}
    assert {name: value for name, value in second.items() if name.startswith("tp_")} == {
        "tp_comm_seconds": 4.0,
        "tp_serial_step_seconds": 6.0,
    }


def test_the_time_of_a_step_is_from_its_begin_to_its_end(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("shardline.telemetry.serial_steps.time", types.SimpleNamespace(perf_counter=clock))
    comparison = SerialComparison(make_config())
    comparison.begin(1)
    clock.now += 3.0
    assert comparison.seconds() == 3.0


def test_waiting_for_data_is_measured(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("shardline.telemetry.telemetry.time", types.SimpleNamespace(perf_counter=clock))
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=2))
    fetch = trainer.loader.step

    def slow():
        clock.now += 7.0
        return fetch()

    trainer.loader.step = slow
    trainer.train()
    assert [row["data_seconds"] for row in strict_rows(tmp_path / "run" / "metrics.jsonl")] == [7.0, 7.0]


def test_memory_and_time_of_the_set_up_do_not_count(tmp_path, monkeypatch):
    peak, clock = [9.0], Clock()
    monkeypatch.setattr("shardline.telemetry.telemetry.reset_peak", lambda device: peak.append(1.5))
    monkeypatch.setattr("shardline.telemetry.telemetry.peak_memory_gib", lambda device: peak[-1])
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=2))
    trainer.telemetry.meter.clock = clock
    clock.now = trainer.telemetry.meter.started + 1000.0
    trainer.train()
    rows = strict_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(row["memory_gib"], row["step_seconds"]) for row in rows] == [(1.5, pytest.approx(0.0, abs=1e-6))] * 2


def test_the_learning_rate_of_a_row_is_that_of_its_step(tmp_path):
    config = tiny_config(tmp_path / "run", training__steps=4, lr_scheduler__decay_type="linear")
    Trainer(config).train()
    rates = [row["lr"] for row in strict_rows(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([3e-3 * share for share in (0.5, 1.0, 1.0, 0.5)])
