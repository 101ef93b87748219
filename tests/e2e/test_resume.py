"""Checkpoints: an interrupted run goes on as if nothing had happened; what is broken or foreign is refused."""

import itertools
import json
import math
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from shardline.checkpoint import background
from shardline.checkpoint import format as files
from shardline.checkpoint.resume import RunPosition, Start
from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.run.options import TrainOptions
from shardline.storage import crash_points as save_points
from shardline.training.setup import Setup
from shardline.training.trainer import Trainer
from tests.e2e.tiny import rows, run, tiny_config

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False}
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens")


def numbers(written):
    return [[row[key] for key in NUMBERS] for row in written]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return numbers(run(folder, training__steps=8, **SAVING)), folder


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, uninterrupted):
    whole, whole_folder = uninterrupted
    folder = tmp_path / "run"
    run(folder, training__steps=5, lr_scheduler__total_steps=8, **SAVING)
    resumed = Trainer(tiny_config(folder, training__steps=8, checkpoint__load_step=4, **SAVING))
    assert resumed.progress.step == 4
    resumed.train()
    assert numbers(rows(folder))[4:] == whole[4:]
    assert [row["step"] for row in rows(folder, "metrics.before-resume.jsonl")] == [5]
    a, b = (files.find_checkpoint(f, 8) for f in (folder, whole_folder))
    for prefix in ("model/", "optimizer/"):
        left, right = a.tensors(prefix), b.tensors(prefix)
        assert set(left) == set(right)
        assert len(left) > 0
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_rank_whose_disk_lacks_the_checkpoint_says_so(tmp_path, monkeypatch):
    """Rank 0 chooses on its own machine; another one sees another disk."""
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    mesh = SimpleNamespace(
        from_rank_0=lambda choose: SimpleNamespace(name="step-4", step=4, finished=False),
        from_everyone=lambda value: [value],
    )
    start = Start(tiny_config(tmp_path, **SAVING), tmp_path / "checkpoint", None, None, None, 8, mesh)
    with pytest.raises(UserError) as said:
        start.run(resume=True, seed=0)
    assert str(said.value) == (
        f"node7 has no step-4 in {tmp_path / 'checkpoint'}: checkpoints must be on a disk that all machines share"
    )


def test_checkpoints_hold_unfused_names(uninterrupted):
    saved = files.find_checkpoint(uninterrupted[1], 8)
    names = set(saved.tensors("model/"))
    assert {"layers.0.attention.wq.weight", "layers.0.feed_forward.w3.weight", "norm.weight"} <= names
    assert not any("wqkv" in name or "w13" in name for name in names)
    assert "exp_avg/layers.1.attention.wk.weight" in set(saved.tensors("optimizer/"))


def test_a_run_that_does_not_start_replaces_none(tmp_path):
    run(tmp_path / "run", training__steps=2, **SAVING)
    with pytest.raises(UserError, match="absent does not exist"):
        run(tmp_path / "run", TrainOptions(overwrite=True), checkpoint__initial_load_path="absent", **SAVING)
    assert len(run(tmp_path / "run", training__steps=4, **SAVING)) == 4


def test_a_finished_run_says_so(tmp_path, uninterrupted, capsys):
    folder = uninterrupted[1]
    result = Trainer(tiny_config(folder, training__steps=8, **SAVING)).train()
    assert result.finished_before
    assert "already finished at step 8" in (folder / "log" / "rank-0.log").read_text()


def test_weights_only_never_resume_as_full(tmp_path):
    folder = tmp_path / "run"
    settings = {"checkpoint__enable": True, "checkpoint__interval": 100, "checkpoint__last_save_model_only": True}
    run(folder, training__steps=3, **settings)
    assert files.find_checkpoint(folder).kind == "model"
    assert Trainer(tiny_config(folder, training__steps=3, **settings)).train().finished_before
    weights = folder / "checkpoint" / "step-3"
    for options in (None, TrainOptions(resume=True)):
        with pytest.raises(
            UserError, match=r"holds weights only \(checkpoint.last_save_model_only, or an import\)"
        ) as caught:
            Trainer(tiny_config(folder, training__steps=6, **settings), options)
    (remedy,) = re.findall(r"--checkpoint.(initial_load_path)=(\S+);", str(caught.value))
    assert remedy == ("initial_load_path", str(weights))
    begun = run(tmp_path / "other", training__steps=1, checkpoint__enable=True, checkpoint__initial_load_path=remedy[1])
    assert begun[-1]["loss"] < rows(folder)[0]["loss"]


def test_a_finished_run_is_trained_longer(tmp_path):
    """Where the learning rate does not depend on the number of steps, as the run that was never finished."""
    settings = {"checkpoint__enable": True, "lr_scheduler__decay_type": "constant"}
    straight = run(tmp_path / "straight", training__steps=6, **settings)
    run(tmp_path / "run", training__steps=3, **settings)
    log = tmp_path / "run" / "log" / "rank-0.log"
    assert re.search(r"last save +step 3, [\d.]+ [KM]iB: all of the run is in it", log.read_text())
    assert Trainer(tiny_config(tmp_path / "run", training__steps=3, **settings)).train().finished_before
    assert "nothing to do; training.steps > 3 continues it" in log.read_text()
    longer = run(tmp_path / "run", training__steps=6, **settings)
    assert numbers(longer) == numbers(straight)
    assert files.find_checkpoint(tmp_path / "run", 6).kind == "full"


def test_checkpoints_by_the_clock(tmp_path):
    """Five seconds a step: a save is due after the steps at 12 seconds or more since the last one."""
    settings = SAVING | {"checkpoint__interval": 12, "checkpoint__interval_type": "seconds"}
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=8, **settings))
    seconds = itertools.count(5, 5)
    trainer.requests.clock, trainer.requests._last_due = lambda: next(seconds), 0
    trainer.train()
    saved = [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()]
    assert sorted(saved) == ["step-3", "step-6", "step-8"]
    assert "every 12 seconds and at the end" in (tmp_path / "run" / "log" / "rank-0.log").read_text()


def test_a_damaged_checkpoint_gives_way_to_the_copy_it_replaced(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=4, lr_scheduler__total_steps=8, **SAVING)
    newest = folder / "checkpoint" / "step-4"
    shutil.copytree(newest, newest.with_name("step-4.replaced"))  # a crash between the renaming and the removal
    state = newest / files.shard_name(0, 1)
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    trainer = Trainer(tiny_config(folder, training__steps=6, lr_scheduler__total_steps=8, **SAVING))
    assert trainer.progress.step == 4
    trainer.close()


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=4, lr_scheduler__total_steps=8, **SAVING)
    state = folder / "checkpoint" / "step-4" / files.shard_name(0, 1)
    content = bytearray(state.read_bytes())
    content[-100] ^= 1
    state.write_bytes(content)
    trainer = Trainer(tiny_config(folder, training__steps=8, **SAVING))
    assert trainer.progress.step == 2
    trainer.close()
    with pytest.raises(UserError, match="damaged"):
        Trainer(tiny_config(folder, training__steps=8, checkpoint__load_step=4, **SAVING))


def test_another_model_or_other_data_is_refused(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=2, **SAVING)
    wider = {**tiny_config(folder).model.overrides, "ffn_dim": 128}
    with pytest.raises(UserError, match=r"another model.*ffn_dim: 96 -> 128"):
        Trainer(tiny_config(folder, model__overrides=wider, **SAVING))
    with pytest.raises(UserError, match=r"would change its data.*seed: 0 -> 1"):
        Trainer(tiny_config(folder, debug__seed=1, **SAVING))
    with pytest.raises(UserError, match=r"global_batch_size: 4 -> 8"):
        Trainer(tiny_config(folder, training__global_batch_size=8, **SAVING))
    fresh_data = {"debug__seed": 1, "checkpoint__exclude_from_loading": ["dataloader"]}
    trainer = Trainer(tiny_config(folder, **fresh_data, **SAVING))
    assert (trainer.progress.step, trainer.progress.samples) == (2, 0)
    trainer.close()


def test_a_folder_with_a_run_is_refused_and_overwrite_replaces_it(tmp_path):
    folder = tmp_path / "run"
    run(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--overwrite"):
        Trainer(tiny_config(folder))
    with pytest.raises(UserError, match="--resume"):
        Trainer(tiny_config(folder, checkpoint__enable=True), TrainOptions(resume=True))
    assert len(run(folder, TrainOptions(overwrite=True), training__steps=2)) == 2
    assert (folder / "notes.txt").read_text() == "mine"
    seed = {"checkpoint__enable": True, "checkpoint__create_seed_checkpoint": True}
    Trainer(tiny_config(folder, **seed), TrainOptions(overwrite=True)).train()
    assert len(list(folder.glob("replaced-*"))) == 2
    assert not list(folder.glob("replaced-*/.pending"))  # a step and a save settle it


def test_a_run_that_failed_before_its_first_step_does_not_block_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(Setup, "_start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Trainer(tiny_config(folder))
    monkeypatch.undo()
    assert len(run(folder)) == 6


def test_pruning_keeps_the_newest_and_one_that_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    settings = {"checkpoint__last_save_model_only": True, "checkpoint__interval": 2, "checkpoint__keep_latest_k": 1}
    run(folder, training__steps=6, checkpoint__enable=True, **settings)
    kept = files.list_checkpoints(folder / "checkpoint")
    assert [(saved.step, saved.kind) for saved in kept] == [(4, "full"), (6, "model")]


def test_seed_checkpoint_and_initial_load(tmp_path):
    seed = tmp_path / "seed"
    trainer = Trainer(
        tiny_config(seed, checkpoint__enable=True, checkpoint__create_seed_checkpoint=True, debug__seed=5)
    )
    trainer.train()
    assert files.find_checkpoint(seed).step == 0
    loaded = Trainer(
        tiny_config(tmp_path / "run", checkpoint__enable=True, checkpoint__initial_load_path=str(seed))
    )  # seed 0, weights of seed 5
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name]), name
    assert loaded.progress.step == 0
    loaded.close()


def test_load_only_saves_nothing_and_first_step_checkpoint_does(tmp_path):
    run(tmp_path / "a", checkpoint__load_only=True, **SAVING)
    assert not (tmp_path / "a" / "checkpoint").exists()
    run(tmp_path / "b", training__steps=3, checkpoint__enable_first_step_checkpoint=True, **SAVING)
    assert [s.step for s in files.list_checkpoints(tmp_path / "b" / "checkpoint")] == [1, 2, 3]


def test_a_crash_while_saving_leaves_the_earlier_one(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def full_disk(point, path):
        if point == "tensor-written" and "step-4" in str(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_points, "listener", full_disk)
    with pytest.raises(UserError, match=r"step-4 was not saved: No space left on device \(shard-00000-of-00001"):
        run(folder, **SAVING)
    assert [s.step for s in files.list_checkpoints(folder / "checkpoint")] == [2]
    monkeypatch.undo()
    trainer = Trainer(tiny_config(folder, **SAVING))
    assert trainer.progress.step == 2
    trainer.train()
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]


def test_no_pickle_in_a_checkpoint(uninterrupted):
    step = uninterrupted[1] / "checkpoint" / "step-8"
    assert {path.name for path in step.iterdir()} == {"manifest.json", "shard-00000-of-00001.safetensors"}
    json.loads((step / "manifest.json").read_text())


def test_a_damaged_newest_checkpoint_does_not_cost_the_next_ones(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=4, lr_scheduler__total_steps=8, **SAVING)
    state = folder / "checkpoint" / "step-4" / files.shard_name(0, 1)
    state.write_bytes(state.read_bytes()[:-1])
    run(folder, training__steps=3, lr_scheduler__total_steps=8, checkpoint__keep_latest_k=1, **SAVING)
    assert [s.step for s in files.list_checkpoints(folder / "checkpoint")] == [3]
    assert (folder / "checkpoint" / "step-4.damaged").is_dir()


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=6, **SAVING)
    settings = {**SAVING, "checkpoint__load_step": 2, "checkpoint__keep_latest_k": 2}
    run(folder, training__steps=4, lr_scheduler__total_steps=6, **settings)
    assert [s.step for s in files.list_checkpoints(folder / "checkpoint")] == [2, 4]
    assert (folder / "checkpoint" / "step-6.abandoned").is_dir()


def test_a_rename_cut_short_hides_no_checkpoint(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=4, **SAVING)
    (folder / "checkpoint" / "step-4").rename(folder / "checkpoint" / "step-4.replaced")
    assert [s.step for s in files.list_checkpoints(folder / "checkpoint")] == [2, 4]


def test_an_excluded_model_is_drawn_anew(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=2, **SAVING)
    excluded = {"checkpoint__exclude_from_loading": ["model", "optimizer"]}
    trainer = Trainer(tiny_config(folder, **excluded, **SAVING))
    fresh = Trainer(tiny_config(tmp_path / "fresh"))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, dict(fresh.model.named_parameters())[name]), name
    trainer.close()
    fresh.close()


def test_an_excluded_schedule_starts_again(tmp_path):
    folder = tmp_path / "run"
    first = run(folder, training__steps=4, lr_scheduler__total_steps=8, **SAVING)
    excluded = {"checkpoint__exclude_from_loading": ["lr_scheduler"], "lr_scheduler__total_steps": 8}
    second = run(folder, training__steps=8, **excluded, **SAVING)
    assert [row["lr"] for row in second[4:]] == [row["lr"] for row in first]


@pytest.fixture(scope="module")
def scheduled_late(tmp_path_factory):
    """A checkpoint of step 4 whose learning rate began at step 2."""
    folder = tmp_path_factory.mktemp("before") / "run"
    run(folder, training__steps=2, **SAVING)
    run(folder, training__steps=4, checkpoint__exclude_from_loading=["lr_scheduler"], **SAVING)
    return folder / "checkpoint" / "step-4"


def begun_from(checkpoint, *excluded):
    return {
        "checkpoint__initial_load_path": str(checkpoint),
        "checkpoint__initial_load_model_only": False,
        "checkpoint__exclude_from_loading": list(excluded),
        **SAVING,
    }


@pytest.mark.parametrize(
    "part",
    [
        "model",
        pytest.param("optimizer", marks=pytest.mark.slow),
        pytest.param("lr_scheduler", marks=pytest.mark.slow),
        "dataloader",
        pytest.param("train_state", marks=pytest.mark.slow),
    ],
)
def test_what_a_run_began_without_is_not_left_out_when_it_is_started_again(tmp_path, scheduled_late, part):
    """As a restart after a crash does, or a job that is queued again with the same command."""
    settings = {"training__steps": 10, **begun_from(scheduled_late, part)}
    whole = numbers(run(tmp_path / "run", **settings))
    again = Trainer(tiny_config(tmp_path / "run", checkpoint__load_step=8, **settings))
    assert again.progress.step == 8
    again.train()
    assert numbers(rows(tmp_path / "run")) == whole
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert f"since this run began without it: {part}" in log


def test_data_that_change_once_more_begin_anew_once_more(tmp_path, scheduled_late):
    settings = begun_from(scheduled_late, "dataloader")
    run(tmp_path / "run", training__steps=6, debug__seed=1, **settings)
    trainer = Trainer(tiny_config(tmp_path / "run", training__steps=8, debug__seed=2, **settings))
    assert (trainer.progress.step, trainer.progress.samples) == (6, 0)
    trainer.close()


def test_steps_that_count_anew_leave_the_schedule_where_it_was(tmp_path, scheduled_late):
    whole = run(tmp_path / "whole", training__steps=8, **begun_from(scheduled_late))
    counted = run(tmp_path / "run", training__steps=4, **begun_from(scheduled_late, "train_state"))
    assert [row["step"] for row in counted] == [1, 2, 3, 4]
    assert [row["lr"] for row in counted] == [row["lr"] for row in whole]


def test_steps_cannot_count_anew_beside_checkpoints(tmp_path):
    run(tmp_path / "run", training__steps=2, **SAVING)
    settings = {"checkpoint__exclude_from_loading": ["train_state"], **SAVING}
    with pytest.raises(UserError, match=r"would count steps from 0 beside .*step-2; use another job.dump_folder"):
        Trainer(tiny_config(tmp_path / "run", training__steps=4, **settings))


def test_a_run_that_would_train_nothing_is_refused(tmp_path, scheduled_late):
    with pytest.raises(UserError, match=r"step-4 is at step 4 and this run would end at 3, since training.steps"):
        Trainer(tiny_config(tmp_path / "run", training__steps=3, **begun_from(scheduled_late)))


@pytest.mark.slow
def test_epochs_are_of_the_data_that_were_begun_anew(tmp_path, scheduled_late):
    settings = {"training__epochs": 0.01, **begun_from(scheduled_late, "dataloader")}
    trainer = Trainer(tiny_config(tmp_path / "run", **settings))
    steps = trainer.total_steps - 4
    trainer.train()
    fresh = Trainer(tiny_config(tmp_path / "fresh", training__epochs=0.01))
    fresh.close()
    assert steps == fresh.total_steps
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(5, 5 + steps))
    again = Trainer(tiny_config(tmp_path / "run", **settings))
    assert again.finished
    again.close()


def test_a_validation_of_other_samples_is_said(tmp_path):
    settings = {"validation__enable": True, "validation__steps": 2, "validation__seq_len": 32, **SAVING}
    run(tmp_path / "run", training__steps=2, validation__local_batch_size=2, **settings)
    run(tmp_path / "run", training__steps=4, validation__local_batch_size=2, **settings)
    log = tmp_path / "run" / "log" / "rank-0.log"
    assert "are not comparable" not in log.read_text()
    run(tmp_path / "run", training__steps=6, validation__local_batch_size=4, **settings)
    assert "validation reads 8 samples, but 4 before this start: losses are not comparable" in log.read_text()


def test_data_that_changed_is_named(tmp_path):
    folder, data = tmp_path / "run", tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "a line of text, number {n}"}}\n' for n in range(200)))
    own = {"training__dataset_path": str(data), "model__tokenizer_path": "bytes"}
    own |= {"training__cache_folder": str(tmp_path / "cache")}
    run(folder, training__steps=2, **own, **SAVING)
    with data.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match=rf"the data of training.dataset_path = {data}: '\w+' -> '\w+'"):
        Trainer(tiny_config(folder, training__steps=4, **own, **SAVING))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"checkpoint__initial_load_path": "absent"}, "checkpoint.initial_load_path: absent does not exist"),
        (
            {"checkpoint__initial_load_path": "absent", "checkpoint__initial_load_in_hf": True},
            "checkpoint.initial_load_path: absent: there is no model.safetensors and no model.safetensors.index.json",
        ),
        ({"checkpoint__mirror": "foo://x"}, "checkpoint.mirror: foo://x cannot be opened: Protocol not known: foo"),
    ],
)
def test_a_place_that_is_not_there_is_named_with_its_key(tmp_path, keys, said):
    with pytest.raises(UserError) as error:
        Trainer(tiny_config(tmp_path / "run", checkpoint__enable=True, **keys))
    assert str(error.value) == said


def test_a_hugging_face_folder_needs_its_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a Hugging Face folder; set checkpoint\.initial_load_in_hf = true"):
        Trainer(tiny_config(tmp_path / "run", checkpoint__enable=True, checkpoint__initial_load_path=str(tmp_path)))


def test_a_refused_resume_leaves_the_config_as_it_was(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=2, **SAVING)
    before = (folder / "config.toml").read_text()
    with pytest.raises(UserError, match="would change its data"):
        Trainer(tiny_config(folder, debug__seed=1, **SAVING))
    assert (folder / "config.toml").read_text() == before


def test_a_step_that_is_not_there_and_other_arithmetic_are_noticed(tmp_path, caplog):
    with pytest.raises(UserError, match=r"load_step = 100"):
        Trainer(tiny_config(tmp_path / "a", checkpoint__load_step=100, **SAVING))
    run(tmp_path / "b", training__steps=2, **SAVING)
    other = {**tiny_config(tmp_path).model.overrides, "rope_theta": 1000.0}
    initial = {"checkpoint__initial_load_path": str(tmp_path / "b"), "model__overrides": other}
    Trainer(tiny_config(tmp_path / "c", **initial, **SAVING)).close()
    assert "computes differently: rope_theta: 500000.0 -> 1000.0" in caplog.text


def test_initial_weights_of_another_model_are_refused(tmp_path, caplog):
    run(tmp_path / "a", training__steps=2, **SAVING)
    sizes = tiny_config(tmp_path).model.overrides
    other = {**sizes, "ffn_dim": 2 * sizes["ffn_dim"], "rope_theta": 1000.0}
    initial = {"checkpoint__initial_load_path": str(tmp_path / "a"), "model__overrides": other}
    said = (
        f"checkpoint.initial_load_path: {tmp_path}/a/checkpoint/step-2 is of another model"
        f" (ffn_dim: {sizes['ffn_dim']} -> {other['ffn_dim']}, rope_theta: 500000.0 -> 1000.0); "
    )
    with pytest.raises(UserError) as refused:
        Trainer(tiny_config(tmp_path / "b", **initial, **SAVING))
    assert str(refused.value).startswith(said)
    assert "computes differently" not in caplog.text
    without = {"checkpoint__exclude_from_loading": ["model"], **initial, **SAVING}
    Trainer(tiny_config(tmp_path / "c", **without)).close()


def test_an_architecture_without_a_family_is_refused_before_the_first_step(tmp_path):
    strange = {**tiny_config(tmp_path).model.overrides, "qk_norm": True, "mlp_bias": True}
    settings = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True, "model__overrides": strange}
    with pytest.raises(UserError, match="feed-forward bias"):
        Trainer(tiny_config(tmp_path / "run", **settings))


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    folder, lamb = tmp_path / "run", {"optimizer__name": "LAMB", **SAVING}
    run(folder, training__steps=2, **SAVING)
    kept = sorted(path.name for path in (folder / "checkpoint").iterdir())
    with pytest.raises(UserError, match=r"'AdamW', but this run has 'LAMB'.*exclude_from_loading = \[\"optimizer\"\]"):
        Trainer(tiny_config(folder, **lamb))
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == kept
    initial = {"checkpoint__initial_load_path": str(folder), "checkpoint__initial_load_model_only": False}
    with pytest.raises(UserError, match="'AdamW', but this run has 'LAMB'"):
        Trainer(tiny_config(tmp_path / "other", **initial, **lamb))
    Trainer(tiny_config(tmp_path / "weights", checkpoint__initial_load_path=str(folder), **lamb)).close()
    trainer = Trainer(tiny_config(folder, checkpoint__exclude_from_loading=["optimizer"], **lamb))
    assert trainer.progress.step == 2
    assert not any(trainer.optimizer.state.values())
    trainer.close()


# ---- saves behind the run --------------------------------------------------------------------------------------------

BEHIND = {**SAVING, "checkpoint__async_mode": "async"}


def test_saves_behind_the_run_hold_the_step_they_began_at(tmp_path, uninterrupted, monkeypatch):
    """Writing is slow: it goes on while the steps after change every weight."""
    monkeypatch.setattr(save_points, "listener", lambda point, path: time.sleep(0.01))
    folder = tmp_path / "run"
    assert numbers(run(folder, training__steps=8, **BEHIND)) == uninterrupted[0]
    for step in (2, 4, 6, 8):
        a, b = (files.find_checkpoint(f, step) for f in (folder, uninterrupted[1]))
        a.verify()
        left, right = a.tensors(""), b.tensors("")
        assert set(left) == set(right)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_save_behind_that_fails_ends_the_run_at_a_step_boundary(tmp_path, monkeypatch):
    def full_disk(point, path):
        if point == "shard-written" and "step-4" in str(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_points, "listener", full_disk)
    with pytest.raises(UserError, match=r"step-4 was not saved: No space left on device \(shard-00000.*are intact"):
        run(tmp_path / "run", training__steps=400, **{**BEHIND, "checkpoint__interval": 4})
    assert 4 <= rows(tmp_path / "run")[-1]["step"] <= 8
    assert list((tmp_path / "run" / "checkpoint").iterdir()) == []


def test_a_file_system_that_hangs_is_named_by_the_next_save(tmp_path, monkeypatch):
    hung = threading.Event()

    def hangs(point, path):
        if point == "shard-opened" and "step-2" in str(path):
            hung.wait(30)

    monkeypatch.setattr(save_points, "listener", hangs)
    monkeypatch.setattr(background, "LAST_SECONDS", 0.1)
    settings = {**BEHIND, "checkpoint__save_timeout_seconds": 2, "training__steps": 8}
    with pytest.raises(UserError, match=r"step-2 has not ended after \d+ s: rank 0 is at opening .*shard-00000-of"):
        run(tmp_path / "run", **settings)
    hung.set()
    assert rows(tmp_path / "run")[-1]["step"] == 4  # it trained on to the next save


def test_a_run_that_ends_waits_for_what_goes_on_behind(tmp_path, monkeypatch):
    """An error that has nothing to do with it, right after a save began."""
    monkeypatch.setattr(save_points, "listener", lambda point, path: time.sleep(0.02))

    def broken(self, result):
        if self.progress.step == 3:
            raise UserError("something else")

    monkeypatch.setattr(Trainer, "_after_step", broken)
    with pytest.raises(UserError, match="something else"):
        run(tmp_path / "run", **BEHIND)
    files.find_checkpoint(tmp_path / "run", 2).verify()


def test_a_run_that_only_loads_leaves_later_checkpoints_alone(tmp_path):
    saving = {**SAVING, "checkpoint__interval": 1}
    run(tmp_path, training__steps=4, **saving)
    before = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    run(tmp_path, training__steps=4, checkpoint__load_only=True, checkpoint__load_step=2, **saving)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == before


def test_adafactors_own_schedule_is_resumed(tmp_path):
    own = {"optimizer__name": "Adafactor", "optimizer__adafactor_relative_step": True, **SAVING}
    whole = run(tmp_path / "whole", training__steps=4, **own)
    run(tmp_path / "parts", training__steps=4, **own)
    shutil.rmtree(tmp_path / "parts/checkpoint/step-4")
    parts = run(tmp_path / "parts", training__steps=4, **own)
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]


@pytest.mark.parametrize("losses", [[math.nan, 2.0, 1.0, 3.0], [math.inf, 1.0, 3.0]])
def test_a_validation_that_is_not_finite_is_not_the_best(losses):
    progress = RunPosition(step=1)
    trainer = SimpleNamespace(
        progress=progress, total_steps=9, config=load_config(overrides={"validation.patience": 3})
    )
    for loss in losses:
        Trainer._stop_if_worse(trainer, loss)
    assert progress.best_validation == 1.0
    assert progress.worse_validations == 1
    assert trainer.total_steps == 9
