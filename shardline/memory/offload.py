"""Activation offload: what a block keeps for backward is moved to host memory while other blocks compute.

    forward    computing       | block 0 | block 1 | block 2 | block 3 |
               device -> host            | kept 0  | kept 1  | kept 2  |
    backward   computing       | block 3 | block 2 | block 1 | block 0 |
               host -> device            | kept 1  | kept 0  |                 3 and 2 had not left the device yet

Autograd passes every tensor that it saves inside a block's function to `pack`, and gets it back from `unpack` in
backward. Whole storages are copied, each once: tensors keep their strides, and views of one storage remain views of one
storage. A block's copy starts when the next block begins, in whatever order a schedule runs blocks, so tensors that
backward needs at once are never sent. A block's backward fetches what the previous block kept. The hooks are around the
compiled function; its graph does not contain them.

With `offload_every` n, only every n-th block sends what it keeps, so its copy may take as long as n blocks.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardline.models.decoder import Decoder

log = logging.getLogger("shardline")
Function = Callable[..., Any]
Place = tuple[int, int]  # address and size of a tensor's whole storage

# Smaller storages stay on the device. Those of one element must, as their address may identify something (a ticket).
LEAST_BYTES = {"cuda": 2**20, "cpu": 2**10}


def offload_activations(model: Decoder, every: int) -> Offload:
    """Wrap each block's function, compiled or not; every n-th block's activations leave the device."""
    offload, sent = Offload(every), 0
    for layer, block in zip(model.layers, model.blocks(), strict=True):
        leaves = int(layer) % every == 0
        sent += leaves
        block.function = offload.around(block.function) if leaves else offload.beside(block.function)
    log.info("activation offload: %d of %d blocks keep activations in host memory", sent, len(model.layers))
    return offload


class Offload:
    """Copies what blocks keep to the host, in the order in which their forwards run.

    A copy starts with the next block and may take as long as `every` blocks; then the memory on the device is freed.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.copies: Copies | None = None  # of the device that the first block runs on
        self.last: KeptBlock | None = None  # the latest block that is offloaded
        self.leaving: deque[tuple[int, KeptBlock]] = deque()  # with the number of the block that waits for the copy
        self._unsent: KeptBlock | None = None
        self._begun = 0  # number of blocks that have begun
        self.sent = 0  # bytes to the host since the last `take`

    def take(self) -> int:
        """Return the bytes copied to the host since the last call."""
        sent, self.sent = self.sent, 0
        return sent

    def around(self, function: Function) -> Function:
        """Wrap `function(x, weights, ...)`: only x and what the function computes may leave the device."""

        def run(x: Tensor, *others: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(x, *others)
            kept = self._begin(x, others)
            with saved_tensors_hooks(kept.pack, kept.unpack):
                out = function(x, *others)
            kept.output = _place(next(_tensors(out)))
            return out

        return run

    def beside(self, function: Function) -> Function:
        """Wrap the function of a block between two offloaded ones, which keeps everything on the device."""

        def run(x: Tensor, *others: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(x, *others)
            self._advance()
            out = function(x, *others)
            if self.last is not None and self.last.output == _place(x):
                self.last.output = _place(next(_tensors(out)))  # the next offloaded block continues from here
            return out

        return run

    def _advance(self) -> None:
        """Call when a block begins: free what is due, and start to copy what the previous block keeps."""
        self._begun += 1
        while self.leaving and self.leaving[0][0] <= self._begun:
            self.leaving.popleft()[1].leave()
        if self._unsent is not None:
            self.sent += self._unsent.send()
            self.leaving.append((self._begun + self.every, self._unsent))
            self._unsent = None

    def _begin(self, x: Tensor, others: tuple[Any, ...]) -> KeptBlock:
        """Begin an offloaded block."""
        if self.copies is None:
            self.copies = Copies(x.device)
        self._advance()
        before = self.last
        continues = before is not None and before.output == _place(x)
        stay = {_place(tensor) for tensor in _tensors(others)}
        self.last = self._unsent = KeptBlock(self.copies, stay, before if continues else None)
        return self.last


class KeptMemory:
    """The storage of saved tensors: on the device, on the host, or on both while it is copied."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.size = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.host: Tensor | None = None


class SavedView(NamedTuple):
    """What autograd holds instead of a tensor."""

    memory: KeptMemory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class KeptBlock:
    """What one run of a block's function saved, until its backward begins; from then on, only tensors hold the memory.

    `stay` has the places of weights, which FSDP frees and gathers itself, and of tables and masks, which all blocks
    share.
    """

    def __init__(self, copies: Copies, stay: set[Place], before: KeptBlock | None) -> None:
        self.copies, self.stay, self.before = copies, stay, before
        self.memories: dict[Place, KeptMemory] = {}
        self.output: Place | None = None
        self.sent: Any = None  # event: the copy to the host is complete
        self.fetched: Any = None

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        storage, place, device = tensor.untyped_storage(), _place(tensor), tensor.device
        if device != self.copies.device or storage.nbytes() < LEAST_BYTES[device.type] or place in self.stay:
            return tensor
        memory = self.memories.setdefault(place, KeptMemory(storage))
        return SavedView(memory, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        self._begin_backward()
        if isinstance(saved, Tensor):
            return saved
        memory, dtype, offset, size, stride = saved
        assert memory.storage is not None
        return torch.empty(0, dtype=dtype, device=self.copies.device).set_(memory.storage, offset, size, stride)

    def _begin_backward(self) -> None:
        """When backward needs the first tensor, wait for all of them, and fetch those of the previous block."""
        if self.memories:
            self.fetch()
            self.copies.wait(self.fetched)
            for memory in self.memories.values():
                self.copies.give(memory)
            self.memories = {}
        before, self.before = self.before, None
        if before is not None:
            before.fetch()

    def send(self) -> int:
        """Start to copy everything to the host; return the bytes."""
        with self.copies.to_host():
            for memory in self.memories.values():
                self.copies.send(memory)
            self.sent = self.copies.mark()
        return sum(memory.size for memory in self.memories.values())

    def leave(self) -> None:
        """Free the memory on the device, which the computation may reuse once the copy is complete."""
        self.copies.wait(self.sent)
        for memory in self.memories.values():
            memory.storage = None

    def fetch(self) -> None:
        """Start to copy back what has left the device."""
        away = [memory for memory in self.memories.values() if memory.storage is None]
        if not away:
            return
        self.copies.make_room(away)
        with self.copies.to_device():
            for memory in away:
                self.copies.fetch(memory)
            self.fetched = self.copies.mark()


class Copies:
    """Copies between a device and the host, on two streams of a GPU and with reusable page-locked buffers.

    Memory on the device belongs to the computation's stream. This stream waits for every copy before it frees or uses
    that memory, and a copy starts after all earlier computation, so neither needs `record_stream`. A CPU copies
    synchronously, into ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.on_gpu else []
        self.free: dict[int, list[Tensor]] = defaultdict(list)  # size of a buffer -> buffers

    def to_host(self) -> contextlib.AbstractContextManager[None]:
        return self._stream(0)

    def to_device(self) -> contextlib.AbstractContextManager[None]:
        return self._stream(1)

    @contextlib.contextmanager
    def _stream(self, number: int) -> Iterator[None]:
        """Copies inside this context run beside the computation, after all work that is already queued there."""
        if not self.on_gpu:
            yield
            return
        stream = self.streams[number]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self.on_gpu else None

    def wait(self, event: Any) -> None:
        """Make the computation wait for the event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def send(self, memory: KeptMemory) -> None:
        assert memory.storage is not None
        memory.host = self._buffer(memory.size)
        memory.host[: memory.size].copy_(_bytes(memory.storage), non_blocking=True)

    def make_room(self, memories: list[KeptMemory]) -> None:
        for memory in memories:
            memory.storage = torch.empty(memory.size, dtype=torch.uint8, device=self.device).untyped_storage()

    def fetch(self, memory: KeptMemory) -> None:
        assert memory.storage is not None
        assert memory.host is not None
        _bytes(memory.storage).copy_(memory.host[: memory.size], non_blocking=True)

    def _buffer(self, size: int) -> Tensor:
        """Return a buffer of a power-of-two size, to which torch rounds anyway: the sizes of experts keep changing."""
        room = 1 << (size - 1).bit_length()
        if self.free[room]:
            return self.free[room].pop()
        return torch.empty(room, dtype=torch.uint8, pin_memory=self.on_gpu)

    def give(self, memory: KeptMemory) -> None:
        """Take a buffer back; the next copy into it starts after everything that the computation has waited for."""
        if memory.host is not None:
            self.free[memory.host.numel()].append(memory.host)
            memory.host = None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _place(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
