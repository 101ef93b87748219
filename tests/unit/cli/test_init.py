"""`shardline init`: the config that answers make, through options, a pipe and a terminal."""

import io
import os
import pty
import signal
import subprocess
import sys

import pytest

from shardline.config.load import load_config

ALL = ("--model", "llama3 debugmodel", "--data", "demo", "--goal", "pretrain", "--gpus", "0", "--run", "out")


def test_options_answer_everything(run, tmp_path):
    code, out, _ = run("init", str(tmp_path / "run.toml"), *ALL)
    assert code == 0
    assert f"shardline train {tmp_path / 'run.toml'}" in out
    config = load_config(tmp_path / "run.toml")
    assert (config.job.dump_folder, config.model.flavor, config.optimizer.lr) == ("out", "debugmodel", 3e-4)
    assert config.generation.prompts
    assert run("config", str(tmp_path / "run.toml"))[0] == 0


def test_a_pipe_answers_line_by_line(run, tmp_path, monkeypatch):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"owner/name\n{tmp_path / 'chat.jsonl'}\nlora\n4\n\n"))
    code, out, err = run("init", str(tmp_path / "run.toml"))
    assert code == 0, err
    assert "--nproc 4" in out
    config = load_config(tmp_path / "run.toml")
    assert config.lora.enable
    assert config.checkpoint.initial_load_in_hf
    assert config.data.sources == [{"path": str(tmp_path / "chat.jsonl"), "type": "chat_template"}]
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.compile.enable
    assert config.job.dump_folder == "outputs/run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--goal": "tune"}, "--goal: expected one of pretrain, finetune, lora, got 'tune'"),
        ({"--goal": "lora"}, "--goal lora needs weights"),
        ({"--gpus": "two"}, "--gpus: expected a whole number, 0 or more, got 'two'"),
        ({"--model": "llama3 8C"}, "llama3 has no such flavor"),
        ({"--model": "nothing"}, "--model: expected FAMILY FLAVOR"),
        ({"--run": ""}, "--run: expected an answer"),
    ],
)
def test_answers_that_cannot_be_used_leave_nothing(run, tmp_path, changes, message):
    given = dict(zip(ALL[::2], ALL[1::2], strict=True)) | changes
    code, _, err = run("init", str(tmp_path / "run.toml"), *[f"{key}={value}" for key, value in given.items()])
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert message in err


def test_a_file_is_not_overwritten(run, tmp_path):
    (tmp_path / "run.toml").write_text("mine")
    code, _, err = run("init", str(tmp_path / "run.toml"), *ALL)
    assert code == 2
    assert "already exists" in err
    assert (tmp_path / "run.toml").read_text() == "mine"


def test_input_that_ends_names_the_option(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    code, _, err = run("init", str(tmp_path / "run.toml"))
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "the input ended before question 3: pass --goal VALUE" in err


def test_ctrl_c_at_a_terminal_leaves_nothing(tmp_path):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "shardline", "init"]
    asking = subprocess.Popen(words, cwd=tmp_path, stdin=theirs, stderr=subprocess.PIPE, env=dict(os.environ))
    try:
        os.write(ours, b"\n")
        while b"2/5" not in asking.stderr.read1():
            pass
        asking.send_signal(signal.SIGINT)
        assert asking.wait(20) == 128 + signal.SIGINT
        assert list(tmp_path.iterdir()) == []
    finally:
        asking.kill()
        asking.wait()
        asking.stderr.close()
        os.close(ours)
        os.close(theirs)
