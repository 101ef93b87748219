"""What workers that meet now and then, or never wait, send and learn, on two or more hosts with shaped links.

    python benchmarks/semi_sync.py                              # root and iproute2: network namespaces, 100 Mbit/s
    python benchmarks/semi_sync.py --rate 1gbit --variants ddp diloco
    python benchmarks/semi_sync.py --variants ddp async --paces 0.2 0.4   # one host at half the speed of the other
    python benchmarks/semi_sync.py --hosts 3 --variants ddp async --paces 0.2 0.2 0.4     # a link each to a switch
    python benchmarks/semi_sync.py --steps 2000 --rate none -- --training.seed=1   # words after -- go to every run

One rank per host, one thread each; the demo's model and text. All variants train on the same tokens, in the same order,
and are validated once, after the last step. One JSON line per variant, with the machine, its load and the versions:

    step_seconds       mean over all steps but the first ones, meetings included
    samples_per_second of all workers together
    tokens             of all workers together, from the first step to the last one
    bytes_per_token    all that rank 0 sends, over the tokens of the global batch
    fewer_bytes        ddp's bytes per token over these
    hidden             share of the time of the exchanges in which rank 0 went on training
    loss               mean of the last tenth of the steps (of all workers, over all targets)
    against_ddp        loss over that of ddp, less 1
    validation         validation loss after the last step (of the global weights)
    validation_against_ddp   the same over that of ddp, less 1
    staleness          async: steps by which the oldest contribution of a step was late, as a mean over the steps
    contributions      async: how many each worker made

A step of "async, local" has --local-steps times the samples of the others' steps, and there are as many times fewer.

Without root the ranks communicate over 127.0.0.1, unshaped; the first line says so.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.dp_overlap import on_all, places, start_here  # noqa: E402

FT = "--fault_tolerance."
DILOCO = ["--parallelism.data_parallel_mode=diloco"]


def variants(options: argparse.Namespace) -> dict[str, list[str]]:
    diloco = [*DILOCO, f"{FT}sync_steps={options.sync_steps}"]
    streaming = [*diloco, f"{FT}num_fragments=2", f"{FT}fragment_sync_delay=5", f"{FT}fragment_update_alpha=0.5"]
    asynchronous, local = ["--parallelism.data_parallel_mode=async"], options.local_steps
    return {
        "ddp": [],
        "local_sgd": [*diloco, f"{FT}semi_sync_method=local_sgd"],
        "diloco": diloco,
        "diloco, momentum 0.5": [*diloco, f"{FT}outer_momentum=0.5"],
        "diloco, int8": [*diloco, f"{FT}should_quantize"],
        "streaming": streaming,
        "streaming, int8": [*streaming, f"{FT}should_quantize"],
        "async": asynchronous,
        "async, local": [
            *asynchronous,
            f"{FT}async_steps={local}",
            f"--training.global_batch_size={options.batch * options.hosts * local}",
            f"--training.steps={options.steps // local}",
            f"--validation.freq={options.steps // local}",
            f"--lr_scheduler.warmup_steps={max(1, 20 // local)}",
        ],
    }


def words(options: argparse.Namespace, folder: Path) -> list[str]:
    return [
        "--preset=demo",
        f"--parallelism.data_parallel_replicate_degree={options.hosts}",
        f"--training.steps={options.steps}",
        f"--training.local_batch_size={options.batch}",
        "--metrics.log_freq=1",
        "--validation.enable",
        f"--validation.freq={options.steps}",
        f"--validation.steps={options.validation_steps}",
        f"--job.dump_folder={folder}",
        *([f"--experimental.custom_import={ROOT / 'benchmarks' / 'slow_host.py'}"] if options.paces else []),
        *options.words,
    ]


def run(options: argparse.Namespace, variant: list[str], address: str, starts: list[Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        own = {word.partition("=")[0] for word in variant}
        shared = [word for word in words(options, folder) if word.partition("=")[0] not in own]
        on_all(["-m", "shardline", "train", *shared, *variant], address, starts)
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def machine() -> dict[str, Any]:
    """Where and by what a result was measured."""
    import torch

    from shardline.run.device import device_name

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "machine": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def summary(rows: list[dict[str, Any]], seq_len: int = 128) -> dict[str, Any]:
    steps = [row for row in rows if "loss" in row]
    later, ends = steps[3:], steps[-max(1, len(steps) // 10) :]
    comm, waited = steps[-1].get("outer_comm_seconds", 0), steps[-1].get("outer_exposed_seconds", 0)
    seconds = statistics.fmean(row["step_seconds"] for row in later)
    tokens = (later[-1]["tokens"] - steps[2]["tokens"]) / len(later)
    found: dict[str, Any] = {
        "step_seconds": seconds,
        "samples_per_second": tokens / seconds / seq_len,
        "tokens": steps[-1]["tokens"],
        "bytes_per_token": sum(sum(row["comm_bytes"].values()) for row in steps) / steps[-1]["tokens"],
        "hidden": 1 - waited / comm if comm else None,
        "loss": statistics.fmean(row["loss"] for row in ends),
        "validation": next((row["validation_loss"] for row in reversed(rows) if "validation_loss" in row), None),
    }
    if "staleness" in steps[-1]:
        found["staleness"] = statistics.fmean(row["staleness"] for row in steps)
        made = [row["contributions"] for row in steps]
        found["contributions"] = {worker: sum(one[worker] for one in made) for worker in made[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--rate", default="100mbit", help='of the link, as tc writes it; "none": 127.0.0.1')
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sync-steps", type=int, default=100)
    parser.add_argument("--local-steps", type=int, default=10, help='of "async, local", in each contribution')
    parser.add_argument("--batch", type=int, default=4, help="sequences of each worker")
    parser.add_argument("--validation-steps", type=int, default=20, help="batches of each host in the validation")
    parser.add_argument("words", nargs="*", help="settings for every run, after --")
    parser.add_argument("--paces", type=float, nargs="+", help="seconds of forward and backward on each host, at least")
    options = parser.parse_args()
    known = variants(options)
    if options.steps < 4 or options.hosts < 2:
        sys.exit("--steps: at least 4, the first three are not counted; --hosts: at least 2")
    if options.steps % options.local_steps or options.steps < 4 * options.local_steps:
        known.pop("async, local")  # it would train on fewer tokens than the others, or have too few steps
        if "async, local" in (options.variants or ()):
            sys.exit('--steps: for "async, local" a multiple of --local-steps, and 4 times it at least')
    if options.paces and len(options.paces) != options.hosts:
        sys.exit(f"--paces: {len(options.paces)} given for --hosts {options.hosts}")
    if options.paces:
        os.environ["SEMI_SYNC_PACES"] = " ".join(map(str, options.paces))
    unknown = [name for name in options.variants or () if name not in known]
    if unknown:
        sys.exit(f"--variants: {unknown[0]!r} is not one of {', '.join(known)}")
    if options.rate == "none":
        return measure(options, known, "127.0.0.1", [start_here] * options.hosts, "127.0.0.1, unshaped")
    with places(options.rate, options.hosts) as (address, starts, link):
        measure(options, known, address, starts, link)


def measure(
    options: argparse.Namespace, known: dict[str, list[str]], address: str, starts: list[Any], link: str
) -> None:
    keys = ("hosts", "steps", "batch", "sync_steps", "local_steps", "paces")
    of_run = {"link": link, **{key: getattr(options, key) for key in keys}}
    print(json.dumps(of_run | machine()), flush=True)
    base: dict[str, Any] = {}
    for name in options.variants or known:
        where = machine()  # the load before this run
        line = summary(run(options, known[name], address, starts))
        base = line if name == "ddp" else base
        if base:
            line["fewer_bytes"] = base["bytes_per_token"] / line["bytes_per_token"]
            line["against_ddp"] = line["loss"] / base["loss"] - 1
            line["validation_against_ddp"] = line["validation"] / base["validation"] - 1
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
        print(json.dumps({"variant": name} | rounded | where), flush=True)


if __name__ == "__main__":
    main()
