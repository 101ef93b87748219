"""Times that kernels with communication inside a matrix product record: how long they ran, waited and sent.

A kernel writes six words in its GPU's memory (parallel/tensor/fused_kernels.py). They are read after the step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORDS = 6
LATE = 1 << 62  # the earliest moment of a kind is kept as its distance from here, by a maximum
NANOSECONDS = 1e9


class KernelTimes(NamedTuple):
    """Seconds of one kernel; `sent` counts from its start. `waited` is the mean over the concurrent programs."""

    lasted: float
    waited: float
    sent: tuple[float, float] | None


class TimedKernel:
    """One launch: its name, the words that it writes, and the number of programs that run concurrently.

    Waits beyond `most` seconds, the time of the communication alone, are caused by a slower rank and do not count.
    """

    def __init__(self, name: str, device: torch.device, abreast: int, most: float = math.inf) -> None:
        self.name, self.abreast, self.most = name, abreast, most
        self.words = torch.zeros(WORDS, dtype=torch.int64, device=device)

    def times(self) -> KernelTimes:
        """Call when the device has finished."""
        times = times_of(self.words, self.abreast)
        return times._replace(waited=min(times.waited, self.most))

    def as_row(self) -> dict[str, Any]:
        """Return the row for a trace, in microseconds."""
        lasted, waited, sent = self.times()
        span = None if sent is None else [moment * 1e6 for moment in sent]
        return {"name": self.name, "lasted": lasted * 1e6, "waited": waited * 1e6, "sent": span}


def times_of(words: Tensor, abreast: int) -> KernelTimes:
    began, ended, waited, stalled, sent_from, sent_to = words.tolist()
    began, sent_from = LATE - began, LATE - sent_from
    sent = ((sent_from - began) / NANOSECONDS, (sent_to - began) / NANOSECONDS) if sent_to else None
    return KernelTimes((ended - began) / NANOSECONDS, (waited + stalled) / NANOSECONDS / abreast, sent)
