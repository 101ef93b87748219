"""`shardline bench overlap`: the products of a tensor-parallel block with their communication, with every backend.

Times are medians over rounds in which all candidates take turns, on the slowest rank.

    matmul       the matrix products alone, not split           comm        the collective alone
    exposed      time - matmul
    efficiency   1 - exposed / serial's exposed: the hidden share of what communication costs without overlap
    comm_hidden  1 - exposed / comm, at most 1: the hidden share of the communication's own time

Serial's exposed time can be several times its communication: a product runs slower after a wait than back to back.
"""

from __future__ import annotations

import json as json_lines
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.flavors import resolve
from shardline.parallel.tensor.async_tp import usable_backends
from shardline.parallel.tensor.autotune import Measured, block_shapes, candidates, fastest, measure
from shardline.parallel.tensor.backend_table import Choice, backends
from shardline.parallel.tensor.tensor import check_tensor_parallel
from shardline.precision.mixed import DTYPES
from shardline.registry import nearest
from shardline.run.device import device_name
from shardline.run.options import TrainOptions
from shardline.tools.bench import torch_fused
from shardline.tools.bench.ranks import on_ranks, rank_count
from shardline.words import to_stderr

NAMES = ("serial", "ring", "symmetric", "fused", "auto")


def run(
    config: Config,
    start: TrainOptions,
    seq: int,
    batch: int,
    backend: str | None,
    dtype: str | None,
    iterations: int | None,
    json: bool,
) -> int:
    """Check the options, then start the ranks, or measure if this is one; return the exit code."""
    degree, arch = config.parallelism.tensor_parallel_degree, resolve(config.model)
    if backend is not None and backend not in NAMES:
        raise UserError(f"--backend: expected one of {', '.join(NAMES)}, got {backend!r}{nearest(backend, NAMES)}")
    if degree < 2:
        raise UserError("one rank has nothing to overlap: --tp 2 measures two")
    if rank_count(start, degree) != degree:
        raise UserError(f"--tp {degree} needs {degree} ranks, but {rank_count(start, degree)} were requested")
    check_tensor_parallel(arch, degree)
    rows = seq * batch
    if rows % degree:
        raise UserError(f"{batch} x {seq} = {rows} tokens cannot be shared evenly by {degree} ranks")

    def work(mesh: Mesh, device: torch.device) -> int:
        kind = DTYPES[dtype] if dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
        lines: list[str] = []
        allowed = usable_backends(backend or "auto", device, lines)
        sequence_parallel = config.parallelism.enable_sequence_parallel
        shapes = block_shapes(arch, degree, rows, kind, sequence_parallel=sequence_parallel)
        speaks, shown = mesh.rank == 0, []
        for line in lines if speaks else ():
            to_stderr(f"note: {line}")
        for number, shape in enumerate(shapes, start=1):
            if speaks:
                print(f"{number} of {len(shapes)}: {shape.product}", file=sys.stderr, flush=True)
            measured = measure_all(shape, allowed, device, iterations)
            for refused, why in measured.refused.items() if speaks else ():
                to_stderr(f"note: {measured.product}: {refused} cannot be used here: {why}")
            shown.append(measure_row(measured, device))
            if speaks and json:
                print(json_lines.dumps(shown[-1]), flush=True)
        if speaks and not json:
            _show(shown, device)
        return 0

    return on_ranks("bench overlap", config, start, degree, work)


def measure_all(shape: Any, allowed: list[str], device: torch.device, rounds: int | None) -> Measured:
    """Measure every candidate, and for comparison PyTorch's fused op, which is never chosen."""
    tried = candidates(shape.product, allowed)
    theirs: list[Choice] = []
    if "symmetric" in backends:
        backends["torch"] = torch_fused.TorchFused()
        theirs = [choice for choice in candidates(shape.product, ["torch"]) if choice not in tried]
    measured = measure(shape, [*tried, *theirs], device, rounds)
    ours = {choice: measured.times[choice] for choice in tried if choice in measured.times}
    return replace(measured, chosen=fastest(ours))


def measure_row(measured: Measured, device: torch.device) -> dict[str, Any]:
    p = measured.product
    found: dict[str, Any] = {}
    for name in dict.fromkeys(choice.backend for choice in measured.times):
        best = measured.best(name)
        if name != "serial" and best is not None:
            found[name] = {"ms": round(measured.times[best] * 1e3, 4), "chunks": best.chunks, **_hidden(measured, best)}
    return {
        "op": p.operation,
        "direction": p.direction,
        "M": p.rows,
        "K": p.depth,
        "N": p.width,
        "dtype": str(p.dtype).removeprefix("torch."),
        "world": collectives.axis_size(p.axis),
        "matmul_ms": round(measured.matmul * 1e3, 4),
        "comm_ms": round(measured.comm * 1e3, 4),
        "serial_ms": round(measured.serial * 1e3, 4),
        "backends": found,
        "chosen": measured.chosen.backend,
        "chosen_chunks": measured.chosen.chunks,
        "chosen_ms": round(measured.times[measured.chosen] * 1e3, 4),
        **_hidden(measured, measured.chosen),
        "device": device_name(device),
        "torch": torch.__version__,
    }


def _hidden(measured: Measured, choice: Choice) -> dict[str, float]:
    return {
        "efficiency": round(measured.efficiency(choice), 3),
        "comm_hidden": round(measured.comm_hidden(choice), 3),
    }


def _show(rows: list[dict[str, Any]], device: torch.device) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["backends"]))
    shares = ("hidden of serial - matmul", "hidden of comm")
    table = Table("operation", "direction", "M x K x N", "matmul", "comm", "serial", *names, "chosen", *shares)
    for row in rows:
        cells = [_cell(row["backends"].get(name)) for name in names]
        sizes = f"{row['M']} x {row['K']} x {row['N']}"
        times = [f"{row[key]:.3f}" for key in ("matmul_ms", "comm_ms", "serial_ms")]
        chosen = str(Choice(row["chosen"], row["chosen_chunks"]))
        hidden = [f"{row[key]:.2f}" for key in ("efficiency", "comm_hidden")]
        table.add_row(row["op"], row["direction"], sizes, *times, *cells, chosen, *hidden)
    console = Console(width=max(180, Console().width))
    console.print(table)
    console.print(f"milliseconds (chunks), {rows[0]['world']} ranks, {rows[0]['dtype']}, {device_name(device)}")
    for line in together(rows):
        console.print(line)


def together(rows: list[dict[str, Any]]) -> list[str]:
    """Return two lines for each operation, for the chosen backends and for each one: the hidden share of what serial
    adds to all its products, and of the communication alone, as the mean over products.
    """
    lines = []
    for operation in dict.fromkeys(row["op"] for row in rows):
        of_it = [row for row in rows if row["op"] == operation]
        alone = sum(row["matmul_ms"] for row in of_it)
        exposed = sum(row["serial_ms"] for row in of_it) - alone
        if exposed <= 0:
            continue
        taken = {"chosen": [{"ms": row["chosen_ms"], "comm_hidden": row["comm_hidden"]} for row in of_it]}
        for name in dict.fromkeys(name for row in of_it for name in row["backends"]):
            if all(name in row["backends"] for row in of_it):
                taken[name] = [row["backends"][name] for row in of_it]
        shares = {name: 1 - (sum(one["ms"] for one in found) - alone) / exposed for name, found in taken.items()}
        means = {name: statistics.mean(one["comm_hidden"] for one in found) for name, found in taken.items()}
        lines.append(f"{operation}: serial adds {exposed:.2f} ms to the products; hidden of that: {_percent(shares)}")
        lines.append(f"{operation}: hidden of the communication alone, mean over products: {_percent(means)}")
    return lines


def _percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _cell(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['ms']:.3f} ({entry['chunks']})"
