"""`shardline data show`: samples as a run would train on them, with trained tokens colored, and counts."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardline.config.schema import Config
from shardline.config.sources import SourceTable, source_tables
from shardline.data.chunks import Chunk
from shardline.data.formats.base import FormatOptions, Tokens
from shardline.data.formats.choose import choose_format
from shardline.data.records import record_source
from shardline.data.tokenize_workers import CHUNK_MEMORY, RecordEncoder, encode_all, memory_limit
from shardline.data.tokenizer import Tokenizer, choose_tokenizer
from shardline.errors import UserError, blame
from shardline.words import counted

COUNTED = 2000  # records of a source that are tokenized for its counts
TRAINED, PLAIN = "\x1b[1;32m", "\x1b[0m"
MARKS = ("⟦", "⟧")  # around trained tokens if there are no colors
# Fields of a record -> the format that has them, for a file without --type.
USUAL: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("chosen", "rejected"), {"type": "chat_template.default"}),
    (("messages",), {"type": "chat_template"}),
    (
        ("conversations",),
        {
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
    ),
    (("instruction", "output"), {"type": "alpaca"}),
    (("segments",), {"type": "input_output"}),
    (("input_ids",), {}),
    (("text",), {"type": "completion"}),
)


def command(config: Config, file: str | None, *, samples: int, type: str | None) -> int:
    """Show samples of a data file, or of the sources of a config."""
    tokenizer = choose_tokenizer(config)
    tables = [file_table(file, type)] if file is not None else source_tables(config.data.sources)
    if not tables:
        raise UserError("the config has no data.sources: name a data file, or a config with sources")
    for place, table in enumerate(tables):
        blamed = f"data.sources[{place}]" if file is None else str(file)
        with blame(blamed), memory_limit(CHUNK_MEMORY):
            for line in show_source(config, table, tokenizer, samples, colour=sys.stdout.isatty()):
                print(line)
    return 0


def file_table(file: str, kind: str | None) -> SourceTable:
    """Return the source for a file without a config; without a type, infer it from the first record's fields."""
    if kind is not None:
        return SourceTable(path=file, type=kind)
    first = next(
        (record for chunk in record_source(SourceTable(path=file)).chunks() for record in chunk.documents()), None
    )
    if first is None:
        raise UserError(f"{file} holds no record")
    for fields, table in USUAL:
        if all(field in first[1] for field in fields):
            return SourceTable(path=file, **table)
    raise UserError(f"{first[0]}: fields {', '.join(first[1])} match no known format: name one with --type")


def show_source(
    config: Config, table: SourceTable, tokenizer: Tokenizer, samples: int, *, colour: bool
) -> Iterator[str]:
    """Yield the lines of one source: its first samples, then counts of its tokens."""
    kind, mark = choose_format(table, FormatOptions.of(config.data), tokenizer)
    encoder = RecordEncoder(tokenizer, kind, mark)
    lengths: list[int] = []
    trained = records = 0
    found = _records(table)
    for where, rows in _encoded(itertools.islice(found, COUNTED), encoder):
        if records < samples:
            yield from _sample(where, rows, tokenizer, colour)
        records += 1
        lengths += [len(row.ids) for row in rows]
        trained += sum(int(row.trained[1:].sum()) for row in rows)
    name = f"{table.path}: {'the first ' if next(found, None) else ''}"
    yield from _counts(name, lengths, trained, records, config.training.seq_len)


def _records(table: SourceTable) -> Iterator[tuple[str, Any]]:
    for chunk in record_source(table).chunks():
        yield from chunk.documents()


def _encoded(records: Iterator[tuple[str, Any]], encoder: RecordEncoder) -> Iterator[tuple[str, list[Tokens]]]:
    """Yield the place and the rows of each record. Another process tokenizes, because a bad tokenizer may kill it."""
    places: deque[str] = deque()

    def chunks() -> Iterator[Chunk]:
        for record in records:
            places.append(record[0])
            yield Chunk(functools.partial(list, [record]), 1)

    for result in encode_all(chunks(), encoder, workers=1):
        trained = result.trained if result.trained is not None else np.ones(len(result.tokens), bool)
        parts = zip(np.split(result.tokens, result.ends), np.split(trained, result.ends), strict=True)
        yield places.popleft(), [Tokens(*part) for part in itertools.islice(parts, len(result.ends))]


def _sample(where: str, rows: list[Tokens], tokenizer: Tokenizer, colour: bool) -> Iterator[str]:
    names = ("chosen: ", "rejected: ") if len(rows) == 2 else ("",)
    for name, row in zip(names, rows, strict=True):
        yield f"--- {where}: {name}{counted(len(row.ids), 'token')}, {int(row.trained[1:].sum())} trained"
        yield painted(row, tokenizer, colour)
    if not rows:
        yield f"--- {where}: no token"


def painted(row: Tokens, tokenizer: Tokenizer, colour: bool) -> str:
    """Return the text of a row, with trained parts in green or between marks. Multi-token characters stay whole."""
    before, after = (TRAINED, PLAIN) if colour else MARKS
    borders = np.flatnonzero(np.diff(row.trained.astype(np.int8))) + 1
    parts = []
    for ids, flags in zip(np.split(row.ids, borders), np.split(row.trained, borders), strict=True):
        text = _text(ids.tolist(), tokenizer)
        parts.append(f"{before}{text}{after}" if len(flags) and flags[0] else text)
    return "".join(parts)


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of some tokens; special tokens appear as their names."""
    text, plain = "", list[int]()
    for token in [*ids, None]:
        if token is not None and not tokenizer.is_named(token):
            plain.append(token)
            continue
        text += tokenizer.decode(plain) + ("" if token is None else tokenizer.token_text(token))
        plain = []
    return text


def _counts(name: str, lengths: list[int], trained: int, records: int, seq_len: int) -> Iterator[str]:
    tokens = sum(lengths)
    yield (
        f"{name}{counted(records, 'record')}, {tokens:,} tokens, {trained:,} trained"
        f" ({100 * trained / max(tokens, 1):.1f}%); the shortest has {min(lengths, default=0):,}, the longest"
        f" {max(lengths, default=0):,}"
    )
    if too_long := sum(length > seq_len for length in lengths):
        yield f"{too_long:,} longer than training.seq_len = {seq_len:,} tokens"
