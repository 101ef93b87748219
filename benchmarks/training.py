"""Tokens per second and peak memory of whole training steps: ours, and `transformers`' Llama in a plain loop.

    python benchmarks/training.py                             # Llama 3 8B cut to 8 layers on a GPU, tiny on CPU
    python benchmarks/training.py --flavor 1B --variants compiled
    python benchmarks/training.py -- --activation_checkpoint.mode=full   # flags after -- go to every run of ours

Each variant runs in its own process and prints one JSON line. The first half of the steps is warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANTS = {
    "eager": [],
    "compiled": ["--compile.enable"],
    "compiled, selective op": ["--compile.enable", "--activation_checkpoint.mode=selective",
                               "--activation_checkpoint.selective_ac_option=op"],
    "compiled, full": ["--compile.enable", "--activation_checkpoint.mode=full"],
    "compiled, offload": ["--compile.enable", "--activation_checkpoint.mode=offload"],
}  # fmt: skip
TINY = ["--model.overrides.dim=128", "--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=2",
        "--model.overrides.head_dim=32", "--model.overrides.ffn_dim=384", "--model.overrides.n_layers=2",
        "--model.overrides.vocab_size=512"]  # fmt: skip


def words(options: argparse.Namespace) -> list[str]:
    size = TINY if options.tiny else [f"--model.overrides.n_layers={options.layers}"] if options.layers else []
    return [
        f"--model.flavor={options.flavor}",
        *size,
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}",
        f"--training.steps={options.steps}",
        "--metrics.log_freq=1",
        *options.extra,
    ]


def ours(options: argparse.Namespace, variant: list[str]) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "shardline",
            "train",
            *words(options),
            *variant,
            f"--job.dump_folder={folder}/run",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    measured = rows[len(rows) // 2 :]
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in measured),
        "memory_gib": rows[-1]["memory_gib"],
        "mfu": statistics.median(row["mfu"] for row in measured) if rows[-1]["mfu"] is not None else None,
        "data_share": sum(row["data_seconds"] for row in measured) / sum(row["step_seconds"] for row in measured),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def theirs(options: argparse.Namespace) -> dict[str, float | None]:
    """The alternative, in a process of its own (`--theirs`)."""
    command = [sys.executable, __file__, "--theirs", *sys.argv[1:]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def transformers_loop(options: argparse.Namespace) -> dict[str, float | None]:
    """LlamaForCausalLM, sdpa, compiled on CUDA, float32 weights under bfloat16 autocast, fused AdamW, clipping."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardline.config.load import load_config
    from shardline.models.flavors import resolve
    from shardline.run.device import choose_device, flops_per_token, peak_flops, peak_memory_gib

    arch = resolve(load_config(overrides=words(options)).model)
    device = choose_device()
    config = LlamaConfig(
        hidden_size=arch.dim, num_hidden_layers=arch.n_layers, num_attention_heads=arch.n_heads,
        num_key_value_heads=arch.n_kv_heads, head_dim=arch.head_dim, intermediate_size=arch.ffn_dim,
        vocab_size=arch.vocab_size, rope_theta=arch.rope_theta, max_position_embeddings=options.seq_len,
        tie_word_embeddings=arch.tie_word_embeddings, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    step_model = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for step in range(options.steps):
        tokens = torch.randint(256, (options.batch, options.seq_len), device=device)
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= options.steps // 2:
            seconds.append(time.perf_counter() - begun)
    rate = options.batch * options.seq_len / statistics.median(seconds)
    peak = peak_flops(device, torch.bfloat16)
    return {
        "tokens_per_second": rate,
        "memory_gib": peak_memory_gib(device),
        "mfu": rate * flops_per_token(arch, options.seq_len) / peak if peak else None,
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="8B")
    parser.add_argument("--layers", type=int, default=8, help="0 keeps the flavor's own")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", default="compiled", help=f"comma list of: {', '.join(VARIANTS)}; or all")
    parser.add_argument("--no-alternative", action="store_true")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*")
    options = parser.parse_args()
    options.tiny = not torch.cuda.is_available()
    if options.tiny:
        options.seq_len, options.steps, options.flavor = min(options.seq_len, 128), min(options.steps, 8), "debugmodel"
    if options.theirs:
        print(json.dumps(transformers_loop(options)))
        return
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version()}
    shape = {"flavor": options.flavor, "layers": options.layers, "batch": options.batch, "seq_len": options.seq_len}
    chosen = list(VARIANTS) if options.variants == "all" else options.variants.split(",")
    for name in chosen:
        result = ours(options, VARIANTS[name.strip()])
        print(json.dumps({"benchmark": "training", "variant": name, **shape, **result, **about}), flush=True)
    if not options.no_alternative:
        result = theirs(options)
        print(json.dumps({"benchmark": "training", "variant": "transformers, plain loop", **shape, **result, **about}))


if __name__ == "__main__":
    main()
