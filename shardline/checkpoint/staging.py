"""Copies of the state in host memory, which a save writes while training changes the originals.

Buffers are made once and used again: a staging costs a copy, and no page is touched for the first time. From a GPU into
pinned memory the copies run beside training:

    training stream   step 8 | backward of step 9 ... | wait for `copied` | optimizer step 9
    copying stream           | copy, copy, copy ... -> copied

The host only issues them. What changes the state is the optimizer's step, and that waits, on the device, for the event.
The little that backward changes already is copied on the training stream, before all else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.checkpoint.shards import Part, moved

PINNED_CHUNK = 1 << 30  # torch rounds pinned memory up to powers of two: many tensors share one of that size
ALIGNMENT = 64


class Buffers:
    """Host memory for some parts; made again when they are not those of the save before."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._shapes: list[Any] = []
        self._views: list[Tensor] = []

    def views(self, parts: list[Part]) -> list[Tensor]:
        shapes = [(part.tensor.shape, part.tensor.dtype) for part in parts]
        if shapes != self._shapes:
            self._views = []  # the old ones go before the new ones come
            self._views, self._shapes = self._made(parts), shapes
        return self._views

    def _made(self, parts: list[Part]) -> list[Tensor]:
        """A view for each part, one behind the other in chunks."""
        sizes = [-(-part.tensor.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        chunks: list[list[int]] = []
        room = 0
        for index, size in enumerate(sizes):
            if size > room:
                chunks.append([])
                room = PINNED_CHUNK
            chunks[-1].append(index)
            room -= size
        views: list[Tensor] = [torch.empty(0)] * len(parts)
        for indices in chunks:
            memory = torch.empty(sum(sizes[i] for i in indices), dtype=torch.uint8, pin_memory=self.pinned)
            if not self.pinned:
                memory.zero_()  # pages are given at the first touch
            offset = 0
            for i in indices:
                tensor = parts[i].tensor
                views[i] = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                offset += sizes[i]
        return views


class Staging:
    """Copies parts for one save after the other; `ready` waits, in the writer's thread, until they are there."""

    def __init__(self, optimizer: torch.optim.Optimizer, pinned: bool) -> None:
        self._buffers = Buffers(pinned and torch.cuda.is_available())
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def prepare(self, parts: list[Part]) -> None:
        """Make the buffers, which takes longer than a copy: pages have to be found, and pinned."""
        self._buffers.views(parts)

    def stage(self, parts: list[Part]) -> list[Part]:
        views = self._buffers.views(parts)
        on_device = [part.tensor.is_cuda for part in parts]
        if any(on_device) and self._buffers.pinned:
            pairs = [(part, view) for part, view, cuda in zip(parts, views, on_device, strict=True) if cuda]
            for part, view in pairs:
                if part.in_backward:
                    view.copy_(part.tensor, non_blocking=True)
            self._copy_beside(pairs[0][0].tensor.device, [(p.tensor, v) for p, v in pairs if not p.in_backward])
        else:
            on_device = [False] * len(parts)
        for part, view, cuda in zip(parts, views, on_device, strict=True):
            if not cuda:
                view.copy_(part.tensor)
        return [moved(part, view) for part, view in zip(parts, views, strict=True)]

    def _copy_beside(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # what training has written so far
        with torch.cuda.stream(self._stream):
            for tensor, view in pairs:
                view.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _before_step(self, *_: Any) -> None:
        """Not before its copy has read it may a parameter change; the device waits, the host does not."""
        copied = self._copied
        if copied is None:
            return
        if copied.query():
            self._copied = None
        else:
            torch.cuda.current_stream().wait_event(copied)

    def ready(self) -> None:
        copied = self._copied
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        self._hook.remove()
