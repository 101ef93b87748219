"""Batches on the device from the token store, by global sample number; worker processes may read ahead."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from shardline.config.architecture import Architecture
from shardline.data.batch import IGNORE, Batch, Item
from shardline.data.order import Order, global_batch, micro_batches
from shardline.data.prepare import store_for
from shardline.data.record_samples import RecordSamples, build_record_samples
from shardline.data.token_store import TokenStore
from shardline.data.tokenizer import Tokenizer, check_vocabulary
from shardline.errors import UserError, blame
from shardline.storage.progress import say

SAMPLES_AHEAD = 4096  # samples whose places are computed together


class Samples(Dataset[Batch]):
    """A pure function from global sample numbers and their first tokens to a batch on the CPU."""

    def __init__(self, store: TokenStore, order: Order, with_documents: bool, vocab_size: int | None = None) -> None:
        self.store, self.order, self.with_documents, self.vocab_size = store, order, with_documents, vocab_size

    def __getitem__(self, item: Item) -> Batch:
        samples, starts = item
        length = self.order.seq_len
        real = samples >= 0
        rows = np.zeros((len(samples), length + 1), dtype=np.int64)  # (B, S + 1)
        numbers = np.zeros((len(samples), length + 1), dtype=np.int32)
        for row in np.flatnonzero(real):
            rows[row] = self.store.read(int(starts[row]), length + 1)
            if self.with_documents:
                numbers[row] = self.store.document_numbers(int(starts[row]), length + 1)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:  # a GPU would fail with a device assert
            row, place = np.argwhere(rows >= self.vocab_size)[0]
            raise self.store.damaged_id(int(starts[row] + place), self.vocab_size)
        labels = rows[:, 1:].copy()
        labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORE  # the next document's first token is not a target
        labels[~real] = IGNORE
        documents = torch.from_numpy(numbers[:, :-1].copy()) if self.with_documents else None
        return Batch(
            torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(labels), documents, torch.from_numpy(samples.copy())
        )

    def tokens_in(self, first: int, count: int) -> int:
        """The tokens of some samples."""
        return count * self.order.seq_len

    def report_read(self, samples: int) -> None:
        """Nothing to report: there is one source."""


class InWorker(Dataset[Batch | UserError]):
    """`Samples` in a worker process; errors are returned as values, because torch would wrap them in a traceback."""

    def __init__(self, samples: Samples | RecordSamples) -> None:
        self.samples = samples

    def __getitem__(self, item: Item) -> Batch | UserError:
        try:
            return self.samples[item]
        except UserError as error:
            return error


class MicroBatchSampler(Sampler[Item]):
    """The samples that come next: the endless training stream from a position, or one pass over the store."""

    def __init__(self) -> None:
        self.rows: Iterator[Item] = iter(())

    def __iter__(self) -> Iterator[Item]:
        return self.rows


class Loader:
    """Batches of one rank. The whole state is `position`: global samples consumed so far.

    `step_tokens` is the number of tokens in the last step on all ranks, without padding.
    """

    def __init__(
        self,
        samples: Samples | RecordSamples,
        *,
        local_batch_size: int,
        global_batch_size: int,
        rank: int,
        ranks: int,
        device: torch.device,
        options: Any,
    ) -> None:
        self.samples = samples
        self.samples_per_epoch = samples.order.samples_per_epoch
        self.local_batch_size, self.global_batch_size = local_batch_size, global_batch_size
        self.rank, self.ranks, self.device = rank, ranks, device
        self.position = self.step_tokens = 0
        self._share: tuple[int, int] | None = (0, 1)
        self._sampler = MicroBatchSampler()
        self._reader = _reader(samples, self._sampler, options, device)
        self._stream: Iterator[Batch] | None = None

    def seek(self, position: int) -> None:
        """Continue at this global sample, as if everything before it had been read."""
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}")
        self.position = position
        self._stream = None

    def take(self, share: tuple[int, int] | None) -> None:
        """From the next step on, read only this share (place, count) of a step's micro-batches; None reads none."""
        if share != self._share:
            self._share, self._stream = share, None

    def step(self) -> list[Batch]:
        """The micro-batches of the next optimizer step for this rank."""
        micro_batches_of_all = range(self.global_batch_size // (self.local_batch_size * self.ranks))
        count = len(self._shared(micro_batches_of_all))
        if self._stream is None and count:
            self._stream = self._start(self._endless())
        batches = [next(self._stream).to(self.device) for _ in range(count)] if self._stream is not None else []
        self.step_tokens = self.samples.tokens_in(self.position, self.global_batch_size)
        self.position += self.global_batch_size
        return batches

    def read(self, first: int, rank: int) -> list[Batch]:
        """The micro-batches that a rank reads of the step that begins with this global sample."""
        rows = micro_batches(first, self.global_batch_size, self.local_batch_size, rank, self.ranks)
        starts = self.samples.order.starts(np.concatenate(rows)).reshape(len(rows), -1)
        self._stream = None
        return [batch.to(self.device) for batch in self._start(iter(list(zip(rows, starts, strict=True))))]

    def epoch(self, limit: int | None = None) -> Iterator[Batch]:
        """Every sample once, in the order of the store, divided among the ranks; at most `limit` batches per rank.

        All ranks get the same number of batches: rows past the end are padding without targets.
        `position` does not change; the next `step` starts reading ahead again.
        """
        self._stream = None
        batches = self._start(self._once(limit))
        for batch in batches:
            yield batch.to(self.device)

    def samples_in(self, batches: int) -> int:
        """The number of samples that an epoch of at most `batches` batches per rank reads; -1 means all."""
        together = self.local_batch_size * self.ranks
        return self.samples_per_epoch if batches < 0 else min(batches * together, self.samples_per_epoch)

    def close(self) -> None:
        """End the worker processes, if any."""
        self._stream = None
        self._reader = None  # the last reference: torch ends the workers and waits for them

    def _start(self, rows: Iterator[Item]) -> Iterator[Batch]:
        if self._reader is None:
            raise RuntimeError("this loader is closed")
        self._sampler.rows = rows
        batches = iter(self._reader)
        return batches if self._reader.num_workers == 0 else _from_workers(batches)

    def _endless(self) -> Iterator[Item]:
        """Micro-batches from `position` on. Computing many places together costs little more than computing one."""
        position, size = self.position, self.global_batch_size
        steps = max(1, SAMPLES_AHEAD // size)
        cut = (size, self.local_batch_size, self.rank, self.ranks)
        while True:
            rows = [row for step in range(steps) for row in self._shared(micro_batches(position + step * size, *cut))]
            starts = self.samples.order.starts(np.concatenate(rows)).reshape(len(rows), -1)
            yield from zip(rows, starts, strict=True)
            position += steps * size

    def _shared(self, of_step: Sequence[Any]) -> Sequence[Any]:
        """The micro-batches of a step that this loader reads."""
        return of_step[:0] if self._share is None else of_step[self._share[0] :: self._share[1]]

    def _once(self, limit: int | None) -> Iterator[Item]:
        together = self.local_batch_size * self.ranks
        count = math.ceil(self.samples_per_epoch / together)
        if limit is not None and limit >= 0:
            count = min(count, limit)
        for number in range(count):
            rows = micro_batches(number * together, together, self.local_batch_size, self.rank, self.ranks)[0]
            rows = np.where(rows < self.samples_per_epoch, rows, -1)
            yield rows, self.samples.order.sequential(np.maximum(rows, 0))


def fitted(arch: Architecture, config: Any, tokenizer: Tokenizer | None = None) -> Architecture:
    """The architecture with what the data needs: documents that are kept apart, and rows for added tokens."""
    changes: dict[str, Any] = {}
    packed = config.data.packing == "first_fit" and config.training.objective == "next_token"
    if config.data.sources and packed:
        changes["attn_mask_type"] = "block_causal"
    if tokenizer is not None and (config.data.added_tokens or config.data.special_tokens):
        changes["vocab_size"] = max(arch.vocab_size, tokenizer.vocab_size)
    return arch.model_copy(update=changes) if changes else arch


def build_loader(
    config: Any,
    section: Literal["training", "validation"],
    arch: Any,
    tokenizer: Tokenizer,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
) -> Loader:
    """The loader of `[training]` or `[validation]`; prepares raw files into the cache the first time."""
    check_vocabulary(tokenizer, arch)
    settings = getattr(config, section)
    together = settings.local_batch_size * ranks
    global_batch_size = global_batch(config.training, ranks) if section == "training" else together
    samples: Samples | RecordSamples
    if config.data.sources:
        samples = build_record_samples(config, section, tokenizer, log=rank == 0)
    else:
        store = store_for(config, section, tokenizer)
        with blame(f"{section}.seq_len"):
            order = Order(store.tokens, settings.seq_len, config.debug.seed or 0)
        samples = Samples(store, order, arch.attn_mask_type == "block_causal", tokenizer.vocab_size)
    return Loader(
        samples,
        local_batch_size=settings.local_batch_size,
        global_batch_size=global_batch_size,
        rank=rank,
        ranks=ranks,
        device=torch.device(device),
        options=settings.dataloader,
    )


def steps_for_epochs(loader: Loader, epochs: float) -> int:
    """Optimizer steps that read the data `epochs` times, the last one possibly reaching into the next epoch."""
    return math.ceil(Fraction(str(epochs)) * loader.samples_per_epoch / loader.global_batch_size)


def _reader(
    samples: Samples | RecordSamples, sampler: MicroBatchSampler, options: Any, device: torch.device
) -> DataLoader[Any] | None:
    """Torch's DataLoader, which reads ahead in its workers; with 0 workers it reads in place."""
    workers = options.num_workers
    if options.pin_memory and device.type != "cuda":
        say(f"dataloader.pin_memory has no effect on {device.type}")
    return DataLoader(
        InWorker(samples) if workers else samples,
        batch_size=None,  # an item of the sampler is a whole micro-batch
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=(options.prefetch_factor or 2) if workers else None,
        persistent_workers=options.persistent_workers and workers > 0,
        pin_memory=options.pin_memory and device.type == "cuda",
        worker_init_fn=_ignore_signals if workers else None,
        generator=torch.Generator(),  # its own: starting to read must not advance the global random state
    )


def _from_workers(batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
    """Report a worker's death that torch misses: between announcing a batch and handing it over."""
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except (OSError, EOFError) as error:
        raise RuntimeError(f"a data loader worker died while handing over a batch: {error}") from error
    finally:
        del batches  # an error keeps this frame alive; the workers must not live as long


def _ignore_signals(worker: int) -> None:
    """Signals to the process group are meant for the trainer, which needs its workers until the step has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
