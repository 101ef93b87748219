"""Preparing: the right tokens, whatever interrupts it, and nothing half done that looks whole."""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shardline.config.load import load_config
from shardline.data import chunks
from shardline.data.chunks import Chunk, chunks_of_texts
from shardline.data.prepare import command, prepare, store_for
from shardline.data.sources import Source, open_source
from shardline.data.token_store import TokenStore, is_store
from shardline.data.tokenizer import ByteTokenizer, load_tokenizer
from shardline.errors import UserError
from tests import processes

from .test_tokenizer import write_tokenizer

BYTES = ByteTokenizer()
DOCUMENTS = [f"document number {i} " + "words " * (i % 7) for i in range(300)]


def write_lines(file: Path, documents: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return file


def expected_tokens(documents: list[str]) -> list[int]:
    return [token for document in documents for token in (256, *document.encode(), 257)]


def same(one: TokenStore, other: TokenStore) -> bool:
    rows = [store.read(0, store.tokens) for store in (one, other)]
    numbers = [store.document_numbers(0, store.tokens) for store in (one, other)]
    return np.array_equal(*rows) and np.array_equal(*numbers)


def part_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("part-*.tokens"))


def test_tokens_and_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    source = open_source("mine", str(write_lines(tmp_path / "a.jsonl", ["", *DOCUMENTS, "  \n"])))
    store = prepare(source, BYTES, tmp_path / "out", workers=2, part_tokens=2000)
    assert store.read(0, store.tokens).tolist() == expected_tokens(DOCUMENTS)
    numbers = [n for n, document in enumerate(DOCUMENTS) for _ in range(len(document) + 2)]
    assert store.document_numbers(0, store.tokens).tolist() == numbers
    assert (store.documents, store.manifest["empty_documents"], store.dtype) == (300, 2, np.dtype("<u2"))
    assert len(store.parts) > 3
    for start, count in ((0, 1), (1990, 40), (3500, 2500)):  # within and across parts
        assert store.read(start, count).tolist() == expected_tokens(DOCUMENTS)[start : start + count]
        relative = np.array(numbers[start : start + count]) - numbers[start]
        assert store.document_numbers(start, count).tolist() == relative.tolist()
    with pytest.raises(IndexError):
        store.read(store.tokens - 1, 2)
    assert store.find_damage() == []
    left = {file.name for file in (tmp_path / "out").iterdir() if not file.name.endswith((".tokens", ".ends"))}
    assert left == {"store.json", ".lock"}


def test_large_text_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 300)
    (tmp_path / "a.txt").write_text("one line\n" * 200)
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.txt").write_text("")
    store = prepare(open_source("mine", str(tmp_path)), BYTES, tmp_path / "out", workers=2, part_tokens=500)
    assert store.read(0, store.tokens).tolist() == expected_tokens(["one line\n" * 200, "short"])
    assert store.documents == 2
    assert store.document_numbers(0, store.tokens).tolist() == [0] * 1802 + [1] * 7


def test_json_tokenizer_gives_what_the_library_gives(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", ["<s>", "</s>"]))
    source = open_source("mine", str(write_lines(tmp_path / "a.jsonl", DOCUMENTS)))
    store = prepare(source, tokenizer, tmp_path / "out", workers=1)
    expected = [token for text in DOCUMENTS for token in (0, *tokenizer.encode(text), 1)]
    assert store.read(0, store.tokens).tolist() == expected


def test_damage_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = open_source("mine", str(write_lines(tmp_path / "a.jsonl", DOCUMENTS)))
    prepare(source, BYTES, out, workers=1)
    tokens = out / "part-00000.tokens"
    good = tokens.read_bytes()
    tokens.write_bytes(good[:100] + bytes([good[100] ^ 4]) + good[101:])
    problem = TokenStore.open(out).find_damage()[0]
    assert (problem.file, problem.start, problem.end) == (str(tokens), 0, len(good))
    tokens.write_bytes(good[:-2])
    with pytest.raises(UserError, match=r"bytes, but \d+ were written: it is torn"):
        TokenStore.open(out)
    tokens.write_bytes(good)
    assert TokenStore.open(out).find_damage() == []
    manifest = (out / "store.json").read_text()
    (out / "store.json").write_text(manifest.replace('"documents": 300', '"documents": 301', 1))
    with pytest.raises(UserError, match=r"its checksum does not match"):
        TokenStore.open(out)
    (out / "store.json").write_text(manifest[:-30])
    with pytest.raises(UserError, match=r"store.json cannot be read"):
        TokenStore.open(out)
    assert same(prepare(source, BYTES, out, workers=1, overwrite=True), prepare(source, BYTES, tmp_path / "b"))


def test_an_error_in_the_source_leaves_no_store_and_no_process(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    file.write_text(file.read_text() + "{broken")
    with pytest.raises(UserError, match=r"a.jsonl:301: not JSON"):
        prepare(open_source("mine", str(file)), BYTES, tmp_path / "out", workers=2)
    assert not is_store(tmp_path / "out")
    assert not children()


def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    deadly = Chunk(functools.partial(os._exit, 3), 1)
    source = Source("deadly", "x", None, lambda: [*chunks_of_texts(["fine"]), deadly])
    with pytest.raises(RuntimeError, match=r"exit code 3"):
        prepare(source, BYTES, tmp_path / "out", workers=1)
    assert not is_store(tmp_path / "out")
    assert not children()


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """Children that were there before, of other tests in this process, do not count."""
    monkeypatch.setitem(OTHERS, "pids", {child.pid for child in psutil.Process().children()})


OTHERS: dict[str, set[int]] = {}


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in OTHERS["pids"]]


# What the processes below run: every chunk of 20 documents is a part; `stop` chunks come, then the source hangs.
SCRIPT = """
import sys, time, logging, resource
from shardline.data.prepare import prepare
from shardline.data.sources import Source
from shardline.data.tokenizer import ByteTokenizer
from shardline.errors import UserError
from tests.unit.data.test_data_prepare import grouped
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
out, stop, pause, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
overwrite = bool(int(sys.argv[5]))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
def make():
    for number, chunk in enumerate(grouped()):
        time.sleep(600 if number == stop else pause)
        yield chunk
try:
    source = Source("s", "s", None, make)
    print(prepare(source, ByteTokenizer(), out, workers=1, part_tokens=1, overwrite=overwrite).tokens)
except UserError as error:
    print("UserError:", error)
"""


def grouped() -> Iterator[Chunk]:
    return (Chunk(functools.partial(list, DOCUMENTS[first : first + 20]), 20) for first in range(0, len(DOCUMENTS), 20))


def start(
    out: Path, stop: int = -1, pause: float = 0.0, limit: int = 0, overwrite: bool = False
) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT, str(out), str(stop), str(pause), str(limit), str(int(overwrite))]
    root = Path(__file__).resolve().parents[3]
    return processes.start(words, stdout=subprocess.PIPE, text=True, cwd=root)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.02)


def test_killed_and_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    process = start(out, stop=9)
    wait_for(out / "part-00004.json")
    workers = psutil.Process(process.pid).children()
    assert workers
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_store(out)
    with pytest.raises(UserError, match=r"unfinished store of another source or tokenizer: --overwrite"):
        prepare(Source("t", "t", None, grouped), BYTES, out)
    (out / "part-00005.tokens").write_bytes(b"torn")
    before = {name: (out / name).stat().st_mtime_ns for name in part_files(out)[:5]}
    with caplog.at_level(logging.INFO, logger="shardline.data"):
        store = prepare(Source("s", "s", None, grouped), BYTES, out, part_tokens=1)
    assert "continuing after" in caplog.text
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert same(store, prepare(Source("s", "s", None, grouped), BYTES, tmp_path / "whole"))
    assert store.find_damage() == []
    deadline = time.monotonic() + 30
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its caller"
        time.sleep(0.05)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("damaged", [False, True])
def test_a_store_stays_when_its_replacement_fails(tmp_path: Path, damaged: bool) -> None:
    out = tmp_path / "out"
    good = open_source("mine", str(write_lines(tmp_path / "a.jsonl", DOCUMENTS)))
    prepare(good, BYTES, out, workers=1, part_tokens=2000)
    if damaged:
        (out / "store.json").write_text("{")
    before = contents(out)
    broken = write_lines(tmp_path / "b.jsonl", DOCUMENTS[:3])
    broken.write_text(broken.read_text() + "{broken")
    empty = write_lines(tmp_path / "c.jsonl", ["", " "])
    for file, said in ((broken, r"b.jsonl:4: not JSON"), (empty, r"holds no text")):
        with pytest.raises(UserError, match=said):
            prepare(open_source("mine", str(file)), BYTES, out, workers=1, overwrite=True)
        assert contents(out) == before
    if not damaged:
        assert prepare(good, BYTES, out).find_damage() == []


def test_a_store_stays_until_its_replacement_is_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, old, new = tmp_path / "out", Source("t", "t", None, grouped), Source("s", "s", None, grouped)
    prepare(old, BYTES, out)
    before = contents(out)
    process = start(out, stop=9, overwrite=True)
    wait_for(out / "part-00005.json")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert {name: contents(out)[name] for name in before} == before
    assert prepare(old, BYTES, out).manifest["source"]["name"] == "t"  # still there, and in use
    assert TokenStore.open(out).find_damage() == []
    with pytest.raises(UserError, match=r"already holds a store of another source or tokenizer: --overwrite"):
        prepare(Source("u", "u", None, grouped), BYTES, out)
    with caplog.at_level(logging.INFO, logger="shardline.data"):
        store = prepare(new, BYTES, out, part_tokens=1)
    assert "continuing after" in caplog.text
    assert store.manifest["source"]["name"] == "s"
    assert same(store, prepare(new, BYTES, tmp_path / "whole"))
    assert store.find_damage() == []
    parts = {part.name + suffix for part in store.parts for suffix in (".tokens", ".ends")}
    assert set(contents(out)) == parts | {"store.json", ".lock"}
    assert same(prepare(new, BYTES, out, overwrite=True), store)
    assert len(part_files(out)) == 1


def test_the_command_goes_on_with_a_replacement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = tmp_path / "out", write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    prepare(Source("t", "t", None, grouped), BYTES, out)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shardline.data.prepare._finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command(str(file), str(out), tokenizer="bytes", workers=1, overwrite=True)
    for again in (False, True):
        capsys.readouterr()
        assert command(str(file), str(out), tokenizer="bytes", workers=1) == 0
        assert ("already prepared" in capsys.readouterr().out) == again
    assert TokenStore.open(out).source_fingerprint == open_source("mine", str(file)).fingerprint


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_two_processes_do_not_mix(tmp_path: Path) -> None:
    """Both wait while a third holds the folder; then one prepares it, and the other uses the result."""
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [start(out), start(out)]
        for process in processes:
            assert "another process is preparing" in process.stdout.readline()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert said[0].split()[-1] == said[1].split()[-1] == str(len(expected_tokens(DOCUMENTS)))
    assert sum("done in" in text for text in said) == 1
    assert TokenStore.open(out).find_damage() == []


def test_full_disk_is_a_user_error_and_can_be_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = start(out, limit=1000).communicate(timeout=60)[0]
    assert "UserError: cannot write the token store" in said
    assert not is_store(out)
    store = prepare(Source("s", "s", None, grouped), BYTES, out)
    assert store.read(0, store.tokens).tolist() == expected_tokens(DOCUMENTS)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    source = open_source("mine", str(write_lines(tmp_path / "a.jsonl", DOCUMENTS[:5])))
    with pytest.raises(UserError, match=r"is a file; choose a folder"):
        prepare(source, BYTES, tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"cannot write the token store .*Not a directory"):
        prepare(source, BYTES, tmp_path / "a.jsonl" / "out")
    with pytest.raises(UserError, match=r"holds other files \('a.jsonl'\)"):
        prepare(source, BYTES, tmp_path, overwrite=True)
    empty = open_source("mine", str(write_lines(tmp_path / "b.jsonl", ["", " "])))
    with pytest.raises(UserError, match=r"holds no text \(2 empty documents\)"):
        prepare(empty, BYTES, tmp_path / "empty")
    prepare(source, BYTES, tmp_path / "out")
    other = open_source("mine", str(write_lines(tmp_path / "c.jsonl", DOCUMENTS[:9])))
    with pytest.raises(UserError, match=r"already holds a store of another source or tokenizer: --overwrite"):
        prepare(other, BYTES, tmp_path / "out")
    assert prepare(other, BYTES, tmp_path / "out", overwrite=True).documents == 9


def config(tmp_path: Path, **keys: Any) -> Any:
    given = {"training.cache_folder": str(tmp_path / "cache")}
    return load_config(overrides=given | {key.replace("__", "."): value for key, value in keys.items()})


def test_raw_files_are_prepared_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    settings = config(tmp_path, training__dataset_path=str(file), validation__dataset_path=str(file))
    first = store_for(settings, "training", BYTES)
    assert first.read(0, first.tokens).tolist() == expected_tokens(DOCUMENTS)

    def never(*arguments: object) -> None:
        raise AssertionError("prepared again")

    with monkeypatch.context() as patch:
        patch.setattr("shardline.data.prepare.encode_all", never)
        assert store_for(settings, "training", BYTES).folder == first.folder
        assert store_for(settings, "validation", BYTES).folder == first.folder
    write_lines(file, DOCUMENTS[:10])
    assert store_for(settings, "training", BYTES).documents == 10
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", ["<s>"]))
    assert store_for(settings, "training", tokenizer).tokenizer_fingerprint == tokenizer.fingerprint


def test_each_section_reads_the_split_and_the_field_that_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        rows = [json.dumps({field: f"{field} of {split} {row}" for field in ("text", "body")}) for row in range(3)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    keys = {"training__dataset_split": "test", "training__dataset_text_field": "body"}
    for section, said in (("training", "body of test"), ("validation", "text of validation")):
        named = {f"{one}__dataset_path": str(folder) for one in ("training", "validation")}
        store = store_for(config(tmp_path, **named, **keys), section, BYTES)
        assert store.read(0, store.tokens).tolist() == expected_tokens([f"{said} {row}" for row in range(3)])
    validation = {"validation__dataset_split": "train", "validation__dataset_text_field": "body"}
    store = store_for(config(tmp_path, **named, **validation), "validation", BYTES)
    assert store.read(0, store.tokens).tolist() == expected_tokens([f"body of train {row}" for row in range(3)])


def test_cache_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "elsewhere"))
    file = write_lines(tmp_path / "a.jsonl", DOCUMENTS[:3])
    store = store_for(load_config(overrides={"training.dataset_path": str(file)}), "training", BYTES)
    assert store.folder is not None
    assert (tmp_path / "elsewhere") in store.folder.parents


def test_command_and_prepared_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_lines(tmp_path / "a.jsonl", ["", *DOCUMENTS]), tmp_path / "out"
    assert command(str(file), str(out), tokenizer="bytes", workers=1) == 0
    assert "300 documents" in capsys.readouterr().out
    assert TokenStore.open(out).manifest["empty_documents"] == 1
    settings = config(tmp_path, training__dataset_path=str(out))
    assert store_for(settings, "training", BYTES).folder == out
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", ["<s>"]))
    with pytest.raises(UserError, match=r"prepared with the tokenizer 'bytes'.*--model.tokenizer_path=bytes"):
        store_for(settings, "training", tokenizer)
    with pytest.raises(UserError, match=r"there is no file or folder '.*/missing.jsonl'"):
        command(str(tmp_path / "missing.jsonl"), str(tmp_path / "x"), tokenizer="bytes")
    assert command("demo", str(tmp_path / "demo"), tokenizer="bytes", split="validation") == 0
