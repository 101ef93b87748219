"""The connection between groups: sums over them, and the state that one sends to another.

Rank r of every group is connected with rank r of the others, over gloo, at the address from which this machine reaches
the lighthouse. Each group serves a store, in which those that connect find each other.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 32 * 2**20


def serve_store(address: str) -> tuple[dist.TCPStore, str]:
    """A store at this address, and host:port of it."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port, descriptor = listening.getsockname()[1], listening.detach()
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True
    )
    return store, f"{address}:{port}"


def connect(place: str, prefix: str, address: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Meet `size` processes in the store at `place`; they listen at their own `address`."""
    host, _, port = place.rpartition(":")
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to say where it listens
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(dist.PrefixStore(f"shardline/replicas/{prefix}", client), rank, size, options)


def leave(group: Any) -> None:
    """Break a connection off, so that whoever still waits in it learns of that at once."""
    with contextlib.suppress(Exception):
        group.abort()


def sum_over(group: Any, tensors: Sequence[Tensor]) -> int:
    """Add up tensors over the groups, in place; returns the bytes that this process sent."""
    sent, running = 0.0, []
    for some in _chunks(tensors):
        flat = torch.cat([one.reshape(-1).cpu() for one in some])
        running.append((some, flat, group.allreduce([flat])))
        sent += 2 * (group.size() - 1) / group.size() * flat.nbytes
    for some, flat, work in running:
        work.wait()
        for one, piece in zip(some, flat.split([one.numel() for one in some]), strict=True):
            one.copy_(piece.view(one.shape))
    return round(sent)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that are summed together."""
    held: dict[torch.dtype, list[Tensor]] = {}
    for one in tensors:
        some = held.setdefault(one.dtype, [])
        some.append(one)
        if sum(other.nbytes for other in some) >= CHUNK_BYTES:
            yield held.pop(one.dtype)
    yield from held.values()


def send_state(group: Any, tensors: Iterable[Tensor]) -> None:
    """Send tensors to the other end of a connection of two."""
    for some in _runs(tensors):
        flat = torch.cat([_bytes(one) for one in some])
        group.send([flat], 1, 0).wait()


def receive_state(group: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """What the other end sends, tensors like these; nothing of it is in place before all is here."""
    received = []
    for some in _runs(tensors):
        flat = torch.empty(sum(one.nbytes for one in some), dtype=torch.uint8)
        group.recv([flat], 0, 0).wait()
        pieces = flat.split([one.nbytes for one in some])
        # A copy of each: a piece may begin where its type cannot.
        received += [piece.clone().view(one.dtype).view(one.shape) for one, piece in zip(some, pieces, strict=True)]
    return received


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for one in tensors:
        some.append(one)
        if sum(other.nbytes for other in some) >= CHUNK_BYTES:
            yield some
            some = []
    if some:
        yield some
