"""A model and a run small enough for a test, and the ways tests start one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shardline.config.load import load_config
from shardline.training.trainer import Trainer

TINY = {
    "model.overrides": {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 96,
        "vocab_size": 272,
    },
    "training.seq_len": 32,
    "training.local_batch_size": 4,
    "training.steps": 6,
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 1,
}


def tiny_config(folder: Path | str, **overrides):
    """`section__key=value` beside the tiny defaults; no file."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = {**TINY, "job.dump_folder": str(folder), **changes}
    if "training.epochs" in settings:
        del settings["training.steps"]
    return load_config(overrides=settings)


def run(folder: Path, options=None, **overrides) -> list[dict]:
    """Train in this process; the rows of metrics.jsonl."""
    Trainer(tiny_config(folder, **overrides), options).train()
    return rows(folder)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def flags(folder: Path, **overrides) -> list[str]:
    settings = {**TINY, "job.dump_folder": str(folder)} | {k.replace("__", "."): v for k, v in overrides.items()}
    words = []
    for key, value in settings.items():
        if isinstance(value, dict):
            words += [f"--{key}.{field}={item}" for field, item in value.items()]
        else:
            words.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def command(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardline", *words], capture_output=True, text=True, **options)
