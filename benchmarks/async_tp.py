"""A training step with and without async tensor parallelism, in alternating blocks of one run.

    python benchmarks/async_tp.py                        # two hosts in network namespaces, 1 Gbit/s (root, iproute2)
    python benchmarks/async_tp.py --rate 10gbit
    python benchmarks/async_tp.py --here --tp 2          # ranks on this machine, on its GPUs or cores
    python benchmarks/async_tp.py --backend ring -- --training.seq_len=512
    python benchmarks/async_tp.py --here --flavor 8B --seq-len 8192 --torch-pass -- --compile.enable=true     # CUDA

Steps alternate between `serial` and the chosen backends, ten at a time. With --silent they also alternate with serial
products in which each rank uses its own rows instead of those of the others: ranks compute and store as much, but
neither communicate nor wait for each other. (The loss of such a run means nothing.) The first block and the first step
of every other one are dropped; numbers are medians of the rest. One JSON line:

    serial, overlapped    step_seconds, tp_comm_seconds, tp_exposed_seconds of each
    speed_up              serial step / overlapped step
    bound                 serial step / (serial step - its exposed communication): if all of that were hidden
    reached               (speed_up - 1) / (bound - 1)
    silent                step_seconds without communication in the blocks, and `bound` and `reached` based on that
    hidden                1 - overlapped's exposed seconds / serial's exposed seconds
    hidden_fraction       the overlapped steps' own tp_hidden_fraction
    exposed_by_rank       seconds that each rank waited in an overlapped step, for a message or for a slower rank
    torch_pass            the same step with PyTorch's own pass (torch._inductor.config._micro_pipeline_tp) over
                          functional collectives, in a separate run: step_seconds, and how many products it fused
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from dp_overlap import free_port, places, start_here  # noqa: E402

BLOCK = 10
KEYS = ("step_seconds", "tp_comm_seconds", "tp_exposed_seconds", "tp_hidden_fraction")
TORCH_PASS, SILENT = "SHARDLINE_BENCH_TORCH_PASS", "SHARDLINE_BENCH_SILENT"


def kind(step: int, silent: bool) -> str:
    """How a step computes its products; steps count from 1, and the first block is serial."""
    kinds = ("serial", "overlapped", "silent") if silent else ("serial", "overlapped")
    return kinds[(step - 1) // BLOCK % len(kinds)]


def counts(step: int) -> bool:
    return step > BLOCK and (step - 1) % BLOCK > 0


def silence() -> Any:
    """Replace the communication of serial products in silent steps: a rank's own rows stand in for the others'."""
    from torch import Tensor

    from shardline.comm import collectives

    def gather_rows(x: Tensor, axis: str) -> Tensor:
        return x.repeat(collectives.axis_size(axis), *[1] * (x.ndim - 1))

    def scatter_rows(x: Tensor, axis: str) -> Tensor:
        return x.unflatten(0, (collectives.axis_size(axis), -1)).sum(0)

    return SimpleNamespace(gather_rows=gather_rows, scatter_rows=scatter_rows, sum_in_place=lambda x, axis: x)


def use_torch_pass(fused: list[str]) -> None:
    """Replace our products by functional collectives around plain products, and let the compiler fuse them."""
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as memory
    from torch import Tensor
    from torch._inductor.fx_passes import post_grad
    from torch.distributed import _functional_collectives as functional

    from shardline.comm import collectives
    from shardline.parallel.tensor import overlap

    def gather(x: Tensor, weights: Any, axis: str) -> tuple[Tensor, ...]:
        full = functional.all_gather_tensor_autograd(x, 0, collectives.axis(axis).group)
        return tuple(full @ weight.to(x.dtype).t() for weight in weights)

    def scatter(x: Tensor, weights: Any, axis: str) -> tuple[Tensor, ...]:
        products = [x @ weight.to(x.dtype).t() for weight in weights]
        group = collectives.axis(axis).group
        return tuple(functional.reduce_scatter_tensor_autograd(one, "sum", 0, group) for one in products)

    plain = post_grad.micro_pipeline_tp_pass

    def counted(graph: Any) -> None:
        memory.enable_symm_mem_for_group(collectives.axis("tp").group.group_name)
        plain(graph)
        fused.extend(str(node.target) for node in graph.nodes if "symm_mem.fused_" in str(node.target))

    overlap.all_gather_linear, overlap.linear_reduce_scatter = gather, scatter  # type: ignore[assignment]
    post_grad.micro_pipeline_tp_pass = counted
    inductor._micro_pipeline_tp = True


def train(words: list[str]) -> None:
    """Run on a rank: train, and change the backend of products between blocks of steps."""
    from shardline import registry
    from shardline.comm import collectives
    from shardline.config.load import load_config
    from shardline.parallel.tensor import serial_and_ring
    from shardline.parallel.tensor.backend_table import SERIAL, choices
    from shardline.training.trainer import Trainer

    fused: list[str] = []
    if os.environ.get(TORCH_PASS):
        use_torch_pass(fused)
    trainer = Trainer(load_config(overrides=words))
    if os.environ.get(TORCH_PASS):
        trainer.train()
        (trainer.folder.path / "fused.json").write_text(json.dumps(fused))
        return
    chosen, silent, quiet = dict(choices.chosen), bool(os.environ.get(SILENT)), silence()

    def switch(step: int) -> None:
        now = kind(step, silent)
        choices.chosen = chosen if now == "overlapped" else dict.fromkeys(chosen, SERIAL)
        assert serial_and_ring.collectives in (quiet, collectives)  # another name would silence nothing
        serial_and_ring.collectives = quiet if now == "silent" else collectives

    switch(1)
    registry.register_hook("after_step")(lambda trainer, row: switch(row["step"] + 1))
    own: list[float] = []
    assert trainer.telemetry.sampler is not None
    end = trainer.telemetry.sampler.end

    def noted() -> Any:
        times = end()
        own.append(times.exposed)
        return times

    trainer.telemetry.sampler.end = noted  # type: ignore[method-assign]
    trainer.train()
    (trainer.folder.path / f"exposed-{trainer.mesh.rank}.json").write_text(json.dumps(own))


def model_words(options: argparse.Namespace) -> list[str]:
    if options.flavor:
        sizes = {"n_layers": options.layers}
        return [f"--model.flavor={options.flavor}", *(f"--model.overrides.{k}={v}" for k, v in sizes.items())]
    heads = {"n_heads": 12, "n_kv_heads": 4, "head_dim": options.dim // 12}
    sizes = {
        "dim": options.dim,
        "n_layers": options.layers,
        **heads,
        "ffn_dim": 8 * options.dim // 3,
        "vocab_size": 272,
    }
    return [f"--model.overrides.{name}={value}" for name, value in sizes.items()]


def run_words(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *model_words(options),
        "--training.dataset=demo",
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}",
        f"--training.steps={options.steps}",
        f"--parallelism.tensor_parallel_degree={options.tp}",
        "--parallelism.enable_async_tensor_parallel=true",
        "--parallelism.async_tensor_parallel_compare_freq=0",
        f"--parallelism.async_tensor_parallel_backend={options.backend}",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1",
        f"--training.cache_folder={folder.parent / 'cache'}",
        f"--job.dump_folder={folder}",
        *options.words,
    ]


def both(options: argparse.Namespace, address: str, starts: list[Any], words: list[str], **more: str) -> None:
    """Run all ranks to their end, spread evenly over the hosts."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(options.tp), **more}
    meeting |= {SILENT: "1"} if options.silent else {}
    each = options.tp // len(starts)
    jobs = []
    for rank in range(options.tp):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__)), "--rank", "--", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        jobs.append(starts[rank // each](command, env=meeting | own, **pipes))
    said = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        sys.exit("\n".join(said))
    if options.verbose:
        print(said[0], file=sys.stderr)


def summary(rows: list[dict[str, Any]], silent: bool) -> dict[str, Any]:
    """Return the medians of each kind of step; the first block and every block's first step do not count."""
    kept = [row for row in rows if counts(row["step"])]
    medians: dict[str, Any] = {}
    for name in ("serial", "overlapped"):
        of_kind = [row for row in kept if kind(row["step"], silent) == name]
        medians[name] = {key: round(statistics.median(row[key] for row in of_kind), 5) for key in KEYS}
        medians[name]["steps"] = len(of_kind)
    serial, overlapped = medians["serial"], medians["overlapped"]
    exposed = serial["tp_exposed_seconds"]
    speed_up = serial["step_seconds"] / overlapped["step_seconds"]

    def against(least: float) -> dict[str, float]:
        """Return the share of the possible gain that was reached, if a step can at best take this many seconds."""
        bound = serial["step_seconds"] / least
        return {"bound": round(bound, 3), "reached": round((speed_up - 1) / (bound - 1), 3) if bound > 1 else 0.0}

    if silent:
        alone = statistics.median(row["step_seconds"] for row in kept if kind(row["step"], silent) == "silent")
        medians["silent"] = {"step_seconds": round(alone, 5), **against(alone)}
    return medians | {
        "communication_share": round(exposed / serial["step_seconds"], 3),
        "speed_up": round(speed_up, 3),
        **against(serial["step_seconds"] - exposed),
        "hidden": round(1 - overlapped["tp_exposed_seconds"] / exposed, 3),
        "hidden_fraction": overlapped["tp_hidden_fraction"],
        "last_loss": rows[-1]["loss"],
    }


def of_ranks(folder: Path, ranks: int, silent: bool) -> list[float]:
    """Return the median exposed seconds of each rank in overlapped steps."""
    found = []
    for rank in range(ranks):
        seconds = json.loads((folder / f"exposed-{rank}.json").read_text())
        kept = [s for step, s in enumerate(seconds, 1) if counts(step) and kind(step, silent) == "overlapped"]
        found.append(round(statistics.median(kept), 5))
    return found


def torch_pass(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    both(options, "127.0.0.1", [start_here], run_words(options, folder), **{TORCH_PASS: "1"})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(row["step_seconds"] for row in rows if row["step"] > BLOCK)
    fused = json.loads((folder / "fused.json").read_text())
    return {"step_seconds": round(seconds, 5), "fused_products": len(fused), "last_loss": rows[-1]["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of the link between two hosts, as tc writes it")
    parser.add_argument("--here", action="store_true", help="ranks on this machine instead of two hosts")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--flavor", help="flavor of llama3, instead of a small model")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--torch-pass", action="store_true", help="also run PyTorch's own pass; with --here, on CUDA")
    parser.add_argument("--silent", action="store_true", help="also run without communication in the blocks")
    parser.add_argument("--verbose", action="store_true", help="show what rank 0 printed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="settings for the run, after --")
    options = parser.parse_args()
    if options.rank:
        return train(options.words)
    least = BLOCK * (4 if options.silent else 3)
    if options.steps < least:
        parser.error(f"--steps {options.steps}: a block of each kind that counts needs at least {least}")
    import torch

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if options.here:
            both(options, "127.0.0.1", [start_here], run_words(options, folder))
            link = "this machine"
        else:
            with places(options.rate) as (address, starts, link):
                both(options, address, starts, run_words(options, folder))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        by_rank = of_ranks(folder, options.tp, options.silent)
        theirs = torch_pass(options, Path(parent) / "theirs") if options.torch_pass else None
        chosen = [[row["product"], *row["chosen"]] for row in json.loads((folder / "async_tp.json").read_text())]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {os.cpu_count()} cores"
    about = {"link": link, "tp": options.tp, "device": device, "torch": torch.__version__}
    shape = {"layers": options.layers, "seq_len": options.seq_len, "batch": options.batch, "steps": options.steps}
    result = {"benchmark": "async_tp", "backend": options.backend, **about, **shape, **summary(rows, options.silent)}
    result["exposed_by_rank"] = by_rank
    result |= {"torch_pass": theirs} if theirs else {}
    print(json.dumps({**result, "python": platform.python_version(), "chosen": chosen}))


if __name__ == "__main__":
    main()
