"""Chunks: a source cut into pieces of about a megabyte, always at the same places.

A chunk is sent to a worker process, which turns it into documents. Preparing can stop after any chunk and continue with
the next one later. `opens` and `closes` say whether its first document begins in it and its last one ends in it.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from shardline.config.names import TEXT_FILES
from shardline.data.files import file_kind
from shardline.errors import UserError
from shardline.json_text import parse_json

CHUNK_BYTES = 2**20
CONTEXT_BYTES = 2**13  # of text on each side of a piece of a large file: context for its first and last tokens
BATCH_ROWS = 256


@dataclass(frozen=True)
class Chunk:
    """A piece of a source. It is sent to a worker process, where `documents` returns its documents.

    They are texts or, in a source with a format, records with their places. A chunk that does not open or close its
    only document has a `Window` of it.
    """

    documents: Callable[[], list[Any]]
    size: float
    opens: bool = True
    closes: bool = True


class Window(NamedTuple):
    """The characters [first, last) of a text, with those around them."""

    text: str
    first: int
    last: int


def file_chunks(file: Path, field: str) -> Iterator[Chunk]:
    kind = file_kind(file)
    if kind == "parquet":
        return _parquet_chunks(file, field)
    return _text_chunks(file) if kind in TEXT_FILES else _line_chunks(file, field)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file, unzipped, with a function that returns how many of its bytes were read since the last call."""
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
    """A file as one chunk, or as pieces of a large one, each with the text around it.

    buffer      | context | piece            | context |
                0         begin              cut
    """
    buffer, begin, opens = b"", 0, True
    with reading(file) as (stream, taken):
        while True:
            wanted = begin + CHUNK_BYTES + CONTEXT_BYTES
            buffer += stream.read(wanted - len(buffer))
            last = len(buffer) < wanted
            if opens:
                buffer = buffer.removeprefix(codecs.BOM_UTF8)
            cut = len(buffer) if last else _cut(buffer, begin, begin + CHUNK_BYTES)
            end = len(buffer) if last else _whole_characters(buffer, len(buffer) - 1)
            read = functools.partial(_passage, str(file), buffer[:end], begin, cut, opens and last)
            yield Chunk(read, taken(), opens, closes=last)
            if last:
                return
            first = _whole_characters(buffer, max(cut - CONTEXT_BYTES, 0))
            buffer, begin, opens = buffer[first:], cut - first, False


def _cut(text: bytes, begin: int, end: int) -> int:
    """The place to cut a long text: after its last line, else before its last word, else between two characters."""
    if (line := text.rfind(b"\n", begin, end) + 1) > begin:
        return line
    if (space := text.rfind(b" ", begin, end)) > begin:
        return space
    return max(_whole_characters(text, end - 1), begin + 1)


def _whole_characters(text: bytes, at: int) -> int:
    """The nearest place before or at `at` that is not inside a character."""
    while at > 0 and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _passage(file: str, text: bytes, begin: int, cut: int, whole: bool) -> list[Any]:
    """A text file, which is one document, or a piece of a large one with the text around it."""
    try:
        if whole:
            return [text.decode()]
        before, piece, after = text[:begin].decode(), text[begin:cut].decode(), text[cut:].decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}") from error
    return [Window(before + piece + after, len(before), len(before) + len(piece))]


def _documents_of_lines(file: str, first: int, lines: bytes, field: str) -> list[str]:
    """The texts in whole lines of a JSONL file; `first` is the number of the first line, counted from 1."""
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
    """Chunks of about CHUNK_BYTES of text; each text adds `cost`, or else its length, to the size of its chunk."""
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
