"""The commands with which a user goes on after a run."""

from pathlib import Path

import pytest

from shardline.cli.commands import TRAIN
from shardline.cli.parser import parse
from shardline.config.load import load_config
from shardline.run.next_steps import KEPT, after_end, resume_command
from shardline.run.options import TrainOptions

FOLDER = Path("outputs/a run")


@pytest.fixture(autouse=True)
def _called(monkeypatch):
    monkeypatch.delenv("SHARDLINE_PROGRAM", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def config(**changes):
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(overrides={"checkpoint.enable": True, **given})


def test_a_run_goes_on_from_its_own_config():
    assert resume_command(FOLDER, config(), TrainOptions()) == "shardline train 'outputs/a run/config.toml' --resume"


def test_options_of_the_start_are_kept_and_others_are_not():
    options = TrainOptions(nproc=8, nnodes="1:2", rdzv_backend="c10d", rdzv_endpoint="a:1", overwrite=True, debug=True)
    command = resume_command(Path("run"), config(checkpoint__load_step=4), options)
    words = command.split()[2:]
    assert words[:2] == ["run/config.toml", "--resume"]
    parsed = parse(TRAIN, words)
    assert {name: parsed.named()[name] for name in KEPT} == {name: getattr(options, name) for name in KEPT}
    assert not parsed.named()["overwrite"]
    assert "--checkpoint.load_step=-1" in words


def test_under_torchrun_it_is_the_command(monkeypatch):
    for name, text in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    assert resume_command(Path("run"), config(), TrainOptions()) == (
        "torchrun --nnodes 2 --nproc-per-node 4 -m shardline.train --job.config_file run/config.toml --resume"
    )


def test_what_can_be_done_with_a_finished_run():
    rows = dict(after_end(Path("run"), config(), TrainOptions(nproc=2), 200))
    assert rows == {
        "generate": 'shardline generate run --prompt "Once upon a time"',
        "export": "shardline export run FOLDER",
        "train on": "shardline train run/config.toml --resume --nproc=2 --training.steps=400",
    }
    assert after_end(Path("run"), config(checkpoint__enable=False), TrainOptions(), 200) == []
    weights = after_end(Path("run"), config(checkpoint__last_save_model_only=True), TrainOptions(), 200)
    assert [label for label, _ in weights] == ["generate", "export"]
    elsewhere = after_end(Path("run"), config(checkpoint__folder="saved"), TrainOptions(), 200)
    assert dict(elsewhere)["export"] == "shardline export run/saved FOLDER"
    epochs = load_config(overrides={"checkpoint.enable": True, "training.epochs": 1.5})
    assert dict(after_end(Path("run"), epochs, TrainOptions(), 9))["train on"].endswith(" --training.epochs=3")
