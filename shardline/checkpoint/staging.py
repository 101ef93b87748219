"""Copies of the state in host memory, which a save writes while training changes the originals.

Buffers are allocated once and reused, so staging costs a copy and no page faults. From a GPU into pinned memory the
copies run while training goes on:

    training stream   step 8 | backward of step 9 ... | wait for `copied` | optimizer step 9
    copying stream           | copy, copy, copy ... -> copied

The host only launches them. The optimizer's step, which changes the state, waits for the event on the device. The few
tensors that the backward pass changes are copied on the training stream first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardline.checkpoint.shards import HeldTensor

PINNED_CHUNK = 1 << 30  # torch rounds pinned memory up to powers of two: many tensors share one of that size
ALIGNMENT = 64


def make_buffers(held: list[HeldTensor], pinned: bool) -> list[Tensor]:
    """Host memory for each tensor, one after the other in chunks."""
    sizes = [-(-one.tensor.nbytes // ALIGNMENT) * ALIGNMENT for one in held]
    chunks: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not chunks or size > room:
            chunks.append([])
            room = PINNED_CHUNK
        chunks[-1].append(index)
        room -= size
    views: list[Tensor] = []
    for indices in chunks:
        memory = torch.empty(sum(sizes[i] for i in indices), dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            memory.zero_()  # the first touch allocates the pages
        for part, i in zip(memory.split([sizes[i] for i in indices]), indices, strict=True):
            tensor = held[i].tensor
            views.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return views


class Staging:
    """Copies tensors for one save after another; the writer's thread waits for the copies with `wait`."""

    def __init__(self, optimizer: torch.optim.Optimizer, pinned: bool) -> None:
        self.pinned = pinned and torch.cuda.is_available()
        self._shapes: list[Any] = []
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def prepare(self, held: list[HeldTensor]) -> list[Tensor]:
        """Allocate the buffers, which takes longer than a copy: their pages have to be mapped and pinned.

        They are allocated again if the shapes are not those of the last save.
        """
        shapes = [(one.tensor.shape, one.tensor.dtype) for one in held]
        if shapes != self._shapes:
            self._buffers = []  # free the old ones before allocating the new ones
            self._buffers, self._shapes = make_buffers(held, self.pinned), shapes
        return self._buffers

    def stage(self, held: list[HeldTensor]) -> list[HeldTensor]:
        """Copy the tensors, or launch their copies; returns `held` with the copies in their place."""
        copies = list(zip(held, self.prepare(held), strict=True))
        on_device = [(one, view) for one, view in copies if one.tensor.is_cuda and self.pinned]
        for one, view in on_device:
            if one.changes_in_backward:
                view.copy_(one.tensor, non_blocking=True)
        if on_device:
            later = [(one.tensor, view) for one, view in on_device if not one.changes_in_backward]
            self._copy_on_stream(on_device[0][0].tensor.device, later)
        for one, view in copies:
            if not (one.tensor.is_cuda and self.pinned):
                view.copy_(one.tensor)
        return [replace(one, tensor=view) for one, view in copies]

    def _copy_on_stream(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # what training has written so far
        with torch.cuda.stream(self._stream):
            for tensor, view in pairs:
                view.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _before_step(self, *_: Any) -> None:
        """Keep the optimizer from changing what is still being copied; the device waits, the host does not."""
        copied = self._copied
        if copied is None:
            return
        if copied.query():
            self._copied = None
        else:
            torch.cuda.current_stream().wait_event(copied)

    def wait(self) -> None:
        copied = self._copied
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        self._hook.remove()
