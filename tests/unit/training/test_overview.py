"""The table of the start, its notes, and what a resumed run says and refuses."""

import re

import pytest
import torch

from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.models.flavors import model_label, resolve
from shardline.parallel.apply import make_model
from shardline.plan.check import before_start
from shardline.precision.mixed import choose_precision
from shardline.run.options import TrainOptions
from shardline.training import overview
from shardline.training.memory_need import memory_need, save_bytes
from shardline.training.overview import usual_rate
from shardline.training.trainer import Trainer
from tests.e2e.tiny import TINY, run, tiny_config

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2}


def started(folder, capsys, options=None, **changes):
    """What a run prints before its first step: its table by label, and all of it."""
    trainer = Trainer(tiny_config(folder, **changes), options)
    trainer.close()
    text = capsys.readouterr().out
    return dict(re.findall(r"^(\w[\w ]{0,10}?) {2,}(.+)$", text, re.MULTILINE)), text


def test_every_line_of_the_table(tmp_path, capsys):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("Once upon a time there was a small language model. " * 40)
    table, text = started(
        tmp_path / "run",
        capsys,
        training__dataset_path=f"{tmp_path}/*.txt",
        training__cache_folder=str(tmp_path / "cache"),
        training__gradient_accumulation_steps=2,
        training__steps=8,
        model__tokenizer_path="bytes",
        lr_scheduler__min_lr_factor=0.1,
        lr_scheduler__decay_type="cosine",
        **SAVING,
        checkpoint__keep_latest_k=3,
    )
    assert table["model"] == "llama3 debugmodel, 96,576 parameters"
    assert table["precision"].startswith("float32; attention by ")
    tokens = 2 * (40 * 51 + 2)
    epochs = 8 * 8 / ((tokens - 1) // 32)
    assert table["data"] == f"{tmp_path}/*.txt: 2 files, {tokens:,} tokens; 8 steps make {epochs:.2g} epochs"
    assert table["tokenizer"] == "bytes, 258 ids"
    assert table["batch"] == "32 tokens x 4 sequences x 2 micro-batches = 8 sequences, 256 tokens a step"
    assert table["schedule"] == "AdamW, 8 steps: warmup 2, peak 0.003, cosine to 0.0003"
    words = (
        r"about [\d.]+ [MG]iB of [\d.]+ GiB: weights 377 KiB, gradients 445 KiB, AdamW state 754 KiB, activations .*"
    )
    assert re.fullmatch(words, table["memory"])
    assert table["run folder"] == str(tmp_path / "run")
    assert table["checkpoints"] == "every 2 steps and at the end, the newest 3 kept, about 1.11 MiB each"
    assert "note: no learning rate" not in text
    assert "warning" not in text
    assert "changed" not in table


def test_a_learning_rate_that_nobody_gave_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(TINY, "optimizer.lr")
    _, text = started(tmp_path / "run", capsys)
    said = "note: no learning rate was given: optimizer.lr = 0.0008 is the default; usual for 96,576 parameters: 1e-3\n"
    assert said in text


@pytest.mark.parametrize(
    ("parameters", "changes", "words"),
    [
        (8_030_000_000, {}, "8,030,000,000 parameters: 1.2e-4 to 3e-4"),
        (405_000_000_000, {}, "405,000,000,000 parameters: 8e-5"),
        (8_030_000_000, {"lora.enable": True}, "LoRA: 1e-4 to 2e-4"),
        (1, {"checkpoint.enable": True, "checkpoint.initial_load_path": "x"}, "fine-tuning all weights: 1e-5 to 2e-5"),
    ],
)
def test_usual_rates(parameters, changes, words):
    assert usual_rate(load_config(overrides=changes), parameters) == words


def test_real_data_that_is_not_saved_is_a_warning(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Once upon a time. " * 40)
    data = {"training__dataset_path": str(tmp_path / "a.txt"), "training__cache_folder": str(tmp_path / "cache")}
    table, text = started(tmp_path / "run", capsys, model__tokenizer_path="bytes", **data)
    assert table["checkpoints"] == "none, nothing will be saved: checkpoint.enable is false"
    assert "warning: this run will not be saved: checkpoint.enable is false (--checkpoint.enable saves it)" in text
    _, text = started(tmp_path / "generated", capsys)
    assert "warning" not in text


def test_memory_that_is_not_there_is_a_warning(tmp_path, capsys, monkeypatch):
    for room in ("training.overview", "plan.check"):
        monkeypatch.setattr(f"shardline.{room}.available_memory", lambda device, ranks: free)
    free = 2**20
    _, text = started(tmp_path / "run", capsys)
    said = r"warning: about [\d.]+ MiB of memory are needed and 1 MiB are free; more ranks or a shorter"
    assert re.search(said, text)
    free = 2_300_000
    _, text = started(tmp_path / "other", capsys)
    smaller = "--training.local_batch_size=1 --training.global_batch_size=4"
    assert re.search(rf"warning: .* are free; what fits, the fastest first: .*{smaller}", text)


def test_the_table_says_which_steps_are_validated(tmp_path, capsys):
    keys = {"validation__enable": True, "validation__freq": 3, "validation__steps": 1, "training__steps": 5}
    row = started(tmp_path / "run", capsys, **keys)[0]["validation"]
    assert re.fullmatch(r"every 3 steps, and after the first and the last: \d+ samples of demo \(generated text\)", row)
    assert [one["step"] for one in run(tmp_path / "run", **keys) if "validation_loss" in one] == [1, 3, 5]


def test_the_table_has_the_clock_of_saves_the_samples_of_a_validation_and_what_is_held(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardline.training.overview.resident_memory", lambda: 5 * 2**30)
    validation = {"validation__enable": True, "validation__freq": 3, "validation__steps": 1}
    saves = {"checkpoint__enable": True, "checkpoint__interval": 60, "checkpoint__interval_type": "seconds"}
    weights = {"checkpoint__keep_latest_k": 0, "checkpoint__last_save_model_only": True}
    table, _ = started(tmp_path / "run", capsys, **validation, **saves, **weights)
    assert table["checkpoints"].startswith("every 60 seconds and at the end, all kept, about ")
    assert table["checkpoints"].endswith(" each, the last one weights only")
    assert table["validation"].endswith(": 8 samples of demo (generated text)")
    assert table["memory"].startswith("about 5 GiB of ")
    assert table["memory"].endswith(", the process itself 5 GiB")


def test_the_batch_of_pairs_and_of_ranks_in_words():
    config = tiny_config("x", training__objective="dpo", training__gradient_accumulation_steps=2)
    words = "2 x 32 tokens x 4 pairs x 2 micro-batches x 3 data ranks = 24 pairs, 1,536 tokens a step"
    assert overview._batch(config, 3) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decay_type": "cosine", "min_lr_factor": 0.1, "total_steps": 16}, "peak 0.003, cosine to 0.0003 at step 16"),
        ({"decay_type": "constant"}, "peak 0.003, then constant"),
        ({"min_lr_factor": 1.0}, "peak 0.003, then constant"),
    ],
)
def test_the_schedule_in_words(changes, words):
    config = tiny_config("x", **{f"lr_scheduler__{name}": value for name, value in changes.items()})
    assert overview._schedule(config, 8, 4) == f"AdamW, 8 steps: warmup 2, {words}"
    grown = config.replace({"optimizer.lr_scaling": "linear", "optimizer.lr_scaling_base_batch": 2})
    assert f"peak {0.003 * 4 / 2:.3g}" in overview._schedule(grown, 8, 4)


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        (
            "diloco",
            {"sync_steps": 8, "outer_momentum": 0.5, "num_fragments": 2, "fragment_sync_delay": 3}
            | {"should_quantize": True, "quantized_dtype": "float8"},
            "averaged every 8 steps in 2 fragments, applied 3 steps later, sent in float8"
            " (DiLoCo, outer rate 0.7, momentum 0.5)",
        ),
        ("diloco", {"semi_sync_method": "local_sgd"}, "averaged every 5 steps (local SGD)"),
        (
            "async",
            {"async_staleness": 4, "async_late": "drop", "async_late_seconds": 30.0},
            "contributions at most 4 steps late, late workers dropped after 30 s",
        ),
    ],
    ids=["diloco", "local-sgd", "async"],
)
def test_workers_in_words(mode, changes, words):
    keys = {f"fault_tolerance__{name}": value for name, value in changes.items()}
    config = tiny_config("x", parallelism__data_parallel_mode=mode, **keys)
    found = overview._workers(config, 2)
    assert found.startswith("2, ")
    assert found.endswith(words)


def test_a_model_of_a_folder_is_named_by_it(tmp_path):
    folder = tmp_path / "SmolLM"
    folder.mkdir()
    cached = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca"
    cached.mkdir(parents=True)
    for path, label in ((folder, "SmolLM"), (cached, "Qwen/Qwen3-0.6B")):
        config = load_config(overrides={"model.name": "auto", "model.hf_assets_path": str(path)})
        assert model_label(config.model) == label


# ---- resumed runs ----------------------------------------------------------------------------------------------------


def interrupted(tmp_path):
    """A run of 8 steps that a signal stopped at step 4, in the middle of its decay."""
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=8, **SAVING))
    step = trainer.train_step

    def stop_after_four(*arguments):
        if trainer.progress.step == 3:
            trainer.requests.stop = "SIGTERM"
        return step(*arguments)

    trainer.train_step = stop_after_four
    assert trainer.train().step == 4
    return tmp_path / "run"


def test_what_differs_is_a_line_of_the_table(tmp_path, capsys):
    folder = interrupted(tmp_path)
    capsys.readouterr()
    same, text = started(folder, capsys, TrainOptions(resume=True), training__steps=8, **SAVING)
    assert "changed" not in same
    assert "note: the learning rate" not in text
    other = {"metrics__log_freq": 5, "debug__check_replicas_freq": 1, "training__steps": 8}
    table, _ = started(folder, capsys, TrainOptions(resume=True), **other, **SAVING)
    assert table["changed"] == "metrics.log_freq from 1 to 5, debug.check_replicas_freq from 0 to 1"


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"training__steps": 16}, "0.00279"),  # a decay of 14 steps, not 6
        ({"training__steps": 8, "optimizer__lr": 1e-3}, "0.000833"),
        ({"training__steps": 8, "lr_scheduler__decay_type": "constant"}, "0.003"),
    ],
)
def test_a_bent_learning_rate_is_refused(tmp_path, changes, rate):
    folder = interrupted(tmp_path)
    said = rf"step-4: step 4 had a learning rate of 0\.0025; with this config it would have had {re.escape(rate)}\."
    with pytest.raises(UserError, match=said) as refused:
        Trainer(tiny_config(folder, **SAVING, **changes))
    assert "it was to end at step 8, and --lr_scheduler.total_steps=8 keeps its schedule" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"lr_scheduler__bend_on_resume": True}, "the learning rate continues at 0.00257; it was 0.0025 in step 4"),
        ({"checkpoint__exclude_from_loading": ["lr_scheduler"]}, None),
        ({"lr_scheduler__total_steps": 8}, None),
    ],
    ids=["bend", "anew", "kept"],
)
def test_a_longer_run_that_is_asked_for(tmp_path, capsys, changes, note):
    folder = interrupted(tmp_path)
    capsys.readouterr()
    _, text = started(folder, capsys, training__steps=16, **SAVING, **changes)
    assert re.findall(r"note: (the learning rate continues .*)", text) == ([] if note is None else [note])


def test_a_finished_run_goes_on_with_a_note(tmp_path, capsys):
    run(tmp_path / "run", training__steps=4, **SAVING)
    capsys.readouterr()
    _, text = started(tmp_path / "run", capsys, training__steps=8, **SAVING)
    assert "note: the learning rate continues at 0.002; it was 0.0015 in step 4" in text


def test_a_length_that_changes_no_rate_needs_no_question(tmp_path, capsys):
    constant = {"lr_scheduler__decay_type": "constant", **SAVING}
    run(tmp_path / "run", training__steps=4, **constant)
    capsys.readouterr()
    _, text = started(tmp_path / "run", capsys, training__steps=8, **constant)
    assert "the learning rate continues" not in text


# ---- memory ----------------------------------------------------------------------------------------------------------


def need_of(**changes):
    config = load_config(overrides=TINY | {key.replace("__", "."): value for key, value in changes.items()})
    precision, device = choose_precision(config, torch.device("cpu"), has_bfloat16=True), torch.device("cpu")
    arch = resolve(config.model)
    model, _ = make_model(arch, config, None, precision)
    planned = before_start(config, arch, Layout(), device).memory
    need = memory_need(model, config, Layout(), precision, "cpu", planned)
    return need, save_bytes(model, config, precision), planned


def test_what_is_kept_of_parameters_is_exact():
    need, saved, _ = need_of()
    assert (need.weights, need.state) == (4 * 96_576, 8 * 96_576)
    assert saved == 12 * 96_576
    bfloat16, *_ = need_of(optimizer__state_dtype="bfloat16")
    assert bfloat16.state == 4 * 96_576
    muon, *_ = need_of(optimizer__name="Muon")
    assert need.state > muon.state > need.state / 2


def test_a_frozen_copy_for_pairs_is_kept_in_the_type_of_computing():
    need, *_ = need_of(training__objective="dpo", training__mixed_precision_param="bfloat16")
    assert need.weights == (4 + 2) * 96_576


def test_the_rest_is_what_the_planner_expects():
    need, _, planned = need_of(training__gradient_accumulation_steps=2)
    assert need.peak == pytest.approx(planned.total, rel=0.01)
    assert need.gradients == int(planned.gradients)
    assert need.activations == pytest.approx(planned.activations + planned.buffers + planned.fragments, abs=2)
    assert need.peak == need.weights + need.gradients + need.state + need.activations


def test_activations_that_nobody_knows():
    config = load_config(overrides=TINY)
    precision = choose_precision(config, torch.device("cpu"), has_bfloat16=True)
    model, _ = make_model(resolve(config.model), config, None, precision)
    need = memory_need(model, config, Layout(), precision, "cpu", None)
    assert need.peak == 16 * 96_576
    assert need.words("AdamW").endswith("activations unknown")
