"""The launcher's folder in $TMPDIR: it goes with the launcher, or with the next start after it was killed."""

import multiprocessing
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from shardline.launch import scratch
from shardline.launch.scratch import scratch_folder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def held(place, ready):
    tempfile.tempdir = place
    with scratch_folder() as folder:
        (folder / "round-0").mkdir()
        (folder / "round-0" / "notes.json").write_text("{}")
        ready.send(str(folder))
        time.sleep(600)


@pytest.fixture
def launcher(place):
    """A process that holds a folder: (process, folder)."""
    context = multiprocessing.get_context("fork")
    reads, writes = context.Pipe(False)
    process = context.Process(target=held, args=(str(place), writes), daemon=True)
    process.start()
    yield process, Path(reads.recv())
    process.kill()
    process.join()


def test_a_folder_is_private_and_ends_with_the_block(place):
    with scratch_folder() as folder:
        assert folder.parent == place
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
    assert not list(place.iterdir())


def test_the_folder_of_a_killed_launcher_goes_with_the_next_start(place, launcher):
    process, folder = launcher
    with scratch_folder():
        assert folder.exists()  # its owner lives
    process.kill()
    process.join()
    assert folder.exists()
    with scratch_folder() as own:
        assert [path.name for path in place.iterdir()] == [own.name]


def test_what_belongs_to_others_stays(place, launcher, monkeypatch):
    process, folder = launcher
    process.kill()
    process.join()
    (place / "shardline-notes").mkdir()
    (place / f"{scratch._prefix()}file").touch()
    (place / f"{scratch._prefix()}link").symlink_to(place / "shardline-notes")
    before = set(place.iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with scratch_folder():
        pass
    assert set(place.iterdir()) == before
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with scratch_folder():
        pass
    assert set(place.iterdir()) == before - {folder}


def test_folders_of_another_boot_and_without_one_are_left_alone(place, launcher, monkeypatch, tmp_path):
    process, folder = launcher
    process.kill()
    process.join()
    monkeypatch.setattr(scratch, "BOOT", tmp_path / "absent")
    with scratch_folder() as own:
        assert own.name.startswith("shardline-")
    monkeypatch.setattr(scratch, "_prefix", lambda: "shardline-00000000-")
    with scratch_folder():
        pass
    assert folder.exists()


def test_starts_at_the_same_time_leave_each_other_their_folders():
    ready, problems = threading.Barrier(8), []

    def start():
        ready.wait()
        for _ in range(40):
            with scratch_folder() as folder:
                if not folder.exists():
                    problems.append(folder)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
