"""Runs with `checkpoint.mirror`: what is saved arrives, faults do not stop training, and a lost folder is no loss."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.checkpoint.format import step_names
from shardline.checkpoint.mirror import Mirror
from shardline.cli.main import main
from shardline.errors import ConfigError, UserError
from shardline.run.options import TrainOptions
from shardline.run.stop import TimeLimit
from shardline.storage.location import locate
from shardline.training.trainer import Trainer
from tests import faulty_storage
from tests.e2e.tiny import command, flags, rows, run, tiny_config
from tests.faulty_storage import faults

pytestmark = pytest.mark.usefixtures("on_cpu")
URL = "faulty://bucket/run"
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 2}


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    faulty_storage.register()
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    yield
    faulty_storage.clear()


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of six steps without any of this."""
    return [row["loss"] for row in run(tmp_path_factory.mktemp("plain") / "run")]


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_arrives(
    mode: str, tmp_path: Path, losses: list[float], caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    settings = {**SAVING, "checkpoint__mirror": URL, "checkpoint__async_mode": mode}
    found = run(tmp_path / "run", **settings)
    assert [row["loss"] for row in found] == losses
    assert step_names(locate(URL)) == ["step-5", "step-6"]  # as here, and the end waited
    assert step_names(locate(tmp_path / "run" / "checkpoint")) == ["step-5", "step-6"]
    assert lines(caplog, logging.WARNING) == []
    assert main(["checkpoint", "verify", URL]) == 0
    with pytest.raises(UserError, match="already holds step-6 of another run"):
        run(tmp_path / "second", **settings)
    assert not list((tmp_path / "second").glob("checkpoint/step-*"))
    with pytest.raises(UserError, match="already holds step-6 of another run"):
        run(tmp_path / "run", TrainOptions(overwrite=True), **settings)
    assert step_names(locate(tmp_path / "run" / "checkpoint")) == ["step-5", "step-6"]  # nothing was removed


def test_an_unreachable_mirror_is_named_once_when_a_run_is_replaced(tmp_path: Path) -> None:
    run(tmp_path / "run", training__steps=1)
    faults.unreachable = True
    settings = {**SAVING, "checkpoint__mirror": URL}
    Trainer(tiny_config(tmp_path / "run", **settings), TrainOptions(overwrite=True)).close()
    assert (tmp_path / "run" / "log" / "rank-0.log").read_text().count("cannot be listed now") == 1


def test_faults_there_do_not_stop_training(
    tmp_path: Path, losses: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard of 1; shard of 2; 3 arrives, shard of 2 again; manifest of 4; then all is brought."""
    nudge = Mirror.nudge

    def nudge_and_wait(mirror: Mirror) -> None:  # one try for each save
        nudge(mirror)
        thread = mirror._thread
        if thread is not None:
            thread.join(60)

    monkeypatch.setattr(Mirror, "nudge", nudge_and_wait)
    faults.fail_at |= {1, 2, 5, 7}
    found = run(tmp_path / "run", **SAVING, checkpoint__mirror=URL)
    assert [row["loss"] for row in found] == losses
    assert step_names(locate(URL)) == ["step-5", "step-6"]
    warned = lines(caplog, logging.WARNING)
    assert len(warned) == 4
    assert all(f"was not copied to {URL}: No space left on the other side" in line for line in warned)
    assert main(["checkpoint", "verify", URL]) == 0


def test_a_mirror_that_is_never_there(tmp_path: Path, losses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    faults.unreachable = True
    found = run(tmp_path / "run", **SAVING, checkpoint__mirror=URL)
    assert [row["loss"] for row in found] == losses
    assert "the run ends without it" in lines(caplog, logging.WARNING)[-1]
    assert step_names(locate(tmp_path / "run" / "checkpoint")) == ["step-5", "step-6"]


def test_the_end_of_the_time_does_not_wait_for_the_mirror(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run ends as one that has saved, and the next start, which finds it finished, makes the copy."""
    let_go = threading.Event()
    faults.before_write = lambda path: let_go.wait(60)
    settings = {**SAVING, "training__steps": 1, "checkpoint__mirror": URL}
    trainer = Trainer(tiny_config(tmp_path / "run", **settings))
    trainer.requests.limit = TimeLimit(0.0, 0.0, "a limit")
    assert trainer.train().step == 1
    assert trainer.requests.final_code == 0
    (line,) = lines(caplog, logging.WARNING)
    assert f"not copied to {URL} before " in line
    assert step_names(locate(URL)) == []
    let_go.set()
    assert Trainer(tiny_config(tmp_path / "run", **settings)).train().finished_before
    assert step_names(locate(URL)) == ["step-1"]


def test_a_lost_folder_is_fetched_and_resumed(
    tmp_path: Path, losses: list[float], caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    caplog.set_level(logging.INFO, logger="shardline")
    settings = {**SAVING, "checkpoint__mirror": URL, "checkpoint__last_save_model_only": False}
    trainer = Trainer(tiny_config(tmp_path / "run", **settings))
    trainer.total_steps = 3
    trainer.train()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="already holds step-3 of another run: continue that run with --resume"):
        run(tmp_path / "fresh", **settings)
    shutil.rmtree(tmp_path / "fresh")
    found = run(tmp_path / "fresh", TrainOptions(resume=True), **settings)
    assert [row["loss"] for row in found] == losses[3:]
    assert f"fetched {URL}/step-3" in (tmp_path / "fresh" / "log" / "rank-0.log").read_text()
    assert step_names(locate(URL)) == ["step-5", "step-6"]
    with pytest.raises(UserError, match=r"no good checkpoint in .* and none in faulty://bucket/empty"):
        run(
            tmp_path / "empty", TrainOptions(resume=True), **{**settings, "checkpoint__mirror": "faulty://bucket/empty"}
        )


def test_an_older_step_resumed_takes_later_ones_from_the_mirror(tmp_path: Path) -> None:
    settings = {**SAVING, "checkpoint__keep_latest_k": 0, "checkpoint__mirror": URL}
    run(tmp_path / "run", **settings, checkpoint__last_save_model_only=False)
    run(tmp_path / "run", **{**settings, "training__steps": 3, "checkpoint__load_step": 2})
    assert step_names(locate(URL)) == ["step-1", "step-2", "step-3"]
    assert main(["checkpoint", "verify", URL]) == 0


def test_a_run_starts_from_a_url(tmp_path: Path) -> None:
    run(tmp_path / "run", **SAVING, checkpoint__mirror=URL)
    weights = []
    for name, path in (("from-url", URL), ("from-path", str(tmp_path / "run"))):
        trainer = Trainer(tiny_config(tmp_path / name, **SAVING, checkpoint__initial_load_path=path))
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    with pytest.raises(UserError, match=r"checkpoint.initial_load_path: .*holds no checkpoint of step 3"):
        Trainer(tiny_config(tmp_path / "x", **SAVING, checkpoint__initial_load_path=URL, checkpoint__load_step=3))


def test_a_mirror_must_be_a_url(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror.*expected a URL such as 's3://bucket/run'"):
        tiny_config(tmp_path / "run", checkpoint__mirror="some/folder")
    with pytest.raises(UserError, match="nosuch://bucket cannot be opened"):
        run(tmp_path / "run", **SAVING, checkpoint__mirror="nosuch://bucket")


@pytest.mark.slow
def test_two_ranks_and_a_folder_that_is_lost(tmp_path: Path, losses: list[float], capsys: Any) -> None:
    """The ranks' shards arrive, and two ranks of another folder go on from there."""
    url = f"file://{tmp_path}/away"
    settings = {**SAVING, "checkpoint__mirror": url, "checkpoint__last_save_model_only": False}
    settings |= {"training__global_batch_size": 4, "training__local_batch_size": 2}
    done = command("train", "--nproc", "2", *flags(tmp_path / "run", **{**settings, "training__steps": 3}))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "away" / "step-3").glob("shard-*-of-00002.safetensors"))) == 2
    capsys.readouterr()
    assert main(["checkpoint", "ls", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-4:] == ["2", "dp_shard", "2", "whole"]
    shutil.rmtree(tmp_path / "run")
    done = command("train", "--nproc", "2", "--resume", *flags(tmp_path / "fresh", **settings))
    assert done.returncode == 0, done.stderr
    assert [row["loss"] for row in rows(tmp_path / "fresh")] == pytest.approx(losses[3:], rel=1e-4)
    assert step_names(locate(url)) == ["step-5", "step-6"]


@pytest.mark.slow
def test_two_ranks_fetch_one_copy(tmp_path: Path) -> None:
    """Each rank asks for it, one fetches it, both start from it."""
    run(tmp_path / "run", **SAVING)
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "away")
    url, custom = f"far://{tmp_path}/away", "--experimental.custom_import=tests.far_storage"
    settings = {**SAVING, "training__global_batch_size": 4, "training__local_batch_size": 2, "training__steps": 1}
    words = flags(tmp_path / "next", **settings, checkpoint__initial_load_path=url)
    done = command("train", "--nproc", "2", *words, custom)
    assert done.returncode == 0, done.stderr
    logged = [(tmp_path / "next" / "log" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert sum(f"fetching {url}/step-6" in text for text in logged) == 1
    assert sum("using the copy in" in text for text in logged) == 1
    words = flags(tmp_path / "again", **settings, checkpoint__initial_load_path=str(tmp_path / "run"))
    assert command("train", "--nproc", "2", *words).returncode == 0
    assert rows(tmp_path / "next")[0]["loss"] == rows(tmp_path / "again")[0]["loss"]
