"""How long a job took from a fault back to training, by part: a line for the user, a record in log/restarts.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.launch.endpoint import print_line
from shardline.launch.failures import in_a_line
from shardline.launch.rounds import Round
from shardline.report import Report
from shardline.storage.atomic import plain_file
from shardline.words import counted

LOG_FILE = Path("log") / "restarts.jsonl"
PARTS = ("detect", "rendezvous", "load", "first step")
MARKS = ("joined", "loaded", "first_step")  # in the notes of rank 0


@dataclass
class Recovery:
    """One way back to training; times are seconds since the epoch by the clock of the machine with rank 0."""

    cause: Report
    fault_at: float
    decided_at: float
    restart: int = 0
    machines: int = 0
    ranks: int = 0
    reached: dict[str, float] = field(default_factory=dict)  # when each of MARKS was reached

    def parts(self) -> dict[str, float]:
        """Seconds by part, as far as they are over."""
        times = [self.fault_at, self.decided_at, *(self.reached[name] for name in MARKS if name in self.reached)]
        return {name: round(max(0.0, b - a), 3) for name, a, b in zip(PARTS, times[:-1], times[1:], strict=False)}

    def begins(self, met: Round, max_restarts: int) -> None:
        """Note that the machines have met again; print why they had to, and how many there are."""
        self.machines, self.ranks, self.restart = len(met.peers), met.ranks, met.state.restarts
        is_failure = self.cause.kind not in ("regroup", "leave")
        what = f"restart {self.restart} of {max_restarts}" if is_failure else "continuing"
        size = f"{counted(self.machines, 'machine')}, {counted(self.ranks, 'rank')}"
        print_line(f"{in_a_line(self.cause)}; {what} with {size}")

    def line(self) -> str:
        parts = self.parts()
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"recovered in {sum(parts.values()):.1f} s: {shown}"

    def record(self, step: int | None) -> dict[str, Any]:
        done = MARKS[-1] in self.reached
        return {
            "time": round(self.fault_at, 3),
            "cause": in_a_line(self.cause),
            "details": self.cause.details,
            "restart": self.restart,
            "machines": self.machines,
            "ranks": self.ranks,
            "from_step": step,
            "recovered": done,
            "seconds": round(sum(self.parts().values()), 3) if done else None,
            "parts": self.parts(),
        }

    def append_to_log(self, folder: str | None, step: int | None) -> None:
        """Append the record to the run's log; without a run folder there is none yet."""
        if folder is None:
            return
        try:
            path = Path(folder) / LOG_FILE
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", opener=plain_file) as file:
                file.write(json.dumps(self.record(step)) + "\n")
        except OSError as error:
            print_line(f"note: {folder}/{LOG_FILE} is not written: {error.strerror}")
