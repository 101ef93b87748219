"""Memory and time of techniques that save memory, each compared with a plain run and with the usual claim.

    python benchmarks/memory.py                                   # small on CPU, Llama 3 8B cut to 8 layers on a GPU
    python benchmarks/memory.py --variants "full AC,early step"   # includes their plain runs
    python benchmarks/memory.py -- --debug.seed=1                 # flags after -- go to every run

Every run is a `shardline train` process; it prints one JSON line per result and a table at the end. Two kinds:

    activations   many tokens: activations take most of the memory
    weights       few tokens: parameters, gradients and optimizer state do; no clipping, which early step refuses

On a GPU, memory is the peak of allocated bytes. On a CPU it is the peak of resident memory minus that of a run with a
minimal model; separate runs measure it, in which freed memory returns to the system at once. Time is the median step of
the second half of a run.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BF16 = "--training.mixed_precision_param=bfloat16"
FLOAT32 = "--training.mixed_precision_param=float32"
EARLY = "--optimizer.early_step_in_backward"


@dataclass(frozen=True)
class Variant:
    kind: str
    against: str | None  # the plain run to compare with
    flags: tuple[str, ...] = ()
    claim: str = ""
    cuda_only: bool = False


VARIANTS = {
    "float32": Variant("activations", None, (FLOAT32,)),
    "bf16 mixed precision": Variant("activations", "float32", (BF16,), "43 % memory, 52 % time saved"),
    "plain": Variant("activations", None),
    "selective AC, op": Variant(
        "activations",
        "plain",
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
        "40 % memory for 12 % time",
    ),
    "selective AC, every 2nd": Variant(
        "activations",
        "plain",
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"),
    ),
    "full AC": Variant("activations", "plain", ("--activation_checkpoint.mode=full",), "60 % memory for 25 % time"),
    "offload": Variant("activations", "plain", ("--activation_checkpoint.mode=offload",)),
    "accumulation, 8 x 1": Variant(
        "activations", "plain", ("--training.local_batch_size=1",), "60 to 90 % memory saved"
    ),
    "compile": Variant("activations", "plain", ("--compile.enable",), "1.16 times as fast"),
    "memory budget 0.5": Variant(
        "activations",
        "compile",
        (
            "--compile.enable",
            "--activation_checkpoint.mode=memory_budget",
            "--activation_checkpoint.memory_budget=0.5",
        ),
    ),
    "compile, offload": Variant("activations", "compile", ("--compile.enable", "--activation_checkpoint.mode=offload")),
    "plain, weights": Variant("weights", None),
    "early step": Variant("weights", "plain, weights", (EARLY,), "25 % memory (the gradients) for 1 to 2 % time"),
    "plain, weights, clipped": Variant("weights", None, ("--training.max_norm=1.0",)),
    "early step, two passes": Variant(
        "weights",
        "plain, weights, clipped",
        (EARLY, "--optimizer.early_step_clipping=two_pass", "--training.max_norm=1.0"),
    ),
    "optimizer state in bf16": Variant("weights", "plain, weights", ("--optimizer.state_dtype=bfloat16",)),
    "optimizer state in int8": Variant("weights", "plain, weights", ("--optimizer.state_dtype=int8",)),
    "Muon": Variant("weights", "plain, weights", ("--optimizer.name=Muon",)),
    "CPU offload": Variant("weights", "plain, weights", ("--training.enable_cpu_offload",), cuda_only=True),
}


def _model(**fields: int) -> list[str]:
    return [f"--model.overrides.{name}={value}" for name, value in fields.items()]


def _batch(size: int, length: int) -> list[str]:
    """Return flags for sequences per step and micro-batch, and tokens per sequence; later flags may override them."""
    return [
        f"--training.global_batch_size={size}",
        f"--training.local_batch_size={size}",
        f"--training.seq_len={length}",
    ]


HEADS = {"n_heads": 8, "n_kv_heads": 4}
NO_SIZE = _model(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=16, vocab_size=272) + _batch(1, 16)
SHAPES = {
    "cpu": {
        "activations": [
            *_model(dim=256, n_layers=8, head_dim=32, ffn_dim=768, vocab_size=512, **HEADS),
            *_batch(8, 512),
        ],
        "weights": [*_model(dim=1024, n_layers=6, head_dim=128, ffn_dim=3072, vocab_size=512, **HEADS), *_batch(1, 64)],
    },
    "cuda": {
        "activations": ["--model.flavor=8B", *_model(n_layers=8), *_batch(8, 2048)],
        "weights": ["--model.flavor=8B", *_model(n_layers=8), *_batch(1, 2048)],
    },
}
ALWAYS = ["--training.dataset=demo", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=2", "--optimizer.lr=1e-4"]
# glibc: every block of 64 KiB or more is mapped separately, and unmapped when it is freed
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class Refused(Exception):
    """The run did not happen; the text says why."""


def train(words: list[str], steps: int, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardline", "train", *words, f"--training.steps={steps}"]
        done = subprocess.run(
            [*command, f"--job.dump_folder={folder}/run"],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
            raise Refused(f"{'refused' if done.returncode == 2 else 'failed'}: {said[-1].strip()}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def measure(name: str, device: str, options: argparse.Namespace, floor: float) -> dict[str, Any]:
    variant = VARIANTS[name]
    no_clipping = ["--training.max_norm=0"] if variant.kind == "weights" else []
    words = [*SHAPES[device][variant.kind], *ALWAYS, *no_clipping, *variant.flags, *options.extra]
    try:
        rows = train(words, options.steps)
        memory = rows[-1]["memory_gib"]
        if device == "cpu":
            memory = train(words, 3, GIVE_BACK)[-1]["memory_gib"] - floor
    except Refused as refusal:
        return {"refused": str(refusal)}
    seconds = statistics.median(row["step_seconds"] for row in rows[len(rows) // 2 :])
    return {"memory_gib": memory, "step_seconds": seconds, "last_loss": rows[-1]["loss"]}


def compared(result: dict[str, Any], base: dict[str, Any] | None) -> dict[str, float]:
    """Return the share of the plain run's memory that is saved, and the share of its time that is added."""
    if base is None or "refused" in result or "refused" in base:
        return {}
    return {
        "memory_saved": 1 - result["memory_gib"] / base["memory_gib"],
        "time_added": result["step_seconds"] / base["step_seconds"] - 1,
    }


def chosen(words: str, device: str) -> list[str]:
    """Return the named variants and the plain runs to compare with, in the order of the table."""
    names = list(VARIANTS) if words == "all" else [part.strip() for part in _split(words)]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        sys.exit(f"no such variant: {', '.join(unknown)}; choose from {'; '.join(VARIANTS)}")
    wanted = {*names, *(VARIANTS[name].against for name in names)}
    return [name for name in VARIANTS if name in wanted and (device == "cuda" or not VARIANTS[name].cuda_only)]


def _split(words: str) -> list[str]:
    """Split at commas that do not belong to a name."""
    found: list[str] = []
    for part in words.split(","):
        if found and f"{found[-1]},{part}".strip() in VARIANTS:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':26}{'memory GiB':>11}{'s / step':>10}{'memory':>9}{'time':>9}  claimed"]
    for name, result in results.items():
        if "refused" in result:
            lines.append(f"{name:26}{result['refused']}")
            continue
        shares = "".join(
            f"{sign * result[key]:>+9.1%}" if key in result else f"{'':9}"
            for key, sign in (("memory_saved", -1), ("time_added", 1))
        )
        numbers = f"{result['memory_gib']:>11.3f}{result['step_seconds']:>10.3f}"
        lines.append(f"{name:26}{numbers}{shares}  {VARIANTS[name].claim}".rstrip())
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--variants", default="all", help=f"{'; '.join(VARIANTS)}; or all")
    parser.add_argument("extra", nargs="*")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version()}
    floor = train([*NO_SIZE, *ALWAYS, *options.extra], 3, GIVE_BACK)[-1]["memory_gib"] if device == "cpu" else 0.0
    results: dict[str, dict[str, Any]] = {}
    for name in chosen(options.variants, device):
        variant = VARIANTS[name]
        result = measure(name, device, options, floor)
        result |= compared(result, results.get(variant.against) if variant.against else None)
        results[name] = result
        line = {"benchmark": "memory", "variant": name, "kind": variant.kind, "against": variant.against, **result}
        print(json.dumps({**line, "claimed": variant.claim, "floor_gib": floor, **about}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
