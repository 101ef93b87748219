"""Who may write into a run's folder, and what happens to a run that is already there."""

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.run import folder
from shardline.run import lock as folder_lock
from shardline.run.folder import RunFolder, open_run_folder
from shardline.run.previous_run import CONFIG_HEADER
from shardline.storage.atomic import write_atomically
from tests import processes


def make_config(folder: Path | str | None, **sections: dict[str, Any]) -> Config:
    job = {"dump_folder": None if folder is None else str(folder), **sections.pop("job", {})}
    return Config.model_validate({"job": job, **sections})


def start(folder: Path | str | None, good: int | None = None, *, resume=False, overwrite=False, **sections):
    """Open the folder as a run does that finds a good checkpoint of step `good` in it."""
    return open_run_folder(
        make_config(folder, **sections), resume=resume, overwrite=overwrite, has_good_checkpoint=lambda path: good
    )


SAVING = {"enable": True}


@pytest.fixture
def lines(caplog):
    """What was logged since this was called last."""
    caplog.set_level(logging.INFO, logger="shardline")

    def take():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return take


def earlier_run(folder: Path, config: str = "") -> None:
    """What a run leaves behind, with some files of the user's among it."""
    run = start(folder)
    run.write_config(config)
    run.metrics_path.write_text("{}\n")
    run.moved_metrics_path.write_text("{}\n")
    run.log_path(0).write_text("line\n")
    for name in ("checkpoint/step-5/state", "profile_traces/iteration_10/ops.txt", "memory_snapshot/iteration_10/a"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    (folder / "tb").mkdir()
    (folder / "tb" / "events.out.tfevents.1").write_text("x")
    (folder / "notes.txt").write_text("mine")
    (folder / "log" / "mine.txt").write_text("mine")
    run.close()


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_new_folder_has_paths_lock_and_ranks(tmp_path):
    run = start(tmp_path / "a" / "run")
    assert not run.resume
    assert run.checkpoint_folder == tmp_path / "a" / "run" / "checkpoint"
    assert run.log_path(3).name == "rank-3.log"
    ranks = json.loads((run.path / "log" / "ranks.json").read_text())
    assert ranks == [{"rank": 0, "host": socket.gethostname(), "pid": os.getpid()}]
    run.close()


def test_config_is_written_with_its_header(tmp_path):
    run = start(tmp_path)
    run.write_config("[job]\n")
    assert run.config_path.read_text() == f"{CONFIG_HEADER}\n[job]\n"
    assert not [name for name in files_in(tmp_path) if name.startswith(".")]
    run.close()


def test_unnamed_folder_takes_the_models_name_and_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = start(None)
    assert re.fullmatch(r"llama3-debugmodel-\d{8}-\d{6}", run.path.name)
    assert run.path.parent == Path("outputs")
    run.close()


def test_a_model_of_a_folder_names_its_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Smol LM").mkdir()
    run = start(None, model={"name": "auto", "hf_assets_path": "Smol LM"})
    assert re.fullmatch(r"Smol-LM-\d{8}-\d{6}", run.path.name)
    run.close()


def test_unnamed_folder_takes_the_config_files_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = start(None, job={"config_file": "configs/my run.toml"})
    assert run.path.name.startswith("my_run-")
    run.close()


def test_unnamed_folders_of_the_same_second_get_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    names = [start(None).path.name for _ in range(3)]
    stem = "llama3-debugmodel-20260102-030405"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]


def test_folder_with_foreign_files_is_used_and_they_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "mine.txt").write_text("mine")
    run = start(tmp_path)
    assert not run.resume
    assert {"notes.txt", "log/mine.txt"} <= files_in(tmp_path)
    run.close()


def test_folder_with_a_run_is_refused_without_checkpoints(tmp_path):
    earlier_run(tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(UserError, match=r"already holds a run.*checkpoint\.enable is false.*--overwrite"):
        start(tmp_path, good=5)
    assert files_in(tmp_path) == before


def test_folder_with_a_run_is_refused_without_a_good_checkpoint(tmp_path):
    earlier_run(tmp_path)
    with pytest.raises(UserError, match=r"no good checkpoint.*--overwrite"):
        start(tmp_path, good=None, checkpoint=SAVING)


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoint/step-5/manifest.json", "tb/events.out.tfevents.1"])
def test_one_file_of_a_run_is_enough_to_refuse(tmp_path, left):
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("x")
    with pytest.raises(UserError, match="--overwrite"):
        start(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("step", [0, 7])
def test_good_checkpoint_resumes_and_says_so(tmp_path, resume, step, lines):
    earlier_run(tmp_path)
    run = start(tmp_path, good=step, resume=resume, checkpoint=SAVING)
    assert run.resume
    assert run.resume_step == step
    assert lines() == [f"resuming from step {step} of the run in {tmp_path}"]
    assert (tmp_path / "checkpoint" / "step-5" / "state").exists()
    run.close()


def test_checkpoint_is_looked_for_in_the_run_folder(tmp_path):
    earlier_run(tmp_path)
    asked = []
    open_run_folder(
        make_config(tmp_path, checkpoint=SAVING), has_good_checkpoint=lambda path: asked.append(path) or 3
    ).close()
    assert asked == [tmp_path]


def test_checkpoint_of_another_model_is_refused_and_the_lock_let_go(tmp_path):
    earlier_run(tmp_path)

    def other_model(path):
        raise UserError("of another model")

    with pytest.raises(UserError, match="of another model"):
        open_run_folder(make_config(tmp_path, checkpoint=SAVING), has_good_checkpoint=other_model)
    start(tmp_path, good=1, checkpoint=SAVING).close()


def test_resume_insists(tmp_path):
    with pytest.raises(UserError, match=r"--resume: there is no folder .*nowhere"):
        start(tmp_path / "nowhere", resume=True, checkpoint=SAVING)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(UserError, match=r"--resume: there is no good checkpoint"):
        start(tmp_path, resume=True, checkpoint=SAVING)
    with pytest.raises(UserError, match=r"--checkpoint\.enable"):
        start(tmp_path, good=3, resume=True)
    with pytest.raises(UserError, match=r"--job\.dump_folder"):
        start(None, resume=True, checkpoint=SAVING)
    with pytest.raises(UserError, match="contradict"):
        start(tmp_path, good=3, resume=True, overwrite=True, checkpoint=SAVING)


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in files_in(folder)}


def test_overwrite_moves_the_run_aside_and_nothing_else(tmp_path, lines):
    earlier_run(tmp_path)
    before = contents(tmp_path)
    run = start(tmp_path, good=5, overwrite=True, checkpoint=SAVING)
    assert not run.resume
    (aside,) = tmp_path.glob("replaced-*")
    lines()
    run.begin()
    assert lines() == [f"--overwrite: the previous run is now in {aside}"]
    run.begin()
    assert lines() == []
    run.settle()
    run.close()
    kept = {"notes.txt", "log/mine.txt", "log/lock"}
    assert contents(aside) == {name: text for name, text in before.items() if name not in kept}
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "log", aside.name}
    assert {path.name for path in (tmp_path / "log").iterdir()} == {"mine.txt", "lock", "ranks.json"}
    assert start(aside, good=5, checkpoint=SAVING).resume_step == 5  # it is a run's folder
    again = start(tmp_path, overwrite=True)
    assert again.replaced is None  # nothing is there but a start that wrote no result
    again.close()


def test_a_run_is_not_replaced_by_one_that_does_not_take_place(tmp_path):
    earlier_run(tmp_path)
    (tmp_path / "checkpoint" / "step-5" / "link").symlink_to("nowhere")
    before = contents(tmp_path)
    run = start(tmp_path, overwrite=True, checkpoint=SAVING)
    assert not (tmp_path / "checkpoint").exists()
    run.log_path(0).write_text("a start that fails\n")
    (tmp_path / "checkpoint").mkdir()
    run.close()
    assert contents(tmp_path) == before
    assert (tmp_path / "checkpoint" / "step-5" / "link").is_symlink()
    assert not list(tmp_path.glob("replaced-*"))


def test_what_cannot_be_moved_is_named_and_the_run_stays_whole(tmp_path, monkeypatch):
    earlier_run(tmp_path)
    before, rename = contents(tmp_path), Path.rename

    def stuck(file, place):
        if file.name == "step-5":
            raise OSError(16, "Device or resource busy")
        return rename(file, place)

    monkeypatch.setattr(Path, "rename", stuck)
    with pytest.raises(UserError, match=r"--overwrite: .*step-5 cannot be moved: Device or resource busy"):
        start(tmp_path, overwrite=True)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob("replaced-*"))


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_is_back_after_one_that_was_killed_before_its_first_step(tmp_path, begins, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(folder, "say", said.append)
    earlier_run(tmp_path)
    before = contents(tmp_path)
    killed = start(tmp_path, overwrite=True, checkpoint=SAVING)
    killed.log_path(0).write_text("a start that is killed\n")
    (tmp_path / "profile_traces" / "iteration_10" / "more").mkdir(parents=True)
    if begins:
        killed.begin()
        killed.write_config("")
        killed.metrics_path.touch()
    killed.lock.release()
    run = start(tmp_path, good=5, checkpoint=SAVING)
    assert [line for line in said if f"is back in {tmp_path}" in line]
    assert run.resume_step == 5
    run.close()
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob("replaced-*"))


def test_a_run_that_was_killed_while_it_was_moved_is_whole_again(tmp_path, monkeypatch):
    earlier_run(tmp_path)
    before, rename = contents(tmp_path), Path.rename

    def killed(file, place):
        if file.name == "step-5":
            raise KeyboardInterrupt
        return rename(file, place)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, overwrite=True)
    assert contents(tmp_path) != before
    start(tmp_path, good=5, checkpoint=SAVING).close()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "5", "[5]", '["../mine"]', '["/tmp"]', '["a/../../mine"]', "[" * 100_000])
def test_a_damaged_list_of_what_was_moved_moves_nothing(tmp_path, text):
    folder = tmp_path / "run"
    earlier_run(folder)
    (tmp_path / "mine").mkdir()
    start(folder, overwrite=True, checkpoint=SAVING).lock.release()
    (aside,) = folder.glob("replaced-*")
    (aside / ".pending").write_text(text)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"the run in {aside} cannot be moved back: .+; move it yourself"):
        start(folder, checkpoint=SAVING)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["checkpoint = 5", '[checkpoint]\nfolder = "\\u0000"', "a = " + "[" * 100_000])
def test_a_damaged_config_of_the_run_before_is_no_obstacle(tmp_path, text):
    earlier_run(tmp_path)
    header = (tmp_path / "config.toml").read_text().splitlines()[0]
    (tmp_path / "config.toml").write_text(f"{header}\n{text}\n")
    start(tmp_path, good=5, overwrite=True, checkpoint=SAVING).close()


def test_a_run_that_made_a_step_keeps_the_folder(tmp_path):
    earlier_run(tmp_path)
    first = start(tmp_path, overwrite=True, checkpoint=SAVING)
    first.begin()
    first.settle()
    first.lock.release()
    (aside,) = tmp_path.glob("replaced-*")
    start(tmp_path, checkpoint=SAVING).close()
    assert (aside / "checkpoint" / "step-5" / "state").read_text() == "x"
    assert not (tmp_path / "checkpoint").exists()


def test_a_restart_of_the_same_job_puts_nothing_back(tmp_path, monkeypatch):
    earlier_run(tmp_path)
    first = start(tmp_path, overwrite=True, checkpoint=SAVING)
    first.begin()
    first.lock.release()
    with monkeypatch.context() as patch:
        patch.setenv("SHARDLINE_ATTEMPT", json.dumps({"folder": str(tmp_path), "begun": True}))
        again = start(tmp_path, good=5, checkpoint=SAVING)
    assert not again.resume
    again.settle()
    again.close()
    assert not list(tmp_path.glob("replaced-*/.pending"))
    assert len(list(tmp_path.glob("replaced-*"))) == 1


EVERY_TEN = "[checkpoint]\nenable = true\ninterval = 10\n"
A_TENTH = "[training]\nsteps = 100\n[checkpoint]\nenable = true\ninterval_ratio = 0.1\n"


@pytest.mark.parametrize(
    ("config", "steps", "left", "begins_again"),
    [
        (EVERY_TEN, [1, 9], None, True),
        (EVERY_TEN, [1, 10], None, False),  # a checkpoint was there and is gone
        (EVERY_TEN, [1, 12], "step-10.partial", True),
        (EVERY_TEN, [1, 22], "step-20.partial", False),
        (EVERY_TEN, [1, 9], "step-5", False),
        (EVERY_TEN + "enable_first_step_checkpoint = true\n", [1, 2], None, False),
        (EVERY_TEN + 'interval_type = "seconds"\n', [1, 19], None, True),  # of half a second each
        (EVERY_TEN + 'interval_type = "seconds"\n', [1, 20], None, False),
        (A_TENTH, [1, 9], None, True),
        (A_TENTH, [1, 10], None, False),
        ("[checkpoint]\nenable = false\ninterval = 10\n", [1, 2], None, False),
        (None, [1, 2], None, False),
    ],
)
def test_a_run_that_ended_before_its_first_save_begins_again(tmp_path, config, steps, left, begins_again, lines):
    run = start(tmp_path)
    if config is not None:
        run.write_config(config)
    run.metrics_path.write_text("".join(f'{{"step": {step}, "step_seconds": 0.5}}\n' for step in steps) + '{"st')
    run.close()
    if left is not None:
        (tmp_path / "checkpoint" / left).mkdir(parents=True)
    for _ in range(2):  # as often as it takes
        if not begins_again:
            with pytest.raises(UserError, match="no good checkpoint to resume from"):
                start(tmp_path, checkpoint=SAVING)
            continue
        run = start(tmp_path, checkpoint=SAVING)
        assert (run.again, run.resume) == (True, False)
        assert lines() == [f"the run in {tmp_path} ended before its first save and begins at step 0 again"]
        run.close()


def test_overwrite_knows_the_folders_the_previous_run_named(tmp_path):
    earlier_run(tmp_path, '[checkpoint]\nfolder = "saves"\n')
    (tmp_path / "saves" / "step-9").mkdir(parents=True)
    (tmp_path / "saves" / "mine").write_text("mine")
    run = start(tmp_path, overwrite=True)
    run.settle()
    run.close()
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["mine"]


def test_overwrite_never_reaches_outside_the_folder(tmp_path):
    outside = tmp_path / "elsewhere"
    (outside / "step-9").mkdir(parents=True)
    (outside / "iteration_1").mkdir()
    folder = tmp_path / "run"
    earlier_run(folder, '[profiling]\nsave_traces_folder = "../elsewhere"\n')
    start(folder, overwrite=True).close()
    with pytest.raises(UserError, match="lies outside the run folder"):
        start(folder, overwrite=True, checkpoint={**SAVING, "folder": str(outside)})
    assert {path.name for path in outside.iterdir()} == {"step-9", "iteration_1"}


def test_checkpoints_in_an_outside_folder_count_as_a_run(tmp_path):
    (tmp_path / "elsewhere" / "step-9").mkdir(parents=True)
    run = start(tmp_path / "run", good=9, checkpoint={**SAVING, "folder": str(tmp_path / "elsewhere")})
    assert run.resume_step == 9
    run.close()


def test_config_file_of_the_user_is_never_overwritten(tmp_path):
    (tmp_path / "config.toml").write_text("[training]\nsteps = 5\n")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="was not written by a run"):
            start(tmp_path, overwrite=overwrite)
    assert (tmp_path / "config.toml").read_text() == "[training]\nsteps = 5\n"


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"job\.dump_folder: cannot use .*is a file"):
            start(path)


def test_unwritable_folder_is_refused(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        start(tmp_path / "run")
    with pytest.raises(UserError, match="Permission denied"):
        start(None)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_leaves_nothing_half_written(monkeypatch, tmp_path, call):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError, match="No space left on device"):
        start(tmp_path / "run")
    assert files_in(tmp_path / "run") <= {"log/lock"}
    monkeypatch.undo()
    start(tmp_path / "run").close()


def test_a_file_that_cannot_be_replaced_stays_as_it_was(monkeypatch, tmp_path):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


# ---- two runs at once ------------------------------------------------------------------------------------------------


def test_second_run_in_a_folder_is_told_who_holds_it(tmp_path):
    run = start(tmp_path)
    with pytest.raises(UserError, match=rf"in use by another run \(pid {os.getpid()} on "):
        start(tmp_path)
    run.close()
    start(tmp_path, overwrite=True).close()


def _race(folder: str | None, ready: Any, done: Any, results: Any) -> None:
    time.strftime = lambda form: "20260102-030405"
    ready.wait()
    try:
        run = start(folder)
        results.put((os.getpid(), str(run.path)))
        done.wait()  # hold the folder until everyone has tried
    except UserError as error:
        results.put((os.getpid(), f"refused: {error}"))
        done.wait()


def race(folder: str | None, number: int) -> dict[int, str]:
    context = multiprocessing.get_context("spawn")
    ready, done, results = context.Barrier(number), context.Barrier(number), context.Queue()
    workers = [context.Process(target=_race, args=(folder, ready, done, results)) for _ in range(number)]
    for worker in workers:
        worker.start()
    try:
        found = dict(results.get(timeout=30) for _ in workers)
        for worker in workers:
            worker.join(timeout=30)
        return found
    finally:
        for worker in workers:
            worker.kill()


def test_racing_processes_one_gets_the_folder(tmp_path):
    found = race(str(tmp_path), 4)
    winners = [pid for pid, text in found.items() if not text.startswith("refused")]
    assert len(winners) == 1
    losers = [text for pid, text in found.items() if pid not in winners]
    assert all(f"pid {winners[0]} on" in text for text in losers)


def test_racing_processes_never_share_an_unnamed_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = race(None, 4)
    assert len(set(found.values())) == 4


HOLDER = """
import os, sys, time
from tests.unit.run.test_run_folder import start
run = start(sys.argv[1])
child = os.fork() if sys.argv[2] == "fork" else None
if not child:  # the child, once it has let go of what it inherited
    print("none" if child is None else os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_killed_run_lets_the_folder_go(tmp_path, kind, lines):
    """Also when a forked data worker of it lives on."""
    root = Path(__file__).parents[3]
    holder = processes.start(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind], stdout=subprocess.PIPE, text=True, cwd=root
    )
    said = holder.stdout.readline().strip()
    child = int(said) if kind == "fork" else None
    with pytest.raises(UserError, match=f"pid {holder.pid} on"):
        start(tmp_path)
    holder.kill()
    holder.wait()
    try:
        run = start(tmp_path, overwrite=True)
        ended = f"the run that had this folder (pid {holder.pid} on {socket.gethostname()}) ended without releasing it"
        assert lines()[0] == f"{ended}: its lock was taken over"
        run.close()
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)


def test_file_system_without_locks_has_the_heartbeat(tmp_path, monkeypatch, lines):
    def refuse(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    run = start(tmp_path)
    assert "cannot be locked (Operation not supported): a heartbeat in it keeps other runs out" in lines()[0]
    with pytest.raises(UserError, match=rf"in use by another run \(pid {os.getpid()} on "):
        start(tmp_path)
    run.close()
    start(tmp_path, overwrite=True).close()
    lines()
    (tmp_path / "log" / "lock").write_text(f"pid {2**22 + 1} on {socket.gethostname()}\n")  # no such process
    run = start(tmp_path, overwrite=True)
    assert "its lock was taken over" in lines()[1]
    run.close()


def left_behind(folder: Path, **changes: str) -> None:
    """A lock of this very process, but for these changes."""
    (folder / "log").mkdir(exist_ok=True)
    (folder / "log" / "lock").write_text(folder_lock.Holder.this_process()._replace(**changes).text())


@contextlib.contextmanager
def beating(file: Path) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_another_process_that_has_the_pid_now_is_not_the_holder(tmp_path, monkeypatch, lines):
    """Without locks; the heartbeat, which would take a quarter of a minute to fall silent, is not needed."""
    monkeypatch.setattr("fcntl.flock", lambda *arguments: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    monkeypatch.setattr(folder_lock, "_beats", lambda file: pytest.fail("the heart was listened to"))
    left_behind(tmp_path, started="1")
    start(tmp_path).close()
    assert f"(pid {os.getpid()} on {socket.gethostname()}) ended without releasing it" in lines()[1]


@pytest.mark.parametrize("change", [{"boot": "b0"}, {"pids": "pid:[1]", "words": f"pid {2**22 + 1} on HOST"}])
def test_a_machine_or_container_of_the_same_name_keeps_the_folder(tmp_path, monkeypatch, change):
    """A machine whose locks are its own, and a container without locks, where this pid does not say anything."""
    change = {key: value.replace("HOST", socket.gethostname()) for key, value in change.items()}
    if "pids" in change:
        refused = OSError(95, "Operation not supported")
        monkeypatch.setattr("fcntl.flock", lambda *arguments: (_ for _ in ()).throw(refused))
    left_behind(tmp_path, **change)
    with beating(tmp_path / "log" / "lock"), pytest.raises(UserError, match="in use by another run"):
        start(tmp_path)


def test_the_lock_of_this_machine_before_its_last_boot_is_waited_for(tmp_path, monkeypatch, lines):
    """A file server may still keep it."""
    left_behind(tmp_path, boot="b0")
    file = tmp_path / "log" / "lock"
    os.utime(file, (1, 1))
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
        timer.start()
        start(tmp_path).close()
        timer.join()
    assert "ended without releasing it" in lines()[0]


# ---- another machine on the same disk --------------------------------------------------------------------------------


ELSEWHERE = """
import fcntl, socket, sys, time
from shardline.run import folder
from shardline.run import lock as folder_lock
from tests.unit.run.test_run_folder import start

folder_lock.BEAT_SECONDS = 0.1
socket.gethostname = lambda: "node7"
if sys.argv[2] == "locks of its own":
    fcntl.flock = lambda *arguments: None  # what this machine locks, others do not see
run = start(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
run.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def elsewhere(folder: Path, locks: str) -> Iterator[subprocess.Popen[str]]:
    """A run that holds the folder on another machine."""
    command = [sys.executable, "-c", ELSEWHERE, str(folder), locks]
    root = Path(__file__).parents[3]
    with processes.running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout.readline() == "held\n"
        yield process


@pytest.mark.parametrize("locks", ["shared locks", "locks of its own"])
def test_a_run_on_another_machine_keeps_the_folder_while_its_heart_beats(tmp_path, monkeypatch, locks, lines):
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 5.0)
    with elsewhere(tmp_path, locks) as process:
        for _ in range(2):
            with pytest.raises(UserError, match=rf"in use by another run \(pid {process.pid} on node7\)"):
                start(tmp_path)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        run = start(tmp_path)
        assert lines() == []
        run.close()


@pytest.mark.parametrize("locks", ["shared locks", "locks of its own"])
def test_a_run_that_was_killed_on_another_machine_is_recognised(tmp_path, monkeypatch, locks, lines):
    with elsewhere(tmp_path, locks) as process:
        process.kill()
        process.wait()
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 1.0)
    run = start(tmp_path)
    ended = f"the run that had this folder (pid {process.pid} on node7) ended without releasing it"
    assert lines() == [f"{ended}: its lock was taken over"]
    run.close()


def test_the_lock_of_a_machine_that_is_gone_is_waited_for(tmp_path, monkeypatch, lines):
    """The file server keeps it for a while; nothing beats."""
    file = tmp_path / "log" / "lock"
    file.parent.mkdir()
    with file.open("w") as held:
        held.write("pid 5 on node7\n")
        held.flush()
        os.utime(file, (1, 1))
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 0.3)
        with pytest.raises(UserError, match=r"in use by another run \(pid 5 on node7\)"):
            start(tmp_path)
        monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 60.0)
        timer = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        timer.start()
        run = start(tmp_path)
        assert "(pid 5 on node7) ended without releasing it" in lines()[0]
        run.close()
        timer.join()


def test_other_ranks_need_no_lock(tmp_path):
    run = start(tmp_path)
    other = RunFolder(run.path)
    assert other.log_path(1) == tmp_path / "log" / "rank-1.log"
    run.close()


def test_a_clock_that_was_set_back_does_not_make_a_dead_run_live(tmp_path, monkeypatch):
    file = tmp_path / "lock"
    file.write_text("host-a 1")
    later = time.time() + 3600
    os.utime(file, (later, later))
    monkeypatch.setattr(folder_lock, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.05)
    began = time.monotonic()
    assert not folder_lock._beats(file)
    assert time.monotonic() - began < 30
