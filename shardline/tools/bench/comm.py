"""`shardline bench comm`: how fast collectives run over one mesh dimension, by size.

The numbers are those of nccl-tests, for n ranks, `size` bytes and a time t:

    size    all_reduce, p2p: of the tensor         all_gather, reduce_scatter, all_to_all: of all ranks' parts together
    algbw = size / t
    busbw = algbw x  2 (n - 1) / n  all_reduce     (n - 1) / n  all_gather, reduce_scatter, all_to_all     1  p2p

so busbw can be compared with the speed of a link for any operation and n. In p2p every rank sends to the next one and
receives from the previous one at the same time. t is the mean of many consecutive calls, on the slowest rank. Every
result is checked once, element by element.
"""

from __future__ import annotations

import json as json_lines
import math
import re

import torch

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.layout import AXES, KEYS, Layout, resolve_layout
from shardline.config.schema import Config, Parallelism
from shardline.errors import UserError
from shardline.precision.mixed import DTYPES
from shardline.registry import nearest
from shardline.run.device import device_name
from shardline.run.options import TrainOptions
from shardline.tools.bench.collectives import OPS, Bench, CollectiveTime
from shardline.tools.bench.ranks import on_ranks, rank_count
from shardline.words import to_stderr

DIMS = (*AXES, "fsdp", "loss", "world")
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def run(
    config: Config, start: TrainOptions, sizes: str, ops: str, dim: str, dtype: str, iterations: int | None, json: bool
) -> int:
    """Check the options, then start the ranks, or measure if this is one; return the exit code."""
    lengths, names = parse_sizes(sizes), parse_ops(ops)
    if dim not in DIMS:
        raise UserError(f"--dim: expected one of {', '.join(DIMS)}, got {dim!r}{nearest(dim, DIMS)}")
    wanted = _wanted(config)
    ranks = rank_count(start, wanted)
    if ranks == 1:
        raise UserError("one rank has no collectives: --nproc 2 starts two")
    config = _with_dim(config, dim, ranks)
    layout = resolve_layout(config.parallelism, ranks)
    if _degree(layout, dim) == 1:
        raise UserError(f"--dim {dim}: the layout {layout} has only one rank there")

    def work(mesh: Mesh, device: torch.device) -> int:
        bench = Bench(collectives.axis(dim), device, DTYPES[dtype], iterations)
        measure_all(bench, names, lengths, dtype, json, prints=mesh.rank == 0)
        return 0

    return on_ranks("bench comm", config, start, wanted, work)


def parse_sizes(text: str) -> list[int]:
    """Parse sizes in bytes: `1M`, `1M:64M` in doubling steps, or several of these separated by commas."""
    sizes = []
    for part in text.split(","):
        low, colon, high = part.partition(":")
        first, last = _size(low, text), _size(high if colon else low, text)
        if last < first:
            raise UserError(f"--sizes {text}: {high} is less than {low}")
        sizes += [first << doublings for doublings in range((last // first).bit_length())]
    return sizes


def _size(text: str, whole: str) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size == 0:
        raise UserError(f"--sizes {whole}: expected sizes such as 512K, 1M or 1M:2G, above 0, got {text!r}")
    return size


def parse_ops(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OPS:
            raise UserError(f"--ops: expected some of {', '.join(OPS)}, got {name!r}{nearest(name, OPS)}")
    return names


def _wanted(config: Config) -> int:
    """Return the number of ranks of the layout; without one, the number of GPUs on this machine, at least two."""
    degrees = [getattr(config.parallelism, key) for key in KEYS.values()]
    named = math.prod(degree for degree in degrees if degree != -1)
    return named if named > 1 else max(2, torch.cuda.device_count())


def _with_dim(config: Config, dim: str, ranks: int) -> Config:
    """Give all ranks to the measured dimension, unless the config has a layout: a degree that is not the default."""
    section, default = config.parallelism, Parallelism()
    if dim not in KEYS or any(getattr(section, key) != getattr(default, key) for key in KEYS.values()):
        return config
    return config.replace({f"parallelism.{KEYS[dim]}": ranks})


def _degree(layout: Layout, dim: str) -> int:
    parts = {"fsdp": ("dp_shard", "cp"), "loss": ("dp_replicate", "dp_shard", "cp"), "world": AXES}
    return math.prod(getattr(layout, axis) for axis in parts.get(dim, (dim,)))


# ---- output ----------------------------------------------------------------------------------------------------------


def measure_all(bench: Bench, ops: list[str], sizes: list[int], dtype: str, json: bool, prints: bool) -> None:
    """Measure, and on the rank that `prints`, print rows as nccl-tests do, or JSON."""
    device = device_name(bench.device)
    if prints and bench.through_host:
        staged = ", all_to_all and p2p through host memory"
        to_stderr(f"note: ranks share a GPU, so these are numbers of gloo, not of NCCL{staged}")
    for op in ops:
        if prints and not json:
            print(f"# {op} over {bench.axis.name}: {bench.axis.size} ranks, {bench.backend}, {device}")
            print(f"# {'size':>12}  {'count':>12}  {'type':>8}  {'time':>12}  {'algbw':>8}  {'busbw':>8}")
            print(f"# {'(B)':>12}  {'(elements)':>12}  {'':>8}  {'(us)':>12}  {'(GB/s)':>8}  {'(GB/s)':>8}", flush=True)
        rows = []
        for size in sizes:
            rows.append(bench.measure(op, size))
            if prints:
                print(json_row(bench, rows[-1], dtype, device) if json else _line(rows[-1], dtype), flush=True)
        if prints and not json:
            mean = sum(row.busbw for row in rows) / len(rows)
            print(f"# average bus bandwidth: {mean:.3f} GB/s\n", flush=True)


def _line(row: CollectiveTime, dtype: str) -> str:
    time_us = row.seconds * 1e6
    return f"  {row.size:>12}  {row.count:>12}  {dtype:>8}  {time_us:>12.1f}  {row.algbw:>8.3f}  {row.busbw:>8.3f}"


def json_row(bench: Bench, row: CollectiveTime, dtype: str, device: str) -> str:
    fields = {
        "benchmark": "comm",
        "op": row.op,
        "dim": bench.axis.name,
        "world": bench.axis.size,
        "bytes": row.size,
        "dtype": dtype,
        "iterations": row.iterations,
        "milliseconds": row.seconds * 1e3,
        "algbw_gbs": row.algbw,
        "busbw_gbs": row.busbw,
        "device": device,
        "backend": bench.backend,
        "torch": torch.__version__,
    }
    return json_lines.dumps(fields)
