"""What context parallelism saves and costs. One JSON line per result.

    python benchmarks/context.py memory                 # CPU: activations of a rank, 4 ranks compared with 1
    python benchmarks/context.py overlap                # root and iproute2: how much of a ring is hidden, two hosts
    python benchmarks/context.py attention              # CPU: ring attention of 2 ranks compared with one
    torchrun --nproc-per-node 2 benchmarks/context.py attention --device cuda --lengths 32768 131072

memory      peak memory of the largest rank in training at two lengths; their difference is activations, and the
            share is the factor by which a rank has fewer of them
overlap     communication and waiting in ring attention, forward and backward, from the spans of the slower rank:
            hidden = 1 - waiting / communication
attention   forward and backward of one layer. First all ranks compute the whole sequence at the same time, so that what
            they share (a GPU under MPS, a machine) is shared then too; then they split the sequence. The ideal is the
            first time divided by the number of ranks: over_ideal is the excess over it. Without torchrun the program
            starts its ranks itself. On a GPU gloo sends keys through host memory; use --backend nccl if each rank has
            its own GPU (or its own host id, NCCL_HOSTID).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from dp_overlap import free_port, places, start_here  # noqa: E402
from torch import Tensor  # noqa: E402

from shardline.comm import collectives  # noqa: E402
from shardline.comm.hidden_time import Times, host_times  # noqa: E402
from shardline.comm.job import job  # noqa: E402
from shardline.models.attention import AttentionMask, attention  # noqa: E402
from shardline.models.partial_attention import fastest_kernel  # noqa: E402
from shardline.parallel.context.context import ContextParallel  # noqa: E402
from shardline.parallel.context.ring import shared_attention  # noqa: E402
from shardline.parallel.context.slices import Slices  # noqa: E402

# glibc: every block of 64 KiB or more is mapped separately, and unmapped when it is freed
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
MODEL = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "ffn_dim": 768, "vocab_size": 272}


def say(**values: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}), flush=True)


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> None:
    say(**machine("cpu"))
    peaks: dict[tuple[int, int], float] = {}
    for ranks in (1, options.ranks):
        for length in (options.short, options.long):
            peaks[ranks, length] = peak(ranks, length, options)
    one, shared = (peaks[ranks, options.long] - peaks[ranks, options.short] for ranks in (1, options.ranks))
    for ranks, activations in ((1, one), (options.ranks, shared)):
        say(
            benchmark="memory",
            ranks=ranks,
            tokens=options.long,
            method=options.method,
            peak_gib=peaks[ranks, options.long],
            activations_gib=activations,
            times_less=one / activations,
        )


def peak(ranks: int, length: int, options: argparse.Namespace) -> float:
    """Return the peak memory of the largest rank, in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardline", "train", "--nproc", str(ranks)]
        command += [f"--model.overrides.{name}={value}" for name, value in MODEL.items()]
        command += [f"--training.seq_len={length}", "--training.local_batch_size=1", "--training.steps=3"]
        command += ["--training.dataset=demo"]
        command += [f"--parallelism.context_parallel_degree={ranks}"] if ranks > 1 else []
        command += [f"--parallelism.context_parallel_rotate_method={options.method}"] if ranks > 1 else []
        command += ["--metrics.log_freq=1", f"--job.dump_folder={folder}/run", *options.words]
        done = subprocess.run(command, env={**os.environ, **GIVE_BACK}, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stderr)
        rows = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        return float(json.loads(rows[-1])["memory_gib"])


# ---- on a rank -------------------------------------------------------------------------------------------------------


def join(options: argparse.Namespace) -> tuple[int, int, torch.device]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo")
    assert dist.group.WORLD is not None
    job.set_axes({name: collectives.Axis(name, dist.group.WORLD, ranks, rank) for name in ("cp", "world")})
    return rank, ranks, device


def drawn(options: argparse.Namespace, tokens: int, device: torch.device) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the result."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    return [torch.randn(1, tokens, h, options.head_dim, device=device).to(dtype).requires_grad_() for h in heads]


def layer(tensors: list[Tensor], mask: AttentionMask) -> None:
    """Run forward and backward."""
    *leaves, gradient = tensors
    torch.autograd.grad(attention(leaves[0], leaves[1], leaves[2], mask), leaves, gradient.detach())


def timed(run: Callable[[], None], options: argparse.Namespace, device: torch.device) -> float:
    """Return the median seconds of the slowest rank."""
    seconds = []
    for _ in range(options.warm_up + options.rounds):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return statistics.median(seconds[options.warm_up :])


def shared_mask(options: argparse.Namespace, ranks: int, rank: int) -> AttentionMask:
    plan = ContextParallel(Slices(ranks, 2), rank, options.method)
    return AttentionMask(plan.method, shared=shared_attention, each=plan.slices.each)


def attention_rank(options: argparse.Namespace) -> None:
    rank, ranks, device = join(options)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = AttentionMask(fastest_kernel(device, dtype, options.head_dim) if device.type == "cuda" else "sdpa")
    part = fastest_kernel(device, dtype, options.head_dim)
    mask = shared_mask(options, ranks, rank)
    if rank == 0:
        say(**machine(device.type), ranks=ranks, backend=options.backend, whole_by=whole.kernel, parts_by=part)
    for length in options.lengths:
        tensors = drawn(options, length, device)
        one = timed(lambda tensors=tensors: layer(tensors, whole), options, device)  # type: ignore[misc]
        tensors = drawn(options, length // ranks, device)
        job.traffic.take()
        both = timed(lambda tensors=tensors: layer(tensors, mask), options, device)  # type: ignore[misc]
        sent = job.traffic.take()["cp"] / (options.warm_up + options.rounds)
        if rank == 0:
            say(
                benchmark="attention",
                tokens=length,
                ranks=ranks,
                method=options.method,
                seconds_whole=one,
                seconds_shared=both,
                over_ideal=both / (one / ranks) - 1,
                mib_sent=sent / 2**20,
            )
    dist.destroy_process_group()


def overlap_rank(options: argparse.Namespace) -> None:
    rank, ranks, device = join(options)
    mask = shared_mask(options, ranks, rank)
    for length in options.lengths:
        tensors = drawn(options, length // ranks, device)
        layer(tensors, mask)
        found: list[Times] = []
        job.traffic.take()
        for _ in range(options.rounds):
            dist.barrier()
            job.spans.record("step")
            layer(tensors, mask)
            found.append(host_times(job.spans.take("step"), "cp"))
            job.spans.stop("step")
        sent = job.traffic.take()["cp"] / options.rounds
        middle = sorted(found, key=lambda times: times.exposed)[len(found) // 2]
        slowest = torch.tensor([*middle, sent])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            communication, waiting, most = slowest.tolist()
            say(
                benchmark="overlap",
                tokens=length,
                ranks=ranks,
                method=options.method,
                mib_sent=most / 2**20,
                communication_seconds=communication,
                waiting_seconds=waiting,
                hidden=1 - waiting / communication,
            )
    dist.destroy_process_group()


# ---- starting ranks --------------------------------------------------------------------------------------------------


def start(options: argparse.Namespace) -> None:
    here = contextlib.nullcontext(("127.0.0.1", [start_here] * options.ranks, "127.0.0.1"))
    with places(options.rate) if options.what == "overlap" else here as (address, starts, link):
        say(benchmark=options.what, link=link, **machine(options.device))
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(starts))}
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        jobs = [
            begin(command, env=meeting | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, cwd=ROOT, text=True)
            for rank, begin in enumerate(starts)
        ]
        codes = [job.wait() for job in jobs]
    sys.exit(max(codes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "overlap", "attention"))
    parser.add_argument("--method", choices=("ring", "allgather"), default="ring", help="how keys travel")
    parser.add_argument("--ranks", type=int, help="default: 4 for memory, 2 otherwise; overlap has two hosts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--rate", default="1gbit", help="rate of the link between two hosts, as tc writes it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens of a sequence")
    parser.add_argument("--heads", type=int, help="32 on a GPU, 8 on a CPU; KV heads are a quarter")
    parser.add_argument("--head-dim", type=int, help="128 on a GPU, 64 on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--short", type=int, default=512, help="memory: tokens of the run that is subtracted")
    parser.add_argument("--long", type=int, default=8192, help="memory: tokens of the run that is measured")
    parser.add_argument("words", nargs="*", help="memory: settings for every run, after --")
    options = parser.parse_args()
    options.ranks = options.ranks or (4 if options.what == "memory" else 2)
    options.heads = options.heads or (32 if options.device == "cuda" else 8)
    options.head_dim = options.head_dim or (128 if options.device == "cuda" else 64)
    options.kv_heads = max(1, options.heads // 4)
    if options.what == "memory":
        memory(options)
    elif "RANK" not in os.environ:
        start(options)
    else:
        (overlap_rank if options.what == "overlap" else attention_rank)(options)


if __name__ == "__main__":
    main()
