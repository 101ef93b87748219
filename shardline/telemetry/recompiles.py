"""Reports functions that were compiled again after the first steps, when all should already be compiled.

Blocks are compiled as full graphs, so a graph break is an error. What can still cost time unnoticed is a recompilation
for another shape or object than the graph was compiled for.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

SETTLED_AFTER = 2  # steps, after which every shape of a run has occurred


class CompileReport:
    """Reports compilations since the last call."""

    def __init__(self) -> None:
        self._last = (_compilations() or [None])[-1]

    def lines(self, step: int, first_step: int) -> list[str]:
        """One line per function that was compiled again since the last call, once the run has settled."""
        new = list(takewhile(lambda metrics: metrics is not self._last, reversed(_compilations())))[::-1]
        self._last = new[-1] if new else self._last
        if step <= first_step + SETTLED_AFTER:
            return []
        return [_line(metrics, step) for metrics in new]


def _line(metrics: Any, step: int) -> str:
    failed = getattr(metrics, "fail_reason", None)
    if failed:
        return f"step {step}: {metrics.co_name} could not be compiled and runs eagerly: {failed}"
    reason = getattr(metrics, "recompile_reason", None) or "first use"
    return f"step {step}: {metrics.co_name} was compiled again ({' '.join(str(reason).split())})"


def _compilations() -> list[Any]:
    """The latest compilations of this process, oldest first; the compiler remembers 64."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())
