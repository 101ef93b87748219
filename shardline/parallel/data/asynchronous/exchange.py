"""Messages between a worker's rank and the ranks that serve its tensors: contributions one way, weights back.

Each pair of ranks has two gloo connections, one for the requests of each rank; a thread serves incoming requests. A
request is a header of float64, followed, if it is a contribution, by the gradients in a vector of float32.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm.exposed_time import exposed
from shardline.comm.job import job
from shardline.comm.spans import now
from shardline.parallel.data.asynchronous.server import Contribution, ParameterServer
from shardline.parallel.data.compression import flatten, unflatten

AXIS = "workers"  # in comm_bytes, and in the times of a step
PUSH, PULL, FIXED = 0.0, 1.0, 6  # kinds of headers; the count of numbers before the sums
A_DAY = timedelta(days=1)  # wait for any live peer; a connection reports at once that its peer has died


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Use around a wait for other workers: it counts as exposed, in metrics.jsonl and in the rows of this rank."""
    started = now()
    yield
    ended = now()
    exposed.add((ended - started) / 1e9)
    for waits in (False, True):
        job.spans.add(AXIS, what, started, ended, waiting=waits)


class Peers:
    """This rank's connections to the ranks at the same place in other workers."""

    def __init__(
        self,
        store: dist.Store,
        server: ParameterServer,
        worker: int,
        shapes: Sequence[Sequence[torch.Size]],
        sums: int,
    ) -> None:
        """`shapes[worker]` are the shapes that this worker's rank serves; a report has `sums` sums."""
        self.server, self.worker, self.shapes, self.sums = server, worker, shapes, sums
        self.device = server.values[0].device if server.values else torch.device("cpu")
        self.sent_bytes, self.closed = 0, False
        self.asked: dict[int, Any] = {}
        self.asking: dict[int, Any] = {}
        for low, high in ((a, b) for b in range(len(shapes)) for a in range(b) if worker in (a, b)):
            other = high if worker == low else low
            for asks, serves in ((low, high), (high, low)):
                place = dist.PrefixStore(f"{asks}-{serves}", store)
                group = dist.ProcessGroupGloo(place, int(worker == serves), 2, A_DAY)
                (self.asking if asks == worker else self.asked)[other] = group
        for other, group in self.asked.items():
            name = f"shardline-serves-{other}"
            threading.Thread(target=self._serve, args=(group,), name=name, daemon=True).start()

    def take_bytes(self) -> int:
        """Return the bytes sent since the last call, answers to requests included."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def close(self) -> None:
        """Abort all connections; peers that still wait for this rank fail."""
        self.closed = True
        for group in (*self.asked.values(), *self.asking.values()):
            with contextlib.suppress(Exception):
                group.abort()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def push(self, report: Contribution, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Send to each worker's rank the part of a contribution that it serves."""
        works, held = [], []
        head = torch.tensor([PUSH, *report[:-1], *report.sums], dtype=torch.float64)
        for other, group in self.asking.items():
            flat = flatten(gradients[other], self.shapes[other], torch.float32, self.device).cpu()
            held.append(flat)
            works += [group.send([head], 1, 0), *([group.send([flat], 1, 0)] if flat.numel() else [])]
            self.sent_bytes += head.nbytes + flat.nbytes
        own = [gradient.detach().float().clone() for gradient in gradients[self.worker]]
        self.server.add(report, own)
        with waiting("push"):
            for work in works:
                work.wait()

    def pull(self, version: int, others: Sequence[int]) -> dict[int, tuple[int, list[Tensor]]]:
        """Request weights of at least this version from these workers' ranks: worker -> (version, weights).

        The biases of the routers follow this rank's own weights.
        """
        head = torch.zeros(FIXED + self.sums, dtype=torch.float64)
        head[0], head[1] = PULL, version
        for other in others:
            if other != self.worker:
                self.asking[other].send([head], 1, 0).wait()
        found = {}
        for other in others:
            if other == self.worker:
                found[other] = self.server.read(version, biases=True)
                continue
            of = torch.zeros(1, dtype=torch.float64)
            self.asking[other].recv([of], 1, 0).wait()
            flat = torch.empty(sum(shape.numel() for shape in self.shapes[other]), dtype=torch.float32)
            if flat.numel():
                self.asking[other].recv([flat], 1, 0).wait()
            found[other] = int(of), unflatten(flat, self.shapes[other])
        return found

    # ---- serving -----------------------------------------------------------------------------------------------------

    def _serve(self, group: Any) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while True:
                self._answer(group)
        except BaseException as error:
            if not self.closed:
                self.server.fail(error)

    def _answer(self, group: Any) -> None:
        head = torch.zeros(FIXED + self.sums, dtype=torch.float64)
        group.recv([head], 0, 0).wait()
        kind, *numbers = head.tolist()
        shapes = self.shapes[self.worker]
        if kind == PUSH:
            flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=torch.float32)
            if flat.numel():
                group.recv([flat], 0, 0).wait()
            ticket, worker, version, targets, norm, *sums = numbers
            report = Contribution(int(ticket), int(worker), int(version), targets, norm, tuple(sums))
            self.server.add(report, unflatten(flat, shapes))
            return
        version, values = self.server.read(int(numbers[0]))
        flat = flatten(values, shapes, torch.float32, self.device).cpu()
        group.send([torch.tensor([float(version)], dtype=torch.float64)], 0, 0).wait()
        if flat.numel():
            group.send([flat], 0, 0).wait()
        self.sent_bytes += flat.nbytes
