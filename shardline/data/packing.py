"""Rows of `seq_len` tokens made of records: one record each, or as many as fit.

A row is a list of pieces of the store, each with its first token and its length. Records are taken in a random order,
in groups; in a group the longest comes first, and each goes into the fullest row that still has room for it:

    records   8 7 5 4 3 3 2        rows of 10   | 8 2 | 7 3 | 5 4 | 3 |

There is no other state: the rows depend on lengths and seed alone, and every rank computes the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shardline.data.order import key, permute
from shardline.errors import UserError
from shardline.words import counted

GROUP = 2**15  # records that are packed together
ORDER_OF_PACKING = 2  # purpose of the key, beside those of order.py


@dataclass(frozen=True)
class Piece:
    """Records as arrays (N,): the first token of each in the store, their lengths, and the source of each."""

    starts: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray


@dataclass
class LengthReport:
    """How many records were left out, cut or split because of their length."""

    records: int = 0
    too_long: int = 0
    too_short: int = 0
    cut: int = 0
    split: int = 0

    def words(self, longest: int, shortest: int | None) -> str:
        parts = [
            (self.too_long, f"longer than {longest} tokens, dropped"),
            (self.cut, f"longer than {longest} tokens, cut"),
            (self.split, f"longer than {longest} tokens, split"),
            (self.too_short, f"shorter than {shortest} tokens, dropped"),
        ]
        return "".join(f"; {number:,} {what}" for number, what in parts if number)


@dataclass
class Rows:
    """Rows of pieces: those of row r are [offsets[r], offsets[r + 1]) of the three arrays."""

    seq_len: int
    offsets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    report: LengthReport = field(default_factory=LengthReport)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def filled(self) -> float:
        return self.tokens / max(1, len(self) * self.seq_len)

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """The number of tokens in each of these rows, padding left out."""
        return np.asarray(self._sums[self.offsets[rows + 1]] - self._sums[self.offsets[rows]])

    @functools.cached_property
    def _sums(self) -> np.ndarray:
        """Tokens before each piece."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def pieces(self, row: int) -> Iterable[tuple[int, int]]:
        """(first token, length) of each piece of a row."""
        part = slice(self.offsets[row], self.offsets[row + 1])
        return zip(self.starts[part].tolist(), self.lengths[part].tolist(), strict=True)


def fit_lengths(
    records: Piece, longest: int, excess: str, shortest: int | None, splits: np.ndarray, report: LengthReport
) -> Piece:
    """Drop, cut or, where `splits` (N,) allows it, split records that are too long; drop those that are too short."""
    starts, lengths, sources = records.starts, records.lengths, records.sources
    report.records = len(starts)
    long = lengths > longest
    if excess == "raise" and (refused := long & ~splits).any():
        raise too_long(int(refused.sum()), longest, int(lengths[refused].max()))
    if (long & splits).any():
        report.split = int((long & splits).sum())
        counts = np.where(splits, -(-lengths // longest), 1)
        owner = np.repeat(np.arange(len(starts)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.where(splits[owner], np.minimum(lengths[owner] - number * longest, longest), lengths[owner])
        starts, sources = starts[owner] + number * longest, sources[owner]
        long, lengths = piece > longest, piece
    if excess == "truncate":
        report.cut = int(long.sum())
        lengths = np.minimum(lengths, longest)
        long = np.zeros(len(lengths), bool)
    report.too_long = int(long.sum())
    short = lengths < (shortest or 1)
    report.too_short = int((short & ~long).sum())
    kept = ~(long | short)
    return Piece(starts[kept], lengths[kept], sources[kept])


def fit_pairs(records: Piece, longest: int, excess: str, shortest: int | None, report: LengthReport) -> Piece:
    """`fit_lengths` for pairs: pieces 2i and 2i + 1 are kept or dropped together."""
    report.records = len(records.starts) // 2
    both = records.lengths.reshape(-1, 2)
    long = both.max(axis=1) > longest
    if excess == "raise" and long.any():
        raise too_long(int(long.sum()), longest, int(both.max()))
    if excess == "truncate":
        report.cut, both, long = int(long.sum()), np.minimum(both, longest), np.zeros(len(both), bool)
    short = both.min(axis=1) < (shortest or 1)
    report.too_long, report.too_short = int(long.sum()), int((short & ~long).sum())
    kept = np.repeat(~(long | short), 2)
    return Piece(records.starts[kept], both.reshape(-1)[kept], records.sources[kept])


def too_long(count: int, longest: int, length: int) -> UserError:
    return UserError(
        f"{counted(count, 'record')} with more than seq_len = {longest} tokens (the longest has {length}):"
        " raise training.seq_len, or set data.excess_length to 'drop' or 'truncate'"
    )


def one_each(records: Piece, seq_len: int, report: LengthReport) -> Rows:
    """Make each record a row."""
    offsets = np.arange(len(records.starts) + 1)
    return Rows(seq_len, offsets, records.starts, records.lengths, records.sources, report)


def pack(records: Piece, seq_len: int, seed: int, report: LengthReport) -> Rows:
    """Fill each row with as many records as fit."""
    count = len(records.starts)
    keys = np.repeat(key(seed, np.zeros(1, np.int64), ORDER_OF_PACKING), count)
    order = np.argsort(permute(np.arange(count), count, keys), kind="stable") if count else np.arange(0)
    members: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for first in range(0, count, GROUP):
        group = order[first : first + GROUP]
        rows = _first_fit(records.lengths[group], seq_len)
        by_row = np.argsort(rows, kind="stable")
        members.append(group[by_row])
        sizes.append(np.bincount(rows))
    chosen = np.concatenate(members) if members else np.empty(0, np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]) if sizes else np.zeros(1, np.int64)
    return Rows(seq_len, offsets, records.starts[chosen], records.lengths[chosen], records.sources[chosen], report)


def _first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each record. `open_rows[r]` are rows with r tokens of room, `free` has a bit for each such r."""
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]
    free, made = 0, 0
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        fitting = free >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                free &= ~(1 << left)
        else:
            row, left, made = made, room, made + 1
        rows[place] = row
        left -= length
        if left:
            open_rows[left].append(row)
            free |= 1 << left
    return rows
