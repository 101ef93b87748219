"""Folders of runs as ranks write them, with numbers that a test can know: 4 ranks, two stages, two data ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYOUT = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 2, "etp": 1}
BEGAN = 1_795_000_000.0
STEPS = 12
# What each pipeline rank did in the last step: name, start and end in microseconds.
ACTIONS = (
    [["0F0", 0, 100], ["0F1", 100, 200], ["0B0", 500, 700], ["0B1", 800, 1000]],
    [["1F0", 0, 100], ["1B0", 100, 300], ["1F1", 300, 400], ["1B1", 400, 600]],
)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_row(step: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "loss": 6.0 - 0.25 * step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64 * step}
    load = {"1": 1.5, "2": 2.0}
    return {
        **row,
        "tokens_per_second": 640.0,
        "step_seconds": 0.1,
        "memory_gib": 0.5,
        "expert_load_layers": load,
        **more,
    }


def rank_rows(rank: int, slow: int | None, ended: bool) -> list[dict[str, Any]]:
    """What one rank wrote; the `slow` one computes for longer, so that its neighbours wait less."""
    layers = [0, 1] if rank < 2 else [2, 3]
    start = {"event": "start", "time": BEGAN, "step": 0, "last_step": STEPS, "rank": rank, "world_size": 4}
    start |= {"layout": LAYOUT, "host": "node0", "pid": 100 + rank, "device": "CPU", "layers": layers}
    rows: list[dict[str, Any]] = [{**start, "parameters": 1000, "weight_bytes": 4000}]
    idle = 0.01 if rank == slow else 0.04
    for step in range(1, STEPS + 1):
        row = {"event": "step", "time": BEGAN + step, "step": step, "seconds": 0.1, "data": 0.001, "optimizer": 0.004}
        row |= {"comm": {"dp_shard": 0.01, "ep": 0.02}, "exposed": {"dp_shard": 0.004, "ep": 0.02}, "idle": idle}
        sent = {"dp_shard": 2048, "ep": 1024, "pp": 512}
        rows.append({**row, "peak_gib": 0.5, "now_gib": 0.25 + 0.01 * rank, "sent": sent})
    began = BEGAN + STEPS - (5.0 if rank >= 2 else 0.0)  # the clock of the second stage is late
    detail = {"event": "detail", "time": BEGAN + STEPS, "step": STEPS, "began": began, "actions": ACTIONS[rank // 2]}
    rows.append(detail | ({"layers": [1, 2], "experts": [[8, 24], [16, 16]]} if rank == 0 else {}))
    if rank == 0:
        rows.append({"event": "save", "time": BEGAN + 6, "step": 6, "size": 4096, "seconds": 0.5, "staged": True})
    if ended:
        rows.append({"event": "end", "time": BEGAN + STEPS + 1, "error": None, "stopped_by": None})
    return rows


def make_run(folder: Path, slow: int | None = 1, ended: bool = True, lr: float = 1e-3) -> Path:
    """A run with everything that a page can draw."""
    write_lines(
        folder / "metrics.jsonl", [*map(metrics_row, range(1, STEPS + 1)), {"step": 6, "validation_loss": 4.75}]
    )
    for rank in range(4):
        write_lines(folder / "log" / f"telemetry-{rank}.jsonl", rank_rows(rank, slow, ended))
    restart = {"time": BEGAN + 3, "cause": "rank 1 was killed by SIGKILL", "seconds": 2.5, "from_step": 2}
    write_lines(folder / "log" / "restarts.jsonl", [restart])
    engaged = {"step": 1, "kept_bytes": 2048, "attention": {"flash": 16}, "other_ranks": {"1": {"kept_bytes": 1}}}
    (folder / "engaged.json").write_text(json.dumps(engaged))
    config = f'[optimizer]\nlr = {lr}\n[training]\nsteps = {STEPS}\n[model]\nname = "llama3"\nflavor = "debugmodel"\n'
    (folder / "config.toml").write_text(config)
    return folder
