"""A ledger of every sample that counts in a run that is interrupted and resumed, each time on other ranks.

    leg 1   fsdp2   step 1 2 3 4 5        SIGTERM in step 5: saved, stopped
    leg 2   tp2                6 7 8      SIGKILL in step 8, last save at step 6
    leg 3   1                    7 8 9 ... to the end
    ledger          1 2 3 4 5  6 7 8 9 ...                what leg 2 did after its save is replaced by leg 3

Ranks come from the nursery: they start fast and can be killed for good. They write down what they read and what came of
it after every step, in a file that outlives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardline.config.layout import Layout, resolve_layout
from shardline.config.load import load_config
from shardline.data.demo import documents
from tests.faults.nursery import Job, Nursery, job_of
from tests.parity.harness import complete

GLOBAL_BATCH, INTERVAL, STEPS = 8, 3, 12
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "1 in parts": (1, {"training.local_batch_size": 2}),
    "ddp2": (2, {REPLICATE: 2, SHARD: 1}),
    "fsdp2": (2, {SHARD: 2}),
    "fsdp2 in parts": (2, {SHARD: 2, "training.local_batch_size": 2}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2}),
    "cp2": (2, {CP: 2}),
    "ddp4": (4, {REPLICATE: 4, SHARD: 1}),
    "hsdp4": (4, {REPLICATE: 2, SHARD: 2}),
    "fsdp2 tp2": (4, {SHARD: 2, TP: 2}),
    "pp2 fsdp2": (4, {PP: 2, SHARD: 2}),
}
ENDS = ("SIGTERM", "SIGINT", "SIGKILL")


@dataclass(frozen=True)
class Leg:
    """One start of the run; `end` comes to `rank` in step `at`, before it is computed or (late) when it is done."""

    layout: str
    end: str | None = None
    at: int = 0
    rank: int = 0
    late: bool = False


@dataclass(frozen=True)
class Entry:
    """One step, as all ranks together saw it: global sample numbers, a checksum of what each was, and the loss."""

    samples: tuple[int, ...]
    contents: tuple[int, ...]
    loss: float


Ledger = dict[int, Entry]


def random_legs(seed: int, steps: int) -> list[Leg]:
    """Two to four interruptions at random steps, of random kinds, on random layouts; then to the end."""
    chance, legs, saved = random.Random(seed), [], 0
    for _ in range(chance.randint(2, 4)):
        end, layout = chance.choice(ENDS), chance.choice(list(LAYOUTS))
        first = saved + 1 if saved or end != "SIGKILL" else INTERVAL + 1  # a run without a save cannot be resumed
        if first >= steps:
            break
        leg = Leg(layout, end, chance.randint(first, steps - 1), chance.randrange(LAYOUTS[layout][0]))
        legs.append(Leg(layout, end, leg.at, leg.rank, late=end == "SIGKILL" and chance.random() < 0.5))
        saved = saved_by(leg, saved)
    return [*legs, Leg(chance.choice(list(LAYOUTS)))]


def saved_by(leg: Leg, before: int) -> int:
    """The newest step on disk after a leg."""
    return max(before, (leg.at - 1) // INTERVAL * INTERVAL) if leg.end == "SIGKILL" else leg.at


class Book:
    """Runs legs in a folder and keeps the ledger."""

    def __init__(self, nursery: Nursery, folder: Path, settings: Mapping[str, Any]) -> None:
        self.nursery, self.folder, self.settings = nursery, folder, dict(settings)
        folder.mkdir(parents=True)
        self.ledger: Ledger = {}
        self.firsts: list[int] = []  # the first step of each leg
        self.samples_per_epoch = 0

    def run(self, legs: list[Leg]) -> Ledger:
        for number, leg in enumerate(legs):
            self._start(number, leg)
        return self.ledger

    def _start(self, number: int, leg: Leg) -> None:
        ranks, cut = LAYOUTS[leg.layout]
        settings = complete({**self.settings, **cut}, ranks)
        settings |= {
            "job.dump_folder": str(self.folder / "run"),
            "checkpoint.enable": True,
            "checkpoint.interval": INTERVAL,
            "checkpoint.last_save_model_only": False,
        }
        if number > 0:
            del settings["training.global_batch_size"]  # the checkpoint knows it
        layout = resolve_layout(load_config(overrides=settings).parallelism, ranks)
        place = self.folder / f"leg-{number}"
        place.mkdir()
        _run_ranks(self.nursery, place, settings, ranks, leg)
        self._take(place, ranks, layout, leg)

    def _take(self, place: Path, ranks: int, layout: Layout, leg: Leg) -> None:
        """Enter what the ranks wrote down; what a rank did not come to was not saved either."""
        written = [
            [json.loads(line) for line in (place / f"rank-{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
        self.samples_per_epoch = written[0][0]["samples_per_epoch"]
        rows = [{row["step"]: row for row in each[1:]} for each in written]
        done = set.intersection(*(set(each) for each in rows))
        first = written[0][0]["first"]
        assert done == set(range(first, first + len(done))), f"{leg}: steps {sorted(done)} from {first} on"
        self.firsts.append(first)
        for step in [step for step in self.ledger if step >= first]:
            del self.ledger[step]  # trained again
        for step in sorted(done):
            self.ledger[step] = _entry([each[step] for each in rows], layout)


def _entry(rows: list[dict[str, Any]], layout: Layout) -> Entry:
    by_data_rank: dict[int, list[list[int]]] = {}
    for rank, row in enumerate(rows):
        at = layout.coordinates(rank)
        data_rank = at["dp_replicate"] * layout.dp_shard + at["dp_shard"]
        assert by_data_rank.setdefault(data_rank, row["read"]) == row["read"], f"rank {rank} read something else"
        assert row["loss"] == rows[0]["loss"]
    read = sorted(tuple(pair) for pairs in by_data_rank.values() for pair in pairs)
    return Entry(tuple(number for number, _ in read), tuple(content for _, content in read), rows[0]["loss"])


# ---- processes -------------------------------------------------------------------------------------------------------


def _run_ranks(nursery: Nursery, place: Path, settings: dict[str, Any], ranks: int, leg: Leg) -> None:
    """One leg, to its end on all ranks: when one is killed, the others are too, as a launcher does."""
    grace = 0.0 if leg.end == "SIGKILL" else 30.0
    words = (json.dumps(asdict(leg)),)
    job = Job(place, ranks, settings, grace=grace, entry="tests.faults.ledger:train", words=words)
    codes = nursery.run(job).codes
    if leg.end == "SIGKILL":
        assert codes[leg.rank] == -signal.SIGKILL, _said(place, leg, codes)
    else:
        assert codes == [{"SIGINT": 130}.get(leg.end or "", 0)] * ranks, _said(place, leg, codes)


def _said(place: Path, leg: Leg, codes: list[int]) -> str:
    return "\n".join(
        [f"{leg}: exit codes {codes}", *(path.read_text()[-3000:] for path in sorted(place.glob("out-*")))]
    )


def train(words: Sequence[str]) -> int:
    """What a rank does; the nursery calls it."""
    from shardline.run.stop import exit_code
    from shardline.training.trainer import Trainer

    job, rank, leg = job_of(words[0]), int(words[1]), Leg(**json.loads(words[3]))
    config = load_config(overrides=job.settings)
    trainer = Trainer(config)
    with (job.folder / f"rank-{rank}.jsonl").open("w", buffering=1) as book:
        first = {"first": trainer.progress.step + 1, "samples_per_epoch": trainer.loader.samples_per_epoch}
        book.write(json.dumps(first) + "\n")
        _watch(trainer, book, leg if leg.rank == rank else Leg(leg.layout))
        return exit_code(trainer.train().stopped_by, config)


def _watch(trainer: Any, book: Any, leg: Leg) -> None:
    """Write down each step, and let the leg's end come to this rank."""
    fetch, compute = trainer.loader.step, trainer.train_step
    read: list[Any] = []

    def end(late: bool) -> None:
        if leg.end is not None and trainer.progress.step + 1 == leg.at and leg.late == late:
            os.kill(os.getpid(), getattr(signal, leg.end))

    def watched_fetch() -> Any:
        batches = fetch()
        read[:] = [pair for batch in batches for pair in _contents(batch)]
        end(late=False)
        return batches

    def watched_compute(*arguments: Any) -> Any:
        outcome = compute(*arguments)
        row = {"step": trainer.progress.step + 1, "read": read, "loss": outcome.loss}
        book.write(json.dumps(row) + "\n")
        end(late=True)
        return outcome

    trainer.loader.step, trainer.train_step = watched_fetch, watched_compute


def _contents(batch: Any) -> list[tuple[int, int]]:
    """Number and checksum of every sample: tokens, labels and, where documents are packed, their boundaries."""
    parts = [batch.tokens, batch.labels, *([] if batch.documents is None else [batch.documents])]
    return [
        (int(number), zlib.crc32(b"".join(part[row].numpy().tobytes() for part in parts)))
        for row, number in enumerate(batch.sample_ids)
    ]


def write_corpus(path: Path, characters: int) -> Path:
    """Long and short documents, `characters` of them in all."""
    chance, left = random.Random(0), characters
    with path.open("w") as file, contextlib.suppress(StopIteration):
        for text in documents("validation"):
            piece = text[: min(left, chance.choice((3, 40, 200)))]
            left -= len(piece)
            file.write(json.dumps({"text": piece}) + "\n")
            if left <= 0:
                break
    return path
