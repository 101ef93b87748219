"""`shardline trace kernels`: where the time of a step goes, by kind of kernel, from the traces of a run.

    matrix products   [ ---- ]   [ -------- ]  [ --- ]
    attention                 [-]
    idle                     ..               .           nothing runs on the GPU

A kind's time is the sum over its kernels. Kernels of two streams may run at the same time; then all kinds together take
longer than the step. Communication kernels are recognized by their process group, all others by their names. Without a
GPU the kinds are those of the main thread's operations, each without the time of the operations that it calls.
"""

from __future__ import annotations

import json as json_lines
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.errors import UserError
from shardline.tools.intervals import length, union, without
from shardline.tools.trace import traces_in, windows
from shardline.tools.trace_events import Activity, RankTrace, read
from shardline.words import counted, numbered

COLLECTIVES, OTHER = "collectives", "other"
# The first matching pattern counts. Names of compiled kernels list the operations fused into them, and names of
# attention kernels the library they are built with, so both come before the products.
KINDS: tuple[tuple[str, str], ...] = (
    (COLLECTIVES, r"nccl|c10d|gloo"),
    ("optimizer and clipping", r"multi_tensor_apply|adam|squares_kernel|_foreach_|linalg_vector_norm"),
    ("loss", r"loss_kernel|nll_loss|log_softmax|cross_?entropy"),
    (
        "rows of experts",
        r"(send_rows|add_up|share_counts|routes)_kernel|shardline::(expert|deepep)_|deep_ep",
    ),
    ("SwiGLU and float8", r"(swiglu|swiglu_gradient|turn|largest)_kernel"),
    ("compiled elementwise", r"^triton_(poi|red|per|for)_|cpp_fused|compiled_?(function|fxgraph)|torch-compiled"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn"),
    (
        "matrix products",
        r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitk|matmul|^triton_tem_|shardline::\w*linear"
        r"|^aten::(mm|addmm|bmm|baddbmm|linear|_?grouped_mm|_scaled_mm|_scaled_grouped_mm)|mkldnn::_linear",
    ),
    (
        "casts and copies",
        r"memcpy|memset|copy|catarray|fillfunctor"
        r"|^aten::(to|_to_copy|clone|contiguous|cat|stack|fill_|zero_|zeros|zeros_like|empty\w*)$",
    ),
    (
        "elementwise",
        r"elementwise|reduce_kernel|softmax|layer_?norm|rms_?norm"
        r"|^aten::(add|sub|mul|div|neg|pow|exp|rsqrt|sqrt|reciprocal|silu|sigmoid|sum|mean|amax|where|clamp)\w*$",
    ),
)


@dataclass
class Amount:
    """Milliseconds and launches; averages per step once `StepTimes` is complete."""

    ms: float = 0.0
    launches: float = 0.0

    def add(self, ms: float, launches: float = 1) -> None:
        self.ms += ms
        self.launches += launches


@dataclass
class StepTimes:
    """The mean step of all traces; `idle` counts gaps instead of launches."""

    on_gpu: bool
    ranks: list[int]
    steps: int = 0
    step: Amount = field(default_factory=Amount)
    idle: Amount = field(default_factory=Amount)
    kinds: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))
    kernels: dict[tuple[str, str], Amount] = field(default_factory=lambda: defaultdict(Amount))  # (kind, name)


def command(traces: Sequence[str], top: int = 15, json: bool = False) -> int:
    paths = [path for trace in traces for path in traces_in(Path(trace))]
    times = times_of([read(path) for path in paths])
    if not times.kernels:
        raise UserError(f"{paths[0]} shows neither kernels nor operations")
    print(json_lines.dumps(_json(paths, times, top)) if json else table(times, top))
    return 0


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def times_of(ranks: Sequence[RankTrace]) -> StepTimes:
    """Return the mean over all steps of all ranks. A kernel belongs to the step in which the host launched it."""
    times = StepTimes(any(rank.on_gpu for rank in ranks), [rank.rank for rank in ranks if rank.rank is not None])
    for rank in ranks:
        timed = _on_gpu(rank) if rank.on_gpu else _on_host(rank)
        busy = union((activity.start, activity.end) for _, activity, _ in timed)
        for _, (begin, end), window in windows(rank):
            gaps = without([window], busy)
            times.steps += 1
            times.step.add(length([window]) / 1e3)
            times.idle.add(length(gaps) / 1e3, len(gaps))
            for kind, activity, spent in timed:
                if begin <= activity.launched < end:
                    times.kinds[kind].add(spent / 1e3)
                    times.kernels[kind, activity.name].add(spent / 1e3)
    for amount in (times.step, times.idle, *times.kinds.values(), *times.kernels.values()):
        amount.ms /= max(times.steps, 1)
        amount.launches /= max(times.steps, 1)
    return times


Timed = tuple[str, Activity, float]  # kind, what ran, microseconds that count for it


def _on_gpu(rank: RankTrace) -> list[Timed]:
    talking = [activity for found in rank.communication.values() for activity in found]
    kinds = [(COLLECTIVES, activity) for activity in talking]
    kinds += [(kind_of(activity.name), activity) for activity in rank.computation]
    return [(kind, activity, activity.end - activity.start) for kind, activity in kinds]


def _on_host(rank: RankTrace) -> list[Timed]:
    """Return the operations and waits of the main thread, each without the time of what runs inside it."""
    busiest = Counter(activity.thread for activity in rank.computation).most_common(1)
    main = rank.main if rank.main is not None or not busiest else busiest[0][0]
    kinds = [(COLLECTIVES, wait) for wait in rank.waits]
    kinds += [(kind_of(activity.name), activity) for activity in rank.computation if activity.thread == main]
    kinds.sort(key=lambda pair: (pair[1].start, -pair[1].end))
    spent = [activity.end - activity.start for _, activity in kinds]
    around: list[int] = []  # the operations in progress, each inside the previous one
    for number, (_, activity) in enumerate(kinds):
        while around and kinds[around[-1]][1].end <= activity.start:
            around.pop()
        if around:
            spent[around[-1]] -= min(activity.end, kinds[around[-1]][1].end) - activity.start
        around.append(number)
    return [(kind, activity, own) for (kind, activity), own in zip(kinds, spent, strict=True)]


# ---- output ----------------------------------------------------------------------------------------------------------


def table(times: StepTimes, top: int) -> str:
    what, gaps = ("kernels", "idle") if times.on_gpu else ("operations", "outside operations")
    where = f" on {numbered('rank', times.ranks)}" if times.ranks else ""
    lines = [f"mean of {counted(times.steps, 'step')}{where}: {times.step.ms:.3f} ms", _header("", "kind")]
    lines += [_line(times, amount, "", kind) for kind, amount in _sorted(times.kinds)]
    lines.append(_line(times, times.idle, "", f"{gaps} (launches: gaps)"))
    if top:
        lines += ["", _header(f"{'kind':<24}", f"{what} that take the most time")]
        for (kind, name), amount in _sorted(times.kernels)[:top]:
            lines.append(_line(times, amount, f"{kind:<24}", f"{name:.100}"))
    return "\n".join(lines)


def _header(kind: str, name: str) -> str:
    return f"{'ms':>12}{'share':>8}{'launches':>10}  {kind}{name}"


def _line(times: StepTimes, amount: Amount, kind: str, name: str) -> str:
    return f"{amount.ms:>12.3f}{_share(times, amount):>8.1%}{amount.launches:>10.1f}  {kind}{name}"


def _share(times: StepTimes, amount: Amount) -> float:
    return amount.ms / times.step.ms if times.step.ms else 0.0


def _sorted(amounts: dict[Any, Amount]) -> list[tuple[Any, Amount]]:
    return sorted(amounts.items(), key=lambda item: -item[1].ms)


def _json(paths: Sequence[Path], times: StepTimes, top: int) -> dict[str, Any]:
    def row(amount: Amount, count: str = "launches", **of: str) -> dict[str, Any]:
        return {**of, "ms": amount.ms, "share": _share(times, amount), count: amount.launches}

    return {
        "traces": [str(path) for path in paths],
        "device": "gpu" if times.on_gpu else "cpu",
        "steps": times.steps,
        "step_ms": times.step.ms,
        "idle": row(times.idle, "gaps"),
        "kinds": [row(amount, kind=kind) for kind, amount in _sorted(times.kinds)],
        "top": [row(amount, kind=kind, name=name) for (kind, name), amount in _sorted(times.kernels)[:top]],
    }
