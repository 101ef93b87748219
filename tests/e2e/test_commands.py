"""The commands as a user meets them: in processes of their own, with signals, full disks, closed pipes, a terminal."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import rich.console

from shardline.checkpoint import format as files
from shardline.cli.main import main
from shardline.config.files import preset_names, preset_path
from shardline.config.load import load_config
from shardline.run.folder import RunFolder
from shardline.run.signals import listening
from shardline.run.stop import Requests
from shardline.telemetry.log import setup_logging
from tests import processes
from tests.e2e.tiny import command, flags, rows, run

ROOT = Path(__file__).parents[2]
ENDLESS = {"training__steps": 100_000, "lr_scheduler__total_steps": 1000}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 1000}


class Running:
    """A command in a process group of its own; its output is read line by line."""

    def __init__(self, *words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        self.process = processes.start([sys.executable, "-m", "shardline", *words], **options)
        self.text = ""
        self.watchdog = threading.Timer(60, self.process.kill)
        self.watchdog.start()

    def until(self, text):
        while text not in self.text:
            line = self.process.stdout.readline()
            assert line, f"{text!r} never came:\n{self.text}"
            self.text += line

    def send(self, number):
        os.killpg(self.process.pid, number)  # as a terminal does: to the workers too

    def end(self):
        if self.process.stdout is not None:
            self.text += self.process.stdout.read()
        code = self.process.wait()
        self.watchdog.cancel()
        return code

    def left_over(self):
        """Whether a process of the group outlives the command by more than a moment."""
        for _ in range(50):
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.1)
        return True


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that a user left to itself, its output sent to a file."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = command("train", *flags(folder, job__description="a tiny run"), env=os.environ | {"FORCE_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


# ---- what a run shows and leaves -------------------------------------------------------------------------------------


def test_piped_output_is_plain_lines(finished):
    folder, output = finished
    assert "\x1b" not in output
    assert "\r" not in output
    lines = output.splitlines()
    assert lines[0] == "a tiny run"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [f"{step}/6" for step in range(1, 7)]
    assert f"run folder   {folder}" in lines
    assert lines[-1] == "last save    none: checkpoint.enable is false"
    assert "\x1b" not in (folder / "log" / "rank-0.log").read_text()


def test_the_config_of_a_run_loads_back_and_trains_the_same(finished, tmp_path):
    folder, _ = finished
    config = load_config(folder / "config.toml")
    assert config == load_config(overrides=[*flags(folder), "--job.description=a tiny run"])
    assert config.is_set("training.steps")
    again = main(["train", str(folder / "config.toml"), f"--job.dump_folder={tmp_path / 'again'}"])
    assert again == 0
    assert [row["loss"] for row in rows(tmp_path / "again")] == [row["loss"] for row in rows(folder)]


def test_a_folder_with_a_run_is_refused_until_overwrite(finished, tmp_path, capsys):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()
    assert main(["train", *flags(folder, training__steps=2)]) == 2
    refused = capsys.readouterr()
    assert refused.err.startswith(f"error: {folder} already holds a run (metrics.jsonl)")
    assert "--overwrite" in refused.err
    assert refused.out == ""
    assert (folder / "metrics.jsonl").read_text() == before
    assert main(["train", *flags(folder, training__steps=2), "--overwrite"]) == 0
    assert [row["step"] for row in rows(folder)] == [1, 2]


def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path):
    running = Running("train", *flags(tmp_path / "run", **ENDLESS), stderr=subprocess.PIPE)
    running.until("step 1/")
    running.process.stdout.close()
    running.process.stdout = None
    errors = running.process.stderr.read()
    assert running.end() == 1
    assert errors == ""


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_sigint_stops_saves_and_resumes(tmp_path):
    folder = tmp_path / "run"
    words = flags(folder, **ENDLESS, **SAVING, training__dataloader__num_workers=2)
    running = Running("train", *words)
    running.until("step 5/")
    running.send(signal.SIGINT)
    assert running.end() == 130
    assert not running.left_over()
    step = int(re.search(r"^stopped at step (\d+) at your request \(SIGINT\)$", running.text, re.MULTILINE)[1])
    assert running.text.count("SIGINT: stopping after this step") == 1
    shown = [line for line in running.text.splitlines() if line.startswith("step ")]
    assert len(shown) == len(set(shown)) == step  # a signal in the middle of a line repeats nothing
    assert f"steps        {step} of 100000" in running.text
    assert [path.name for path in (folder / "checkpoint").iterdir()] == [f"step-{step}"]
    assert main(["train", *words, "--resume", f"--training.steps={step + 2}"]) == 0
    assert f"resumed from {folder}/checkpoint/step-{step}\n" in (folder / "log" / "rank-0.log").read_text()
    assert [row["step"] for row in rows(folder)] == list(range(1, step + 3))


class Interrupting(io.StringIO):
    """A terminal during whose first line a signal comes."""

    came = False

    def write(self, text):
        if not self.came:
            self.came = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_a_signal_in_the_middle_of_a_line_repeats_nothing(tmp_path):
    stream = Interrupting()
    log = setup_logging(RunFolder(tmp_path), terminal=rich.console.Console(file=stream, width=100))
    with listening(Requests()) as requests:
        log.info("a line")
        while "again: at once" not in stream.getvalue():
            time.sleep(0.01)
    assert requests.stop == "SIGINT"
    assert sorted(stream.getvalue().splitlines()) == [
        "SIGINT: stopping after this step (again: at once)",
        "a line",
    ]


def test_sigterm_and_a_second_run_into_the_same_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    running = Running("train", *flags(folder, **ENDLESS, **SAVING))
    running.until("step 1/")
    assert main(["train", *flags(folder, **ENDLESS, **SAVING), "--overwrite"]) == 2
    pid = running.process.pid
    assert f"error: {folder} is in use by another run (pid {pid} on " in capsys.readouterr().err
    running.send(signal.SIGTERM)
    assert running.end() == 0
    assert re.search(r"^stopped at step \d+ at your request \(SIGTERM\)$", running.text, re.MULTILINE)
    assert len(files.list_checkpoints(folder / "checkpoint")) == 1
    assert (folder / "log" / "lock").read_text() == ""


SLOW_DISK = """
import os, time, types
from shardline import register_hook
from shardline.storage import blocks

@register_hook("after_build")
def slow_disk(model, config):
    def fsync(descriptor):
        print("on its way to the disk", flush=True)
        time.sleep(60)

    blocks.os = types.SimpleNamespace(**{**vars(os), "fsync": fsync})
"""


def test_a_second_signal_during_a_save_leaves_no_part_of_it(tmp_path):
    folder, module = tmp_path / "run", tmp_path / "slow_disk.py"
    module.write_text(SLOW_DISK)
    save = {"checkpoint__enable": True, "checkpoint__interval": 2, "experimental__custom_import": str(module)}
    running = Running("train", *flags(folder, **save))
    running.until("on its way to the disk")
    running.send(signal.SIGTERM)
    running.until("SIGTERM: stopping after this step")
    running.send(signal.SIGTERM)
    assert running.end() == 143
    assert running.text.splitlines()[-1] == "interrupted"
    assert "Traceback" not in running.text
    assert list((folder / "checkpoint").iterdir()) == []


def test_what_a_crash_left_of_a_save_goes_with_the_next_one(tmp_path):
    torn = tmp_path / "run" / "checkpoint" / "step-4.partial"
    run(tmp_path / "run", training__steps=2, checkpoint__enable=True, checkpoint__last_save_model_only=False)
    torn.mkdir()
    (torn / "state.safetensors").write_bytes(b"half")
    run(tmp_path / "run", training__steps=5, checkpoint__enable=True)
    assert not torn.exists()
    assert [saved.step for saved in files.list_checkpoints(torn.parent)] == [2, 5]


# ---- a disk that is full ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """3 MB that a test can fill."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True)
    if not done or done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)  # the log of a run in this process is still open


def fill(place, leave):
    free = shutil.disk_usage(place).free
    (place / "other files").write_bytes(bytes(max(0, free - leave)))


def whole_rows(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_disk_that_fills_up_while_saving(small_disk):
    folder = small_disk / "run"
    words = flags(folder, checkpoint__enable=True, checkpoint__interval=1, checkpoint__keep_latest_k=0)
    full = command("train", *words)
    assert full.returncode == 2
    assert full.stderr == (
        f"error: checkpoint {folder}/checkpoint/step-3 was not saved: No space left on device"
        " (shard-00000-of-00001.safetensors);"
        " earlier ones are intact\n"
    )
    saved = files.list_checkpoints(folder / "checkpoint")
    assert [one.step for one in saved] == [1, 2]
    assert len(list((folder / "checkpoint").iterdir())) == 2
    for one in saved:
        one.verify()
    assert "step-3 was not saved" in (folder / "log" / "rank-0.log").read_text()
    shutil.rmtree(folder / "checkpoint" / "step-1")
    assert main(["train", *words, "--checkpoint.interval=100"]) == 0
    assert whole_rows(folder) == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_from_the_start_or_soon(small_disk, capsys):
    fill(small_disk, leave=0)
    folder = small_disk / "run"
    assert main(["train", *flags(folder)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"error: command line: job.dump_folder: cannot use {folder} as the run folder: No space")
    (small_disk / "other files").unlink()
    fill(small_disk, leave=65_536)  # room for the config, what the first step did, and a few rows
    soon = command("train", *flags(folder, training__steps=2000))
    assert soon.returncode == 2
    assert "Traceback" not in soon.stderr
    assert soon.stderr.splitlines()[-1] == f"error: cannot write {folder}/metrics.jsonl: No space left on device"
    written = whole_rows(folder)
    assert len(written) > 2
    assert written == list(range(1, len(written) + 1))


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


def test_a_typo_and_a_missing_file_are_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "tiny.toml").write_text("[training]\nstpes = 3\n")
    typo = command("train", "tiny.toml", cwd=tmp_path)
    assert (typo.returncode, typo.stdout) == (2, "")
    assert typo.stderr == "error: tiny.toml:2: training.stpes: there is no such key, did you mean 'training.steps'?\n"
    missing = command("train", "tinny.toml", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "error: tinny.toml: there is no such file, did you mean 'tiny.toml'?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["training.dataset_path=none.txt"], "training.dataset_path = 'none.txt' needs a tokenizer"),
        (
            ["training.dataset_path=none.txt", "model.tokenizer_path=bytes"],
            "training.dataset_path: there is no file or folder 'none.txt'",
        ),
        (
            ["training.dataset=c4_test", "model.tokenizer_path=bytes"],
            "training.dataset: dataset 'c4_test' needs a path",
        ),
        (["training.dataset_path=few.txt", "model.tokenizer_path=bytes"], "training.seq_len: the data holds 7 tokens"),
        (
            ["validation.enable", "validation.dataset_path=few.txt"],
            "validation.seq_len: the data holds 7 tokens, one sample needs 2049",
        ),
        (
            ["training.dataset_path=few.txt", "model.tokenizer_path=bytes", "training.cache_folder=file/x"],
            "training.cache_folder: cannot write file/x/tokens: Not a directory",
        ),
        (["training.global_batch_size=7"], "training.global_batch_size = 7 does not divide"),
        (["model.overrides.vocab_size=200"], "set --model.overrides.vocab_size=258"),
        (["model.tokenizer_path=nothing"], "no tokenizer at 'nothing'"),
        (["job.dump_folder=file"], "job.dump_folder: cannot use file as the run folder"),
        (["job.save_config_file=file/x"], "job.save_config_file: cannot write file/x: File exists"),
        (["checkpoint.enable", "checkpoint.folder=../file/x"], "checkpoint.folder: cannot write run/../file/x"),
        (["checkpoint.enable", "checkpoint.load_step=4"], "checkpoint.load_step = 4: run/checkpoint holds no such"),
        (["metrics.enable_wandb"], "pip install 'shardline[wandb]'"),
        (["experimental.custom_import=none"], "cannot be imported: ModuleNotFoundError: No module named 'none'\n"),
        (["experimental.custom_import=raises.py"], "/raises.py:2)"),
        (["experimental.custom_import=leaves.py"], "/leaves.py:1)"),
        (["optimizer.lr=1e9", "training.steps=20"], "Lower optimizer.lr"),
        (["model.name=auto", "model.hf_assets_path=none"], "model.hf_assets_path: there is no folder none: set one"),
    ],
)
def test_errors_name_the_key_and_what_to_do(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    (tmp_path / "few.txt").write_text("hello")
    (tmp_path / "file").write_text("a file, not a folder")
    (tmp_path / "raises.py").write_text("one = 1\none / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    code = main(["train", *flags("run"), *(f"--{word}" for word in words)])
    error = capsys.readouterr().err
    assert code == 2
    assert expected in error
    assert "Traceback" not in error


@pytest.fixture
def logged_out(tmp_path):
    """The environment of somebody whom W&B does not know."""
    pytest.importorskip("wandb")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB") and key != "NETRC"}
    return kept | {"HOME": str(tmp_path / "home"), "SHARDLINE_CACHE": str(tmp_path / "cache")}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wandb_without_a_login_is_one_line_before_data_is_read(ranks, tmp_path, logged_out):
    (tmp_path / "mine.txt").write_text("the green bottle on the wall. " * 100)
    data = {"training__dataset_path": "mine.txt", "model__tokenizer_path": "bytes"}
    words = flags("run", metrics__enable_wandb=True, **data)
    refused = command("train", *words, "--nproc", str(ranks), cwd=tmp_path, env=logged_out)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: command line: metrics.enable_wandb: W&B has no login here: run `wandb login`")
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


def test_wandb_offline_writes_the_run_it_was_told_to(tmp_path, logged_out):
    names = {"project": "a-project", "name": "a-name", "group": "a-group", "tags": "tag-1,tag-2", "mode": "offline"}
    keys = {f"metrics__wandb_{key}": value for key, value in names.items()}
    folder = tmp_path / "run"
    done = command("train", *flags(folder, metrics__enable_wandb=True, **keys), cwd=tmp_path, env=logged_out)
    assert done.returncode == 0, done.stderr
    (written,) = (folder / "log" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for text in ("a-project", "a-name", "a-group", "tag-1", "tag-2", "grad_norm"):
        assert text.encode() in content
    assert (folder / "log" / "wandb-0.txt").read_text().strip() in written.name


def test_the_run_s_log_says_why_it_ended(tmp_path, capsys):
    assert main(["train", *flags(tmp_path / "run", optimizer__lr=1e9, training__steps=20)]) == 2
    shown = capsys.readouterr()
    logged = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert re.search(r"ERROR ended after step \d+: step \d+: loss .* Lower optimizer.lr", logged)
    assert "ended after step" not in shown.out  # the command line shows the error itself


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path, capsys):
    folder = tmp_path / "run"
    saving = {"checkpoint__enable": True, "checkpoint__last_save_model_only": False}
    run(folder, **saving)
    before = (folder / "config.toml").read_text()
    for changes in ({"training__seq_len": 16, "training__steps": 8}, {"training__steps": 4}):
        main(["train", *flags(folder, **saving, **changes)])
        assert (folder / "config.toml").read_text() == before
    (folder / "checkpoint" / "step-6" / "manifest.json").write_text("{")
    assert main(["train", *flags(folder, **saving, training__steps=8)]) == 2
    assert "no good checkpoint" in capsys.readouterr().err


def test_a_checkpoint_whose_manifest_is_torn_is_named(tmp_path):
    folder = tmp_path / "run"
    saving = {"checkpoint__enable": True, "checkpoint__interval": 2}
    run(folder, training__steps=4, checkpoint__last_save_model_only=False, **saving)
    (folder / "checkpoint" / "step-4" / "manifest.json").write_text("{")
    assert len(run(folder, training__steps=5, **saving)) == 5
    logged = (folder / "log" / "rank-0.log").read_text()
    assert f"WARNING skipping a damaged checkpoint: {folder}/checkpoint/step-4/manifest.json cannot be read" in logged
    assert f"resumed from {folder}/checkpoint/step-2" in logged


def test_a_sequence_longer_than_the_model_says_is_noted(tmp_path):
    settings = {"training__steps": 1, "training__local_batch_size": 1}
    run(tmp_path / "run", **settings, model__overrides={"max_seq_len": 16, "n_layers": 1, "dim": 32, "n_heads": 2})
    note = "training.seq_len = 32 is longer than the model's max_seq_len, 16"
    assert note in (tmp_path / "run" / "log" / "rank-0.log").read_text()


# ---- other ways to start ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dry_run_of_a_preset(capsys):
    assert main(["train", "--preset", "llama3_8b", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "8,030,261,248" in text
    assert "layers.*.attention.wo.weight" in text


def test_dry_run_marks_what_is_not_built_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--memory_estimation.enable", "--dry-run"]) == 0
    assert "not built yet: memory_estimation.enable = True (memory estimation)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_one_machine_needs_no_meeting_place(tmp_path, capsys):
    assert main(["train", *flags(tmp_path / "run", training__steps=1), "--rdzv-endpoint=host:1", "--node-rank=1"]) == 0
    assert "note: no effect on one machine: --node-rank, --rdzv-endpoint" in capsys.readouterr().err


def test_torchrun_starts_a_run(tmp_path):
    folder = tmp_path / "run"
    file = tmp_path / "run.toml"
    file.write_text('extends = "demo"\n')
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "shardline.train"]
    done = subprocess.run([*start, "--job.config_file", file, *flags(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "log" / "ranks.json").read_text())[0]["rank"] == 0
    assert (folder / "checkpoint" / "step-6" / "manifest.json").is_file()  # as the preset behind the file says


def test_the_lines_of_the_readme_train(tmp_path):
    block = re.search(r"```python\n(from shardline import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "run.toml").write_text(
        "[model.overrides]\ndim = 32\nn_layers = 1\nn_heads = 2\nffn_dim = 32\n[training]\nseq_len = 16\n"
        'local_batch_size = 2\n[job]\ndump_folder = "run"\n'
    )
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run")[-1]["step"] == 100


def test_the_wheel_holds_the_presets(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("shardline-*.whl"))) as wheel:
        names = wheel.namelist()
    presets = {preset_path(name).name for name in preset_names()}
    assert {"finetune.yaml", "text.toml", "demo.toml"} <= presets
    assert {Path(name).name for name in names if "/presets/" in name} == presets
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "shardline").rglob("*.py")}
    assert modules <= set(names)
    assert not any(name.startswith(("tests", "configs", "docs")) for name in names)
