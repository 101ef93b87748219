"""Averages tensors over workers in the background: whole in float32, or in 8 bits with a scale for each block.

In 8 bits, every worker averages a part of the numbers and rounds its average again:

    worker's numbers -> 8 bits | all-to-all | float32, mean of workers -> 8 bits | all-gather | float32

All workers decode the same bytes, so their averages have the same bits. Each of the two roundings changes a number by
at most half a step; a step is 1/127 of the block's largest magnitude (int8), or at most 2^-3 of the number (float8).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.exposed_time import exposed
from shardline.comm.job import Axis, job
from shardline.comm.observe import Observed, Started, described, runs_on_host
from shardline.comm.spans import now
from shardline.parallel.data.compression import flatten, unflatten

BLOCK = 256  # numbers that share a scale
Code = Literal["int8", "float8"]
LARGEST = {"int8": 127.0, "float8": 448.0}
TYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def whole_average(axis: str) -> Callable[[Sequence[Tensor]], WholeSent]:
    """Return a function that averages by an all-reduce in float32."""
    return lambda tensors: WholeSent(tensors, axis)


class WholeSent:
    """Tensors in an all-reduce that runs in the background."""

    def __init__(self, tensors: Sequence[Tensor], axis: str) -> None:
        self.shapes, self.size = [tensor.shape for tensor in tensors], collectives.axis_size(axis)
        self.flat, self.seconds = flatten(tensors, self.shapes, torch.float32, tensors[0].device), 0.0
        self.averages: list[Tensor] | None = None
        self.work: Started | None = None
        if self.size > 1:
            started = now()
            self.work = collectives.start_sum(self.flat, axis)
            _when_done(self.work.work, lambda: setattr(self, "seconds", (now() - started) / 1e9))

    def wait(self) -> list[Tensor]:
        if self.averages is None:
            if self.work is not None:
                with exposed.waiting(self.flat.device):
                    self.work.wait()
                self.flat.div_(self.size)
            self.averages = unflatten(self.flat, self.shapes)
        return self.averages


def _when_done(work: dist.Work, note: Callable[[], None]) -> None:
    """Call `note` when the backend reports that the work is complete, if it does report that."""
    try:
        work.get_future().add_done_callback(lambda future: note())
    except RuntimeError:  # a backend without futures: the time stays unknown
        return


class QuantizedAverage:
    """Averages in 8 bits; a thread of this rank runs one exchange after the other."""

    def __init__(self, axis: str, code: Code) -> None:
        self.axis, self.code = axis, code
        self._tasks: queue.SimpleQueue[QuantizedSent] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> QuantizedSent:
        if self._thread is None:  # a daemon thread: a failing rank must not wait for the others when it exits
            self._thread = threading.Thread(target=self._carry, name="shardline-outer", daemon=True)
            self._thread.start()
        sent = QuantizedSent(tensors, job.axes[self.axis], self.code)
        self._tasks.put(sent)
        return sent

    def _carry(self) -> None:
        while True:
            self._tasks.get().carry()


class QuantizedSent:
    """Tensors in an exchange of 8-bit numbers."""

    def __init__(self, tensors: Sequence[Tensor], over: Axis, code: Code) -> None:
        self.over, self.code, self.seconds = over, code, 0.0
        self.shapes, self.device = [tensor.shape for tensor in tensors], tensors[0].device
        flat = flatten(tensors, self.shapes, torch.float32, self.device)
        self.count = flat.numel()
        rows = -(-self.count // (over.size * BLOCK)) * over.size
        flat = torch.nn.functional.pad(flat, (0, rows * BLOCK - self.count))
        self.parts = encode(flat.view(over.size, -1, BLOCK), code)  # (workers, bytes of a part)
        sent = 2 * (over.size - 1) / over.size * self.parts.nbytes
        on_host = runs_on_host(over.group, self.device)
        self.call = Observed(
            over.name, "all_to_all", described("average", over.name, flat), sent, on_host, background=True
        )
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.flat = flat
        self.averages: list[Tensor] | None = None

    def carry(self) -> None:
        """Run in the background thread."""
        started = now()
        try:
            with torch.cuda.stream(self.stream), torch.no_grad():
                self._exchange()
        except BaseException as error:  # raised again where the rank waits
            self.error = error
        self.seconds = (now() - started) / 1e9
        self.done.set()

    def _exchange(self) -> None:
        received = torch.empty_like(self.parts)
        dist.all_to_all_single(received, self.parts, group=self.over.group)
        mean = decode(received, self.code).mean(0, keepdim=True)
        own = encode(mean, self.code)
        dist.all_gather_into_tensor(received, own.contiguous(), group=self.over.group)
        self.flat = decode(received, self.code).flatten()[: self.count]

    def wait(self) -> list[Tensor]:
        if self.averages is None:
            with exposed.waiting(self.device), self.call:
                self.done.wait()
                if self.stream is not None:
                    torch.cuda.current_stream(self.device).wait_stream(self.stream)
            if self.error is not None:
                raise self.error
            self.averages = unflatten(self.flat, self.shapes)
        return self.averages


def encode(x: Tensor, code: Code) -> Tensor:
    """x (parts, blocks, BLOCK) float32 -> (parts, bytes): the codes of a part, then the scales of its blocks."""
    scales = x.abs().amax(-1, keepdim=True) / LARGEST[code]
    scaled = x / scales.where(scales != 0, 1.0)
    codes = (scaled.round() if code == "int8" else scaled).clamp(-LARGEST[code], LARGEST[code]).to(TYPES[code])
    return torch.cat([codes.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)


def decode(parts: Tensor, code: Code) -> Tensor:
    """(parts, bytes) -> (parts, blocks, BLOCK) float32."""
    blocks = parts.shape[1] // (BLOCK + 4)
    codes, scales = parts.split((blocks * BLOCK, blocks * 4), dim=1)
    numbers = codes.contiguous().view(TYPES[code]).float().view(len(parts), blocks, BLOCK)
    return numbers * scales.contiguous().view(torch.float32)[..., None]


def average_over(axis: str, code: Code | None) -> Any:
    """Return a function that averages over an axis: whole, or in 8 bits."""
    if code is None or collectives.axis_size(axis) == 1:
        return whole_average(axis)
    return QuantizedAverage(axis, code)
