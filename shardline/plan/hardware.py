"""What a machine can do: rates of products, attention and copies, and its links, read from a profile (TOML).

A profile is data: `shardline bench device --write mine.toml` measures one, and `profiles/` has those that ship with
Shardline. A shipped profile names the source of every number in its `[sources]`.
"""

from __future__ import annotations

import itertools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardline.errors import UserError
from shardline.registry import nearest

PROFILES = Path(__file__).parent / "profiles"
GIB = 2**30
NARROW_HEADS = 0.35  # attention on narrower heads slows down with this power of head_dim / 128
HALF_RATE_LENGTH = 800  # tokens at which attention reaches half of its rate on a GPU
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 0.5}


@dataclass(frozen=True)
class ProductRates:
    """Rates of matrix products in one type, FLOP/s."""

    peak: float  # the vendor's dense peak, which MFU is relative to
    achieved: float  # with the best shape, measured alone


class Link(NamedTuple):
    """What connects ranks on one level: inside a node, or between nodes."""

    latency: float  # seconds of one hop
    bandwidth: float  # bytes/s that one rank sends in a ring
    reduce: float = 1.0  # speedup of all-reduce over a ring: with NVLS and SHARP, the switch reduces


@dataclass(frozen=True)
class Hardware:
    """One kind of device and the links between them."""

    name: str
    memory: float  # bytes that torch sees
    multiprocessors: int
    tile: tuple[int, int]  # rows and columns of a product that one multiprocessor computes at a time
    inner: float  # the inner size at which a product reaches half of its rate
    products: Mapping[str, ProductRates]
    sustained: float  # share of `achieved` that remains in long steps, at the power limit
    attention: Mapping[str, tuple[float, float]]  # kernel -> FLOP/s forward and backward, counting the causal half
    copy: float  # bytes/s that a kernel reads and writes
    kernel: float  # seconds that the shortest kernel takes
    launch: float  # seconds that the host takes to start a kernel
    host_link: float  # bytes/s to and from host memory
    node: Link
    network: Link
    per_node: int = 8
    half_length: float = HALF_RATE_LENGTH  # tokens at which attention reaches half of its rate
    allowance: float = 0.0  # bytes that the context, NCCL and other programs take
    price: float | None = None  # per hour and device
    sources: Mapping[str, str] = field(default_factory=dict)

    def product_seconds(self, rows: float, columns: float, inner: float, dtype: str, count: float = 1) -> float:
        """Return the seconds of `count` products (rows, inner) x (inner, columns), run as one grouped product or batch.

        A multiprocessor computes one tile at a time, and the last wave of tiles is rarely full.
        """
        found = self.products.get(dtype) or self.products["bfloat16"]
        flops = 2.0 * rows * columns * inner * count
        high, wide = self.tile
        across = max(1, columns / wide) if columns < 4 * wide else math.ceil(columns / wide)
        tiles = count * math.ceil(rows / high) * across
        waves = tiles / self.multiprocessors
        full = waves / (math.ceil(waves) if waves > 1 else 1.0)
        fill = full * min(1.0, rows / (math.ceil(rows / high) * high)) * (inner / (inner + self.inner))
        read = BYTES.get(dtype, 2)
        moved = count * (read * (rows * inner + inner * columns) + max(2.0, read) * rows * columns)
        return max(flops / (found.achieved * self.sustained * max(fill, 1e-3)), moved / self.copy) + self.kernel

    def attention_seconds(self, flops: float, backward: bool, kernel: str, head_dim: int, length: int) -> float:
        """Return seconds for the `flops` below the diagonal. The softmax costs the same however wide a head is."""
        rates = self.attention.get(kernel) or next(iter(self.attention.values()))
        fill = min(1.0, (head_dim / 128) ** NARROW_HEADS) * length / (length + self.half_length)
        return flops / (rates[backward] * self.sustained * fill) + self.kernel

    def copy_seconds(self, size: float) -> float:
        return size / self.copy

    def peak(self, dtype: str = "bfloat16") -> float:
        return (self.products.get(dtype) or self.products["bfloat16"]).peak


def read_profile(path: Path) -> Hardware:
    """Read a profile from a file; `extends` names the profile whose values it changes."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--gpu {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--gpu {path}: is no TOML file: {error}") from error
    return _hardware(_extended(given, path), path)


def _extended(given: dict[str, Any], path: Path) -> dict[str, Any]:
    base = given.pop("extends", None)
    if base is None:
        return given
    known = PROFILES / f"{base}.toml"
    if not known.is_file():
        raise UserError(f"{path}: extends = {base!r}: there is no such profile{nearest(base, profile_names())}")
    return _merged(_extended(tomllib.loads(known.read_text(encoding="utf-8")), known), given)


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in given.items():
        old = base.get(key)
        found[key] = _merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return found


def _hardware(given: Mapping[str, Any], path: Path) -> Hardware:
    try:
        device, memory, links = given["device"], given["memory"], given["links"]
        return Hardware(
            name=given["name"],
            memory=memory["capacity_gib"] * GIB or _memory_here(),
            multiprocessors=device["multiprocessors"],
            tile=tuple(device["tile"]),
            inner=device["half_rate_inner"],
            products={name: ProductRates(row["peak"], row["achieved"]) for name, row in given["products"].items()},
            sustained=device["sustained"],
            attention={name: (row["forward"], row["backward"]) for name, row in given["attention"].items()},
            copy=memory["copy"],
            kernel=device["kernel"],
            launch=given["host"]["launch"],
            host_link=given["host"]["link"],
            node=Link(**links["node"]),
            network=Link(**links["network"]),
            per_node=device["per_node"],
            half_length=device.get("half_rate_length", HALF_RATE_LENGTH),
            allowance=memory["allowance_gib"] * GIB,
            price=device.get("price"),
            sources=given.get("sources", {}),
        )
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}: is no profile of a device: {what}; `shardline bench device --write mine.toml` makes one"
        ) from error


def _memory_here() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@cache
def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILES.glob("*.toml")))


def find_profile(name: str) -> Hardware:
    """Return the profile of a GPU by its name (`h100`, `NVIDIA H100 80GB HBM3`) or from a file."""
    if name.endswith(".toml") or "/" in name:
        return read_profile(Path(name))
    known = profile_for(name)
    if known is None:
        raise UserError(
            f"--gpu {name}: there is no profile of that name{nearest(name, profile_names())}; profiles:"
            f" {', '.join(profile_names())}. On a machine that has it, `shardline bench device --write mine.toml`"
            " measures one, and --gpu mine.toml reads it"
        )
    return known


@cache
def profile_for(name: str) -> Hardware | None:
    """Return the profile with the longest name whose words all occur in the device's name; None if there is none."""
    plain = name.lower().replace("-", " ").replace("_", " ")
    parts = plain.split()
    words = {"".join(parts), *parts, *map("".join, itertools.pairwise(parts))}  # "RTX 4090" is rtx4090
    found = [known for known in profile_names() if set(known.split("_")) <= words]
    return read_profile(PROFILES / f"{max(found, key=len)}.toml") if found else None


def on_nodes(hardware: Hardware, per_node: int | None) -> Hardware:
    return hardware if per_node is None else replace(hardware, per_node=per_node)


NVIDIA = Path("/proc/driver/nvidia/gpus")  # read without waking a GPU


def local_gpu() -> str | None:
    """Return the name of this machine's first GPU without initializing CUDA; None if none is known or visible."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not NVIDIA.is_dir():
        return None
    for card in sorted(NVIDIA.glob("*/information")):
        for line in card.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return None
