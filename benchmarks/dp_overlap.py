"""How much of the data-parallel communication computation hides, on two hosts with a shaped link.

    python benchmarks/dp_overlap.py                          # root and iproute2: two network namespaces, 1 Gbit/s
    python benchmarks/dp_overlap.py --rate 200mbit --variants ddp "ddp, after backward"
    python benchmarks/dp_overlap.py -- --training.seq_len=512   # flags after -- go to every run

One rank per host, one thread each. One JSON line per variant: medians over all steps after warm-up.

    step_seconds          the whole step
    dp_exposed_seconds    its time spent waiting for data-parallel communication (the slower rank)
    comm_seconds          the time of the same collectives, in as many pieces, one after another without computation:
                          measured right after the run, the median of ten
    hidden                1 - dp_exposed_seconds / comm_seconds (below 0: ranks waited for each other, not for bytes)

Without root the ranks communicate over 127.0.0.1, unshaped; the first line says so, and the numbers mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hosts import joined_hosts, missing  # noqa: E402

DDP = ["--parallelism.data_parallel_replicate_degree=2"]
FSDP = ["--parallelism.data_parallel_shard_degree=2"]
VARIANTS = {
    "ddp, after backward": [*DDP, "--parallelism.overlap_gradient_reduction=false"],
    "ddp": DDP,
    "ddp, bfloat16": [*DDP, "--parallelism.gradient_compression=bfloat16"],
    "ddp, int8": [*DDP, "--parallelism.gradient_compression=int8"],
    "ddp, topk": [*DDP, "--parallelism.gradient_compression=topk"],
    "ddp, powersgd": [*DDP, "--parallelism.gradient_compression=powersgd"],
    "fsdp": FSDP,
    "fsdp, prefetch 0": [*FSDP, "--parallelism.fsdp_prefetch=0"],
    "fsdp, never freed": [*FSDP, "--parallelism.fsdp_reshard_after_forward=never"],
}
WARM_UP = 3
Start = Callable[..., "subprocess.Popen[str]"]


def sizes(options: argparse.Namespace) -> dict[str, int]:
    heads = {"n_heads": 8, "n_kv_heads": 4, "head_dim": 64}
    return {"dim": 512, "n_layers": options.layers, **heads, "ffn_dim": 1408, "vocab_size": 272}


def parameters(options: argparse.Namespace) -> int:
    from shardline.config.load import load_config
    from shardline.models.flavors import resolve
    from shardline.models.fused_weights import parameter_count

    return parameter_count(resolve(load_config(overrides={"model.overrides": sizes(options)}).model))


def words(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *(f"--model.overrides.{name}={value}" for name, value in sizes(options).items()),
        "--training.dataset=demo",
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}",
        f"--training.steps={options.steps}",
        f"--parallelism.gradient_bucket_mib={options.bucket}",
        "--metrics.log_freq=1",
        f"--job.dump_folder={folder}",
        *options.words,
    ]


@contextlib.contextmanager
def places(rate: str, count: int = 2) -> Iterator[tuple[str, list[Start], str]]:
    """The first rank's address, a function for each rank that starts a process on its host, and the link."""
    reason = missing()
    if reason:
        yield "127.0.0.1", [start_here] * count, f"127.0.0.1, unshaped ({reason})"
        return
    with joined_hosts(count, rate) as hosts:
        yield hosts[0].address, [host.start for host in hosts], rate


def start_here(command: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env}, **options)


def run(options: argparse.Namespace, variant: list[str], address: str, starts: list[Start]) -> list[dict[str, Any]]:
    """Return the rows of one run's metrics.jsonl."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        on_all(["-m", "shardline", "train", *words(options, folder), *variant], address, starts)
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def on_all(program: list[str], address: str, starts: list[Start]) -> str:
    """Run a program as one rank on each host, to its end; returns what rank 0 printed."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(starts))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    jobs = []
    for rank, start in enumerate(starts):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        jobs.append(start([sys.executable, *program], env=meeting | own, **pipes))
    ended = [job.communicate() for job in jobs]
    if any(job.returncode for job in jobs):
        sys.exit("\n".join(error for _, error in ended))
    return ended[0][0]


Piece = tuple[str, int]  # a collective, and the bytes that a rank sends for it


def measure(pieces: list[Piece]) -> None:
    """Run on a rank: print the seconds that these collectives take one after another, without computation."""
    import torch
    import torch.distributed as dist

    from shardline.comm import collectives
    from shardline.comm.mesh import Mesh, stop_process_group
    from shardline.config.layout import Layout

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Mesh(Layout(dp_shard=2), "cpu")

    def ready(what: str, sent: int) -> Callable[[], Any]:
        """With two ranks, an all-reduce sends the size of the tensor, a gather or scatter half of it."""
        one, two = torch.ones(sent // 4), torch.ones(2 * (sent // 4))
        return {
            "all_reduce": lambda: dist.all_reduce(one),
            "reduce_scatter": lambda: collectives.scatter_sum_into(one, two, "dp_shard"),
            "all_gather": lambda: collectives.gather_into(two, one, "dp_shard"),
            "all_to_all": lambda: collectives.exchange_blocks(two.view(2, -1), "dp_shard"),
        }[what]

    calls, seconds = [ready(*piece) for piece in pieces], []
    for _ in range(12):
        dist.barrier()
        started = time.perf_counter()
        for call in calls:
            call()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(statistics.median(seconds[2:])))
    dist.barrier()
    stop_process_group()


def pieces_of(name: str, sent: dict[str, int], options: argparse.Namespace) -> list[Piece]:
    """Return the collectives of a step, from its counted bytes: a piece for each bucket, or for each layer."""
    if not name.startswith("ddp"):
        gradients = parameters(options) * 4 // 2  # two ranks: each sends half of them
        gathered, each = sent["dp_shard"] - gradients, gradients // (options.layers + 1)
        return _cut("all_gather", gathered, each) + _cut("reduce_scatter", gradients, each)
    total, buckets = sent["dp_replicate"], parameters(options) * 4 / (options.bucket * 2**20)
    each = max(4, int(total / buckets))
    if name.endswith("int8"):
        return _cut("all_to_all", total // 2, each // 2) + _cut("all_gather", total // 2, each // 2)
    if name.endswith("powersgd"):
        each //= 2  # the P of a bucket, and its Q
    return _cut("all_gather" if name.endswith("topk") else "all_reduce", total, each)


def _cut(what: str, sent: int, each: int) -> list[Piece]:
    count = max(1, round(sent / each))
    return [(what, sent // count)] * count


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = ("step_seconds", "dp_exposed_seconds")
    return {key: statistics.median(row[key] for row in rows[WARM_UP:]) for key in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rate", default="1gbit", help="rate of the link, as tc writes it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--bucket", type=float, default=4.0, help="MiB of gradients that DDP sums in one piece")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="settings for every run, after --")
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    with places(options.rate) as (address, starts, link):
        print(json.dumps({"link": link}), flush=True)
        for name in options.variants:
            rows = run(options, VARIANTS[name], address, starts)
            line, sent = summary(rows), rows[-1]["comm_bytes"]
            line["mib_sent"] = sum(size for axis, size in sent.items() if axis.startswith("dp_")) / 2**20
            pieces = json.dumps(pieces_of(name, sent, options))
            line["comm_seconds"] = json.loads(on_all([str(Path(__file__)), "--measure", pieces], address, starts))
            line["hidden"] = 1 - line["dp_exposed_seconds"] / line["comm_seconds"]
            print(json.dumps({"variant": name} | {k: round(v, 4) for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    main()
