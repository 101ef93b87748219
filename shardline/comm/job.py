"""The state of the job that this process is a rank of: one object, `job`.

The mesh fills it, the rest of `comm` reads it, and `stop_process_group` clears it at the end of a run, so that the next
run in the same process starts without state of the last one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardline.comm.exposed_time import exposed
from shardline.comm.hidden_time import DeviceClock, RowClock
from shardline.comm.spans import Spans

if TYPE_CHECKING:
    from shardline.comm.symmetric_memory import Space
    from shardline.comm.watchdog import Watchdog


@dataclass(frozen=True)
class Axis:
    """The ranks of one mesh dimension that this rank talks to."""

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int


class Traffic:
    """Bytes sent per axis since the last `take`."""

    plans = False  # True in a dry run, which assumes that sizes that depend on values are even

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)

    def add(self, axis: str, size: float) -> None:
        self.bytes[axis] += size

    def planned(self, axis: str, kind: str, size: float) -> None:
        """Report what an operation on fake tensors would send; only a dry run records it."""

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is sent inside this context: it measures the run and is not part of it."""
        kept = dict(self.bytes)
        yield
        self.bytes.clear()
        self.bytes.update(kept)

    def take(self) -> dict[str, int]:
        taken = {axis: round(size) for axis, size in self.bytes.items()}
        self.bytes.clear()
        return taken


@dataclass
class JobState:
    """The state of one rank."""

    axes: dict[str, Axis] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # axis or channel -> its ranks, for the watchdog
    joined: set[str] = field(default_factory=set)  # axes whose ranks have connected in a collective on a device
    # Axis -> what runs collectives on GPU tensors instead of the process group (symmetric_memory.Direct)
    direct: dict[str, Any] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    spans: Spans = field(default_factory=Spans)
    clock: DeviceClock = field(default_factory=DeviceClock)
    row_clock: RowClock = field(default_factory=RowClock)
    watchdog: Watchdog | None = None
    waiter: ThreadPoolExecutor | None = None  # notes when transfers end, while spans are recorded
    spaces: dict[str, Space] = field(default_factory=dict)  # group name -> memory that its ranks share
    workspaces: dict[str, int] = field(default_factory=dict)  # group name -> bytes of PyTorch's own workspace
    carrier: Any = None  # sends rows to experts (parallel/expert/dispatch.py)
    rows_under_way: dict[int, Any] = field(default_factory=dict)  # for experts: address of a ticket -> the transfer

    def set_axes(self, axes: dict[str, Axis]) -> None:
        """Replace the axes, and clear all state that belonged to the old ones."""
        self.axes = dict(axes)
        self.members = {name: tuple(dist.get_process_group_ranks(over.group)) for name, over in axes.items()}
        if "fsdp" in axes:
            self.members["dp_shard"] = self.members["fsdp"]  # FSDP's collectives have this name but also run over cp
        self.joined.clear()
        self.direct.clear()
        self.carrier = None
        self.rows_under_way.clear()
        self.traffic.take()
        exposed.begin_run()

    def reset(self) -> None:
        """Forget the run that ends. Readers of spans stay: each reader ends its own recording."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.waiter is not None:
            self.waiter.shutdown(wait=False)
            self.waiter = None
        self.set_axes({})
        self.clock, self.row_clock = DeviceClock(), RowClock()

    def waiting_thread(self) -> ThreadPoolExecutor:
        if self.waiter is None:
            self.waiter = ThreadPoolExecutor(1, thread_name_prefix="shardline-transfers")
        return self.waiter


job = JobState()
