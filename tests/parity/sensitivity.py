"""How far the numbers of one process move when its initial weights change in their last bit.

    python -m tests.parity.sensitivity CASE [KEY=VALUE ...]

A layout rounds its sums differently, so it cannot agree with one process better than that process agrees with itself.
A case whose numbers move by its tolerance or more compares nothing: take a lower learning rate, or fewer steps, for it.
Each line is one draw: the relative change of the gradient norm in each step, then the largest change of a loss.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch

from shardline.config.load import load_config
from shardline.training.trainer import Trainer
from tests.parity.cases import CASES
from tests.parity.crossing import crossed
from tests.parity.harness import LAYOUT_KEYS, Harness

LAST_BIT = 2.0**-24
DRAWS = 5


def nudge(trainer: Trainer, seed: int) -> None:
    """Multiply every weight by 1 + LAST_BIT or 1 - LAST_BIT."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + LAST_BIT * signs)


def numbers(settings: dict[str, Any], folder: Path, seed: int) -> tuple[list[float], list[float]]:
    """Gradient norms and losses of one run; seed 0 leaves the weights as they are."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(load_config(overrides=settings | {"job.dump_folder": str(folder)}))
        if seed:
            nudge(trainer, seed)
        trainer.train()
    rows = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    return [row["grad_norm"] for row in rows], [row["loss"] for row in rows]


def apart(values: list[float], base: list[float]) -> list[float]:
    return [abs(value / other - 1) for value, other in zip(values, base, strict=True)]


def main(name: str, *changes: str) -> None:
    (entry,) = (case for case in (*CASES, *crossed()) if case.name == name)
    changed = {key: tomllib.loads(f"value = {value}")["value"] for key, value in (one.split("=") for one in changes)}
    kept = {key: value for key, value in (entry.overrides | changed).items() if not key.startswith(LAYOUT_KEYS)}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        settings = Harness(Mock(), folder).settings(kept, 1)
        norms, losses = numbers(settings, folder / "0", 0)
        print("norms", " ".join(f"{norm:.3f}" for norm in norms))
        for seed in range(1, DRAWS + 1):
            moved, moved_losses = numbers(settings, folder / str(seed), seed)
            shown = " ".join(f"{change:.0e}" for change in apart(moved, norms))
            print(f"{shown}  losses {max(apart(moved_losses, losses)):.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
