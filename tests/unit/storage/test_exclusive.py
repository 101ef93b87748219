"""One process at a time, also where a file system has no locks."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from shardline.data.prepare import prepare
from shardline.data.sources import open_source
from shardline.data.tokenizer import load_tokenizer
from shardline.storage import exclusive as module
from shardline.storage.exclusive import exclusive


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("left", [(), (1, 2)])
def test_without_locks_one_at_a_time_holds_it(
    left: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where holders were killed: they are silent."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    for number in left:
        (tmp_path / f".lock.{number}").touch()
    inside, most = list[int](), list[int]()

    def work(number: int) -> None:
        with exclusive(tmp_path / ".lock", lambda: None):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] * 6
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    said = "cannot be locked (Function not implemented): a heartbeat beside it keeps other processes out"
    assert "".join(capsys.readouterr()).count(said) == 6


@pytest.mark.usefixtures("without_locks")
def test_a_holder_is_waited_for_as_long_as_it_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    waited = threading.Event()
    file, order = tmp_path / ".lock.1", list[str]()
    file.touch()

    def wait() -> None:
        with exclusive(tmp_path / ".lock", waited.set):
            order.append("the next one")

    thread = threading.Thread(target=wait)
    thread.start()
    assert waited.wait(30)
    for _ in range(20):
        os.utime(file)
        time.sleep(0.03)
    order.append("the holder")
    file.unlink()
    thread.join(30)
    assert order == ["the holder", "the next one"]


@pytest.mark.usefixtures("without_locks")
def test_data_is_prepared_without_locks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text\n")
    for overwrite in (False, True):
        store = prepare(
            open_source("mine", str(text)), load_tokenizer("bytes"), tmp_path / "out", workers=1, overwrite=overwrite
        )
        assert store.find_damage() == []
    assert "cannot be locked" in "".join(capsys.readouterr())
    assert not list((tmp_path / "out").glob(".lock.*"))


def test_other_errors_of_a_lock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="Input/output"), exclusive(tmp_path / ".lock", lambda: None):
        pass
