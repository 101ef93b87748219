"""Ours and TorchTitan on one GPU in the same run: tokens per second, peak memory, loss.

    python benchmarks/torchtitan.py                          # experts: DeepSeek 16B cut to 8 layers, Qwen3 30B-A3B to 6
    python benchmarks/torchtitan.py --models llama3          # dense: Llama 3 8B cut to 8 layers

TorchTitan 0.2.2 must be importable. Both train in bfloat16, compiled, without checkpointing, with AdamW and clipping,
on byte tokens; each run has a process of its own and prints one JSON line. The first half of the steps is warm-up.
Memory is what the allocator has reserved at most: TorchTitan resets the other peak at each logged step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    name: str  # model.name, the same in both
    flavor: str
    layers: int
    seq_len: int
    batch: int
    args: str  # TorchTitan's table of flavors, and what is changed in this one
    changes: dict[str, Any]


CAUSAL = {"attn_type": "sdpa", "attn_mask_type": "causal"}
SHAPES = {
    "deepseek_v3": Shape("deepseek_v3", "16B", 8, 4096, 4, "deepseekv3_args", CAUSAL),
    "qwen3": Shape("qwen3", "30B-A3B", 6, 4096, 4, "qwen3_args", {"max_seq_len": 4096}),
    "llama3": Shape("llama3", "8B", 8, 8192, 2, "llama3_args", {}),
}

# Runs inside TorchTitan, as its `experimental.custom_import`.
PEAK = """
import atexit, torch
GIB = 2**30
atexit.register(lambda: print("PEAK", torch.cuda.max_memory_reserved() / GIB))
"""
FLAVOR = """
import copy, dataclasses
from torchtitan.models.{name} import {args} as flavors
flavors["cut"] = dataclasses.replace(copy.deepcopy(flavors["{flavor}"]), n_layers={layers}, **{changes})
"""


def write_assets(folder: Path) -> None:
    """A byte tokenizer and some text, in the forms that TorchTitan reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    data = folder / "c4_test"
    data.mkdir()
    text = "".join(f"Line {n} of a text that is long enough to be cut into many sequences. " for n in range(4000))
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(20)))


def titan(shape: Shape, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_assets(folder)
        (folder / "cut_flavor.py").write_text(FLAVOR.format(**shape._asdict()) + PEAK)
        command = [
            *(sys.executable, "-m", "torchtitan.train", f"--job.dump_folder={folder}/out"),
            *(f"--model.name={shape.name}", "--model.flavor=cut", f"--model.hf_assets_path={folder}"),
            *("--experimental.custom_import=cut_flavor", "--training.dataset=c4_test"),
            *(f"--training.dataset_path={folder}/c4_test", f"--training.seq_len={shape.seq_len}"),
            *(f"--training.local_batch_size={shape.batch}", f"--training.steps={steps}", "--metrics.log_freq=1"),
            *("--compile.enable", "--activation_checkpoint.mode=none"),
        ]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **ranks, "PYTHONPATH": path, "NO_COLOR": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    if done.returncode:
        raise SystemExit(plain[-4000:])
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"tps: ([\d,]+)", plain)]
    losses = [float(loss) for loss in re.findall(r"loss: +([\d.]+)", plain)]
    reserved = float(re.findall(r"PEAK ([\d.]+)", plain)[-1])
    return {
        "tokens_per_second": statistics.median(rates[len(rates) // 2 :]),
        "reserved_gib": reserved,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def ours(shape: Shape, steps: int, extra: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "shardline", "train", f"--job.dump_folder={folder}/run", "--compile.enable"),
            *(f"--model.name={shape.name}", f"--model.flavor={shape.flavor}"),
            *("--training.dataset=demo", f"--model.overrides.n_layers={shape.layers}"),
            *("--model.overrides.attn_mask_type=causal", "--model.overrides.attn_backend=auto"),
            *(f"--training.seq_len={shape.seq_len}", f"--training.local_batch_size={shape.batch}"),
            *(f"--training.steps={steps}", "--metrics.log_freq=1", "--experimental.custom_import=cut_peak", *extra),
        ]
        Path(folder, "cut_peak.py").write_text(PEAK)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    measured = rows[len(rows) // 2 :]
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in measured),
        "reserved_gib": float(re.findall(r"PEAK ([\d.]+)", done.stdout)[-1]),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="deepseek_v3,qwen3", help=f"comma list of: {', '.join(SHAPES)}")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("extra", nargs="*", help="flags after -- go to our runs")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    about = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    for name in options.models.split(","):
        shape = SHAPES[name]
        where = {"model": name, "flavor": shape.flavor, "layers": shape.layers, "seq_len": shape.seq_len}
        results = {"torchtitan": titan(shape, options.steps), "shardline": ours(shape, options.steps, options.extra)}
        for who, result in results.items():
            print(json.dumps({"benchmark": "torchtitan", "trainer": who, **where, **result, **about}), flush=True)
        ratios = {
            f"{key}_ratio": round(results["shardline"][key] / results["torchtitan"][key], 3)
            for key in ("tokens_per_second", "reserved_gib")
        }
        print(json.dumps({"benchmark": "torchtitan", **where, **ratios}), flush=True)


if __name__ == "__main__":
    main()
