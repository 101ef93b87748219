"""Chunks: a source cut into pieces of about a megabyte, always at the same places.

A chunk is sent to a worker process, which turns it into documents. Preparing can stop after any chunk and continue
with the next one later. `opens` and `closes` say whether a chunk's first document begins in it, and its last one ends.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardline.config.names import TEXT_FILES
from shardline.data.files import file_kind
from shardline.errors import UserError
from shardline.json_text import parse_json

CHUNK_BYTES = 2**20
BATCH_ROWS = 256


@dataclass(frozen=True)
class Chunk:
    """`documents` reads the documents of a chunk from what it carries, and travels to a worker process with it.

    They are texts, or, of a source with a format, records with the place where each is.
    """

    documents: Callable[[], list[Any]]
    size: float
    opens: bool = True
    closes: bool = True


def file_chunks(file: Path, field: str) -> Iterator[Chunk]:
    kind = file_kind(file)
    if kind == "parquet":
        return _parquet_chunks(file, field)
    return _text_chunks(file) if kind in TEXT_FILES else _line_chunks(file, field)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The file's content, unzipped, and a function that gives the bytes of the file read since its last call."""
    with file.open("rb") as raw:
        before = 0

        def taken() -> int:
            nonlocal before
            before, last = raw.tell(), before
            return before - last

        yield (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if file.suffix == ".gz" else raw), taken


def _line_chunks(file: Path, field: str) -> Iterator[Chunk]:
    first = 1
    with reading(file) as (stream, taken):
        while piece := stream.read(CHUNK_BYTES):
            piece += stream.readline()  # up to the end of the line
            yield Chunk(functools.partial(_documents_of_lines, str(file), first, piece, field), taken())
            first += piece.count(b"\n")


def _text_chunks(file: Path) -> Iterator[Chunk]:
    rest, opens = b"", True
    with reading(file) as (stream, taken):
        while True:
            piece = stream.read(CHUNK_BYTES)
            last = len(piece) < CHUNK_BYTES
            text = rest + piece
            cut = len(text) if last else _cut(text)
            yield Chunk(functools.partial(_passage, str(file), text[:cut], opens), taken(), opens, closes=last)
            rest, opens = text[cut:], False
            if last:
                return


def _cut(text: bytes) -> int:
    """The place to cut a long text: after its last line, else before its last word, else between two characters."""
    if line := text.rfind(b"\n") + 1:
        return line
    if (space := text.rfind(b" ")) > 0:
        return space
    at = len(text) - 1
    while at > 1 and text[at] & 0xC0 == 0x80:  # inside a character
        at -= 1
    return at


def _passage(file: str, text: bytes, opens: bool) -> list[str]:
    """A text file, which is one document, or some whole lines of a large one."""
    try:
        return [text.decode("utf-8-sig" if opens else "utf-8")]
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}") from error


def _documents_of_lines(file: str, first: int, lines: bytes, field: str) -> list[str]:
    """Whole lines of a JSONL file; `first` is the number of the first one, counted from 1."""
    rows = enumerate(lines.split(b"\n"), start=first)
    return [_text_of_line(file, number, line, field) for number, line in rows if line.strip()]


def _text_of_line(file: str, number: int, line: bytes, field: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{file}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{file}:{number}: expected one JSON object per line, got {type(row).__name__}")
    if field not in row:
        raise UserError(f"{file}:{number}: no field {field!r}; {fields_there(row)}")
    return _text(row[field], file, f"line {number}", field)


def _text(value: Any, file: str, where: str, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{file}, {where}: field {field!r} holds {type(value).__name__}, expected text")
    return value


def fields_there(names: Iterable[str]) -> str:
    there = ", ".join(sorted(map(str, names))) or "none"
    return f"its fields: {there} (choose one with dataset_text_field, or --text-field in `shardline data prepare`)"


def open_parquet(file: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{file}: Parquet needs pyarrow: pip install shardline[parquet]") from error
    try:
        return parquet.ParquetFile(file)
    except Exception as error:  # pyarrow's own errors and OSError
        raise UserError(f"{file} cannot be read as Parquet: {error}") from error


def _parquet_chunks(file: Path, field: str) -> Iterator[Chunk]:
    with open_parquet(str(file)) as table:
        names, rows = table.schema_arrow.names, max(table.metadata.num_rows, 1)
        if field not in names:
            raise UserError(f"{file}: no column {field!r}; {fields_there(names)}")
        batches = (batch.column(0).to_pylist() for batch in table.iter_batches(BATCH_ROWS, columns=[field]))
        try:
            yield from chunks_of_rows(batches, str(file), field, file.stat().st_size / rows)
        except ValueError as error:  # pyarrow raises it for damaged pages, besides OSError
            raise UserError(f"{file} cannot be read: {error}") from error


def chunks_of_texts(texts: Iterable[str], cost: float | None = None) -> Iterator[Chunk]:
    """Groups of about CHUNK_BYTES; each text adds `cost`, or else its length, to the size of its chunk."""
    group: list[str] = []
    length = 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length >= CHUNK_BYTES:
            yield Chunk(functools.partial(list, group), length if cost is None else cost * len(group))
            group, length = [], 0
    if group:
        yield Chunk(functools.partial(list, group), length if cost is None else cost * len(group))


def chunks_of_rows(batches: Iterable[list[Any]], name: str, field: str, cost: float) -> Iterator[Chunk]:
    rows = enumerate(itertools.chain.from_iterable(batches))
    return chunks_of_texts((_text(row, name, f"row {number}", field) for number, row in rows), cost)
