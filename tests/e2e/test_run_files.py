"""Files of a run that are not what they seem: planted links, FIFOs, and a umask that lets everybody write."""

import os
import stat
import threading
from pathlib import Path

import pytest

from shardline.errors import UserError
from shardline.run.options import TrainOptions
from tests.e2e.tiny import rows, run

pytestmark = pytest.mark.usefixtures("on_cpu")
SAVING = {
    "checkpoint__enable": True,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 2,
    "checkpoint__last_save_model_only": False,
    "training__steps": 2,
}
TRACING = {
    "profiling__enable_profiling": True,
    "profiling__profile_freq": 2,
    "profiling__profiler_warmup": 1,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def umask():
    before = os.umask(0)
    yield 0
    os.umask(before)


def test_nobody_else_can_write_to_what_a_run_makes(tmp_path, umask):
    run(tmp_path / "outputs" / "run", **SAVING, **TRACING)
    run(tmp_path / "outputs" / "run", **SAVING | {"training__steps": 3})
    made = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "outputs").rglob("*")}
    assert {path.name for path in made} >= {
        "config.toml",
        "metrics.jsonl",
        "rank-0.log",
        "lock",
        "manifest.json",
        "ops.txt",
    }
    assert {str(path): oct(mode) for path, mode in made.items() if mode & 0o022} == {}
    assert os.umask(0) == umask  # the process has its own again


PLANTED = [
    "log/lock",
    "log/rank-0.log",
    "log/ranks.json",
    "log/ranks.json.tmp",
    "config.toml.tmp",
    "metrics.jsonl",
    "profile_traces/iteration_3/rank0_trace.json",
    "profile_traces/iteration_3/ops.txt",
    "metrics.before-resume.jsonl",
    "checkpoint/step-2.partial",
]


REFUSED = ("log/lock", "log/rank-0.log", "metrics.before-resume.jsonl")  # others give way to a file


@pytest.mark.parametrize("name", PLANTED)
def test_a_run_does_not_write_through_a_planted_link(name, tmp_path):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    run(folder, **SAVING | {"training__steps": 1})
    victim.write_text("precious")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9}\n')  # will be moved
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    problem = ""
    try:
        run(folder, **SAVING | {"training__steps": 3}, **TRACING)
    except UserError as error:
        problem = str(error)
    assert victim.read_text() == "precious"
    if problem:
        assert Path(name).name in problem
    else:
        assert rows(folder)[-1]["step"] == 3
        assert not (folder / name).is_symlink()
    assert bool(problem) == (name in REFUSED), problem


def test_the_folder_itself_and_folders_in_it_may_be_links_of_the_user(tmp_path):
    (tmp_path / "disk" / "saves").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoint").symlink_to(tmp_path / "disk" / "saves")
    run(tmp_path / "run", **SAVING)
    assert (tmp_path / "disk" / "saves" / "step-2").is_dir()


def test_links_of_other_users_in_the_folder_are_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a link of another user")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "log").symlink_to(tmp_path / "elsewhere")
    os.lchown(tmp_path / "run" / "log", 4321, 4321)
    with pytest.raises(UserError, match="log is a symbolic link of another user"):
        run(tmp_path / "run", **SAVING)
    assert not list((tmp_path / "elsewhere").iterdir())


def ended(work, seconds=60):
    """The error with which work ends; it runs in a thread, because it may never end."""
    found = []

    def call():
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for the other end of the FIFO"
    return found[0] if found else None


FIFOS = ["config.toml", "metrics.jsonl", "log/lock", "log/rank-0.log", "checkpoint/step-2/manifest.json"]


@pytest.mark.parametrize("name", FIFOS)
def test_a_fifo_in_the_place_of_a_file_is_named(name, tmp_path):
    run(tmp_path / "run", **SAVING)
    if name.startswith("checkpoint"):
        (tmp_path / "run" / "checkpoint" / "step-1" / "manifest.json").unlink()
    path = tmp_path / "run" / name
    path.unlink()
    os.mkfifo(path)
    options, more = TrainOptions(resume=name.startswith("checkpoint")), SAVING | {"training__steps": 3}
    error = ended(lambda: run(tmp_path / "run", options, **more))
    assert isinstance(error, UserError), error
    assert Path(name).name in str(error) or "step-2" in str(error)


def test_a_fifo_as_metrics_of_a_run_that_never_saved_is_named(tmp_path):
    run(tmp_path / "run", **SAVING)
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.rename(tmp_path / path.name)
    os.mkfifo(tmp_path / "run" / "metrics.before-resume.jsonl")
    error = ended(lambda: run(tmp_path / "run", **SAVING))
    assert isinstance(error, UserError), error
    assert "metrics.before-resume.jsonl is a FIFO, a device or a folder, not a file" in str(error)


def test_a_fifo_as_the_users_config_is_named(tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    from shardline.config.load import load_config

    error = ended(lambda: load_config(tmp_path / "run.toml"), 20)
    assert str(error) == f"{tmp_path}/run.toml: is a FIFO, expected a TOML or YAML file"
    reader, writer = os.pipe()
    os.write(writer, b"[training]\nsteps = 7\n")
    os.close(writer)
    assert load_config(f"/dev/fd/{reader}").training.steps == 7  # as `<(...)` of a shell
    os.close(reader)
