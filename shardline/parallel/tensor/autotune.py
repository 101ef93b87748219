"""Measures at the start which backend runs each product fastest, for all ranks together, and remembers it.

Candidates take turns for several rounds; each candidate's time is the median of the slowest rank. `serial` is a
candidate like the others, and is kept if no other is clearly faster. A backend whose results differ from those of
`serial` is no candidate. Choices are kept in a file for the next run with the same device, versions and rank placement.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardline import __version__
from shardline.comm import collectives, symmetric_memory
from shardline.comm.hidden_time import Alone
from shardline.comm.job import job
from shardline.config.architecture import Architecture
from shardline.parallel.tensor.backend_table import SERIAL, Choice, Product, backend
from shardline.parallel.tensor.float8_rows import arithmetic
from shardline.parallel.tensor.serial_and_ring import (
    COLUMN,
    ROW,
    Needs,
    input_gradient,
    products_of,
    weight_gradients,
)
from shardline.parallel.tensor.tensor import cut_widths

CLEARLY = 0.01  # another backend must save this share of the time to replace serial
LEAST_ROUNDS, MOST_ROUNDS, MOMENT = 4, 25, 0.25  # as many rounds as the slowest candidate runs in MOMENT seconds
IN_A_ROW = 6
HOPELESS = 3.0
NEAR, RUN_OFF = 1.15, 2.0  # candidates within a factor NEAR of the best run again for about RUN_OFF seconds
MATTERS = ("NCCL_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")  # environment variables that matter
OFF, FAR_OFF = 0.02, 0.25  # largest relative errors: over all elements; of one element, relative to the usual size


@dataclass(frozen=True)
class Measured:
    """The seconds of one product: the matrix products alone, the communication alone, and each candidate."""

    product: Product
    matmul: float
    comm: float
    times: dict[Choice, float]
    chosen: Choice
    remembered: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # backend -> why it cannot run this product
    weights: float = 0.0  # the part of matmul for weight gradients; only measured on GPUs
    date: str = ""  # when it was measured

    @property
    def serial(self) -> float:
        return self.times[SERIAL]

    @property
    def alone(self) -> Alone:
        return Alone(max(self.matmul - self.weights, 0.0), self.weights, self.comm)

    def efficiency(self, choice: Choice) -> float:
        """Return the hidden share of the time that `serial` adds to the products: 1 if all is hidden, 0 if none.

        Serial adds more than its communication, because a product also runs slower after a wait than back to back.
        """
        exposed = self.serial - self.matmul
        return 1 - (self.times[choice] - self.matmul) / exposed if exposed > 0 else 0.0

    def comm_hidden(self, choice: Choice) -> float:
        """Return the hidden share of the communication's own time: 1 if the backend adds nothing to the products.

        Below 0, the backend adds more to the products than the collective takes by itself.
        """
        return min(1.0, 1 - (self.times[choice] - self.matmul) / self.comm) if self.comm > 0 else 0.0

    def best(self, backend: str) -> Choice | None:
        tried = [choice for choice in self.times if choice.backend == backend]
        return min(tried, key=lambda choice: self.times[choice]) if tried else None

    def words(self) -> str:
        where = "".join(f", {backend} cannot be used here: {why}" for backend, why in self.refused.items())
        where += f", measured on {self.date}" if self.remembered else ""
        return (
            f"{self.chosen}, {self.times[self.chosen] * 1e3:.2f} ms against {self.serial * 1e3:.2f} serial and"
            f" {self.matmul * 1e3:.2f} without communication{where}"
        )


class Shape(NamedTuple):
    """A product and the widths of its weights."""

    product: Product
    widths: tuple[int, ...] = ()


Projections = tuple[tuple[str, ...], ...]  # the projections in each weight that reads the same rows
Beside = Callable[[Projections], set[tuple[int, ...]]]


def block_shapes(
    arch: Architecture,
    degree: int,
    rows: int,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool = True,
    training: bool = True,
    low: str = "",
    beside: Beside = lambda projections: {()},
) -> list[Shape]:
    """Return the products of the blocks for `rows` tokens on one of `degree` ranks.

    `low` is the float8 recipe as `float8_rows.written` encodes it. `beside` returns the widths of the LoRA weights that
    are multiplied together with some projections.
    """
    column, row = (COLUMN, ROW) if sequence_parallel else ("copy_linear", "linear_all_reduce")
    into_heads = zip(_into_heads(arch, degree), _heads(arch, degree), strict=True)
    weights = [
        (column, depth, (*widths, *more)) for (depth, widths), names in into_heads for more in sorted(beside(names))
    ]
    weights.append((row, arch.n_heads * arch.v_dim // degree, (arch.dim,)))
    for width in cut_widths(arch).values():
        into = [((2 if arch.gated else 1) * width // degree, *more) for more in sorted(beside((("w1", "w3"),)))]
        weights += [*((column, arch.dim, widths) for widths in into), (row, width // degree, (arch.dim,))]
    silent = {("copy_linear", "forward"), ("linear_all_reduce", "backward")}
    return [
        Shape(Product(operation, direction, rows, depth, sum(widths), dtype, "tp", low), widths)
        for direction in ("forward", "backward")[: 2 if training else 1]
        for operation, depth, widths in weights
        if (operation, direction) not in silent
    ]


def _heads(arch: Architecture, degree: int) -> list[Projections]:
    """Return the projections in each weight of the products that compute queries, keys and values."""
    if arch.latent is not None:
        return [(("wq" if arch.latent.q_rank is None else "wq_b",),), (("wkv_b",),)]
    return [(("wq",), ("wk", "wv")) if degree > arch.n_kv_heads else (("wq", "wk", "wv"),)]


def _into_heads(arch: Architecture, degree: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return depth and widths of the products that compute queries, keys and values."""
    heads = arch.n_heads * arch.head_dim // degree
    if arch.latent is not None:
        sizes = arch.latent
        return [
            (sizes.q_rank or arch.dim, (heads,)),
            (sizes.kv_rank, (arch.n_heads * (sizes.nope_dim + sizes.v_dim) // degree,)),
        ]
    kv = 2 * arch.head_dim * max(arch.n_kv_heads // degree, 1)
    split = degree > arch.n_kv_heads  # keys and values have a separate weight
    return [(arch.dim, (heads, kv) if split else (heads + kv,))]


def candidates(product: Product, allowed: Sequence[str]) -> list[Choice]:
    """Return every choice for a product, serial first."""
    rows = product.rows // collectives.axis_size(product.axis)
    found = [SERIAL]
    for name in allowed:
        if name != "serial":
            counts = backend(name, product).counts(product.operation, product.direction)
            found += [Choice(name, count) for count in counts if count <= rows]
    return found


class Trial:
    """One product with its operands, which can run by any choice, and each of its parts alone."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device, self.product = shape, device, shape.product
        self.arithmetic = arithmetic(shape.product.low, shape.product.dtype)
        p, n = shape.product, collectives.axis_size(shape.product.axis)
        self.t = p.rows // n
        # Each rank draws different numbers. The run's own generator must not depend on what is remembered.
        source = torch.Generator(device).manual_seed(collectives.axis(p.axis).rank)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device, generator=source).mul_(0.05).to(p.dtype)

        self.weights = [drawn(width, p.depth) for width in shape.widths]
        gathers = p.operation == COLUMN
        self.x = drawn(self.t if gathers and p.direction == "forward" else p.rows, p.depth)
        scatters = p.operation == ROW
        rows = self.t if scatters else p.rows
        self.gradients = [drawn(rows, width) for width in shape.widths] if p.direction == "backward" else []
        self.full = drawn(p.rows, p.depth) if gathers and p.direction == "forward" else self.x
        self.kept = self.arithmetic.rows(self.x) if gathers else self.x  # what forward keeps
        self.all_gradients = [drawn(p.rows, w) for w in shape.widths] if self.gradients and scatters else self.gradients

    def turn(self) -> None:
        """Flip the sign of what is sent and so of every result: stale memory must not pass for new results."""
        for tensor in self.gradients or [self.x]:
            tensor.neg_()

    def run(self, choice: Choice) -> Any:
        p, used, how = self.product, backend(choice.backend, self.product), (self.product.axis, choice.chunks)
        if p.direction == "forward":
            if p.operation == COLUMN:
                return used.gather_linear(self.x, self.weights, *how)
            method = used.linear_scatter if p.operation == ROW else used.linear_sum
            return method(self.x, self.weights[0], *how)
        if p.operation == ROW:
            return used.linear_scatter_backward(self.gradients[0], self.x, self.weights[0], *how, Needs())
        backward = used.gather_linear_backward if p.operation == COLUMN else used.linear_copy_backward
        return backward(self.gradients, self.kept, self.weights, *how, Needs())

    def multiply(self) -> Any:
        """Run the matrix products alone, not cut into chunks."""
        if self.product.direction == "forward":
            return products_of(self.arithmetic, self.full, self.weights)
        return input_gradient(self.arithmetic, self.all_gradients, self.weights), self.differentiate()

    def differentiate(self) -> Any:
        """Compute the gradients of the weights alone."""
        return weight_gradients(self.arithmetic, self.all_gradients, self.full)

    def communicate(self) -> Any:
        """Run the collective alone."""
        p = self.product
        if p.operation in ("linear_all_reduce", "copy_linear"):
            width = p.width if p.direction == "forward" else p.depth
            return collectives.sum_in_place(self.full.new_empty(p.rows, width), p.axis)
        width = p.depth if p.operation == COLUMN else p.width
        if (p.operation == COLUMN) == (p.direction == "forward"):
            return collectives.gather_rows(self.arithmetic.like(self.full, self.t, width), p.axis)
        return collectives.scatter_rows(self.full.new_empty(p.rows, width), p.axis)


def measure(shape: Shape, tried: Sequence[Choice], device: torch.device, rounds: int | None = None) -> Measured:
    """Time every choice; all ranks of the job call this together.

    A backend that fails with one number of chunks is not used with any other. A choice that is far slower than the best
    in its first runs is not run again; one close to the best runs longer. On a GPU, each sample is the mean of several
    consecutive runs after an untimed one, since in training the host runs ahead.
    """
    trial = Trial(shape, device)
    parts: dict[Any, Callable[[], Any]] = {"matmul": trial.multiply, "comm": trial.communicate}
    if _tells_pace(trial):
        parts["weights"] = trial.differentiate
    runs = parts | {choice: functools.partial(trial.run, choice) for choice in tried}
    in_a_row = IN_A_ROW if device.type == "cuda" else 1
    with job.traffic.uncounted():
        wanted = _tensors(trial.run(SERIAL))
        failures = {who: _failure(run, device, *(() if who in parts else (trial, wanted))) for who, run in runs.items()}
        del wanted
        refused = {choice.backend: failures[choice] for choice in tried if failures[choice]}
        works = [who for who in runs if who in parts or who.backend not in refused]
        begun = slowest([timed(runs[who], device, in_a_row) for who in works], device)
        first = dict(zip(works, begun, strict=True))
        enough = HOPELESS * min(first[who] for who in works if who not in parts)
        kept = [who for who in works if who in parts or first[who] < enough or who == SERIAL]
        longest = max(first[who] for who in kept) * in_a_row
        count = rounds or min(max(int(MOMENT / longest), LEAST_ROUNDS), MOST_ROUNDS)
        found = first | medians(runs, kept, count, device, in_a_row)
        best = min(found[who] for who in kept if who not in parts)
        near = [who for who in kept if who not in parts and found[who] < NEAR * best]
        more = min(int(RUN_OFF / (best * in_a_row * len(near))), MOST_ROUNDS)
        if rounds is None and len(near) > 1 and more > count:
            found |= medians(runs, near, more, device, in_a_row)
    times = {choice: found[choice] for choice in tried if choice in found}
    alone = {part: found[part] for part in parts}
    return Measured(shape.product, times=times, chosen=fastest(times), refused=refused, date=today(), **alone)


def today() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def _tells_pace(trial: Trial) -> bool:
    """Whether weight gradients are timed separately: they show how fast a GPU computes during a step."""
    return trial.device.type == "cuda" and bool(trial.gradients)


def medians(
    runs: dict[Any, Callable[[], Any]], some: Sequence[Any], rounds: int, device: torch.device, in_a_row: int
) -> dict[Any, float]:
    """Return median seconds of some of the runs, which take turns so that none always follows the same other run."""
    samples: dict[Any, list[float]] = {who: [] for who in some}
    for turn in range(rounds):
        first = turn % len(some)
        for who in (*some[first:], *some[:first]):
            samples[who].append(timed(runs[who], device, in_a_row))
    agreed = slowest([seconds for who in some for seconds in samples[who]], device)
    return {who: statistics.median(agreed[place * rounds : (place + 1) * rounds]) for place, who in enumerate(some)}


def fastest(times: dict[Choice, float]) -> Choice:
    """Return the fastest choice, or serial if none is clearly faster."""
    best = min(times, key=lambda choice: times[choice])
    return best if SERIAL not in times or times[best] < times[SERIAL] * (1 - CLEARLY) else SERIAL


def failure(shape: Shape, choice: Choice, device: torch.device) -> str:
    """Return why a choice cannot run a product; empty if it gives the same results as `serial` on every rank."""
    trial = Trial(shape, device)
    with job.traffic.uncounted():
        return _failure(lambda: trial.run(choice), device, trial, _tensors(trial.run(SERIAL)))


def _failure(
    run: Callable[[], Any], device: torch.device, trial: Trial | None = None, wanted: Sequence[Tensor] = ()
) -> str:
    """Return why `run` cannot run with these shapes; empty if it can on every rank. This also warms up.

    With a trial, the results are compared with `wanted`, then twice more with flipped signs, since a backend may
    alternate between two buffers.
    """

    def attempt() -> None:
        found = run()
        _synchronize(device)
        if trial is None:
            return
        told = _difference(_tensors(found), wanted)
        trial.turn()
        try:
            for _ in range(2):
                found = run()
                _synchronize(device)
                told = told or _difference([-one for one in _tensors(found)], wanted)
        finally:
            trial.turn()
        if told:
            raise RuntimeError(told)

    said = symmetric_memory.agreed_reason(attempt)
    if said is not None:
        symmetric_memory.start_anew()
    return said or ""


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []  # received float8 rows are bytes
    return [one for part in result for one in _tensors(part)] if isinstance(result, (tuple, list)) else []


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    for one, other in zip(found, wanted, strict=True):
        apart, size = one - other, _norm(other)
        off, worst = _norm(apart) / size, _norm(apart, float("inf")) / size * math.sqrt(other.numel())
        if not (off < OFF and worst < FAR_OFF):
            return f"its results differ from serial's: by {off:.1%} overall, one by {worst:.1f} times the usual size"
    return ""


def _norm(tensor: Tensor, order: float = 2) -> float:
    return float(torch.linalg.vector_norm(tensor, order, dtype=torch.promote_types(tensor.dtype, torch.float32)))


def timed(run: Callable[[], Any], device: torch.device, in_a_row: int) -> float:
    dist.barrier()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # the host is ahead from here on
        begin.record()
        for _ in range(in_a_row):
            run()
        end.record()
        _synchronize(device)
        return begin.elapsed_time(end) / 1e3 / in_a_row
    start = time.perf_counter()
    for _ in range(in_a_row):
        run()
    return (time.perf_counter() - start) / in_a_row


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Return the slowest rank's seconds: the same numbers, and so the same choices, on every rank."""
    values = torch.tensor(seconds, dtype=torch.float64, device=device)
    agreed: list[float] = collectives.max_in_place(values, "world").tolist()
    return agreed


# Remembered choices


def topology(device: torch.device) -> dict[str, Any]:
    """Return what choices depend on besides the product itself: device, versions, and the hosts of the ranks."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    axis = collectives.axis("tp")
    return {
        "device": _device(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "shardline": __version__,
        "backend": str(dist.get_backend(axis.group)),
        "tp": axis.size,
        "hosts": [sorted(set(hosts)).index(host) for host in hosts],
        "names": sorted(set(hosts)),
        "network": {key: value for key, value in sorted(os.environ.items()) if key.startswith(MATTERS)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device(device: torch.device) -> str:
    """Return the name of a device with its multiprocessors: a partition of a GPU counts as a different device."""
    if device.type != "cuda":
        return f"cpu, {os.cpu_count()} cores"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name}, {about.multi_processor_count} multiprocessors"


def remembered_file(folder: Path, place: dict[str, Any]) -> Path:
    mark = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "overlap" / f"{mark}.json"


def as_row(measured: Measured) -> dict[str, Any]:
    times = [[choice.backend, choice.chunks, seconds] for choice, seconds in measured.times.items()]
    alone = {"matmul": measured.matmul, "weights": measured.weights, "comm": measured.comm}
    row = {**alone, "times": times, "chosen": list(measured.chosen), "date": measured.date}
    return {**row, "refused": measured.refused} if measured.refused else row


def from_row(product: Product, row: dict[str, Any]) -> Measured:
    times = {Choice(backend, chunks): float(seconds) for backend, chunks, seconds in row["times"]}
    matmul, weights, sent = (float(row[part]) for part in ("matmul", "weights", "comm"))
    refused = dict(row.get("refused", {}))
    chosen, date = Choice(*row["chosen"]), str(row["date"])
    return Measured(product, matmul, sent, times, chosen, True, refused, weights, date)
