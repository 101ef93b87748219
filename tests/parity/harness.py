"""Train a tiny model under some layout and compare every number with one process.

    reference = harness.reference(overrides)         one process, the whole global batch at once
    result = harness.run(overrides, ranks=4)         the same samples, cut over ranks and micro-batches
    compare(reference, result)                       AssertionError that names the first difference

The trainer runs its own loop; `_watch` only writes down what passes by.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardline.comm.job import job
from shardline.config.layout import Layout, resolve_layout
from shardline.config.load import load_config
from shardline.data.demo import documents
from shardline.models.fused_weights import unfuse
from tests import leftovers, proven
from tests.model_state import whole
from tests.parity.pool import TIMEOUT_SECONDS, Pool

STEPS = 10
GLOBAL_BATCH = 8
DEVICE = os.environ.get("SHARDLINE_PARITY_DEVICE", "cpu")  # "cuda": ranks share the GPU, gloo carries the collectives

MODEL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 8,
    "ffn_dim": 128,
    "vocab_size": 272,
}
BASE: dict[str, Any] = {
    "model.tokenizer_path": "bytes",
    "training.seq_len": 32,
    "training.global_batch_size": GLOBAL_BATCH,
    "training.steps": STEPS,
    "training.mixed_precision_param": "float32",
    "training.max_norm": 1.0,  # gradient norms here are about 2: every step is clipped
    "optimizer.lr": 1e-3,  # at 3e-3 some models amplify rounding differences a hundredfold in ten steps
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 1,
}
# How a run is cut up, not what it computes: the reference leaves these out.
LAYOUT_KEYS = ("parallelism.", "activation_checkpoint.", "compile.", "comm.", "optimizer.early_step", "debug.check")
ROUTER_KEYS = ("expert_load", "expert_load_layers", "aux_loss", "z_loss")
LAYOUT_KEYS += ("quantize.linear.float8.enable_fsdp", "quantize.linear.float8.precompute")
LAYOUT_KEYS += ("training.local_batch_size", "validation.local_batch_size", "training.enable_cpu_offload")

Overrides = Mapping[str, Any]
# Breaks a built trainer while the context it returns is open, on every rank: for tests of the harness itself.
Mutation = Callable[[Any], contextlib.AbstractContextManager[None]]


@dataclass
class Result:
    """What a run computed. Tensors are whole, under their logical names; `samples[step][data rank]` are sample ids."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]  # of step 1, as the optimizer got them
    parameters: dict[str, Tensor]  # after the last step
    samples: list[list[list[int]]]
    validation_losses: list[float] = field(default_factory=list)
    comm_bytes: list[dict[str, int]] = field(default_factory=list)
    routers: list[dict[str, Any]] = field(default_factory=list)  # what metrics.jsonl says of experts, by step
    offloaded: list[int] = field(default_factory=list)  # bytes of activations that each step sent to the host
    layout: str = ""  # ranks and what was changed, of an unbroken run on several ranks or of one that cuts its work up


@dataclass(frozen=True)
class Tolerances:
    """Relative; for tensors the norm of the difference over the norm."""

    loss: float = 1e-4
    grad_norm: float = 1e-5
    gradient: float = 1e-3
    parameter: float = 1e-3


FLOAT32 = Tolerances()
# bfloat16 keeps 8 bits of each number, and what is summed where depends on the layout.
# Measured at a learning rate of 1e-3: 3e-5, 5e-4, 6e-3, 5e-3; cutting the batch alone, on one process, costs as much.
BFLOAT16 = Tolerances(loss=2e-4, grad_norm=3e-3, gradient=2e-2, parameter=2e-2)
# Float8 keeps 4 bits of each number: one that lies near the border between two is rounded up in one layout and down in
# another, since it comes from sums that were taken in another order. Seen: norms 7.6e-3 apart in step 10 (ZBV with TP).
FLOAT8 = Tolerances(loss=1e-3, grad_norm=2e-2, gradient=2e-2, parameter=2e-2)
# In bfloat16 the numbers that are rounded differ in their eighth bit already: one in 16 is rounded the other way.
FLOAT8_OF_BFLOAT16 = Tolerances(loss=1e-3, grad_norm=2e-2, gradient=8e-2, parameter=2e-2)


def of_pairs(single: Tolerances) -> Tolerances:
    """A pair's loss and gradients are differences of its rows' sums, which are many times larger.

    Measured in bfloat16: 3e-4 of the loss; in float32, 2e-5 of the norm after steps of LAMB.
    """
    return Tolerances(10 * single.loss, 5 * single.grad_norm, 2 * single.gradient, 2 * single.parameter)


class Harness:
    """Runs cases in a pool of workers; one reference for all cases that compute the same."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.corpus = write_corpus(folder / "corpus.jsonl")
        self._references: dict[str, Result] = {}
        self._numbers = itertools.count()

    def reference(self, overrides: Overrides, timeout: float = TIMEOUT_SECONDS) -> Result:
        kept = {key: value for key, value in overrides.items() if not key.startswith(LAYOUT_KEYS)}
        name = json.dumps(kept, sort_keys=True, default=str)
        if name not in self._references:
            with self._shared(name) as path:
                if path.exists():
                    self._references[name] = pickle.loads(path.read_bytes())
                else:
                    self._references[name] = self.run(kept, 1, timeout=timeout)
                    path.write_bytes(pickle.dumps(self._references[name]))
        return self._references[name]

    @contextlib.contextmanager
    def _shared(self, name: str) -> Iterator[Path]:
        """A file that the processes of a session share, for one of them at a time: whoever is first computes it."""
        folder = Path(os.environ.get(leftovers.VARIABLE, self.folder)) / "references"
        folder.mkdir(exist_ok=True)
        path = folder / hashlib.sha1(name.encode()).hexdigest()
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path

    def run(
        self,
        overrides: Overrides,
        ranks: int,
        mutation: Mutation | None = None,
        timeout: float = TIMEOUT_SECONDS,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Result:
        """Every rank builds its trainer and trains inside `around()`."""
        folder = self.folder / f"run-{next(self._numbers)}"
        settings = self.settings(overrides, ranks) | {"job.dump_folder": str(folder)}
        layout = resolve_layout(load_config(overrides=settings).parallelism, ranks)
        try:
            records = self.pool.run(ranks, train, settings, mutation, around, timeout=timeout)
            result = join(records, layout, folder)
            if mutation is None and any(key.startswith(LAYOUT_KEYS) for key in overrides):
                result.layout = f"{ranks} {json.dumps(overrides, sort_keys=True, default=str)}"
            return result
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def settings(self, overrides: Overrides, ranks: int) -> dict[str, Any]:
        corpus = {f"{section}.dataset_path": str(self.corpus) for section in ("training", "validation")}
        data = {} if "data.sources" in overrides else corpus
        return complete(overrides, ranks) | data | {"training.cache_folder": str(self.folder / "cache")}


def complete(overrides: Overrides, ranks: int) -> dict[str, Any]:
    """The whole config of a case. Unless it says otherwise, each data rank takes its share in one micro-batch."""
    settings: dict[str, Any] = {**BASE, **overrides, "model.overrides": MODEL | overrides.get("model.overrides", {})}
    if "training.epochs" in settings:
        del settings["training.steps"]
    layout = resolve_layout(load_config(overrides=settings).parallelism, ranks)
    share = settings["training.global_batch_size"] // layout.data_ranks
    settings.setdefault("training.local_batch_size", share)
    settings.setdefault("validation.local_batch_size", share)
    return settings


def write_corpus(path: Path) -> Path:
    """Long and very short documents mixed, so that samples have different numbers of targets under block_causal."""
    chance = random.Random(0)
    texts = [text[: chance.choice((1, 2, 5, len(text)))] for text in documents("validation")[:400]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# ---- on a rank -------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one rank saw. Rank 0 carries the tensors; of the others' only the fingerprints, which must be the same."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradient_prints: dict[str, str] = field(default_factory=dict)
    parameter_prints: dict[str, str] = field(default_factory=dict)


def train(
    settings: dict[str, Any],
    mutation: Mutation | None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Record:
    """A worker's part of a case: build the trainer, run its loop, write down what it did."""
    from shardline.training.trainer import Trainer

    with _chosen_device(), _own_logging(), around():
        trainer = Trainer(load_config(overrides=settings))
        record = Record()
        with contextlib.nullcontext() if mutation is None else mutation(trainer):
            _watch(trainer, record)
            trainer.train()
        record.parameters, record.parameter_prints = _whole(
            trainer, lambda parameter: parameter.detach(), of_trained=False
        )
        if trainer.mesh.apart:  # each worker has its own
            record.gradients, record.gradient_prints = {}, {}
        if trainer.mesh.rank % (trainer.mesh.world_size // trainer.mesh.layout.pp):  # the first of each stage has them
            record.gradients, record.parameters = {}, {}
        return record


@contextlib.contextmanager
def _chosen_device() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    brief = patch.multiple(
        "shardline.parallel.tensor.autotune", LEAST_ROUNDS=1, MOST_ROUNDS=1
    )  # which one wins is not the matter
    with brief, patch("shardline.training.setup.choose_device", lambda *_: torch.device(DEVICE)):
        yield


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Take the run's log files away from the loggers: the folder is removed before the next case."""
    try:
        yield
    finally:
        for name in ("shardline", "py.warnings"):
            for handler in list(logging.getLogger(name).handlers):
                logging.getLogger(name).removeHandler(handler)
                handler.close()


def _watch(trainer: Any, record: Record) -> None:
    fetch, step = trainer.loader.step, trainer.train_step

    def watched_fetch() -> Any:
        batches = fetch()
        record.samples.append([int(number) for batch in batches for number in batch.sample_ids.tolist()])
        return batches

    def watched_step(*arguments: Any) -> Any:
        outcome = step(*arguments)
        record.losses.append(outcome.loss)
        record.grad_norms.append(outcome.grad_norm)
        if not record.gradients:  # an optimizer that runs in backward keeps no gradient, but this one's first moment
            decay = 1 - trainer.config.optimizer.beta1
            record.gradients, record.gradient_prints = _whole(
                trainer, lambda parameter: trainer.optimizer.state[parameter]["exp_avg"] / decay
            )
        return outcome

    trainer.loader.step, trainer.train_step = watched_fetch, watched_step
    if not trainer.config.optimizer.early_step_in_backward:
        _watch_gradients(trainer, record)


def _watch_gradients(trainer: Any, record: Record) -> None:
    """Keep the gradients that the first optimizer step is given: summed over ranks, clipped."""
    update = trainer.optimizer.step

    def watched(*arguments: Any, **options: Any) -> Any:
        if not record.gradients:
            scale = getattr(trainer.optimizer, "scale", 1.0)  # of an optimizer that clips gradients as it reads them
            record.gradients, record.gradient_prints = _whole(
                trainer, lambda parameter: None if parameter.grad is None else parameter.grad * scale
            )
        return update(*arguments, **options)

    trainer.optimizer.step = watched


def _whole(
    trainer: Any, value: Callable[[Any], Tensor | None], of_trained: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A tensor of each (trained) parameter, gathered from its shards and unfused; every rank must call this."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        if (of_trained and not parameter.requires_grad) or ".stored." in name:  # codes lie as the layout wants them
            continue
        tensor = value(parameter)
        if tensor is None:
            raise AssertionError(f"{name} has no gradient")
        with job.traffic.uncounted():
            full = whole(tensor.detach())
        for part, content in unfuse(trainer.arch, name, full).items():
            tensors[part] = content.float().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, {name: hashlib.sha1(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


# ---- results ---------------------------------------------------------------------------------------------------------


def join(records: list[Record], layout: Layout, folder: Path) -> Result:
    """One result from the ranks' records; what every rank must have alike is checked here."""
    first, of_stage = records[0], len(records) // layout.pp
    for rank, record in enumerate(records):
        for what in ("losses", "grad_norms"):
            _check_alike(what, rank, getattr(first, what), getattr(record, what))
        for what in ("gradient_prints", "parameter_prints"):
            same = getattr(records[rank - rank % of_stage], what)
            _check_alike(what, rank, same, getattr(record, what))
            _check_shared(what, rank, getattr(first, what), getattr(record, what))
    stages = records[::of_stage]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["loss"] for row in steps] == first.losses, "metrics.jsonl shows other losses than the steps had"
    return Result(
        losses=first.losses,
        grad_norms=first.grad_norms,
        gradients={name: value for record in stages for name, value in record.gradients.items()},
        parameters={name: value for record in stages for name, value in record.parameters.items()},
        samples=_samples_by_data_rank(records, layout),
        validation_losses=[row["validation_loss"] for row in rows if "validation_loss" in row],
        comm_bytes=[row["comm_bytes"] for row in steps],
        routers=[{key: row[key] for key in ROUTER_KEYS if key in row} for row in steps],
        offloaded=[row.get("offloaded_bytes", 0) for row in steps],
    )


def _check_alike(what: str, rank: int, first: Any, other: Any) -> None:
    """Loss and norm are the world's, and so is a gathered tensor: bit by bit the same on every rank."""
    if first == other:
        return
    if isinstance(first, dict):
        names = [name for name in first if first[name] != other.get(name)]
        raise AssertionError(f"{what}: rank {rank} differs from rank 0 in {len(names)} of {len(first)}: {names[:5]}")
    step = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    raise AssertionError(
        f"{what}: rank {rank} differs from rank 0 at step {step + 1}: {other[step:][:1]} {first[step:][:1]}"
    )


def _check_shared(what: str, rank: int, first: dict[str, str], other: dict[str, str]) -> None:
    """Tied embeddings are on two pipeline stages."""
    differing = [name for name in first.keys() & other.keys() if first[name] != other[name]]
    if differing:
        raise AssertionError(f"{what}: rank {rank} holds another copy than rank 0 of {differing}")


def _samples_by_data_rank(records: list[Record], layout: Layout) -> list[list[list[int]]]:
    by_data_rank: dict[int, list[list[int]]] = {}
    for rank, record in enumerate(records):
        place = layout.coordinates(rank)
        data_rank = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
        seen = by_data_rank.setdefault(data_rank, record.samples)
        assert seen == record.samples, f"rank {rank} read other samples than the ranks it shares its batch with"
    return [list(step) for step in zip(*(by_data_rank[number] for number in sorted(by_data_rank)), strict=True)]


def compare(reference: Result, result: Result, tolerances: Tolerances = FLOAT32) -> None:
    """Raise AssertionError that names the first difference, in the order in which a run computes things."""
    kinds = (
        _sample_differences(reference, result),
        _number_differences("loss", reference.losses[:1], result.losses[:1], tolerances.loss),
        _tensor_differences("gradient", reference.gradients, result.gradients, tolerances.gradient),
        _number_differences("grad_norm", reference.grad_norms, result.grad_norms, tolerances.grad_norm),
        _number_differences("loss", reference.losses, result.losses, tolerances.loss),
        _router_differences(reference.routers, result.routers, max(tolerances.loss, tolerances.grad_norm)),
        _number_differences("validation_loss", reference.validation_losses, result.validation_losses, tolerances.loss),
        _tensor_differences("parameter", reference.parameters, result.parameters, tolerances.parameter),
    )
    lines = [line for kind in kinds for line in _shortened(list(kind))]
    if lines:
        raise AssertionError("\n  ".join(dict.fromkeys(lines)))
    if result.layout:
        proven.note("layout", result.layout)


def _shortened(lines: list[str], most: int = 5) -> list[str]:
    return lines[:most] + ([f"... and {len(lines) - most} more of these"] if len(lines) > most else [])


def _sample_differences(reference: Result, result: Result) -> Iterator[str]:
    if len(reference.samples) != len(result.samples):
        yield f"{len(result.samples)} steps read samples, the reference has {len(reference.samples)}"
    for step, (wanted, ranks) in enumerate(zip(reference.samples, result.samples, strict=False), 1):
        expected = sorted(number for rank in wanted for number in rank)
        seen = sorted(number for rank in ranks for number in rank)
        if seen != expected or len(set(seen)) != len(seen):
            twice = sorted({number for number in seen if seen.count(number) > 1})
            missing = sorted(set(expected) - set(seen))
            yield f"samples at step {step}: read twice {twice}, not read {missing}, by data rank {ranks}"


def _number_differences(what: str, wanted: list[float], seen: list[float], tolerance: float) -> Iterator[str]:
    if len(wanted) != len(seen):
        yield f"{what}: {len(seen)} values, the reference has {len(wanted)}"
    for step, (a, b) in enumerate(zip(wanted, seen, strict=False), 1):
        relative = abs(a - b) / max(abs(a), 1e-12)
        if not relative <= tolerance:
            yield f"{what} at step {step}: {b!r}, the reference has {a!r} (relative {relative:.2e} > {tolerance:g})"


def _router_differences(wanted: list[dict[str, Any]], seen: list[dict[str, Any]], tolerance: float) -> Iterator[str]:
    """A load is a count, which one token with two equal scores may change by one: its band is wider."""
    for step, (a, b) in enumerate(zip(wanted, seen, strict=True), 1):
        if a.keys() != b.keys() or a.get("expert_load_layers", {}).keys() != b.get("expert_load_layers", {}).keys():
            yield f"router at step {step}: {b}, the reference has {a}"
            continue
        for key in ("aux_loss", "z_loss", "expert_load"):
            band = 100 * tolerance if key == "expert_load" else tolerance
            yield from _number_differences(f"{key} (step {step})", [a.get(key, 0.0)], [b.get(key, 0.0)], band)


def _tensor_differences(
    what: str, wanted: dict[str, Tensor], seen: dict[str, Tensor], tolerance: float
) -> Iterator[str]:
    """Worst first: one wrong gradient also changes the norm, and with it all that are clipped by it."""
    for name in sorted(wanted.keys() ^ seen.keys()):
        yield f"{what} {name} is only in the {'reference' if name in wanted else 'result'}"
    errors = {}
    for name in (name for name in wanted if name in seen):
        if wanted[name].shape != seen[name].shape:
            yield f"{what} {name}: shape {tuple(seen[name].shape)}, the reference has {tuple(wanted[name].shape)}"
        else:
            errors[name] = relative_error(wanted[name], seen[name])
    for name, relative in sorted(errors.items(), key=lambda item: -item[1]):
        if not relative <= tolerance:
            ratio = float(seen[name].norm() / wanted[name].norm().clamp(min=1e-30))
            yield f"{what} of {name}: relative {relative:.2e} > {tolerance:g} (norm {ratio:.4f} of the reference's)"


def relative_error(wanted: Tensor, seen: Tensor) -> float:
    return float((seen.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def worst(reference: Result, result: Result) -> dict[str, float]:
    """The largest relative error of each kind: how far inside its band a case is."""

    def numbers(wanted: list[float], seen: list[float]) -> float:
        return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(wanted, seen, strict=True)), default=0.0)

    def tensors(wanted: dict[str, Tensor], seen: dict[str, Tensor]) -> float:
        return max((relative_error(wanted[name], seen[name]) for name in wanted), default=0.0)

    return {
        "loss": numbers(reference.losses, result.losses),
        "grad_norm": numbers(reference.grad_norms, result.grad_norms),
        "gradient": tensors(reference.gradients, result.gradients),
        "parameter": tensors(reference.parameters, result.parameters),
    }
