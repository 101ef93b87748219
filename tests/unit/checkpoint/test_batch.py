"""The global batch of a resumed run: kept on another number of ranks, or refused with numbers that work."""

import re

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.checkpoint.resume_batch import SavedBatch, batch_line, batch_to_keep, keep_batch
from shardline.config.layout import resolve_layout
from shardline.data.order import micro_batches
from shardline.errors import UserError
from shardline.models.flavors import resolve
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.run.options import TrainOptions
from shardline.training.trainer import Trainer
from tests.e2e.tiny import TINY, run, tiny_config

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False}


def kept_batch(config):
    return batch_to_keep(config, resolve(config.model))


def numbers_after(words, text):
    found = re.search(rf"{words} ((?:\d+(?:, | or )?)+)", text)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


@given(size=st.integers(1, 64), local=st.integers(1, 12), ranks=st.integers(1, 8))
def test_a_kept_batch_is_the_same_samples_and_a_refusal_names_what_works(size, local, ranks):
    config = tiny_config("unused", training__local_batch_size=local)
    saved = SavedBatch(size, "step-4")
    try:
        kept = keep_batch(config, saved, ranks, lambda other: None)
    except UserError as error:
        text = str(error)
        assert size % (local * ranks) != 0
        assert f"global batch of {size}" in text
        assert f"= {local} x {ranks} = {local * ranks} does not divide" in text
        locals_that_work = [n for n in range(1, size + 1) if size % (n * ranks) == 0]
        assert numbers_after("local_batch_size to", text) == locals_that_work
        assert numbers_after("use", text) == [n for n in range(1, size + 1) if size % (local * n) == 0]
        return
    assert kept.training.global_batch_size == size
    read = [micro_batches(40, size, local, rank, ranks) for rank in range(ranks)]
    assert sorted(np.concatenate([np.concatenate(each) for each in read])) == list(range(40, 40 + size))
    assert batch_line(kept, saved, ranks).startswith(f"global batch {size} as in step-4: {len(read[0])} micro-batch")


def test_sizes_that_the_pipeline_cannot_cut_are_not_offered():
    config = tiny_config(
        "unused",
        training__local_batch_size=6,
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_microbatch_size=2,
    )
    arch, layout = resolve(config.model), resolve_layout(config.parallelism, 2)
    with pytest.raises(UserError, match=r"= 6 x 1 = 6 does not divide") as said:
        keep_batch(config, SavedBatch(8, "step-4"), 1, lambda other: plan_pipeline(other, arch, layout))
    offered = numbers_after("local_batch_size to", str(said.value))
    assert offered
    assert all(number % 2 == 0 for number in offered)


def test_a_resumed_run_takes_the_batch_of_its_checkpoint(tmp_path):
    whole = run(tmp_path / "whole", training__steps=6, training__local_batch_size=8, **SAVING)
    folder = tmp_path / "run"
    run(folder, training__steps=4, lr_scheduler__total_steps=6, training__local_batch_size=8, **SAVING)
    assert kept_batch(tiny_config(folder, training__local_batch_size=2, **SAVING)).size == 8
    for other in (
        {"training__global_batch_size": 8},
        {"checkpoint__exclude_from_loading": ["dataloader"]},
        {"checkpoint__enable": False},
        {"checkpoint__load_step": 3},
    ):
        assert kept_batch(tiny_config(folder, **{**SAVING, **other})) is None
    resumed = run(folder, training__steps=6, training__local_batch_size=2, **SAVING)
    assert [row["tokens"] for row in resumed] == [row["tokens"] for row in whole]
    np.testing.assert_allclose([row["loss"] for row in resumed], [row["loss"] for row in whole], rtol=1e-4)
    text = (folder / "log" / "rank-0.log").read_text()
    assert f"global batch 8 as in {folder}/checkpoint/step-4: 4 micro-batches of 2 on 1 data-parallel rank" in text
    assert "global_batch_size = 8" in (folder / "config.toml").read_text()


def test_a_batch_that_does_not_divide_is_refused_and_one_that_is_given_is_not_changed(tmp_path):
    folder = tmp_path / "run"
    run(folder, training__steps=2, training__local_batch_size=8, **SAVING)
    with pytest.raises(UserError, match=r"global batch of 8, .* = 3 x 1 = 3 does not divide: set training.local_batch"):
        Trainer(tiny_config(folder, training__local_batch_size=3, **SAVING))
    other = {**TINY["model.overrides"], "dim": 32}
    with pytest.raises(UserError, match=r"step-2 is of another model \(dim: 64 -> 32\); use another job.dump_folder"):
        Trainer(tiny_config(folder, training__local_batch_size=3, model__overrides=other, **SAVING))
    with pytest.raises(UserError, match="global_batch_size: 8 -> 4"):
        Trainer(tiny_config(folder, training__local_batch_size=2, training__global_batch_size=4, **SAVING))
    trainer = Trainer(
        tiny_config(folder, training__local_batch_size=3, training__steps=4, **SAVING), TrainOptions(overwrite=True)
    )
    assert trainer.loader.global_batch_size == 3
    trainer.close()


def test_a_run_that_takes_over_a_position_takes_over_its_batch(tmp_path):
    run(tmp_path / "first", training__steps=2, training__local_batch_size=8, **SAVING)
    initial = {"checkpoint__initial_load_path": str(tmp_path / "first"), "training__local_batch_size": 4}
    trainer = Trainer(tiny_config(tmp_path / "a", checkpoint__initial_load_model_only=False, **initial, **SAVING))
    assert (trainer.loader.global_batch_size, trainer.progress.samples) == (8, 16)
    trainer.close()
    trainer = Trainer(tiny_config(tmp_path / "b", **initial, **SAVING))
    assert (trainer.loader.global_batch_size, trainer.progress.samples) == (4, 0)
    trainer.close()


def test_the_batch_of_a_checkpoint_at_a_url_is_read_there(tmp_path):
    run(tmp_path / "first", training__steps=2, training__local_batch_size=8, **SAVING)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "first" / "checkpoint"), "/batches/run/checkpoint", recursive=True)
    initial = {"checkpoint__initial_load_path": "memory://batches/run", "checkpoint__initial_load_model_only": False}
    try:
        kept = kept_batch(tiny_config(tmp_path / "a", **initial, **SAVING))
        assert (kept.size, kept.path) == (8, "memory://batches/run/checkpoint/step-2")
    finally:
        memory.rm("/batches", recursive=True)
    assert kept_batch(tiny_config(tmp_path / "a", **initial, **SAVING)) is None  # reported when it is loaded


def test_a_run_that_is_fetched_from_its_mirror_keeps_its_batch(tmp_path):
    settings = {**SAVING, "checkpoint__mirror": f"file://{tmp_path}/mirror"}
    run(tmp_path / "first", training__steps=2, training__local_batch_size=8, **settings)
    config = tiny_config(tmp_path / "second", training__local_batch_size=4, training__steps=4, **settings)
    trainer = Trainer(config, TrainOptions(resume=True))
    assert (trainer.loader.global_batch_size, trainer.progress.step) == (8, 2)
    trainer.close()


def test_a_run_that_gets_its_folder_back_keeps_its_batch(tmp_path):
    run(tmp_path, training__steps=2, training__local_batch_size=8, **SAVING)
    Trainer(tiny_config(tmp_path, training__local_batch_size=3, **SAVING), TrainOptions(overwrite=True)).close()
    assert not (tmp_path / "checkpoint" / "step-2").exists()
    trainer = Trainer(tiny_config(tmp_path, training__local_batch_size=4, training__steps=4, **SAVING))
    assert (trainer.loader.global_batch_size, trainer.progress.step) == (8, 2)
    trainer.close()
