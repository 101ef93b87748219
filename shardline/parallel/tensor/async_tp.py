"""Prepares async tensor parallelism: finds the usable backends, chooses one per product, and reports the choice."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardline.adapters.peft_files import adaptation_of
from shardline.comm import collectives, symmetric_memory
from shardline.comm.job import job
from shardline.comm.mesh import Mesh
from shardline.comm.observe import runs_on_host
from shardline.config.architecture import Architecture
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.parallel.tensor import fused, symmetric
from shardline.parallel.tensor.autotune import (
    Beside,
    Measured,
    Projections,
    Shape,
    as_row,
    block_shapes,
    candidates,
    failure,
    fastest,
    from_row,
    measure,
    remembered_file,
    topology,
)
from shardline.parallel.tensor.backend_table import Product, backends, choices
from shardline.parallel.tensor.float8_rows import written
from shardline.parallel.tensor.tensor import TensorParallel, batch_shapes
from shardline.precision.float8 import Recipe
from shardline.storage.atomic import write_atomically

FILE = "async_tp.json"  # in the run's folder
ENOUGH_COMPUTE = 2.0  # products should take this many times as long as their communication


@dataclass
class AsyncTensor:
    """The measurements and choices; `lines` are for the console."""

    measured: list[Measured] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    measure_again: Callable[[], AsyncTensor] | None = None  # all ranks call it together; None if nothing is chosen

    def table(self) -> list[tuple[str, str]]:
        """Return label and value for each row of the log's table: the products and their chosen backends."""
        return [(str(one.product), one.words()) for one in self.measured]

    def rows(self) -> list[dict[str, Any]]:
        return [{"product": str(one.product), **as_row(one)} for one in self.measured]

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps(self.rows(), indent=1))

    def missed(self) -> list[str]:
        """Return a log line for each product that ran since the last call but was not measured at the start."""
        found = sorted(map(str, choices.unmeasured)) if self.measured else []
        choices.unmeasured.clear()
        return [f"Async TP: {product} was not measured at the start, so it runs serially" for product in found]


def prepare(
    config: Config,
    arch: Architecture,
    mesh: Mesh,
    plan: TensorParallel | None,
    dtype: torch.dtype,
    device: torch.device,
    cache: Path,
    recipes: Collection[Recipe | None] = (None,),
    tell: Callable[[str], None] = lambda text: None,
    again: bool = False,
) -> AsyncTensor:
    """Choose a backend for every product of this run; all ranks call it together.

    `recipes` are the float8 recipes of the blocks' products, with None for products that do not compute in float8.
    `tell` gets a text whenever a measurement begins. With `again`, measurements of earlier runs are ignored.
    """
    choices.reset()
    section = config.parallelism
    if not section.enable_async_tensor_parallel:
        return AsyncTensor()
    if plan is None:
        return AsyncTensor(lines=["Async TP has nothing to do: parallelism.tensor_parallel_degree is 1"])
    checkpoint, lines = config.activation_checkpoint, list[str]()
    choices.visible = checkpoint.mode == "selective" and checkpoint.selective_ac_option == "op"
    allowed = usable_backends(section.async_tensor_parallel_backend, device, lines)
    forced = allowed[-1] if section.async_tensor_parallel_backend != "auto" else None
    place = topology(device)
    file = remembered_file(cache, place)
    remembered: dict[str, Any] = mesh.from_rank_0(lambda: _read(file))
    # Equal on all ranks, in one order: they measure together. Stages may differ in what is converted.
    of_ranks = mesh.from_everyone(sorted({written(recipe) for recipe in recipes}))
    shapes = run_shapes(config, arch, plan, dtype, sorted({low for some in of_ranks for low in some}))

    def choose(known: dict[str, Any], tell: Callable[[str], None]) -> AsyncTensor:
        found, fresh = _choose(shapes, allowed, forced, known, device, tell)
        if fresh and mesh.rank == 0:
            _write(file, {**remembered, **fresh}, place)
        return found

    done = choose({} if again else remembered, tell)
    done.lines = lines + done.lines
    if forced is None and section.data_parallel_mode != "async":  # asynchronous workers cannot measure together
        done.measure_again = lambda: choose({}, lambda text: None)
    return done


def _choose(
    shapes: Sequence[Shape],
    allowed: Sequence[str],
    forced: str | None,
    known: dict[str, Any],
    device: torch.device,
    tell: Callable[[str], None],
) -> tuple[AsyncTensor, dict[str, Any]]:
    """Choose for each product; return the choices, and the file's rows for products that had to be measured now."""
    done, fresh, began = AsyncTensor(), dict[str, Any](), time.perf_counter()
    for number, shape in enumerate(shapes, start=1):
        measured = _recall(shape, allowed, known)
        if measured is None or failure(shape, _settled(measured, forced).chosen, device):
            tell(f"Async TP: measuring backends for product {number} of {len(shapes)}, once for this layout")
            measured = measure(shape, candidates(shape.product, allowed), device)
        if not measured.remembered:  # a recalled measurement may lack times that the file has
            fresh[str(shape.product)] = as_row(measured)
        measured = _settled(measured, forced)
        choices.chosen[shape.product] = measured.chosen
        choices.alone[shape.product] = measured.alone
        done.measured.append(measured)
    done.lines += _refusal_lines(done.measured)
    done.lines.append(_summary_line(done.measured, len(fresh), time.perf_counter() - began))
    used = [backends[choice.backend] for choice in choices.chosen.values()]
    symmetric_memory.keep({purpose for one in (*used, *job.direct.values()) for purpose in one.regions})
    return done, fresh


def run_shapes(
    config: Config,
    arch: Architecture,
    plan: TensorParallel,
    dtype: torch.dtype,
    lows: Sequence[str] = ("",),
) -> list[Shape]:
    """Return the products of training and, if their sizes differ, of validation, for a rank's part of each sequence.

    `lows` are the float8 recipes of products as `written`; "" for none.
    """
    found: dict[Product, Shape] = {}
    for name, batch, length in batch_shapes(config):
        rows = batch * length // config.parallelism.context_parallel_degree
        sizes = (arch, plan.degree, rows, dtype)
        trains, sequence_parallel = name == "training", plan.sequence_parallel
        for low in lows:
            for beside in _kinds_beside(config, arch, low):
                shapes = block_shapes(
                    *sizes, sequence_parallel=sequence_parallel, training=trains, low=low, beside=beside
                )
                found |= {shape.product: shape for shape in shapes}
    return list(found.values())


def _kinds_beside(config: Config, arch: Architecture, low: str) -> list[Beside]:
    """Return the products with LoRA; with DPO also those without it, as the frozen weights are the reference model."""
    with_lora = beside_products(config, arch, low)
    alone = config.lora.enable and config.training.objective == "dpo"
    return [with_lora, lambda projections: {()}] if alone else [with_lora]


def beside_products(config: Config, arch: Architecture, low: str) -> Beside:
    """Return a function for the widths that LoRA adds to products of projections; they may differ between layers."""
    how = adaptation_of(config, arch)
    targets = () if how is None or how.dropout or low else how.targets

    def widths(projections: Projections) -> set[tuple[int, ...]]:
        found = set()
        for layer in range(arch.n_layers):
            here = {name.rpartition(".")[2]: name for name in targets if name.startswith(f"layers.{layer}.")}
            ranks = {last: how.rank_of(name) for last, name in here.items() if how is not None}
            wide = [sum(ranks.get(one, 0) for one in of_weight) for of_weight in projections]
            found.add(tuple(width for width in wide if width))
        return found

    return widths


def usable_backends(asked: str, device: torch.device, lines: list[str]) -> list[str]:
    """Return the usable backends, serial first and a forced one last. Reasons against others are added to `lines`."""
    if asked in ("serial", "ring"):
        return list(dict.fromkeys(("serial", asked)))
    reason = symmetric_memory.unusable(device)
    if reason is not None:
        if asked != "auto":
            lines.append(f"Async TP: {asked} cannot be used here ({reason}); ring runs instead")
        elif device.type == "cuda":
            lines.append(f"Async TP: symmetric and fused cannot be used here ({reason}); serial and ring remain")
        return ["serial", "ring"]
    backends["symmetric"] = symmetric.Symmetric()
    if runs_on_host(collectives.axis("tp").group, device):
        job.direct["tp"] = symmetric_memory.Direct()
    if asked == "symmetric":
        return ["serial", "symmetric"]
    reason = fused.unusable(device)
    if reason is None:
        backends["fused"] = fused.Fused()
        return ["serial", "fused"] if asked == "fused" else ["serial", "ring", "symmetric", "fused"]
    left = "symmetric runs instead" if asked == "fused" else "serial, ring and symmetric remain"
    lines.append(f"Async TP: fused cannot be used here ({reason}); {left}")
    return ["serial", "symmetric"] if asked == "fused" else ["serial", "ring", "symmetric"]


def _settled(measured: Measured, forced: str | None) -> Measured:
    """Choose the forced backend, if there is one, instead of the fastest."""
    if forced is None:
        return measured
    best = measured.best(forced)
    if best is not None:
        return replace(measured, chosen=best)
    return replace(measured, refused={forced: "it does not support this operation", **measured.refused})


def _recall(shape: Shape, allowed: Sequence[str], known: dict[str, Any]) -> Measured | None:
    """Return the measurement of an earlier run, if it tried everything that is allowed now."""
    try:
        measured = from_row(shape.product, known[str(shape.product)])
    except (KeyError, TypeError, ValueError):  # missing, or not in this release's format
        return None
    refused = {name: why for name, why in measured.refused.items() if name in allowed}
    wanted = [choice for choice in candidates(shape.product, allowed) if choice.backend not in refused]
    if not set(wanted) <= set(measured.times):
        return None
    times = {choice: measured.times[choice] for choice in wanted}
    return replace(measured, times=times, chosen=fastest(times), refused=refused)


def _refusal_lines(measured: Sequence[Measured]) -> list[str]:
    """Return a line for each backend that cannot run some products, with the first reason; the table has all."""
    reasons: dict[str, list[str]] = {}
    for one in measured:
        for name, why in one.refused.items():
            reasons.setdefault(name, []).append(why)
    total = len(measured)
    return [f"Async TP: {name} cannot run {len(why)} of {total} products: {why[0]}" for name, why in reasons.items()]


def _summary_line(measured: Sequence[Measured], fresh: int, seconds: float) -> str:
    """Return a line with the number of products per backend, and whether their communication can be hidden."""
    chosen = Counter(str(one.chosen) for one in measured)
    how = (
        f"{fresh} of them measured in {seconds:.1f} s" if fresh else f"measured on {min(one.date for one in measured)}"
    )
    line = f"Async TP is enabled for {len(measured)} products ({how}): "
    line += ", ".join(f"{count} by {choice}" for choice, count in chosen.most_common())
    compute, sent = sum(one.matmul for one in measured), sum(one.comm for one in measured)
    if sent > 0:
        line += f"; they take {compute / sent:.1f} times as long as their communication"
        if compute < ENOUGH_COMPUTE * sent:
            hint = "not all of it can hide: fewer tensor-parallel ranks or a faster link help"
            line += f", and below {ENOUGH_COMPUTE:g} {hint}"
    return line


def _read(file: Path) -> dict[str, Any]:
    try:
        products = json.loads(file.read_text())["products"]
        return products if isinstance(products, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(file: Path, products: dict[str, Any], place: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):  # without the file, the next run measures again
        write_atomically(file, json.dumps({"place": place, "products": products}, indent=1))
