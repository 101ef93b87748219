"""Sources: every format, path notation and mistake a user can make."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline import registry
from shardline.config.sources import SourceTable
from shardline.data import chunks
from shardline.data.prepare import named_source
from shardline.data.records import record_source
from shardline.data.sources import Source, open_source
from shardline.errors import UserError


def texts(source: Source) -> list[str]:
    return [text for chunk in source.chunks() for text in chunk.documents()]


def read(path: object, **options: str) -> list[str]:
    return texts(open_source("mine", str(path), **options))


def write_lines(file: Path, *documents: object, field: str = "text") -> Path:
    content = "".join(json.dumps({field: document}) + "\n" for document in documents).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    monkeypatch.setattr(chunks, "CONTEXT_BYTES", 16)


def test_one_document_per_text_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")  # with a byte order mark
    assert read(tmp_path) == ["first", "second\n\nstill second"]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("text", ["line of words\n" * 50, "äöü ß " * 80, "€" * 300, "x" * 80, "x" * 79 + "\n"])
def test_large_text_is_cut_between_characters_and_stays_one_document(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    pieces = list(open_source("mine", str(tmp_path / "a.txt")).chunks())
    assert len(pieces) > 1
    windows = [piece.documents()[0] for piece in pieces]
    assert "".join(window.text[window.first : window.last] for window in windows) == text
    for window, after in itertools.pairwise(windows):
        assert after.text[after.first :].startswith(window.text[window.last :])
        assert window.text[: window.last].endswith(after.text[: after.first])
        assert min(len(window.text[window.last :].encode()), len(after.text[: after.first].encode())) > 8
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.size for piece in pieces) == (tmp_path / "a.txt").stat().st_size


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    documents = [f"document {i} with ünicode\n and \u2028 signs" for i in range(40)]
    file = write_lines(tmp_path / name, *documents)
    source = open_source("mine", str(file))
    assert texts(source) == documents == texts(source)
    assert sum(chunk.size for chunk in source.chunks()) == source.size


def test_json_line_without_a_last_newline_and_with_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\r\n\r\n{"text": "b"}')
    assert read(tmp_path / "a.jsonl") == ["a", "b"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    documents = [f"document {i}" for i in range(1000)] + [None]
    parquet.write_table(pyarrow.table({"body": documents}), tmp_path / "a.parquet", row_group_size=100)
    assert read(tmp_path / "a.parquet", text_field="body") == [*documents[:-1], ""]
    with pytest.raises(UserError, match=r"a.parquet: no column 'text'; its fields: body"):
        read(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"b.parquet cannot be read as Parquet"):
        read(tmp_path / "b.parquet")


def test_missing_libraries_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install shardline\[parquet\]"):
        read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"pip install shardline\[datasets\]"):
        open_source("owner/name", None)


def test_globs_folders_and_lists(tmp_path: Path) -> None:
    for name in ("x/1.jsonl", "x/2.jsonl", "x/deep/3.jsonl.gz", "y/4.jsonl", "x/.hidden/5.jsonl"):
        write_lines(tmp_path / name, Path(name).name[0])
    (tmp_path / "x" / "notes.pdf").write_bytes(b"not read")
    assert read(tmp_path / "x") == ["1", "2", "3"]
    assert read(tmp_path / "x" / "*.jsonl") == ["1", "2"]
    assert read(tmp_path / "**" / "*.jsonl") == ["1", "2", "4"]
    assert read(f"{tmp_path}/y, {tmp_path}/x/2.jsonl,{tmp_path}/x/*.jsonl") == ["4", "2", "1"]


def test_a_folder_whose_files_name_their_split_gives_the_wanted_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "en" / "c4-train.00000-of-00002.json.gz", "t0")
    write_lines(tmp_path / "en" / "c4-train.00001-of-00002.json.gz", "t1")
    write_lines(tmp_path / "en" / "c4-validation.00000-of-00001.json.gz", "v")
    assert texts(open_source("c4", str(tmp_path))) == ["t0", "t1"]
    assert texts(open_source("c4_validation", str(tmp_path), split="validation")) == ["v"]
    with pytest.raises(UserError, match=r"no files of the split 'test'; its splits: train, validation"):
        read(tmp_path, split="test")
    write_lines(tmp_path / "en" / "data.json", "more")
    assert sorted(read(tmp_path, split="test")) == ["more", "t0", "t1", "v"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ('{"text": "a"}\n["b"]\n', r"a.jsonl:2: expected one JSON object per line, got list"),
        ('{"body": "a", "id": 1}\n', r"a.jsonl:1: no field 'text'; its fields: body, id .*dataset_text_field"),
        ('{"text": 3}\n', r"a.jsonl, line 1: field 'text' holds int"),
        ("\xff\n", r"a.jsonl:1: not JSON"),
        (
            '{"text": "a"}\n{"text": "b", "x": ' + "[" * 50_000 + "]" * 50_000 + "}\n",
            r"a.jsonl:2: not JSON: nested more",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl")


@pytest.mark.usefixtures("small_chunks")
def test_line_numbers_go_on_from_chunk_to_chunk(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *["some words of text"] * 50)
    file.write_bytes(file.read_bytes() + b"{broken\n")
    with pytest.raises(UserError, match=r"a.jsonl:51: not JSON"):
        read(file)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe bad")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8"):
        read(tmp_path / "a.txt")
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"b.jsonl.gz' cannot be read"):
        read(tmp_path / "b.jsonl.gz")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 999)[:-20])
    with pytest.raises(UserError, match=r"c.jsonl.gz' cannot be read"):
        read(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.pdf").write_bytes(b"x")
    with pytest.raises(UserError, match=r"d.pdf': unknown format; files end in .txt"):
        read(tmp_path / "d.pdf")
    with pytest.raises(UserError, match=r"no file matches '.*\*.jsonl'"):
        read(tmp_path / "*.jsonl")
    with pytest.raises(UserError, match=r"there is no file or folder 'owner/name' in /.*dataset = 'owner/name'"):
        read("owner/name")


def test_names_without_a_path(tmp_path: Path) -> None:
    for name in ("c4", "c4_test", "c4_validation"):
        with pytest.raises(UserError, match=rf"dataset '{name}' needs a path"):
            open_source(name, None)
        assert texts(open_source(name, str(write_lines(tmp_path / "data.json", "x")))) == ["x"]
    with pytest.raises(UserError, match=r"unknown dataset 'c4_tset', did you mean 'c4_test'\? Known: demo, c4"):
        open_source("c4_tset", None)


def test_a_command_names_what_is_like_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    with pytest.raises(UserError, match=r"there is no file or folder 'corpsu', did you mean 'corpus'\?; a dataset of"):
        named_source("corpsu", "text", "train")


def test_registered_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def numbers(path: str | None) -> Iterator[str]:
        return (f"{path} {i}" for i in range(3))

    monkeypatch.setitem(registry.sources, "numbers", numbers)
    assert texts(open_source("numbers", "p")) == ["p 0", "p 1", "p 2"]
    assert open_source("numbers", "p").fingerprint != open_source("numbers", "q").fingerprint
    with pytest.raises(UserError, match=r"Known: .*numbers"):
        open_source("nothing_like_it", None)
    monkeypatch.setitem(registry.sources, "numbers", lambda path: [1])
    with pytest.raises(UserError, match=r"'numbers' yielded int"):
        texts(open_source("numbers", None))


def test_fingerprint_follows_files_and_field(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", "x")
    before = open_source("mine", str(file)).fingerprint
    assert open_source("other", str(file)).fingerprint == before
    assert open_source("mine", str(file), text_field="body").fingerprint != before
    write_lines(file, "xy")
    assert open_source("mine", str(file)).fingerprint != before


def test_hugging_face_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = [f"document {i}" for i in range(600)]
    data = datasets.Dataset.from_dict({"text": documents, "n": list(range(600))})
    data.save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one") == documents
    datasets.DatasetDict({"train": data, "test": data.select([5])}).save_to_disk(str(tmp_path / "two"))
    assert read(tmp_path / "two", split="test") == ["document 5"]
    with pytest.raises(UserError, match=r"no split 'validation'; its splits: train, test"):
        read(tmp_path / "two", split="validation")
    with pytest.raises(UserError, match=r"no field 'body'; its fields: n, text"):
        read(tmp_path / "one", text_field="body")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "rows.csv").write_text("text,n\nhello,1\n")
    assert read(tmp_path / "csv") == ["hello"]
    with pytest.raises(UserError, match=r"'no-such/name:en' cannot be loaded with `datasets` \(split 'train'\)"):
        open_source("no-such/name:en", None)


def test_the_card_of_a_dataset_is_none_of_its_texts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# About this folder")
    (tmp_path / "a.txt").write_text("a text")
    assert read(tmp_path) == ["# About this folder", "a text"]
    write_lines(tmp_path / "train-0.jsonl", "a record")
    (tmp_path / "a.txt").unlink()
    assert read(tmp_path) == ["a record"]
    assert read(tmp_path / "README.md") == ["# About this folder"]


@pytest.mark.parametrize("installed", [True, False])
def test_a_folder_without_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / ".hidden").write_text("no data")
    with pytest.raises(UserError, match=rf"^the folder '{tmp_path}' is empty$"):
        read(tmp_path)
    with pytest.raises(UserError, match=rf"^the folder '{tmp_path}' is empty$"):
        record_source(SourceTable(path=str(tmp_path), type="alpaca"))
    (tmp_path / "weights.bin").write_bytes(b"0123")
    if installed:
        wanted = "cannot be loaded with `datasets`"
    else:
        wanted = r"holds no file that can be read \(.txt, .*\), but 1 other file, such as 'weights.bin'; pip install"
    with pytest.raises(UserError, match=wanted):
        read(tmp_path)
