"""The order of samples: global sample number -> window of the token store, a pure function of the seed.

    sample n  ->  epoch n // N, index n % N  ->  shuffled window w in [0, N)  ->  tokens [start, start + S]

Nothing is stored: the shuffle of an epoch is a keyed permutation, computed only for the numbers that are needed.
A reader's state is therefore one integer, the number of samples consumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardline.config.schema import Config, Training
from shardline.errors import UserError

ROUNDS = 8


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words so that each input bit changes about half of the output bits (a bijection)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # arrays wrap around without a warning
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, epochs: np.ndarray, purpose: int) -> np.ndarray:
    """One 64-bit key per epoch, seed and purpose."""
    base = _mix(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return _mix(base + _mix(epochs.astype(np.uint64) * np.uint64(2) + np.uint64(purpose + 1)))


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Map each index in [0, size) to its place in the permutation chosen by its key.

    A Feistel network permutes [0, 2^bits); results outside [0, size) are sent through again until they fall
    inside, which is a permutation of [0, size). 2^bits < 2 size, so two passes are enough on average.
    """
    bits = max(2, (size - 1).bit_length())
    value = index.astype(np.uint64)
    pending = np.arange(len(value))
    while len(pending):
        value[pending] = _feistel(value[pending], bits, keys[pending])
        pending = pending[value[pending] >= np.uint64(size)]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Each round XORs one half with a hash of the other half, so each round can be undone."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    for number in range(0, ROUNDS, 2):
        low ^= _mix(keys + high * np.uint64(0xD1342543DE82EF95) + np.uint64(number)) & low_mask
        high ^= _mix(keys + low * np.uint64(0xD1342543DE82EF95) + np.uint64(number + 1)) & high_mask
    return (high << low_bits) | low


@dataclass(frozen=True)
class Order:
    """The endless shuffled stream over a store of `tokens` tokens in samples of `seq_len` inputs.

    Windows advance by seq_len and hold seq_len + 1 tokens: the last one is only a label there and the first
    input of the next window. Each token is an input at most once and a label at most once per epoch.
    """

    tokens: int
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples_per_epoch < 1:
            raise UserError(
                f"the data holds {self.tokens} tokens, one sample needs {self.seq_len + 1} (seq_len + 1):"
                " use more text or a smaller seq_len"
            )

    @property
    def samples_per_epoch(self) -> int:
        return (self.tokens - 1) // self.seq_len

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """First token of each global sample number, shuffled by epoch."""
        size = self.samples_per_epoch
        epochs, index = np.divmod(samples.astype(np.int64), size)
        windows = permute(index, size, key(self.seed, epochs, 0))
        return self._offsets(epochs) + windows * self.seq_len

    def sequential(self, samples: np.ndarray) -> np.ndarray:
        """First token of each sample in the order of the store, for validation."""
        return samples.astype(np.int64) * self.seq_len

    def _offsets(self, epochs: np.ndarray) -> np.ndarray:
        """The first token of window 0, chosen by epoch among the tokens left over, so that window borders vary."""
        spare = self.tokens - 1 - self.samples_per_epoch * self.seq_len
        return (key(self.seed, epochs, 1) % np.uint64(spare + 1)).astype(np.int64)


def micro_batches(step_start: int, global_batch: int, local_batch: int, rank: int, ranks: int) -> list[np.ndarray]:
    """The global samples that this rank reads for one step, one array (local_batch,) per micro-batch.

    Micro-batch a, rank r, row l reads sample step_start + a*(L*R) + r*L + l.
    """
    together = local_batch * ranks
    rows = np.arange(local_batch, dtype=np.int64) + step_start + rank * local_batch
    return [rows + a * together for a in range(global_batch // together)]


def global_batch(section: Training, ranks: int) -> int:
    """The number of sequences in one step of this many data ranks."""
    if section.gradient_accumulation_steps is not None:
        return section.local_batch_size * section.gradient_accumulation_steps * ranks
    return resolve_global_batch(section.global_batch_size, section.local_batch_size, ranks)


def one_pass(config: Config, local_batch: int) -> Config:
    """The config with one forward pass per rank and step, of this many sequences."""
    changes = {"local_batch_size": local_batch, "global_batch_size": -1, "gradient_accumulation_steps": None}
    return config.replace({f"training.{name}": value for name, value in changes.items()})


def resolve_global_batch(global_batch: int, local_batch: int, ranks: int) -> int:
    """-1 means one micro-batch per rank; anything else must be a whole number of micro-batches."""
    together = local_batch * ranks
    if global_batch < 0:
        return together
    if global_batch == 0 or global_batch % together:
        below = global_batch // together * together
        nearest = [str(n) for n in (below, below + together) if n > 0]
        raise UserError(
            f"training.global_batch_size = {global_batch} does not divide: it must be a multiple of"
            f" local_batch_size x data-parallel ranks = {local_batch} x {ranks} = {together};"
            f" nearest: {' or '.join(nearest)}"
        )
    return global_batch
