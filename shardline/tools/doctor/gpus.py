"""Reads GPUs: what the driver reports, whether they can access each other's memory, and how they are connected."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from shardline.plan.hardware import NVIDIA
from shardline.tools.doctor.readings import GPUState

VERSION = Path("/proc/driver/nvidia/version")
FIELDS = (
    *("name", "memory.used", "pcie.link.width.current", "pcie.link.width.max"),
    "ecc.errors.uncorrected.volatile.total",
)
SLOWED = ("clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown")
MIB = 2**20
SECONDS = 20  # limit for nvidia-smi, which waits for a GPU that hangs


def cards() -> int:
    """Return the number of NVIDIA GPUs that the kernel knows, whether or not torch can use them."""
    return len(list(NVIDIA.glob("*"))) if NVIDIA.is_dir() else 0


def driver_version() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", VERSION.read_text())
    except OSError:
        return None
    return found[1] if found else None


def cuda_problem() -> str:
    """Return why torch cannot compute on the GPUs that it should see; "" if it can."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        for number in range(torch.cuda.device_count()):
            x = torch.ones(64, 64, device=f"cuda:{number}")
            if (x @ x).sum().item() != 64.0**3:
                return f"GPU {number} computes wrong results"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if torch.cuda.device_count() else "torch sees no GPU"


def peers() -> list[list[bool]]:
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def read_gpus() -> list[GPUState]:
    """Return what nvidia-smi reports for each GPU; without it, only their names."""
    told = parse_query(_nvidia_smi(_query(*FIELDS, *SLOWED)) or _nvidia_smi(_query(*FIELDS)))
    return told or [GPUState(torch.cuda.get_device_name(number)) for number in range(torch.cuda.device_count())]


def read_paths() -> list[list[str]]:
    return parse_topology(_nvidia_smi("topo", "-m")) if torch.cuda.device_count() > 1 else []


def _query(*fields: str) -> str:
    return f"--query-gpu={','.join(fields)}"


def _nvidia_smi(*words: str) -> str:
    """Return what nvidia-smi prints; "" if it is missing, fails or hangs."""
    more = ["--format=csv,noheader,nounits"] if words[0].startswith("--query") else []
    try:
        done = subprocess.run(["nvidia-smi", *words, *more], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_query(text: str) -> list[GPUState]:
    """Return the GPUs in the output of a query of FIELDS, with or without SLOWED."""
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) < len(FIELDS):
            continue
        name, used, width, most, errors, *slowed = row
        memory = _number(used)
        found.append(
            GPUState(
                name,
                None if memory is None else memory * MIB,
                _number(width),
                _number(most),
                _number(errors),
                any(word == "Active" for word in slowed) if slowed else None,
            )
        )
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def parse_topology(text: str) -> list[list[str]]:
    """Return the connections between GPUs from `nvidia-smi topo -m`: NV18, PIX, PHB, NODE, SYS; X with itself."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+\S", line)]
    return [row[1 : 1 + len(rows)] for row in rows]


def worst_pairs(matrix: Sequence[Sequence[object]], good: object) -> list[str]:
    """Return `0-1` and so on for each pair of GPUs whose entry is not `good`."""
    return [
        f"{i}-{j}" for i, row in enumerate(matrix) for j, entry in enumerate(row) if i < j and entry != good
    ]  # fmt: skip
