"""Measures what async TP gains: some logged steps run their products serially, for comparison with the others.

    logged steps   1  10  20  30  ...  110  120  130        with a comparison every 10 logged steps
                   |      serial            serial

Only a step's number decides whether it runs serially, so a resumed run repeats that. A serial step also shows how long
communication takes by itself, the reference for hidden time from then on. With the profiler nothing is compared, so
that traces show the products as they normally run.

If overlapped steps turn out slower than serial ones, the measurement at the start may have been wrong, for example
because the machine was busy. The products are then measured again, once in a run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from shardline.comm.hidden_time import Times
from shardline.config.schema import Config
from shardline.parallel.tensor.backend_table import choices

ENOUGH = 3  # steps of each kind before they can contradict the measurement at the start
SERIAL_PLACE = 2  # index among the logged steps between two comparisons: the first ones include start-up costs


def runs_serially(config: Config, step: int) -> bool:
    """Whether a logged step of a run with async TP is to run serially for comparison."""
    section, freq = config.parallelism, config.parallelism.async_tensor_parallel_compare_freq
    overlaps = section.enable_async_tensor_parallel and section.async_tensor_parallel_backend != "serial"
    if not overlaps or freq == 0 or config.profiling.enable_profiling:
        return False
    place, rest = divmod(step, config.metrics.log_freq)
    return rest == 0 and place % freq == SERIAL_PLACE % freq


class SerialComparison:
    """Times logged steps, and requests serial products in some of them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.alone: list[float] = []  # seconds of communication in serial steps
        self.serial: list[float] = []  # seconds of steps
        self.overlapped: list[float] = []
        self._began = 0.0

    def begin(self, step: int) -> None:
        """Start timing a step; the device has finished the previous one."""
        choices.serial = runs_serially(self.config, step)
        self._began = time.perf_counter()

    def end(self, times: Times, seconds: float) -> dict[str, Any]:
        """Return entries for a logged step's row. `times` and `seconds` are those of the slowest rank."""
        was_serial, choices.serial = choices.serial, False
        if was_serial:
            self.alone.append(times.comm)
            self.serial.append(seconds)
            return {"tp_comm_seconds": times.comm, "tp_serial_step_seconds": seconds}
        found = Times(statistics.median(self.alone) if self.alone else times.comm, times.exposed)
        row = {"tp_comm_seconds": found.comm, "tp_exposed_seconds": found.exposed, "tp_hidden_fraction": found.hidden}
        if not self.config.parallelism.enable_async_tensor_parallel:
            return row
        self.overlapped.append(seconds)
        return row | {"tp_overlapped_step_seconds": seconds}

    def is_contradicted(self) -> bool:
        """Whether overlapped steps take longer than serial ones; the same on every rank: all use the slowest's."""
        if min(len(self.serial), len(self.overlapped)) < ENOUGH:
            return False
        return statistics.median(self.overlapped) > statistics.median(self.serial)

    def words(self) -> str:
        overlapped, serial = map(statistics.median, (self.overlapped, self.serial))
        return f"overlapped steps took {overlapped:.3f} s and serial ones {serial:.3f} s"

    def forget(self) -> None:
        """Restart the comparison, with other choices."""
        self.serial, self.overlapped = [], []

    def seconds(self) -> float:
        """Seconds since the step began; the device has finished it."""
        return time.perf_counter() - self._began
