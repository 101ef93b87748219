"""How well the planner predicts step times and memory on this machine's CPU: runs of one and of two ranks.

    python benchmarks/planner_host.py                      # measures a profile first; a few minutes on quiet cores
    python benchmarks/planner_host.py --cases tp fsdp      # some of the cases
    python benchmarks/planner_host.py --profile mine.toml  # a profile that `shardline bench device` wrote

A profile is measured for each number of ranks, because ranks share cores, caches and memory. Every case then trains a
Llama with the trainer's own command. One JSON line each:

    seconds, predicted_seconds   the median step after the first ones, and the planner's prediction
    error                        predicted over measured, less 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.semi_sync import machine  # noqa: E402
from shardline.config.load import load_config  # noqa: E402
from shardline.plan.check import judge  # noqa: E402
from shardline.plan.hardware import find_profile  # noqa: E402

WARM_UP = 3
MODEL = ["model.name=llama3", "model.flavor=debugmodel", "model.tokenizer_path=bytes", "training.dataset=demo",
         "model.overrides.dim=512", "model.overrides.n_layers=6", "model.overrides.n_heads=8",
         "model.overrides.n_kv_heads=4", "model.overrides.ffn_dim=1536", "model.overrides.vocab_size=8192",
         "training.seq_len=512", "training.local_batch_size=4", "metrics.log_freq=1",
         "checkpoint.enable=false"]  # fmt: skip
PARALLEL = "parallelism."
CASES: dict[str, tuple[int, list[str]]] = {  # name -> ranks, flags
    "one rank": (1, []),
    "short": (1, ["training.seq_len=128", "training.local_batch_size=16"]),
    "long": (1, ["training.seq_len=2048", "training.local_batch_size=1"]),
    "wide": (1, ["model.overrides.dim=1024", "model.overrides.ffn_dim=3072", "model.overrides.n_layers=2"]),
    "full ac": (1, ["activation_checkpoint.mode=full"]),
    "accumulation": (1, ["training.local_batch_size=1", "training.global_batch_size=4"]),
    "ddp": (2, [f"{PARALLEL}data_parallel_replicate_degree=2"]),
    "fsdp": (2, []),
    "tp": (2, [f"{PARALLEL}tensor_parallel_degree=2"]),
    "cp": (2, [f"{PARALLEL}context_parallel_degree=2"]),
    "pp": (2, [f"{PARALLEL}pipeline_parallel_degree=2"]),
}


def shardline(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "shardline", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"shardline {' '.join(words)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def profile(folder: Path, ranks: int) -> str:
    path = folder / f"{ranks}.toml"
    if not path.exists():
        shardline("bench", "device", "--nproc", str(ranks), "--write", str(path))
    return str(path)


def trained(folder: Path, ranks: int, flags: list[str], steps: int) -> list[dict[str, Any]]:
    run = folder / "run"
    words = [f"--{flag}" for flag in (*MODEL, *flags, f"training.steps={steps}", f"job.dump_folder={run}")]
    shardline("train", *words, "--nproc", str(ranks), "--overwrite")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def case(folder: Path, name: str, steps: int, given: str | None) -> dict[str, Any]:
    ranks, flags = CASES[name]
    config = load_config(None, [f"--{flag}" for flag in (*MODEL, *flags)])
    verdict = judge(config, find_profile(given or profile(folder, ranks)), ranks, device="cpu", changes=False)
    rows = trained(folder, ranks, flags, steps)
    seconds = statistics.median(row["step_seconds"] for row in rows[WARM_UP:])
    return {
        "case": name,
        "ranks": ranks,
        "seconds": round(seconds, 4),
        "predicted_seconds": round(verdict.seconds, 4),
        "error": round(verdict.seconds / seconds - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", help="a profile for all cases, instead of measuring this machine")
    options = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name in options.cases:
            found.append(case(Path(folder), name, options.steps, options.profile))
            print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"mean_error": round(statistics.fmean(abs(row["error"]) for row in found), 3)}))


if __name__ == "__main__":
    main()
