"""Fake ranks and tensors without memory, with which dry runs and plans act as one rank of many.

PyTorch's fake process group, fake tensors and dispatch modes are private APIs; only this file uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.comm.job import Traffic, job
from shardline.comm.mesh import stop_process_group
from shardline.errors import UserError

# Part of the name of torch's op -> our name for the collective
KINDS = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "send": "send",
}

# (axis, kind), or (axis, kind, phase) -> number of calls, and bytes that this rank sends
Collectives = dict[tuple[str, ...], Counter[str]]
PHASES = ("forward", "between stages", "backward", "end")  # "end": after the last backward


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Make this process `rank` of `world_size` ranks, whose collectives return at once and change nothing."""
    if dist.is_initialized():
        raise RuntimeError("a fake process group cannot exist beside a real one")
    if world_size > 1:
        dist.init_process_group("fake", store=_fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        stop_process_group()


def _fake_store() -> Any:
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise UserError(f"PyTorch {torch.__version__} has no fake process group to simulate other ranks") from error
    return FakeStore()


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes, types and devices, but no memory and no values."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise UserError(f"cannot simulate a run: PyTorch {torch.__version__} has no fake tensors") from error
    return FakeTensorMode(allow_non_fake_inputs=True)  # parameters come from the meta device


def count_collectives(step: Callable[[], object], by_phase: bool = False) -> Collectives:
    """Count the collectives of `step`, which runs on fake tensors up to the first value that it reads."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    counted, seen, plain = _Recorder(), _KindsRecorder(), job.traffic
    job.traffic = counted
    try:
        with seen, suppress(DataDependentOutputException):
            step()
    finally:
        job.traffic = plain
    found: Collectives = {}
    # Every collective is counted once and issued once, in the same order.
    issued = [(*event, kind) for event, kind in zip(counted.events, seen.kinds, strict=True)]
    last = max((place for place, event in enumerate(issued) if event[2]), default=len(issued))
    for place, (axis, size, inside, kind) in enumerate((*issued, *counted.announced)):
        phase = "end" if last < place < len(issued) else _phase(axis, kind, inside)
        found.setdefault((axis, kind, phase) if by_phase else (axis, kind), Counter()).update(calls=1, bytes=size)
    return found


def _phase(axis: str, kind: str, inside: bool) -> str:
    """Return the phase of a collective; a pipeline sums a stage's gradients between passes, not `inside` backward."""
    if axis == "pp":
        return "between stages"
    sums = axis in ("dp_shard", "dp_replicate", "expert_shard") and kind in ("reduce-scatter", "all-reduce")
    return "backward" if inside or sums else "forward"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Recorder(Traffic):
    plans = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int, bool]] = []  # axis, bytes, whether inside backward
        self.announced: list[tuple[str, int, bool, str]] = []  # the same, and the kind

    def add(self, axis: str, size: float) -> None:
        super().add(axis, size)
        self.events.append((axis, int(size), _in_backward()))

    def planned(self, axis: str, kind: str, size: float) -> None:
        self.announced.append((axis, int(size), _in_backward(), kind))


class _KindsRecorder(TorchDispatchMode):
    """Records the kind of each collective that reaches PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.kinds += [word for part, word in KINDS.items() if part in func.__name__]
        return func(*args, **(kwargs or {}))
