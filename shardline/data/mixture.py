"""Chooses the next row, as a pure function of the seed: every row once per epoch, or sources by their shares.

With shares, sample number k of a source with share w has the time (k + u) / w, where u comes from the seed. The samples
of all sources, sorted by time, are the stream:

    shares 2/3 and 1/3       A  B  A     A  B  A     A  B  A
    time                     0.7 1.4 2.2   3.7 ...

The source of sample n is therefore computed from n alone, without the samples before it: about n of them come before
time n. After any number of samples, each source has provided its share of them to within a few samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardline.data.order import key, permute
from shardline.errors import UserError
from shardline.storage.progress import say

SHIFT = 3  # purpose of the key that gives u, beside those of order.py and packing.py


def shares_of(weights: Sequence[float], temperature: float) -> list[float]:
    """Weights, each raised to the power 1 / temperature, divided by their sum."""
    raised = np.asarray(weights, dtype=np.float64) ** (1.0 / temperature)
    return [float(share) for share in raised / raised.sum()]


@dataclass(frozen=True)
class Mixture:
    """The endless stream over banks of rows, of `counts` rows each; rows are numbered across all banks.

    Without `shares` the banks act as one: an epoch reads every row once. With them, each bank has epochs of its own,
    and an epoch of the run is as many samples as there are rows.
    """

    counts: tuple[int, ...]
    seed: int
    shuffle: bool = True
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        empty = [place for place, count in enumerate(self.counts) if not count]
        if not self.samples_per_epoch or (self.shares is not None and empty):
            raise UserError(f"there is no record to train on{f' in source {empty[0]}' if self.shares else ''}")

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.counts)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """The row of each global sample number."""
        samples = samples.astype(np.int64)
        if self.shares is None:
            return self._shuffled(samples, self.samples_per_epoch, 0)
        banks, numbers = self.draw(samples)
        rows = np.empty_like(samples)
        first = 0
        for bank, count in enumerate(self.counts):
            here = banks == bank
            rows[here] = first + self._shuffled(numbers[here], count, bank)
            first += count
        return rows

    def sequential(self, samples: np.ndarray) -> np.ndarray:
        """Rows in the order of the data, for validation."""
        return samples.astype(np.int64)

    def draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bank of each sample, and its number among the samples of that bank."""
        assert self.shares is not None
        width = len(self.shares)
        times, banks, numbers = [], [], []
        before = np.zeros(len(samples), np.int64)
        begin = np.maximum(samples - width, 0).astype(np.float64)
        for bank, (share, shift) in enumerate(zip(self.shares, self._shifts(), strict=True)):
            first = _before(begin, share, shift)
            before += first
            candidates = first[:, None] + np.arange(int(np.ceil((2 * width + 1) * share)) + 2)
            times.append((candidates + shift) / share)
            banks.append(np.full_like(candidates, bank))
            numbers.append(candidates)
        order = np.argsort(np.concatenate(times, axis=1), axis=1, kind="stable")
        chosen = np.take_along_axis(order, (samples - before)[:, None], axis=1)
        return tuple(np.take_along_axis(np.concatenate(t, axis=1), chosen, axis=1)[:, 0] for t in (banks, numbers))  # type: ignore[return-value]

    def drawn(self, samples: int) -> np.ndarray:
        """How many of the first samples came from each bank."""
        assert self.shares is not None
        last = min(samples, 4 * len(self.shares) + 8)  # only these are drawn: `_before` counts the rest
        counts = np.zeros(len(self.shares), np.int64)
        begin = max(0, samples - last)
        for bank, (share, shift) in enumerate(zip(self.shares, self._shifts(), strict=True)):
            counts[bank] = _before(np.array([max(0.0, begin - len(self.shares))]), share, shift)[0]
        start = int(counts.sum())
        banks, _ = self.draw(np.arange(start, samples))
        return counts + np.bincount(banks, minlength=len(self.shares))

    def _shifts(self) -> np.ndarray:
        banks = np.arange(len(self.counts))
        return np.asarray((key(self.seed, banks, SHIFT) >> np.uint64(11)) / 2.0**53)

    def _shuffled(self, samples: np.ndarray, count: int, bank: int) -> np.ndarray:
        epochs, index = np.divmod(samples, count)
        if not self.shuffle or not len(samples):
            return np.asarray(index)
        return permute(index, count, key(self.seed + bank, epochs, 0))


def _before(time: np.ndarray, share: float, shift: float) -> np.ndarray:
    """How many samples k = 0, 1, ... of a source come before a time: those with (k + shift) / share < time."""
    count = np.maximum(np.ceil(time * share - shift), 0).astype(np.int64)
    count += (count + shift) / share < time  # corrects the rounding of the product
    count -= (count > 0) & ((count - 1 + shift) / share >= time)
    return count


def report_shares(names: Sequence[str], amounts: Sequence[float], what: str) -> None:
    """Log each source's percentage of the total, in one line."""
    total = max(sum(amounts), 1)
    parts = [f"{name} {100 * amount / total:.1f}%" for name, amount in zip(names, amounts, strict=True)]
    say(f"{what}: {', '.join(parts)}")
