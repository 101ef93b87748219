"""Detects a loss spike: a loss far above those of the steps before it, relative to their variation."""

from __future__ import annotations

import math
import statistics
from collections import deque

REMEMBERED, LEAST = 64, 16  # the most and the fewest earlier steps to compare with
WIDE = 8.0  # times the usual deviation (1.4826 x the median of absolute deviations)
SHARE = 0.2  # of the median: if losses hardly vary, a tiny increase is no spike
NORMAL = 1.4826


class LossWatch:
    """`add` returns a line when a spike begins, and one when it is over. Losses of a spike are not remembered."""

    def __init__(self, max_loss: float | None = None) -> None:
        self.max_loss = max_loss
        self.losses: deque[float] = deque(maxlen=REMEMBERED)
        self.began: int | None = None  # the step at which the current spike began

    def add(self, step: int, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return None  # the step itself handles it
        if len(self.losses) < LEAST:
            self.losses.append(loss)
            return None
        usual = statistics.median(self.losses)
        spread = NORMAL * statistics.median(abs(one - usual) for one in self.losses)
        if loss > usual + max(WIDE * spread, SHARE * abs(usual)):
            return self._spike(step, loss, grad_norm, usual)
        line = None
        if self.began is not None:
            line = f"step {step}: the loss is {loss:.4g} again, {step - self.began} steps after its spike"
            self.began = None
        self.losses.append(loss)
        return line

    def _spike(self, step: int, loss: float, grad_norm: float, usual: float) -> str | None:
        first, lasts = self.began is None, step - (self.began or step)
        self.began = step if self.began is None else self.began
        if lasts >= REMEMBERED:  # no longer a spike: the loss has stayed there
            self.losses.clear()
            self.began = None
            return f"step {step}: the loss has stayed at {loss:.4g} since step {step - lasts}, up from {usual:.4g}"
        if not first:
            return None
        ends = "training.max_loss would end it" if self.max_loss is None else f"above {self.max_loss:g} it ends"
        return (
            f"step {step}: the loss jumped to {loss:.4g}, from a median of {usual:.4g} over the last"
            f" {len(self.losses)} steps (gradient norm {grad_norm:.4g}); the run goes on, {ends}"
        )
