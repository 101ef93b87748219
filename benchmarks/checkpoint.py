"""What a save costs: the stall of the training loop, and bandwidth compared with `dd`. One JSON line per result.

    python benchmarks/checkpoint.py                      # 2 GiB of state on a CPU, 20 GiB on a GPU
    python benchmarks/checkpoint.py --gib 8 --folder /mnt/disk --repeats 5

A loop runs steps of a model with AdamW state of that size (matrix products, then the optimizer's own step) and saves it
in each mode. A save delays the loop in two ways, both in seconds:

    stall      the call that saves; for asynchronous saves, until the loop continues
    slowdown   by how much the steps until the save is on disk, all together, take longer than usual

Every save is loaded again, from disk if the system allows us to drop its cached pages, and compared bit by bit with the
state at its start: steps that ran in the meantime must not be in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import format as files
from shardline.checkpoint.load import load_model, load_optimizer
from shardline.checkpoint.resume import DataIdentity, RunPosition
from shardline.checkpoint.saver import Saver
from shardline.comm.mesh import Mesh
from shardline.config.architecture import Architecture
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import parameter_count
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from shardline.run.device import choose_device, device_name

BYTES_PER_PARAMETER = 12  # float32 weight and two moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help="size of the state (default: 2 on a CPU, 20 on a GPU)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="keep the state on the CPU even if there is a GPU")
    given = parser.parse_args()
    device = torch.device("cpu") if given.cpu else choose_device()
    gib = given.gib or (20 if device.type == "cuda" else 2)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        run(Path(name), device, gib, given.repeats)


def run(folder: Path, device: torch.device, gib: float, repeats: int) -> None:
    loop = Loop(device, gib)
    about = {"machine": device_name(device), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    about |= {"python": platform.python_version(), "state_gib": round(loop.bytes / 2**30, 2)}
    dd = statistics.median(dd_seconds(folder, loop.bytes) for _ in range(repeats))
    show(about, "dd", seconds=dd, gb_per_second=loop.bytes / dd / 1e9)
    modes = ("disabled", "async", "async_with_pinned_mem") if device.type == "cuda" else ("disabled", "async")
    stalls: dict[str, float] = {}
    for mode in modes:
        rows = [measured for _ in range(repeats) for measured in [measure(loop, folder, mode)]]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        stalls[mode] = middle["stall"]
        speed = {"write_gb_per_second": loop.bytes / middle["on_disk"] / 1e9, "of_dd": dd / middle["on_disk"]}
        speed["load_gb_per_second"] = loop.bytes / middle["load"] / 1e9
        show(about, mode, **middle, **speed, stall_of_synchronous=middle["stall"] / stalls["disabled"])


class Loop:
    """A model that trains without data: gradients are constants, and the products use other matrices."""

    def __init__(self, device: torch.device, gib: float) -> None:
        self.device = device
        self.config = load_config(overrides={"optimizer.lr": 1e-3})
        self.arch = architecture(gib)
        with torch.device("meta"):
            self.model = Decoder(self.arch)
        self.model.to_empty(device=device)
        for parameter in self.model.parameters():
            parameter.data.normal_()
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer = build_optimizer(self.config, self.model)
        optimizer_state(self.optimizer, self.model)
        self.bytes = parameter_count(self.arch) * BYTES_PER_PARAMETER
        side = 8192 if device.type == "cuda" else 1024
        self.matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if side > 1024 else torch.float32)
        self.step()
        self.usual = statistics.median(self.step() for _ in range(5))

    def step(self) -> float:
        started = time.perf_counter()
        for _ in range(50 if self.device.type == "cuda" else 8):
            self.matrix @ self.matrix
        self.optimizer.step()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fingerprint(self) -> list[int]:
        tensors = [*self.model.parameters(), *optimizer_state(self.optimizer, self.model).values()]
        return [int(tensor.detach().view(torch.int32).sum()) for tensor in tensors]


def architecture(gib: float) -> Architecture:
    """Return a model with as many layers as the size needs."""
    dim, ffn = (4096, 14336) if gib > 8 else (1024, 4096)
    heads = dim // 128

    def sized(layers: int) -> Architecture:
        return Architecture(dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=heads, ffn_dim=ffn, vocab_size=4096)

    wanted = gib * 2**30 / BYTES_PER_PARAMETER
    one = parameter_count(sized(2)) - parameter_count(sized(1))
    return sized(max(1, round((wanted - parameter_count(sized(1))) / one) + 1))


def measure(loop: Loop, folder: Path, mode: str) -> dict[str, float]:
    """Save once to a new folder while the loop continues, then load."""
    place = folder / "checkpoint"
    config = loop.config.replace({"checkpoint.enable": True, "checkpoint.async_mode": mode})
    identity = DataIdentity(seed=0, dataset="", seq_len=1, global_batch_size=1, tokenizer="")
    saver = Saver(config, place, loop.model, loop.optimizer, identity, Mesh(Layout(), loop.device.type))
    saver.prepare()
    saver.finish()
    loop.step()
    before = loop.fingerprint()
    started = time.perf_counter()
    saver.save(RunPosition(step=1))
    stall = time.perf_counter() - started
    slowdown = 0.0
    while saver.busy:
        slowdown += loop.step() - loop.usual
    saver.finish()
    on_disk = saver.seconds
    saver.close()
    load = load_seconds(loop, files.find_checkpoint(place))
    if loop.fingerprint() != before:
        raise SystemExit(f"{mode}: the loaded state differs from the saved one")
    shutil.rmtree(place)
    return {"stall": stall, "slowdown": slowdown, "on_disk": on_disk, "load": load}


def load_seconds(loop: Loop, saved: files.Saved) -> float:
    for path in saved.path.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    started = time.perf_counter()
    load_model(saved, loop.model)
    load_optimizer(saved, loop.model, loop.optimizer)
    loop.wait()
    return time.perf_counter() - started


def dd_seconds(folder: Path, size: int) -> float:
    target = folder / "dd"
    words = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={-(-size // (4 << 20))}", "conv=fsync"]
    started = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def show(about: dict[str, Any], what: str, **numbers: float) -> None:
    rounded = {key: round(value, 4) for key, value in numbers.items()}
    print(json.dumps({"benchmark": "checkpoint", "what": what, **rounded, **about}), flush=True)


if __name__ == "__main__":
    main()
