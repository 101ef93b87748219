"""Sends blocks of rows point to point between ranks while the ranks compute something else.

Every rank sends a block directly to each rank that needs it, nearest first, alternating between both directions:

    3 ranks or more   distance  +1, -1, +2, -2, ...     a rank that sends at distance d receives from distance -d
    2 ranks           distance  +1

Nothing is forwarded, so a transfer never waits for a rank that is busy computing. The blocks of one distance may be cut
into pieces, so that work on the first piece can begin while the rest is under way.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm.job import job
from shardline.comm.observe import Observed, described, runs_on_host
from shardline.comm.spans import now
from shardline.comm.watchdog import pass_over

pass_over(__file__)


def distances(ranks: int) -> list[int]:
    """Return the distances over which blocks are sent, nearest first, alternating between both directions."""
    return list(dict.fromkeys(d % ranks for near in range(1, ranks) for d in (near, -near)))[: ranks - 1]


def pieces(rows: int, chunks: int) -> list[slice]:
    """Cut `rows` into at most `chunks` non-empty parts whose sizes differ by at most one row."""
    chunks = max(1, min(chunks, rows))
    bounds = [rows * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


class Transfer:
    """A block that is being received; `wait` returns when it may be used."""

    def __init__(
        self, exchange: Exchange, receiving: list[Any], into: Tensor | None, staged: Tensor | None, start: int
    ) -> None:
        self.exchange, self.receiving, self.into, self.staged, self.start = exchange, receiving, into, staged, start
        self.done: Future[None] | None = None
        if job.spans.enabled and exchange.on_host and not exchange.inside and receiving:
            self.done = job.waiting_thread().submit(self._note_end)

    def wait(self) -> None:
        if not self.receiving:
            return
        with self.exchange.call:
            if self.done is not None:
                self.done.result()
            else:
                for work in self.receiving:
                    work.wait()
        if self.staged is not None and self.into is not None:
            self.into.copy_(self.staged, non_blocking=True)

    def _note_end(self) -> None:
        """Run in a separate thread: a receive does not report its completion, so a thread must wait for it."""
        for work in self.receiving:
            work.wait()
        job.spans.add(self.exchange.axis.name, self.exchange.what, self.start, now(), waiting=False)


class Exchange:
    """The transfers of one operation over one axis. `size` is the total number of bytes that this rank sends.

    `inside` a collective that is counted, watched and timed as a whole, the transfers are not observed separately.
    """

    def __init__(self, name: str, what: str, like: Tensor, size: int, inside: bool = False) -> None:
        self.axis, self.what, self.inside = job.axes[name], what, inside
        self.on_host = runs_on_host(self.axis.group, like.device)
        self.stages = like.device.type == "cuda" and self.on_host  # gloo sends and receives host memory only
        self.call: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not inside:
            self.call = Observed(name, what, described(what, name, like), size, self.on_host, background=True)
        self._sending: list[tuple[Any, Tensor]] = []  # kept, since dropping a work cancels its transfer

    def staged(self, x: Tensor) -> Tensor:
        """Return x in memory that it can be sent from: for gloo a copy on the host, made once even if sent in parts."""
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x) if self.stages else x

    def swap(self, out: Tensor | None, into: Tensor | None, distance: int) -> Transfer:
        """Send `out` to the rank at `distance`, and receive `into` from the rank at -`distance`.

        Either or both may be None; the peer must know that.
        """
        axis = self.axis
        to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        start = now() if job.spans.enabled else 0
        if not self.on_host:
            ends = ((dist.isend, out, to), (dist.irecv, into, source))
            batch = [
                dist.P2POp(kind, tensor, group=axis.group, group_peer=peer)
                for kind, tensor, peer in ends
                if tensor is not None
            ]
            works = dist.batch_isend_irecv(batch) if batch else []
            if into is None:
                self._sending += [(work, out) for work in works if out is not None]
                works = []
            return Transfer(self, works, into, None, start)
        staged = None
        if self.stages:
            out = None if out is None else out.to("cpu")
            staged = None if into is None else torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
        receiving = []
        if into is not None:
            receiving = [dist.irecv(into if staged is None else staged, group=axis.group, group_src=source)]
        if out is not None:
            self._sending.append((dist.isend(out, group=axis.group, group_dst=to), out))
        return Transfer(self, receiving, into, staged, start)

    def finish(self) -> None:
        """Return when everything is sent and its memory may be reused."""
        with self.call:
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()


def arriving(x: Tensor, full: Tensor, name: str, chunks: int) -> Iterator[slice]:
    """Fill `full` (n t, ...) with the rows x (t, ...) of all ranks; yield its rows as they arrive, own rows first."""
    axis, t = job.axes[name], x.shape[0]
    exchange = Exchange(name, "all_gather", x, (axis.size - 1) * x.nbytes)
    own = slice(axis.rank * t, (axis.rank + 1) * t)
    coming = []
    for distance in distances(axis.size):
        first = (axis.rank - distance) % axis.size * t
        for piece in pieces(t, chunks):
            rows = slice(first + piece.start, first + piece.stop)
            coming.append((rows, exchange.swap(x[piece], full[rows], distance)))
    full[own] = x
    yield own
    for rows, transfer in coming:
        transfer.wait()
        yield rows
    exchange.finish()


class Scattering:
    """Sums over ranks of blocks that are computed one by one; each rank keeps its own rows.

    `compute(rows, out)` fills `out` with this rank's summand for those rows. Other ranks' rows come first: they are
    sent while this rank computes its own rows, and during the caller's work before `result`.
    """

    def __init__(self, compute: Any, rows: int, width: int, like: Tensor, name: str, chunks: int) -> None:
        axis = job.axes[name]
        self.t, n = rows // axis.size, axis.size
        self.mine = like.new_empty(self.t, width)
        outgoing, self.received = (like.new_empty(n - 1, self.t, width) for _ in range(2))
        self.exchange = Exchange(name, "reduce_scatter", self.mine, outgoing.nbytes)
        self.coming: list[list[Transfer]] = []
        for at, distance in enumerate(distances(n)):
            first = (axis.rank + distance) % n * self.t
            self.coming.append([])
            for piece in pieces(self.t, chunks):
                compute(slice(first + piece.start, first + piece.stop), outgoing[at, piece])
                transfer = self.exchange.swap(outgoing[at, piece], self.received[at, piece], distance)
                self.coming[-1].append(transfer)
        compute(slice(axis.rank * self.t, (axis.rank + 1) * self.t), self.mine)

    def result(self) -> Tensor:
        """Return this rank's rows of the sum, added in the order of distances; narrow types in float32."""
        total = _summed(self.mine, self.received, self.coming)
        self.exchange.finish()
        return total


def _summed(mine: Tensor, received: Tensor, coming: Sequence[Sequence[Transfer]]) -> Tensor:
    """Add to mine (t, ...) what arrives in received (n - 1, t, ...), in place if no wider type is needed."""
    wide = len(coming) > 1 and mine.dtype in (torch.bfloat16, torch.float16)
    total = mine.float() if wide else mine
    for at, transfers in enumerate(coming):
        for transfer in transfers:
            transfer.wait()
        total += received[at]
    return total.to(mine.dtype)


def scatter_sum(out: Tensor, x: Tensor, name: str) -> None:
    """out (t, ...) = this rank's rows of the sum of x (n t, ...). Each row is sent once; gloo's own sends it twice."""
    axis = job.axes[name]
    blocks, order = x.view(axis.size, *out.shape), distances(axis.size)
    received = x.new_empty(len(order), *out.shape)
    exchange = Exchange(name, "reduce_scatter", out, 0, inside=True)
    coming = [
        [exchange.swap(blocks[(axis.rank + distance) % axis.size], received[at], distance)]
        for at, distance in enumerate(order)
    ]
    out.copy_(blocks[axis.rank])
    total = _summed(out, received, coming)
    if total is not out:
        out.copy_(total)
    exchange.finish()
