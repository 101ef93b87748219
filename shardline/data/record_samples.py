"""Samples made of records: sources are read and tokenized, records fitted into rows, rows mixed and read as batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from shardline.config.sources import SourceTable, source_tables
from shardline.data.batch import IGNORE, Batch, Item
from shardline.data.formats.base import FormatOptions
from shardline.data.formats.choose import choose_format, idle_notes
from shardline.data.mixture import Mixture, report_shares, shares_of
from shardline.data.order import key, permute
from shardline.data.packing import LengthReport, Piece, Rows, fit_lengths, fit_pairs, one_each, pack
from shardline.data.prepare import store_in_cache
from shardline.data.records import record_source
from shardline.data.token_store import TokenStore
from shardline.data.tokenize_workers import RecordEncoder
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError, blame
from shardline.storage.progress import say
from shardline.words import counted

HELD_OUT = 4  # purpose of the key that chooses records for validation
Section = Literal["training", "validation"]


@dataclass(frozen=True)
class PreparedSource:
    """A tokenized source. `pairs`: documents 2i and 2i + 1 are the better and the worse answer of record i."""

    name: str
    store: TokenStore
    pairs: bool
    splits: bool
    weight: float | None

    @property
    def records(self) -> int:
        return self.store.documents // (2 if self.pairs else 1)


def prepare_sources(config: Any, section: Section, tokenizer: Tokenizer, *, log: bool = True) -> list[PreparedSource]:
    """The sources of `[data]`, each tokenized into the cache once."""
    given = config.data.sources
    listed = "data.sources"
    if section == "validation" and config.data.validation_sources:
        given, listed = config.data.validation_sources, "data.validation_sources"
    options = FormatOptions.of(config.data)
    tables = source_tables(given)
    for line in idle_notes(listed, tables, config.data) if log else ():
        say(f"note: {line}")
    found = []
    for place, table in enumerate(tables):
        with blame(f"{listed}[{place}]"):
            found.append(_prepared(config, table, options, tokenizer))
    return found


def _prepared(config: Any, table: SourceTable, options: FormatOptions, tokenizer: Tokenizer) -> PreparedSource:
    kind, mark = choose_format(table, options, tokenizer)
    store = store_in_cache(config, record_source(table), RecordEncoder(tokenizer, kind, mark))
    return PreparedSource(table.path, store, kind.pairs, kind.splits, table.weight)


class RecordStore:
    """The stores of several sources as one row of tokens."""

    def __init__(self, sources: Sequence[PreparedSource], mark: str) -> None:
        self.stores = [source.store for source in sources]
        self.firsts = np.cumsum([0, *(store.tokens for store in self.stores)])
        marks = [mark, *(f"{s.source_fingerprint} {s.manifest.get('records')}" for s in self.stores)]
        self.source_fingerprint = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:32]

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and whether each is trained."""
        place = int(np.searchsorted(self.firsts, start, side="right")) - 1
        begin = start - int(self.firsts[place])
        return self.stores[place].read(begin, count), self.stores[place].trained(begin, count)

    def damaged_id(self, start: int, vocab_size: int) -> UserError:
        place = int(np.searchsorted(self.firsts, start, side="right")) - 1
        return self.stores[place].damaged_id(start - int(self.firsts[place]), vocab_size)


def build_record_samples(config: Any, section: Section, tokenizer: Tokenizer, *, log: bool = True) -> RecordSamples:
    """The rows of a section's records, and the order in which they are read; a pair of answers is two rows."""
    data, settings, pairs = config.data, getattr(config, section), config.training.objective == "dpo"
    sources = prepare_sources(config, section, tokenizer, log=log)
    _check_kinds(sources, pairs)
    records, splits = _records(sources, config, section)
    by_weight = data.mixture == "weights" and section == "training"
    groups = [records.sources == number for number in range(len(sources))] if by_weight else [slice(None)]
    banks = []
    for chosen in groups:
        report = LengthReport()
        some = Piece(records.starts[chosen], records.lengths[chosen], records.sources[chosen])
        limits = (settings.seq_len, data.excess_length, data.min_length)
        fitted = fit_pairs(some, *limits, report) if pairs else fit_lengths(some, *limits, splits[chosen], report)
        packed = data.packing == "first_fit" and not pairs
        seed = config.debug.seed or 0
        banks.append(
            pack(fitted, settings.seq_len, seed, report) if packed else one_each(fitted, settings.seq_len, report)
        )
        if log:
            _report(section, banks[-1], data, packed)
    weights = _weights(sources, banks) if by_weight else None
    shares = None if weights is None else tuple(shares_of(weights, data.temperature))
    with blame("data.sources"):
        counts = tuple(len(bank) // (2 if pairs else 1) for bank in banks)
        order = Mixture(counts, config.debug.seed or 0, data.shuffle, shares)
    keys = ["mixture", "temperature", "packing", "excess_length", "min_length", "shuffle", "held_out"]
    keys += ["deduplicate"] if data.deduplicate else []  # so runs from before this key can be resumed
    mark = repr([(name, getattr(data, name)) for name in keys] + [source.weight for source in sources])
    names = [source.name for source in sources]
    samples = RecordSamples(RecordStore(sources, mark), join_rows(banks), order, tokenizer, names, pairs)
    if log and len(sources) > 1:
        samples.report_expected(section)
    return samples


def _check_kinds(sources: Sequence[PreparedSource], pairs: bool) -> None:
    """Refuse pairs of answers unless the objective compares two, and single answers if it does."""
    for source in sources:
        if source.pairs and not pairs:
            raise UserError(
                f"data.sources: {source.name!r} holds pairs of answers, which training.objective = 'dpo' compares: set"
                " that, or use records with one answer"
            )
        if pairs and not source.pairs:
            raise UserError(
                f"data.sources: {source.name!r} holds single answers, and training.objective = 'dpo' compares two:"
                " use a type with pairs, such as 'chat_template.default', or set the objective to 'next_token'"
            )


def _records(sources: Sequence[PreparedSource], config: Any, section: Section) -> tuple[Piece, np.ndarray]:
    """All records of a section as pieces of one row of tokens, and which of them may be split."""
    starts, lengths, numbers, splits = [], [], [], []
    first = 0
    for number, source in enumerate(sources):
        ends = source.store.document_ends()
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        starts.append(begins + first)
        lengths.append(ends - begins)
        numbers.append(np.full(len(ends), number))
        splits.append(np.full(len(ends), source.splits))
        first += source.store.tokens
    each = 2 if sources[0].pairs else 1
    longest = getattr(config, section).seq_len if config.data.excess_length == "truncate" else None
    flags = np.concatenate([source.store.has_trained(None if source.splits else longest) for source in sources])
    trained = np.asarray(flags.reshape(-1, each).all(axis=1))
    if config.data.deduplicate:
        trained &= _first_of_each(sources, each)
    kept = np.repeat(_section_mask(len(trained), config, section) & trained, each)
    piece = Piece(*(np.concatenate(arrays)[kept] for arrays in (starts, lengths, numbers)))
    return piece, np.concatenate(splits)[kept]


def _first_of_each(sources: Sequence[PreparedSource], each: int) -> np.ndarray:
    """Whether each record, of `each` documents, is the first with these tokens and this choice of trained ones."""
    seen: set[bytes] = set()
    first = []
    for source in sources:
        ends = source.store.document_ends()[each - 1 :: each].tolist()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            tokens, trained = source.store.read(start, end - start), source.store.trained(start, end - start)
            mark = hashlib.blake2b(tokens.astype(np.int64).tobytes() + trained.tobytes(), digest_size=16).digest()
            first.append(mark not in seen)
            seen.add(mark)
    if not all(first):
        say(f"{counted(first.count(False), 'duplicate record')} of {len(first):,} left out (data.deduplicate)")
    return np.array(first, bool)


def _section_mask(count: int, config: Any, section: Section) -> np.ndarray:
    """Which records belong to a section: the held-out ones are the same whatever the seed of the run."""
    amount = config.data.held_out
    if not amount:
        return np.ones(count, bool)
    wanted = int(amount) if amount >= 1 else max(1, round(amount * count))
    if wanted >= count:
        raise UserError(f"data.held_out = {amount:g} holds out {wanted} of {count} records: none is left to train on")
    held = permute(np.arange(count), count, np.repeat(key(0, np.zeros(1, np.int64), HELD_OUT), count)) < wanted
    return held if section == "validation" else ~held


def _weights(sources: Sequence[PreparedSource], banks: Sequence[Rows]) -> list[float]:
    """The weights of the sources, or their numbers of rows where none is given."""
    given = [source.weight for source in sources]
    weights = [weight for weight in given if weight is not None]
    if weights and len(weights) < len(given):
        place = given.index(None)
        raise UserError(f"data.sources[{place}].weight is missing: set the weights of all sources or of none")
    return weights or [float(len(bank)) for bank in banks]


def join_rows(banks: Sequence[Rows]) -> Rows:
    """Join banks of rows, one after the other."""
    firsts = np.cumsum([0, *(len(bank.starts) for bank in banks)])
    offsets = [bank.offsets[:-1] + first for bank, first in zip(banks, firsts[:-1], strict=True)]
    starts, lengths, sources = (
        np.concatenate([getattr(bank, name) for bank in banks]) for name in ("starts", "lengths", "sources")
    )
    return Rows(banks[0].seq_len, np.concatenate([*offsets, firsts[-1:]]), starts, lengths, sources)


def _report(section: str, rows: Rows, data: Any, packed: bool) -> None:
    verb = "packed into" if packed else "in"
    say(
        f"{section} data: {counted(rows.report.records, 'record')}, {rows.tokens:,} tokens {verb}"
        f" {counted(len(rows), 'row')} of {rows.seq_len:,}, {100 * rows.filled:.1f}% filled"
        f"{rows.report.words(rows.seq_len, data.min_length)}"
    )


class RecordSamples(Dataset[Batch]):
    """A pure function from global sample numbers and their rows to a batch on the CPU.

    row      | record 0 . . | record 1 . | padding |
    labels   the next token where it is trained and of the same record, else IGNORE
    documents 0 0 0 0 0 0 0  1 1 1 1 1 1  2 2 2 2 2

    With `pairs`, a batch of B samples has 2 B rows: row 2 b is the better answer of sample b, row 2 b + 1 the worse.
    """

    def __init__(
        self,
        store: RecordStore,
        rows: Rows,
        order: Mixture,
        tokenizer: Tokenizer,
        names: Sequence[str],
        pairs: bool = False,
    ) -> None:
        self.store, self.rows, self.order, self.names, self.pairs = store, rows, order, list(names), pairs
        self.vocab_size, self.padding = tokenizer.vocab_size, tokenizer.pad_id or 0

    def __getitem__(self, item: Item) -> Batch:
        samples, rows = item
        real = np.repeat(samples >= 0, 2 if self.pairs else 1)
        rows = self._both(rows) if self.pairs else rows
        shape = (len(rows), self.rows.seq_len)
        tokens, labels = np.full(shape, self.padding, np.int64), np.full(shape, IGNORE, np.int64)  # (B, S)
        documents = np.zeros(shape, np.int32)
        for place in np.flatnonzero(real):
            self._fill(int(rows[place]), tokens[place], labels[place], documents[place])
        return Batch(*map(torch.from_numpy, (tokens, labels, documents, samples.copy())))

    def _both(self, pairs: np.ndarray) -> np.ndarray:
        """The rows of pairs: better, worse, better, worse, ..."""
        return (2 * pairs[:, None] + np.arange(2)).reshape(-1)

    def _fill(self, row: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
        at = 0
        for number, (start, length) in enumerate(self.rows.pieces(row)):
            ids, trained = self.store.read(start, length)
            if ids.max() >= self.vocab_size:  # a GPU would fail with a device assert
                raise self.store.damaged_id(start + int(ids.argmax()), self.vocab_size)
            tokens[at : at + length] = ids
            labels[at : at + length - 1] = np.where(trained[1:], ids[1:], IGNORE)
            documents[at : at + length] = number
            at += length
        documents[at:] = documents[at - 1] + 1

    def tokens_in(self, first: int, count: int) -> int:
        """The tokens of some samples, padding left out."""
        rows = self.order.starts(np.arange(first, first + count))
        return int(self.rows.tokens_of(self._both(rows) if self.pairs else rows).sum())

    def report_expected(self, section: str) -> None:
        """Log each source's share of what will be read."""
        if self.order.shares is not None:
            report_shares(self.names, self.order.shares, f"{section} data, shares of samples")
        else:
            tokens = np.bincount(self.rows.sources, weights=self.rows.lengths, minlength=len(self.names))
            report_shares(self.names, tokens.tolist(), f"{section} data, shares of tokens")

    def report_read(self, samples: int) -> None:
        """Log each source's share of what was read so far."""
        if len(self.names) < 2 or samples < 1:
            return
        if self.order.shares is not None:
            report_shares(self.names, self.order.drawn(samples).tolist(), f"of {samples:,} samples read")
            return
        epochs = samples // self.order.samples_per_epoch
        some = self.order.starts(np.arange(epochs * self.order.samples_per_epoch, samples))
        times = np.full(self.order.samples_per_epoch, epochs) + np.bincount(
            some, minlength=self.order.samples_per_epoch
        )
        times = np.repeat(times, 2) if self.pairs else times
        weights = np.repeat(times, np.diff(self.rows.offsets)) * self.rows.lengths
        tokens = np.bincount(self.rows.sources, weights=weights, minlength=len(self.names))
        report_shares(self.names, tokens.tolist(), f"of {int(tokens.sum()):,} tokens read")
