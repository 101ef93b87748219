"""The connection between groups: sums over the groups, and the state that one group sends to another.

Rank r of every group is connected with rank r of the others over gloo, at the address from which this machine reaches
the lighthouse. Each group serves a store through which connecting ranks rendezvous.
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
    """Start a store at this address; return it and its host:port."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port, descriptor = listening.getsockname()[1], listening.detach()
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True
    )
    return store, f"{address}:{port}"


def connect(place: str, prefix: str, address: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect `size` processes through the store at `place`; each listens at its own `address`."""
    host, _, port = place.rpartition(":")
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to set the listen address
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(dist.PrefixStore(f"shardline/replicas/{prefix}", client), rank, size, options)


def leave(group: Any) -> None:
    """Abort a connection, so that peers that still wait in it fail at once."""
    with contextlib.suppress(Exception):
        group.abort()


def sum_over(group: Any, tensors: Sequence[Tensor]) -> int:
    """Sum tensors over the groups, in place; return the bytes that this process sent."""
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
    """Yield lists of tensors of one type that are summed together."""
    held: dict[torch.dtype, list[Tensor]] = {}
    for one in tensors:
        some = held.setdefault(one.dtype, [])
        some.append(one)
        if sum(other.nbytes for other in some) >= CHUNK_BYTES:
            yield held.pop(one.dtype)
    yield from held.values()


def send_state(group: Any, tensors: Iterable[Tensor]) -> None:
    """Send tensors to the peer of a two-process connection."""
    for some in _runs(tensors):
        flat = torch.cat([_bytes(one) for one in some])
        group.send([flat], 1, 0).wait()


def receive_state(group: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Receive tensors shaped like these from the peer; the caller copies them into place once all have arrived."""
    received = []
    for some in _runs(tensors):
        flat = torch.empty(sum(one.nbytes for one in some), dtype=torch.uint8)
        group.recv([flat], 0, 0).wait()
        pieces = flat.split([one.nbytes for one in some])
        # Copy each piece: it may begin at an offset that is not aligned for its type.
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
