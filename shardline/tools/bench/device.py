"""`shardline bench device`: what this machine can do, as a profile that `shardline plan --gpu FILE` reads.

    products     by shape and dtype; `achieved` is the best, `sustained` the share left after a second of full load
    attention    forward and backward with a causal mask, of which half counts
    copy         bytes read and written by a copy kernel
    host         seconds to launch a kernel; bytes to and from host memory; bytes written to disk
    collectives  with --nproc: latency and bandwidth, from all-gathers of two sizes over the ranks

Every number has a source, which says that it was measured here. The network between nodes cannot be measured on one
machine; its numbers come from a built-in profile, and their source says so.
"""

from __future__ import annotations

import json as json_lines
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config
from shardline.errors import UserError
from shardline.models.products.cpu_product import multiply
from shardline.run.device import GIB, choose_device, device_name, peak_by_name
from shardline.run.options import TrainOptions
from shardline.storage.atomic import write_atomically
from shardline.tools.bench.collectives import Bench
from shardline.tools.bench.ranks import on_ranks, rank_count

Times = dict[str, Any]
# Rows, columns and inner size of typical products: wide, square, narrow, short inner size, few rows.
SHAPES = {
    "cuda": ((8192, 28672, 4096), (8192, 6144, 4096), (8192, 4096, 14336), (8192, 8192, 8192), (16384, 8192, 512),
             (8192, 3072, 1024), (1024, 4096, 4096), (8192, 128, 4096)),
    "cpu": ((1024, 1024, 512), (1024, 512, 2048), (128, 512, 512)),
}  # fmt: skip
DTYPES = {"cuda": ("bfloat16", "float8", "float32"), "cpu": ("float32", "bfloat16")}
SHORT, LONG = 128, 1024  # sequences for attention on a CPU
NETWORK = {"latency": 12e-6, "bandwidth": 40e9}
COPIED = {"cuda": 2**31, "cpu": 2**27}
SMALL, LARGE = 2**16, 2**26  # bytes of collectives


def run(config: Config, start: TrainOptions, write: str | None, json: bool) -> int:
    """Measure on one rank; with several ranks also their collectives. Rank 0 prints and writes."""
    if write is not None and not write.endswith(".toml"):
        raise UserError(f"--write {write}: expected a name that ends with .toml")
    if rank_count(start, 1) == 1:
        _finish(measure(choose_device()), write, json)
        return 0

    def work(mesh: Mesh, device: torch.device) -> int:
        links = measure_links(mesh, device)
        if mesh.rank == 0:
            _finish(measure(device) | {"links": links}, write, json)
        collectives.max_in_place(torch.zeros(1, device=device), "world")
        return 0

    return on_ranks("bench device", config, start, 1, work)


def _finish(found: Times, write: str | None, json: bool) -> None:
    if write is not None:
        write_atomically(Path(write), profile_text(found))
    print(json_lines.dumps(found) if json else report(found))
    if write is not None and not json:
        print(f"wrote {write}: shardline plan --gpu {write}")


# ---- measurements ----------------------------------------------------------------------------------------------------


def measure(device: torch.device) -> Times:
    kind = device.type
    products = {dtype: rows for dtype in DTYPES[kind] if (rows := measure_products(device, dtype))}
    return {
        "name": device_name(device),
        "kind": kind,
        "multiprocessors": _multiprocessors(device),
        "memory_gib": _memory(device) / GIB,
        "products": products,
        "sustained": sustained(device, products),
        **measure_attention_by_length(device),
        "copy": measure_copy(device),
        "kernel": measure_kernel(device),
        "launch": measure_launch(device),
        "host_link": measure_host_link(device),
        "disk": measure_disk(),
        "ranks": 1,
    }


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measure_products(device: torch.device, dtype: str) -> list[dict[str, Any]]:
    """Return the FLOP/s of each shape; an empty list if the device does not support such products."""
    found = []
    flops = 2.0 * (3 if device.type == "cpu" else 1)
    for rows, columns, inner in SHAPES[device.type]:
        try:
            call = _product(device, dtype, rows, columns, inner)
            seconds = timed(call, device)
        except (RuntimeError, NotImplementedError):
            return []
        found.append({"shape": [rows, columns, inner], "rate": flops * rows * columns * inner / seconds})
    return found


def _product(device: torch.device, dtype: str, rows: int, columns: int, inner: int) -> Callable[[], object]:
    if dtype == "float8":
        a = torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    kind = getattr(torch, dtype)
    x, weight = (
        torch.randn(rows, inner, device=device, dtype=kind),
        torch.randn(columns, inner, device=device, dtype=kind),
    )
    if device.type == "cpu":  # a third of a step's products sum over rows, which is slower
        y = torch.randn(rows, columns, dtype=kind)
        return lambda: (multiply(x, weight), multiply(y, weight.t()), multiply(y.t(), x.t()))
    return lambda: F.linear(x, weight)


def sustained(device: torch.device, products: dict[str, list[dict[str, Any]]]) -> float:
    """Return the rate of the best product after a second of running it, divided by its rate alone."""
    if device.type == "cpu" or "bfloat16" not in products:
        return 1.0
    best = max(products["bfloat16"], key=lambda row: row["rate"])
    call = _product(device, "bfloat16", *best["shape"])
    alone = 2.0 * best["shape"][0] * best["shape"][1] * best["shape"][2] / best["rate"]
    calls = max(10, int(1.0 / alone))
    for _ in range(calls):
        call()
    return min(1.0, alone / timed(call, device, calls))


def measure_attention_by_length(device: torch.device) -> Times:
    """Return the rates of attention on long sequences; on a CPU also the length at which it reaches half of them."""
    if device.type == "cuda":
        return {"attention": measure_attention(device, 8192)}
    at_short, at_long = (measure_attention(device, length)["cpu"] for length in (SHORT, LONG))
    half = half_rate_length(*(3.5 / (1 / rates["forward"] + 2.5 / rates["backward"]) for rates in (at_short, at_long)))
    rates = {name: rate * (LONG + half) / LONG for name, rate in at_long.items()}
    return {"attention": {"cpu": rates}, "half_rate_length": half}


def half_rate_length(slow: float, fast: float) -> float:
    """Return the length of half the rate, from the rates at the lengths SHORT and LONG."""
    share = max(slow / fast, 2 * SHORT / LONG)
    return max(0.0, round(SHORT * LONG * (1 - share) / (share * LONG - SHORT)))


def measure_attention(device: torch.device, length: int) -> dict[str, dict[str, float]]:
    """Return the FLOP/s of forward and backward of each kernel that runs here, for heads of 128."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = 16 if device.type == "cuda" else 4
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cpu":
        names = {"cpu": SDPBackend.FLASH_ATTENTION}
    found = {}
    for name, backend in names.items():
        q, k, v = (torch.randn(1, heads, length, 128, device=device, dtype=kind, requires_grad=True) for _ in range(3))
        flops = 2.0 * heads * length * length * 128
        try:
            with sdpa_kernel(backend):

                def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                forward = timed(call, device)
                out = call()
                gradient = torch.randn_like(out)
                backward = timed(lambda: out.backward(gradient, retain_graph=True), device)  # noqa: B023
        except RuntimeError:
            continue
        found[name] = {"forward": flops / forward, "backward": 2.5 * flops / backward}
    return found


def measure_copy(device: torch.device) -> float:
    x = torch.empty(COPIED[device.type] // 4, device=device)
    y = torch.empty_like(x)
    return 2.0 * x.nbytes / timed(lambda: y.copy_(x), device)


def measure_kernel(device: torch.device) -> float:
    """Return the seconds of the shortest kernel, from many consecutive ones on the device."""
    x = torch.zeros(1, device=device)
    if device.type != "cuda":
        return timed(lambda: x.add_(1), device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            x.add_(1)
    return timed(graph.replay, device) / 100


def measure_launch(device: torch.device) -> float:
    """Return the seconds that the host needs to launch one small operation."""
    x = torch.zeros(1, device=device)
    started = time.perf_counter()
    for _ in range(2000):
        x.add_(1)
    seconds = (time.perf_counter() - started) / 2000
    _synchronize(device)
    return seconds


def measure_host_link(device: torch.device) -> float:
    if device.type != "cuda":
        return measure_copy(device)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**28, dtype=torch.uint8, device=device)
    return 2**28 / timed(lambda: there.copy_(host, non_blocking=True), device)


def measure_disk() -> float:
    """Return the bytes per second of writing a file, fsync included."""
    block = os.urandom(2**22)
    with tempfile.NamedTemporaryFile() as file:
        started = time.perf_counter()
        for _ in range(32):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return 32 * len(block) / (time.perf_counter() - started)


def measure_links(mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Return the latency of a hop and the bytes per second of a ring, from a small and a large all-gather."""
    bench = Bench(collectives.axis("world"), device, torch.float32, None)
    ranks = mesh.world_size
    small, large = (bench.measure("all_gather", size) for size in (SMALL, LARGE))
    reduced = bench.measure("all_reduce", LARGE)
    hops = ranks - 1
    bandwidth = (LARGE - SMALL) * hops / ranks / max(1e-9, large.seconds - small.seconds)
    return {
        "ranks": float(ranks),
        "latency": max(1e-7, (small.seconds - SMALL * hops / ranks / bandwidth) / hops),
        "bandwidth": bandwidth,
        "reduce": max(0.1, 2 * large.seconds / reduced.seconds),
    }


def timed(call: Callable[[], object], device: torch.device, calls: int | None = None) -> float:
    """Return the seconds of one call: the best of three rounds, each with as many calls as fit into 1/15 second."""
    for _ in range(2):
        call()
    _synchronize(device)
    rounds, calls = (3, _as_many(_round(call, device, 1))) if calls is None else (1, calls)
    return min(_round(call, device, calls) for _ in range(rounds)) / calls


def _as_many(seconds: float) -> int:
    return max(3, min(200, int(0.07 / max(1e-6, seconds))))


def _round(call: Callable[[], object], device: torch.device, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- output ----------------------------------------------------------------------------------------------------------


def report(found: Times) -> str:
    lines = [f"{found['name']}: {found['memory_gib']:.1f} GiB, {found['multiprocessors']} multiprocessors"]
    for dtype, rows in found["products"].items():
        lines.append(f"products in {dtype} (rows, columns, inner size):")
        lines += [f"  {' x '.join(map(str, row['shape'])):<22} {row['rate'] / 1e12:>9.2f} TFLOP/s" for row in rows]
    lines.append(f"sustained: {found['sustained']:.2f} of the best product's rate after a second")
    for name, rates in found["attention"].items():
        both = f"forward {rates['forward'] / 1e12:.2f}, backward {rates['backward'] / 1e12:.2f} TFLOP/s"
        lines.append(f"attention by {name}: {both}")
    lines.append(f"copy {found['copy'] / 1e9:.1f} GB/s, host link {found['host_link'] / 1e9:.1f} GB/s")
    lines.append(f"disk {found['disk'] / 1e6:.0f} MB/s; a kernel {found['kernel'] * 1e6:.1f} us, launched in")
    lines[-1] += f" {found['launch'] * 1e6:.1f} us"
    if "links" in found:
        links = found["links"]
        lines.append(
            f"{links['ranks']:.0f} ranks: {links['bandwidth'] / 1e9:.2f} GB/s, {links['latency'] * 1e6:.1f} us per hop,"
            f" all-reduce {links['reduce']:.2f} x the ring"
        )
    return "\n".join(lines)


def profile_text(found: Times) -> str:
    """Return the profile as TOML; each number has a source."""
    here = f"measured on {platform.node()} by shardline bench device, {date.today().isoformat()}"
    cuda = found["kind"] == "cuda"
    links = found.get("links") or {"latency": 2.5e-6, "bandwidth": 300e9 if cuda else 2e9, "reduce": 1.0, "ranks": 1}
    fallback = here if "links" in found else "not measured: run with --nproc 2 or more"
    tables: dict[str, dict[str, Any]] = {
        "device": {
            "multiprocessors": found["multiprocessors"],
            "tile": [128, 256] if cuda else [1, 1],
            "half_rate_inner": half_rate_inner(found),
            **({} if cuda else {"half_rate_length": found["half_rate_length"]}),
            "sustained": round(found["sustained"], 3),
            "kernel": found["kernel"],
            "per_node": max(8 if cuda else 1, int(links["ranks"])),
        },
        **{f"products.{dtype}": _rates(found, dtype, rows) for dtype, rows in found["products"].items()},
        **{f"attention.{name}": rates for name, rates in found["attention"].items()},
        "memory": {
            "capacity_gib": round(found["memory_gib"], 1),
            "copy": found["copy"],
            "allowance_gib": 1.5 if cuda else 0.5,
        },
        "host": {"launch": found["launch"], "link": found["host_link"], "disk": found["disk"]},
        "links.node": {key: links[key] for key in ("latency", "bandwidth", "reduce")},
        "links.network": NETWORK,
    }
    lines = [f"name = {json_lines.dumps(found['name'])}"]
    elsewhere = {"links.node": fallback, "links.network": "8 x 400 Gb/s per node, as in the profile h100"}
    sources = {}
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        for key in values:
            sources[f"{table}.{key}"] = elsewhere.get(table, here)
    lines += ["", "[sources]", *(f'"{key}" = {json_lines.dumps(text)}' for key, text in sources.items())]
    return "\n".join(lines) + "\n"


def _rates(found: Times, dtype: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    best = max(row["rate"] for row in rows)
    known = peak_by_name(found["name"]) if found["kind"] == "cuda" else None
    factor = {"bfloat16": 1.0, "float8": 2.0}.get(dtype)
    return {"peak": known * factor if known and factor else best, "achieved": best}


def half_rate_inner(found: Times) -> float:
    """Return the inner size at which a product reaches half its rate, from shapes with a long and a short one."""
    wanted = "float32" if found.get("kind") == "cpu" else "bfloat16"
    rows = found["products"].get(wanted) or next(iter(found["products"].values()))
    best = max(row["rate"] for row in rows)
    short = min(rows, key=lambda row: row["shape"][2])
    return max(1.0, round(short["shape"][2] * (best / short["rate"] - 1)))


def _toml(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json_lines.dumps(value)
