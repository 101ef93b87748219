"""What a user sees of records: the chat demo, samples shown, errors with file and line, a run that resumes exactly."""

import json

import pytest

from shardline.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "validation_loss" not in line]


def train(folder, *flags):
    return main(["train", "--preset", "chat-demo", "--job.dump_folder", str(folder), "--metrics.log_freq=1", *flags])


@pytest.mark.slow
def test_the_chat_demo_learns(tmp_path):
    assert train(tmp_path / "run") == 0
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert losses[0] > 5
    assert losses[-1] < 0.6
    tokens = [row["tokens"] for row in rows(tmp_path / "run")]
    assert tokens[0] < 8 * 256  # padding is not counted
    assert (tmp_path / "run" / "config.toml").read_text().count('path = "demo"') == 1


def test_a_mixture_resumes_where_it_stopped(tmp_path):
    sources = '[{path="demo", type="chat_template", weight=1.0, split="train[:50]"},'
    sources += ' {path="demo", type="chat_template", weight=3.0, split="train[50:90]"}]'
    flags = [f"--data.sources={sources}", "--data.mixture=weights", "--validation.no_enable", "--data.held_out=0"]
    flags += ["--training.local_batch_size=2", "--model.overrides.n_layers=1", "--model.overrides.dim=32"]
    assert train(tmp_path / "whole", *flags, "--training.steps=6", "--lr_scheduler.total_steps=6") == 0
    assert train(tmp_path / "parts", *flags, "--training.steps=3", "--lr_scheduler.total_steps=6") == 0
    assert train(tmp_path / "parts", *flags, "--training.steps=6", "--lr_scheduler.total_steps=6", "--resume") == 0
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in parts] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert [row["tokens"] for row in parts] == [row["tokens"] for row in whole]
    log = (tmp_path / "whole" / "log" / "rank-0.log").read_text()
    assert "of 12 samples read: demo 25.0%, demo 75.0%" in log


def test_samples_are_shown_with_marks(tmp_path, capsys):
    assert main(["data", "show", "--preset", "chat-demo", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦The opposite of long is short.<|im_end|>⟧\n" in shown
    assert "demo: 2,000 records, 249,129 tokens, 61,173 trained (24.6%)" in shown
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"instruction": "Say é", "output": "é"}) + "\n")
    assert main(["data", "show", str(file), "--model.tokenizer_path=bytes"]) == 0
    assert "### Response:\n⟦é<end>⟧" in capsys.readouterr().out
    assert main(["data", "show", str(file), "--model.tokenizer_path=bytes", "--type=completion"]) == 2
    assert f"{file}:1: no field 'text'; its fields: instruction, output" in capsys.readouterr().err
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Q", "chosen": "good", "rejected": "bad"}) + "\n")
    flags = ["--model.tokenizer_path=bytes", "--data.chat_template=chatml", "--data.added_tokens=<|im_end|>"]
    assert main(["data", "show", str(pairs), *flags]) == 0
    assert "rejected: " in capsys.readouterr().out


def test_colours_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["data", "show", "--preset", "chat-demo", "--samples", "1"]) == 0
    assert "\x1b[1;32mThe opposite of long is short." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "usr", "content": "x"}]}, ":2: messages[0]: unknown role 'usr', did you mean 'user'"),
        ({"text": "x"}, ":2: no field 'messages'; its fields: text"),
        ("not json", ":2: not JSON"),
    ],
)
def test_a_bad_record_ends_a_run_with_its_place(tmp_path, capsys, line, message):
    file = tmp_path / "chat.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]})
    file.write_text(f"{good}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    sources = f'--data.sources=[{{path="{file}", type="chat_template"}}]'
    assert train(tmp_path / "run", sources, "--data.held_out=0", "--validation.no_enable") == 2
    seen = capsys.readouterr().err
    assert f"data.sources[0]: {file}{message}" in seen
    assert "Traceback" not in seen


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.dataset_path=x"], "data.sources: it replaces training.dataset"),
        (["--data.held_out=0"], "no records are named for validation"),
        (["--data.held_out=1.5"], "expected a fraction below 1 or a whole number of records, got 1.5"),
        (["--data.mixture=weights", "--data.no_shuffle"], "data.shuffle"),
        (['--data.validation_sources=[{path="demo"}]'], "already names the records to validate on"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tmp_path, capsys, flags, message):
    assert train(tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
