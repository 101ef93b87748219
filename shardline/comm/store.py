"""The job's store, through which ranks find each other: connections to it, hosts and pids, time-outs of groups."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardline.errors import UserError

MARGIN = 1.2  # the backends' own time-outs name no rank: they come after the watchdog's
LEAST_MARGIN_SECONDS = 20


def ranks_from_environment(name: str, otherwise: int) -> int:
    """A number of ranks that the launcher set in the environment."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{name}={text} in the environment: a launcher sets it to a number of ranks; unset it")
    return int(text)


def connect_store(timeout_seconds: float = 60) -> dist.Store:
    """A separate connection to the job's store: one on which a collective waits is blocked for all other users."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return dist.PrefixStore(f"shardline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def start_groups(backend: str, timeout: timedelta) -> None:
    """Join the ranks of this attempt. The launcher's store outlives attempts and torch's keys in it do not name them:
    a restarted rank would find those of the attempt before.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.PrefixStore("groups", connect_store(timeout.total_seconds()))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def gather_ranks(store: dist.Store, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Rank, host and pid of every worker, on rank 0; the other ranks only report theirs and get an empty list."""
    own = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    store.set(f"ranks/{rank}", json.dumps(own))
    if rank != 0:
        return []
    return [json.loads(text) for text in store.multi_get([f"ranks/{other}" for other in range(world_size)])]


def backend_timeout(seconds: float) -> timedelta:
    """The time-out to give a process group where the watchdog has `seconds`."""
    return timedelta(seconds=max(seconds * MARGIN, seconds + LEAST_MARGIN_SECONDS))


def set_group_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Change the time-out of collectives that are issued from now on, where this release of torch can."""
    from torch.distributed import distributed_c10d

    change = getattr(distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        for group in groups:
            change(timeout, group)
