"""The closing table of a run, which summarises its rows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunSummary:
    """What the closing table needs from the steps and rows so far."""

    first: tuple[int, float] | None = None  # step and loss
    last: tuple[int, float] | None = None
    validation: tuple[int, float] | None = None
    memory: float = 0.0
    speeds: list[float] = field(default_factory=list)  # tokens per second
    tensor: list[dict[str, float]] = field(default_factory=list)  # rows with tensor-parallel communication
    bubbles: list[float] = field(default_factory=list)
    theoretical_bubble: float | None = None
    plain_bubble: float | None = None  # of 1F1B on the same ranks, if the run has another schedule
    expert_loads: list[float] = field(default_factory=list)  # the largest of all layers, max over mean
    expert_layers: dict[str, float] = field(default_factory=dict)  # from the last row

    def stepped(self, step: int, loss: float) -> None:
        self.first = self.first or (step, loss)
        self.last = (step, loss)

    def add(self, row: dict[str, Any]) -> None:
        self.speeds.append(row["tokens_per_second"])
        self.memory = max(self.memory, row["memory_gib"])
        if "tp_comm_seconds" in row:
            self.tensor.append(row)
        if "pp_bubble_fraction" in row:
            self.bubbles.append(row["pp_bubble_fraction"])
        if "expert_load" in row:
            self.expert_loads.append(row["expert_load"])
            self.expert_layers = row["expert_load_layers"]


def summary(seen: RunSummary, step: int, total: int) -> list[tuple[str, str]]:
    """Label and value of each row of the closing table."""
    rows = [("steps", f"{step}" if step == total else f"{step} of {total}")]
    losses = {"first loss": seen.first, "last loss": seen.last, "validation loss": seen.validation}
    rows += [(label, f"{found[1]:.4f} (step {found[0]})") for label, found in losses.items() if found is not None]
    if seen.speeds:  # the first row includes start-up costs
        rows.append(("speed", f"{statistics.harmonic_mean(seen.speeds[1:] or seen.speeds):,.0f} tokens/s"))
        rows.append(("peak memory", f"{seen.memory:.2f} GiB"))
    if seen.tensor:
        rows.append(("tp communication", tensor_summary(seen.tensor)))
    if seen.bubbles:
        rows.append(("pp bubble", bubble_summary(seen.bubbles, seen.theoretical_bubble, seen.plain_bubble)))
    if seen.expert_loads:
        rows.append(("expert load", expert_summary(seen.expert_loads, seen.expert_layers)))
    return rows


def tensor_summary(rows: list[dict[str, float]]) -> str:
    """How long tensor-parallel communication takes, how much is hidden, and how steps compare with serial ones."""

    def median(key: str) -> float | None:
        found = [row[key] for row in rows[1:] or rows if key in row]  # the first row includes start-up costs
        return statistics.median(found) if found else None

    hidden, step, serial = map(median, ("tp_hidden_fraction", "tp_overlapped_step_seconds", "tp_serial_step_seconds"))
    text = f"{median('tp_comm_seconds') or 0.0:.3f} s a step"
    if hidden is not None:
        text += f", {hidden:.0%} hidden"
    if step and serial:
        times = f"{serial / step:.2f} times as fast as serial steps, measured: {step:.3f} s against {serial:.3f}"
        text += f"; {times}{'' if serial > step else ' (not worth it here)'}"
    return text


def bubble_summary(bubbles: list[float], theory: float | None, plain: float | None = None) -> str:
    """The idle share of a step, without the first one's start-up costs, next to the schedule's theoretical share.

    A schedule that promises less than 1F1B's share, `plain`, and does not keep to it is said to be not worth it.
    """
    measured = statistics.median(bubbles[1:] or bubbles)
    text = f"{measured:.1%} of the step" + (f", {theory:.1%} by the schedule" if theory is not None else "")
    if theory is not None and plain is not None and theory < plain <= measured:
        text += f"; no less than 1F1B's {plain:.1%} (not worth it here)"
    return text


def expert_summary(loads: list[float], layers: dict[str, float]) -> str:
    """The load of the most used expert relative to the mean, in the last row and in the worst."""
    worst = max(layers, key=lambda layer: layers[layer])
    return f"{loads[-1]:.2f} times the mean at most (layer {worst}), {max(loads):.2f} in the worst step"
