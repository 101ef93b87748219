"""`checkpoint.mirror`: shards first, manifest last, nothing of others touched, failures said and tried again."""

import asyncio
import json
import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest

from shardline.checkpoint import format as files
from shardline.checkpoint.commit import CheckpointWriter
from shardline.checkpoint.fetch import fetch_to_resume, local_path
from shardline.checkpoint.format import find, find_checkpoint, look_at, manifest_checksum, step_names
from shardline.checkpoint.mirror import Mirror, check_free, read_record
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.storage.location import locate
from tests import faulty_storage
from tests.e2e.tiny import run
from tests.faulty_storage import faults

pytestmark = pytest.mark.usefixtures("on_cpu")
URL = "faulty://bucket/run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full checkpoints of steps 1 to 4 and the last weights, of step 5."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(
        folder,
        training__steps=5,
        checkpoint__enable=True,
        checkpoint__interval=1,
        checkpoint__last_save_model_only=True,
    )
    return folder / "checkpoint"


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    faulty_storage.register()
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    yield
    faulty_storage.clear()
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


def save(trained: Path, folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.copytree(trained / f"step-{step}", folder / f"step-{step}")


def copied(mirror: Mirror) -> list[str]:
    mirror.nudge()
    mirror.finish()
    return step_names(mirror.place)


def content(where: Any) -> dict[str, bytes]:
    return {name: (where / name).open().read() for name in where.names()}


@pytest.mark.parametrize("kind", ["memory", "faulty", "file", "local"])
def test_a_copy_is_the_checkpoint(kind: str, trained: Path, folder: Path, tmp_path: Path) -> None:
    url = f"{kind}://{tmp_path}/far/away" if kind in ("file", "local") else f"{kind}://bucket/run"
    save(trained, folder, 2)
    mirror = Mirror(url, folder, keep=3)
    assert copied(mirror) == ["step-2"]
    assert content(mirror.place / "step-2") == content(locate(folder / "step-2"))
    assert main(["checkpoint", "verify", url]) == 0
    save(trained, folder, 3, 4)
    assert copied(mirror) == ["step-2", "step-3", "step-4"]


def test_the_manifest_goes_last_and_is_removed_first(trained: Path, folder: Path) -> None:
    save(trained, folder, 2)
    mirror = Mirror(URL, folder, keep=1)
    copied(mirror)
    written = [path for what, path in faults.log if what == "write"]
    assert len(written) == len(list((folder / "step-2").iterdir()))
    assert written[-1] == "/bucket/run/step-2/manifest.json"
    shutil.rmtree(folder / "step-2")
    save(trained, folder, 3)
    faults.log.clear()
    assert copied(mirror) == ["step-3"]
    removed = [path for what, path in faults.log if what == "remove"]
    assert removed[0] == "/bucket/run/step-2/manifest.json"
    last = max(index for index, (what, _) in enumerate(faults.log) if what == "write")
    assert faults.log.index(("remove", removed[0])) > last  # only after the next one was there
    assert step_names(mirror.place) == ["step-3"]
    assert not (mirror.place / "step-2").exists()


def test_pruned_as_here(trained: Path, folder: Path) -> None:
    """The newest k, and always the newest that can be resumed; 0 keeps all."""
    everything = Mirror("memory://all", folder, keep=0)
    two = Mirror(URL, folder, keep=2)
    for step in (1, 2, 3, 4):
        save(trained, folder, step)
        (folder / "mirror.json").unlink(missing_ok=True)
    assert copied(two) == ["step-3", "step-4"]
    (folder / "mirror.json").unlink()
    assert copied(everything) == ["step-1", "step-2", "step-3", "step-4"]
    (folder / "mirror.json").unlink()
    one = Mirror("memory://one", folder, keep=1)
    save(trained, folder, 5)
    assert copied(one) == ["step-4", "step-5"]  # 5 holds weights alone


def test_a_failed_copy_is_said_and_tried_again_at_each_write(
    trained: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever write fails, there is never a manifest of what is not whole; the next save brings both."""
    save(trained, folder, 1)
    mirror = Mirror(URL, folder, keep=3)
    copied(mirror)
    writes = faults.writes
    assert writes >= 2
    for fault in ("fail_at", "cut_at"):
        for number in range(1, writes + 1):
            faulty_storage.clear()
            shutil.rmtree(folder)
            folder.mkdir()
            caplog.clear()
            save(trained, folder, 1)
            mirror = Mirror(URL, folder, keep=3)
            getattr(faults, fault).add(number)
            mirror.nudge()
            wait(mirror)
            for saved in listed(mirror):  # of a manifest at most a part is there, or all but its last newline
                assert saved is None or saved.find_damage() == []
            (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert f"{folder / 'step-1'} was not copied to {URL}: " in line
            assert line.endswith("; the next save tries again")
            reason = "No space left on the other side" if fault == "fail_at" else "were sent"
            assert reason in line
            save(trained, folder, 2)
            assert copied(mirror) == ["step-1", "step-2"]
            assert [saved.find_damage() for saved in listed(mirror)] == [[], []]


def wait(mirror: Mirror) -> None:
    thread = mirror._thread
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


def listed(mirror: Mirror) -> list[Any]:
    return [look_at(mirror.place / name).saved for name in step_names(mirror.place)]


def test_the_end_tries_once_more_and_then_says_so(
    trained: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(trained, folder, 1)
    mirror = Mirror(URL, folder, keep=3)
    faults.fail_at.add(1)
    mirror.nudge()
    wait(mirror)
    mirror.finish()
    assert step_names(mirror.place) == ["step-1"]
    faults.unreachable = True
    save(trained, folder, 2)
    mirror.finish()
    assert caplog.records[-1].getMessage().endswith("no route to the other side; the run ends without it")
    mirror.finish()  # as where the first try was under way when the run ended
    assert caplog.text.count("the run ends without it") == 1
    faults.unreachable = False
    assert step_names(mirror.place) == ["step-1"]


def test_an_error_that_is_no_exception_does_not_end_the_copies(
    trained: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancelled request of a file system's event loop is one: the end would wait for a thread that is gone."""
    save(trained, folder, 1)
    mirror, cancelled = Mirror(URL, folder, keep=3), [asyncio.CancelledError()]

    def cancel(path: str) -> None:
        if cancelled:
            raise cancelled.pop()

    faults.before_write = cancel
    mirror.nudge()
    wait(mirror)
    assert caplog.messages == [f"{URL}: CancelledError; the next save tries again"]
    assert copied(mirror) == ["step-1"]


def test_what_others_put_there_is_left_alone(trained: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = locate(URL)
    for name in ("step-1", "step-2", "step-3"):
        (there / name).make_folder()
        with (there / name / "manifest.json").open("wb") as file:
            file.write(b'{"format": "another"}')
    before = content(there / "step-2")
    with pytest.raises(UserError, match=r"already holds step-3 of another run: continue that run with --resume"):
        check_free(URL)
    save(trained, folder, 2)
    mirror = Mirror(URL, folder, keep=1)
    copied(mirror)
    assert caplog.text.count(f"{URL}/step-2 belongs to another run") == 1
    assert content(there / "step-2") == before
    save(trained, folder, 4)
    copied(mirror)
    assert step_names(there) == ["step-1", "step-2", "step-3", "step-4"]
    assert content(there / "step-2") == before
    faults.unreachable = True
    check_free(URL)
    assert "cannot be listed now (no route" in caplog.messages[-1]
    faults.unreachable = False
    logged = len(caplog.messages)
    check_free("memory://free")
    assert len(caplog.messages) == logged


def test_a_step_that_was_trained_again_replaces_the_older(trained: Path, folder: Path) -> None:
    save(trained, folder, 1, 2, 3)
    mirror = Mirror(URL, folder, keep=0)
    copied(mirror)
    for step in (2, 3):
        shutil.rmtree(folder / f"step-{step}")
    save(trained, folder, 2)
    path = folder / "step-2" / "manifest.json"
    again = json.loads(path.read_text())
    again["trainer"]["tokens"] = 12345
    path.write_text(json.dumps({**again, "crc32": manifest_checksum(again)}))
    (folder / "step-2" / "note.txt").write_text("beside")
    assert copied(mirror) == ["step-1", "step-2"]  # 3 comes after what was trained again
    assert content(mirror.place / "step-2") == content(locate(folder / "step-2"))


def test_a_copy_that_lost_a_file_is_made_again(trained: Path, folder: Path) -> None:
    save(trained, folder, 1)
    copied(Mirror(URL, folder, keep=3))
    place = locate(URL) / "step-1"
    shard = next(name for name in place.names() if name.endswith(".safetensors"))
    (place / shard).remove()
    (folder / "mirror.json").unlink()  # as in a folder that was fetched from there
    assert copied(Mirror(URL, folder, keep=3)) == ["step-1"]
    assert content(place) == content(locate(folder / "step-1"))


def test_a_damaged_file_here_is_not_passed_on(trained: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(trained, folder, 1)
    path = max((folder / "step-1").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert copied(Mirror(URL, folder, keep=3)) == []
    assert "fail their checksum" in caplog.text


def test_the_step_being_copied_is_protected(trained: Path, folder: Path) -> None:
    save(trained, folder, 1)
    mirror = Mirror(URL, folder, keep=1)
    seen: list[set[int]] = []
    faults.before_write = lambda path: seen.append(mirror.protected())
    copied(mirror)
    assert seen == [{1}] * faults.writes
    assert mirror.protected() == set()


def test_one_that_is_pruned_while_it_waits_is_passed_over(
    trained: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(trained, folder, 1, 2)
    mirror = Mirror(URL, folder, keep=2)
    faults.before_write = lambda path: shutil.rmtree(folder / "step-1", ignore_errors=True)  # while 2 is copied
    assert copied(mirror) == ["step-2"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_training_does_not_wait_for_a_slow_copy(trained: Path, folder: Path) -> None:
    save(trained, folder, 1)
    mirror, begun, let_go = Mirror(URL, folder, keep=2), threading.Event(), threading.Event()
    faults.before_write = lambda path: (begun.set(), let_go.wait(60))
    mirror.nudge()
    assert begun.wait(60)
    save(trained, folder, 2)
    mirror.nudge()  # returns at once
    assert mirror.protected() == {1}
    let_go.set()
    mirror.finish()
    assert step_names(mirror.place) == ["step-1", "step-2"]


def test_a_stop_cuts_the_last_copy_short_and_the_next_start_makes_it(
    trained: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(trained, folder, 1, 2)
    mirror, let_go = Mirror(URL, folder, keep=2), threading.Event()
    faults.before_write = lambda path: let_go.wait(60)
    mirror.finish(lambda: "within 5 s after SIGTERM")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    missing = f"step-1, step-2 in {folder}: not copied to {URL} within 5 s after SIGTERM"
    assert line == f"{missing}; the next start of this run copies them"
    thread = next(one for one in threading.enumerate() if one.name == "shardline-mirror")
    let_go.set()
    thread.join(60)
    assert step_names(mirror.place) == []
    again = Mirror(URL, folder, keep=2)
    again.finish(lambda: "" if again._thread is not None else "too late for a copy that is made")
    assert step_names(again.place) == ["step-1", "step-2"]
    assert caplog.text.count("not copied to") == 1


def test_a_mirror_inside_the_run_is_refused(folder: Path) -> None:
    for path in (folder, folder / "deeper", folder.parent):
        with pytest.raises(UserError, match="overlaps"):
            Mirror(f"file://{path}", folder, keep=1)
    with pytest.raises(UserError, match="nosuch"):
        Mirror("nosuch://bucket", folder, keep=1)


# ---- back from there -------------------------------------------------------------------------------------------------


def test_a_url_is_fetched_once_and_verified(trained: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    save(trained, folder, 2, 4)
    mirror = Mirror(URL, folder, keep=5)
    copied(mirror)
    path = local_path(URL)
    assert find_checkpoint(path).step == 4
    assert path.is_relative_to(tmp_path / "cache")
    assert content(locate(path)) == content(locate(folder / "step-4"))
    stamp = (path / "manifest.json").stat().st_mtime_ns
    assert local_path(f"{URL}/step-4") == path
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    assert find_checkpoint(local_path(URL, 2)).step == 2
    with pytest.raises(UserError, match=r"holds no checkpoint of step 3 \(steps there: 2, 4\)"):
        local_path(URL, 3)
    # a copy that is torn is fetched again, another one behind the same URL too
    shard = max(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert content(locate(local_path(URL))) == content(locate(folder / "step-4"))
    assert local_path(folder) == folder
    assert local_path(f"file://{folder}") == folder


def test_what_is_damaged_on_the_way_is_not_taken(trained: Path, folder: Path, tmp_path: Path) -> None:
    save(trained, folder, 2)
    mirror = Mirror("memory://bucket/run", folder, keep=5)
    copied(mirror)
    memory = fsspec.filesystem("memory")
    name = next(name for name in memory.find("/bucket/run") if name.endswith(".safetensors"))
    data = bytearray(memory.cat_file(name))
    data[len(data) // 2] ^= 1
    memory.pipe_file(name, bytes(data))
    with pytest.raises(UserError, match=r"memory://bucket/run/step-2/.* is damaged: bytes 0 to"):
        local_path("memory://bucket/run")
    memory.pipe_file(name, bytes(data[:-1]))
    with pytest.raises(UserError, match="torn"):
        local_path("memory://bucket/run")
    assert not list((tmp_path / "cache").rglob("step-2*"))
    faults.unreachable = True
    with pytest.raises(UserError, match="faulty://bucket/run cannot be read: ConnectionError: no route"):
        local_path(URL)


def test_the_newest_good_one_is_fetched_to_resume(
    trained: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(trained, folder, 1, 2, 3, 4, 5)
    copied(Mirror("memory://bucket/run", folder, keep=0))
    memory = fsspec.filesystem("memory")
    torn = next(name for name in memory.find("/bucket/run/step-4") if name.endswith(".safetensors"))
    memory.pipe_file(torn, memory.cat_file(torn)[:-1])
    fresh = tmp_path / "fresh"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="shardline"):
        fetch_to_resume("memory://bucket/run", fresh)
    notes = [line for line in caplog.messages if not line.startswith("fetching ")]
    # 5 holds weights alone and 4 is torn: 3 is what can be resumed
    assert step_names(locate(fresh)) == ["step-3", "step-5"]
    assert "memory://bucket/run/step-5" in notes[0]
    assert "skipping a damaged checkpoint" in notes[1]
    assert "fetched memory://bucket/run/step-3" in notes[2]
    fetch_to_resume("memory://bucket/run", fresh)  # not empty any more
    assert step_names(locate(fresh)) == ["step-3", "step-5"]
    # they are this run's own from now on: the mirror keeps pruning them
    mirror = Mirror("memory://bucket/run", fresh, keep=1)
    shutil.rmtree(fresh / "step-5")
    save(trained, fresh, 4)
    assert copied(mirror) == ["step-4"]
    fetch_to_resume("memory://nothing/there", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_is_there_is_the_runs_own_even_if_it_is_killed_while_it_fetches(
    trained: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its next saves of these steps would never be copied: they would belong to another run."""
    save(trained, folder, 1, 2)
    copied(Mirror("memory://bucket/run", folder, keep=0))
    monkeypatch.setattr("shardline.checkpoint.fetch.fetch", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fetch_to_resume("memory://bucket/run", tmp_path / "fresh")
    assert sorted(read_record(tmp_path / "fresh", "memory://bucket/run")) == ["step-1", "step-2"]


@pytest.mark.parametrize("url", ["memory://bucket/run", URL])
def test_commands_take_urls(url: str, trained: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    save(trained, folder, 2)
    copied(Mirror(url, folder, keep=1))
    assert find(locate(url))[1][0].step == 2
    for command in ("ls", "verify", "show"):
        assert main(["checkpoint", command, url]) == 0
    assert main(["export", url, str(tmp_path / "there"), "--format=consolidated"]) == 0
    assert main(["export", str(folder), str(tmp_path / "here"), "--format=consolidated"]) == 0
    assert content(locate(tmp_path / "there")) == content(locate(tmp_path / "here"))
    capsys.readouterr()
    assert main(["generate", url, "--prompt", "the", "--max-new-tokens=3"]) == 0
    from_url = capsys.readouterr().out
    assert main(["generate", str(folder), "--prompt", "the", "--max-new-tokens=3"]) == 0
    assert from_url.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


def test_what_is_being_copied_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer: Any = object.__new__(CheckpointWriter)
    kept: list[Any] = []
    writer.section, writer.mirror = SimpleNamespace(keep_latest_k=3), SimpleNamespace(protected=lambda: {2})
    monkeypatch.setattr(files, "prune", lambda folder, keep, protected: kept.append((keep, protected)) or ["step-1"])
    assert writer._prune(8, tmp_path, SimpleNamespace(at="")) == 1
    assert kept == [(3, {2, 8})]
