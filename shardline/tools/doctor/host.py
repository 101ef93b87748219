"""Reads one machine: versions, cores, memory, shared memory, limits of the process, control groups."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from shardline import __version__
from shardline.launch.endpoint import gloo_interface
from shardline.run.device import available_memory
from shardline.tools.doctor import gpus
from shardline.tools.doctor.readings import HostState

CONTROL_GROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")


def read_host() -> HostState:
    cards = gpus.cards()
    problem = gpus.cuda_problem() if cards else ""
    usable = torch.cuda.is_available() and not problem
    return HostState(
        host=socket.gethostname(),
        versions=versions(),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(CONTROL_GROUP),
        memory_left=available_memory(torch.device("cpu"), 1),
        shared_memory=shared_memory(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=dist.is_available() and dist.is_nccl_available(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or gloo_interface(_first_machine(), alone=not _first_machine()),
        cards=cards,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES") == "",
        cuda_problem=problem,
        gpus=gpus.read_gpus() if usable else (),
        peers=gpus.peers() if usable else (),
        paths=gpus.read_paths() if usable else (),
    )


def versions() -> dict[str, str | None]:
    nccl = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "shardline": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": gpus.driver_version(),
        "linux": platform.release(),
    }


def cpu_quota(root: Path) -> float | None:
    """Return the number of cores that a control group allows; None without a limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max": there is no limit
        return None


def shared_memory() -> tuple[int, int] | None:
    if not SHARED_MEMORY.is_dir():
        return None
    found = shutil.disk_usage(SHARED_MEMORY)
    return found.total, found.free


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _first_machine() -> str:
    """Return the rendezvous address of ranks on several machines; "" on one machine."""
    alone = os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")
    return "" if alone else os.environ.get("MASTER_ADDR", "")
