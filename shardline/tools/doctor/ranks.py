"""Measures clocks and links between ranks, and how fast their devices are: products and copies."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardline.comm.mesh import Mesh
from shardline.plan.hardware import Hardware, profile_for
from shardline.run.device import device_name
from shardline.tools.bench import device as bench
from shardline.tools.doctor.readings import RankState, Rate

QUESTIONS = 8  # per machine; the fastest answer counts


class ClockReading(NamedTuple):
    """By how much another clock is ahead, and the possible error of that."""

    ahead: float
    error: float


def compare_clocks(ask: Callable[[], float], now: Callable[[], float] = time.time) -> ClockReading:
    """Compare this clock with the one that `ask` reads, presumably halfway through the fastest of the questions."""
    found = []
    for _ in range(QUESTIONS):
        asked = now()
        there = ask()
        answered = now()
        found.append(ClockReading(there - (asked + answered) / 2, (answered - asked) / 2))
    return min(found, key=lambda reading: reading.error)


def read_ranks(mesh: Mesh | None, device: torch.device) -> list[RankState]:
    """Return all ranks of the job, on every rank; the first rank of each machine compares the machine's clock."""
    host, kind = socket.gethostname(), device_name(device) if device.type == "cuda" else "cpu"
    if mesh is None or mesh.world_size == 1:
        return [RankState(0, host, kind)]
    places = mesh.from_everyone((host, kind))
    first = {name: rank for rank, (name, _) in reversed(list(enumerate(places)))}
    clocks = {0: ClockReading(0.0, 0.0)}
    for rank in sorted(set(first.values()) - {0}):
        if mesh.rank == 0:
            clocks[rank] = compare_clocks(lambda rank=rank: _ask(rank))  # type: ignore[misc]
        elif mesh.rank == rank:
            for _ in range(QUESTIONS):
                _answer()
    known = mesh.from_rank_0(lambda: clocks)
    return [
        RankState(rank, name, kind, *known[first[name] if first[name] in known else 0])
        for rank, (name, kind) in enumerate(places)
    ]


def _ask(rank: int) -> float:
    there = torch.zeros(1, dtype=torch.float64)
    dist.send(there, rank)
    dist.recv(there, rank)
    return there.item()


def _answer() -> None:
    question = torch.zeros(1, dtype=torch.float64)
    dist.recv(question, 0)
    dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)


# ---- rates -----------------------------------------------------------------------------------------------------------


def device_rates(rank: int, device: torch.device) -> list[Rate]:
    """Return the rates of this rank's device."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    hardware = profile_for(device_name(device)) if device.type == "cuda" else None
    products = bench.measure_products(device, dtype)
    best = max((row["rate"] for row in products), default=0.0)
    expected = None if hardware is None else hardware.products[dtype].achieved
    rates = [
        Rate(f"products in {dtype}", rank, best / 1e12, _scaled(expected, 1e12), "TFLOP/s"),
        Rate("copies in its memory", rank, bench.measure_copy(device) / 1e9, _of(hardware, "copy"), "GB/s"),
    ]
    if device.type == "cuda":
        link = bench.measure_host_link(device) / 1e9
        rates.append(Rate("from host memory", rank, link, _of(hardware, "host_link"), "GB/s"))
    return rates


def link_rate(mesh: Mesh, device: torch.device, machines: int) -> Rate:
    """Return the rate at which a rank sends in a ring over all ranks, which the slowest link limits."""
    measured = bench.measure_links(mesh, device)["bandwidth"] / 1e9
    hardware = profile_for(device_name(device)) if device.type == "cuda" else None
    link = None if hardware is None else hardware.node if machines == 1 else hardware.network
    return Rate("between ranks", 0, measured, None if link is None else link.bandwidth / 1e9, "GB/s")


def _of(hardware: Hardware | None, name: str) -> float | None:
    return None if hardware is None else float(getattr(hardware, name)) / 1e9


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
