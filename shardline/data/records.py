"""Records of a source: JSON, JSONL, Parquet and text files, `datasets` folders and Hub names; splits, slices, shards.

A record travels with its place (`file:line`, or `file, row N`), which errors name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shardline.config.names import TEXT_FILES
from shardline.config.sources import SourceTable
from shardline.data.chunks import BATCH_ROWS, CHUNK_BYTES, Chunk, open_parquet, reading
from shardline.data.demo import conversations
from shardline.data.files import SPLITS, file_kind, file_mark, find_files, leave_to_datasets, readable_files
from shardline.data.sources import Source, fingerprint_of, load_datasets
from shardline.errors import UserError
from shardline.hub import local_path
from shardline.json_text import parse_json, parse_one

DEMO = "demo"  # a path: generated conversations
Place = tuple[str, dict[str, Any]]  # where a record is, and the record
Batches = Iterator[tuple[int, Callable[[], list[Place]], float]]  # number of records, a function that reads them, bytes

_SLICE = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<from>-?\d+%?)?:(?P<to>-?\d+%?)?\])?")


def record_source(table: SourceTable) -> Source:
    """The records of a source, the same ones in the same order each time."""
    name, start, stop = parse_split(table.split or "train")
    if table.path == DEMO:
        rows = conversations()
        first, last = _range(len(rows), start, stop, table)
        some = rows[first:last]
        mark = fingerprint_of(DEMO, 2, first, last)
        return Source(DEMO, mark, len(some), lambda: _selected(_numbered(iter([some]), DEMO, 1.0), 0, None))
    where = local_path(table.path)
    is_local = Path(where).expanduser().exists() or any(sign in where for sign in "*?,")
    if not is_local and (file_kind(Path(where)) or where[:1] in "./~" or where.count("/") != 1):
        raise UserError(f"there is no file or folder {where!r}")
    folder = Path(where).expanduser()
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    of_other_kinds = not saved and folder.is_dir() and not readable_files(folder)
    if of_other_kinds:
        leave_to_datasets(folder)
    if saved or not is_local or of_other_kinds:
        return _dataset(table, name, saved)
    files = _files(table, name)
    stats = [file_mark(file) for file in files]

    def batches() -> Batches:
        return itertools.chain.from_iterable(_of_file(file, table.ds_type) for file in files)

    def chunks() -> Iterator[Chunk]:
        first, last = 0, None
        if (start, stop) != (None, None) or table.shards:
            first, last = _range(sum(count for count, _, _ in batches()), start, stop, table)
        return _selected(batches(), first, last)

    marks = [start, stop, table.shards, table.shards_idx, table.ds_type]
    return Source(table.path, fingerprint_of("records", stats, marks), sum(size for _, size, _ in stats), chunks)


def parse_split(text: str) -> tuple[str, str | None, str | None]:
    """Split `train[:10%]` into its name, its start and its stop."""
    found = _SLICE.fullmatch(text.strip())
    if found is None:
        raise UserError(f"split = {text!r}: expected a name, or a part of it such as 'train[:10%]' or 'train[100:200]'")
    return found["name"], found["from"], found["to"]


def _range(total: int, start: str | None, stop: str | None, table: SourceTable) -> tuple[int, int]:
    """The records [first, last) of a slice and of a shard of it, cut as `datasets` cuts them."""
    first, last = _bound(start, total, 0), _bound(stop, total, total)
    if table.shards:
        size, rest = divmod(max(last - first, 0), table.shards)
        number = table.shards_idx or 0
        first += size * number + min(number, rest)
        last = first + size + (number < rest)
    return first, last


def _bound(text: str | None, total: int, otherwise: int) -> int:
    if text is None:
        return otherwise
    value = round(int(text[:-1]) * total / 100) if text.endswith("%") else int(text)
    return min(max(value + total if value < 0 else value, 0), total)


def _files(table: SourceTable, split: str) -> list[Path]:
    if table.data_files is None:
        return find_files(table.path, split)
    given = [table.data_files] if isinstance(table.data_files, str) else table.data_files
    return find_files(",".join(str(Path(local_path(table.path)).expanduser() / name) for name in given), split)


def _selected(batches: Batches, first: int, last: int | None) -> Iterator[Chunk]:
    """The chunks of the records [first, last)."""
    at = 0
    for count, read, size in batches:
        begin, end = max(first - at, 0), count if last is None else min(last - at, count)
        at += count
        if begin < end:
            whole = (begin, end) == (0, count)
            yield Chunk(read if whole else functools.partial(_some, read, begin, end), size)
        if last is not None and at >= last:
            return


def _some(read: Callable[[], list[Place]], begin: int, end: int) -> list[Place]:
    return read()[begin:end]


# ---- files -----------------------------------------------------------------------------------------------------------


def _of_file(file: Path, ds_type: str | None) -> Batches:
    kind = file_kind(file)
    if ds_type == "parquet" or (ds_type is None and kind == "parquet"):
        return _parquet(file)
    if ds_type == "text" or (ds_type is None and kind in TEXT_FILES):
        return iter([(1, functools.partial(_whole_text, str(file)), float(file.stat().st_size))])
    if ds_type == "arrow":
        return _rows(load_datasets(str(file)).Dataset.from_file(str(file)), str(file))
    with reading(file) as (stream, _):
        is_list = stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    return _json_list(file) if is_list else _json_lines(file)


def _whole_text(file: str) -> list[Place]:
    try:
        with reading(Path(file)) as (stream, _):
            return [(file, {"text": stream.read().decode("utf-8-sig")})]
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}") from error


def _json_lines(file: Path) -> Batches:
    number = 1
    with reading(file) as (stream, taken):
        while piece := stream.read(CHUNK_BYTES):
            lines = (piece + stream.readline()).split(b"\n")
            numbered = [(at, line) for at, line in enumerate(lines, start=number) if line.strip()]
            number += len(lines) - 1
            yield len(numbered), functools.partial(_parsed, str(file), numbered), taken()


def _parsed(file: str, lines: list[tuple[int, bytes]]) -> list[Place]:
    found = []
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{file}:{number}: not JSON: {error}") from error
        found.append(_checked(row, f"{file}:{number}"))
    return found


def _checked(row: Any, where: str) -> Place:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return where, row


def _json_list(file: Path) -> Batches:
    """A file that is one list of objects; each has the number of the line on which it begins."""
    with reading(file) as (stream, taken):
        text = stream.read().decode("utf-8-sig", errors="replace")
        size = taken()
    at, line, counted_to = text.index("[") + 1, 1, 0
    found: list[Place] = []
    while True:
        at = _skip(text, at)
        if text[at : at + 1] in ("]", ""):
            break
        line, counted_to = line + text.count("\n", counted_to, at), at
        try:
            row, at = parse_one(text, at)
        except ValueError as error:
            raise UserError(f"{file}:{line}: not JSON: {error}") from error
        found.append(_checked(row, f"{file}:{line}"))
    if text[at : at + 1] != "]":
        raise UserError(f"{file}: the list has no end: the file may be cut off")
    if (rest := _skip(text, at + 1)) < len(text):
        line += text.count("\n", counted_to, rest)
        raise UserError(f"{file}:{line}: text after the end of the list; a file holds one list, or one object per line")
    for first in range(0, len(found), BATCH_ROWS):
        some = found[first : first + BATCH_ROWS]
        yield len(some), functools.partial(list, some), size * len(some) / len(found)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _parquet(file: Path) -> Batches:
    with open_parquet(str(file)) as table:
        cost = file.stat().st_size / max(table.metadata.num_rows, 1)
        try:
            yield from _numbered((batch.to_pylist() for batch in table.iter_batches(BATCH_ROWS)), str(file), cost)
        except ValueError as error:
            raise UserError(f"{file} cannot be read: {error}") from error


def _numbered(batches: Iterable[list[dict[str, Any]]], name: str, cost: float) -> Batches:
    first = 0
    for rows in batches:
        some = [(f"{name}, row {first + place}", row) for place, row in enumerate(rows)]
        first += len(rows)
        yield len(some), functools.partial(list, some), cost * len(some)


# ---- the library `datasets` ------------------------------------------------------------------------------------------


def _dataset(table: SourceTable, split: str, saved: bool) -> Source:
    """A folder that `datasets` saved or understands, or a dataset of the Hub."""
    library = load_datasets(table.path)
    try:
        if saved:
            data = library.load_from_disk(str(Path(table.path).expanduser()))
        else:
            options = {"revision": table.revision, "data_files": table.data_files}
            given = {name: value for name, value in options.items() if value is not None}
            data = library.load_dataset(table.path, table.name, split=split, **given)
    except Exception as error:  # of many types: network, missing, private, wrong config or split
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{table.path!r} cannot be loaded with `datasets` (split {split!r}): {reason}") from error
    if isinstance(data, dict):
        chosen = split if split in data else SPLITS.get(split, split)
        if chosen not in data:
            raise UserError(f"{table.path!r} has no split {split!r}; its splits: {', '.join(data)} (split)")
        data = data[chosen]
    _, start, stop = parse_split(table.split or "train")
    first, last = _range(len(data), start, stop, table)
    marks = fingerprint_of("datasets", table.path, split, first, last, str(data._fingerprint))
    return Source(table.path, marks, last - first, lambda: _selected(_rows(data, table.path), first, last))


def _rows(data: Any, name: str) -> Batches:
    starts = range(0, len(data), BATCH_ROWS)
    return _numbered((data.select(range(at, min(at + BATCH_ROWS, len(data)))).to_list() for at in starts), name, 1.0)
