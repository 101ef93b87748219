"""What `shardline doctor` reads: one record for each machine, each rank and each measured rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class GPUState:
    """One GPU as its driver reports it; None for what the driver does not report."""

    name: str
    memory_used: float | None = None  # bytes used by other programs
    link_width: int | None = None  # PCIe lanes now
    link_width_most: int | None = None
    uncorrected_errors: int | None = None  # memory errors since the driver was loaded
    slowed: bool | None = None  # by heat, or by the power supply


@dataclass(frozen=True)
class HostState:
    """One machine, as a rank on it sees it."""

    host: str
    versions: Mapping[str, str | None]  # shardline, python, torch, cuda, nccl, linux, driver
    cores: int  # available to this process
    cpu_quota: float | None  # cores allowed by the control group
    memory_left: int | None  # bytes for new programs, within the control group's limit
    shared_memory: tuple[int, int] | None  # bytes of /dev/shm: all, free
    open_files: int  # limits of this process; -1: none
    processes: int
    locked_memory: int
    infiniband: bool
    gloo: bool
    nccl: bool
    interface: str | None = None  # that gloo uses
    cards: int = 0  # GPUs that the kernel knows
    hidden: bool = False  # CUDA_VISIBLE_DEVICES is empty: the user wants the CPU
    cuda_problem: str = ""  # why the GPUs cannot be used
    gpus: Sequence[GPUState] = ()
    peers: Sequence[Sequence[bool]] = ()  # whether GPU i may read the memory of GPU j
    paths: Sequence[Sequence[str]] = ()  # how GPU i is connected to GPU j, in nvidia-smi's words


@dataclass(frozen=True)
class StorageState:
    """The file system of a run's folder."""

    path: str
    problem: str = ""  # why nothing can be written
    kind: str = ""  # ext4, nfs4, ...
    free: int = 0
    write: float = 0.0  # bytes/s of writing a file, fsync included
    read: float = 0.0  # bytes/s of reading it again, past the cache if possible
    sync_seconds: float = 0.0  # until a small file is safe
    lock_problem: str = ""  # why flock does not keep a second process out


@dataclass(frozen=True)
class RankState:
    """One rank: where it runs, and by how much its clock is ahead of rank 0's."""

    rank: int
    host: str
    device: str = "cpu"
    clock_ahead: float = 0.0  # seconds
    clock_error: float = 0.0  # half of the fastest answer


@dataclass(frozen=True)
class Rate:
    """A measured rate and the one that the device should reach; None if there is no profile for it."""

    what: str
    rank: int
    measured: float
    expected: float | None
    unit: str  # GB/s, TFLOP/s


@dataclass(frozen=True)
class CheckpointNeed:
    """The space that the checkpoints of a config need."""

    size: int  # bytes of one checkpoint
    keep: int  # how many are kept; 0: all
    enabled: bool


@dataclass(frozen=True)
class Examination:
    """All readings; those not taken are empty."""

    hosts: Sequence[HostState]
    ranks: Sequence[RankState]
    storage: Sequence[StorageState] = ()  # by host
    rates: Sequence[Rate] = ()
    need: CheckpointNeed | None = None
    job: bool = field(default=False)  # several ranks are connected

    def ranks_on(self, host: str) -> int:
        return sum(rank.host == host for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
