"""How replicas exchange the gradients of one bucket: whole, rounded to bfloat16, or as products of thin matrices.

PowerSGD keeps for each matrix M (rows n, columns m) a thin Q (m, r) and what its approximation left out so far:

    M = gradient + error    P = sum over ranks of M Q, made orthonormal    Q = M^T P    error = M - P Q^T
                                                                           sum over ranks of Q; result = P Q^T

so (n + m) r numbers travel instead of n m. Q starts with its value after the last step, which makes each product a step
of the power method; the error is added to the next gradient, so that nothing is lost for good. The errors take as much
memory as the gradients in float32. They differ between ranks; each saves its own (checkpoint/powersgd_state.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.exposed_time import exposed


class GradientExchange(Protocol):
    """Sums one bucket's gradients over an axis. A missing gradient counts as zero.

    All ranks call these methods in the same order, since each may issue a collective.
    """

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None: ...

    def advance(self) -> None:
        """Issue the next collective, if the result needs one more."""

    def finish(self) -> list[Tensor]:
        """Wait, and return the sums in the shapes of the gradients; the caller owns them."""


class WholeExchange:
    """Sums the gradients themselves, sent (and therefore added) in the type `sent`; the result has the type `dtype`."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str, sent: torch.dtype) -> None:
        self.shapes, self.dtype, self.axis, self.sent = list(shapes), dtype, axis, sent
        self.flat: Tensor | None = None
        self.work: collectives.Started | None = None

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        self.flat = flatten(gradients, self.shapes, self.sent, device)
        self.work = collectives.start_sum(self.flat, self.axis)

    def advance(self) -> None:
        return

    def finish(self) -> list[Tensor]:
        assert self.flat is not None
        wait(self.work, self.flat)
        parts = unflatten(self.flat.to(self.dtype), self.shapes)
        self.flat = self.work = None
        return parts


class LowRankExchange:
    """PowerSGD for the matrices that it makes smaller; other gradients travel whole, together with the P."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[torch.Size], rank: int, dtype: torch.dtype, axis: str
    ) -> None:
        self.names, self.shapes, self.rank, self.dtype, self.axis = list(names), list(shapes), rank, dtype, axis
        self.matrices = [index for index, shape in enumerate(shapes) if is_worthwhile(shape, rank)]
        self.rest = [index for index in range(len(shapes)) if index not in self.matrices]
        self.errors: dict[int, Tensor] = {}  # during an exchange: M
        self.q: dict[int, Tensor] = {}
        self.p: dict[int, Tensor] = {}
        self.summed_rest: list[Tensor] = []
        self.flat: Tensor | None = None
        self.work: collectives.Started | None = None

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        products: list[Tensor | None] = []
        for index in self.matrices:
            error, q = self.memory(index, device)
            gradient = gradients[index]
            if gradient is not None:
                error.add_(gradient)
            products.append(error @ q)
        parts = [*products, *(gradients[index] for index in self.rest)]
        self.flat = flatten(parts, self._first_shapes(), self.dtype, device)
        self.work = collectives.start_sum(self.flat, self.axis)

    def advance(self) -> None:
        """Project this rank's matrices onto the summed P, and start the sum of the Q."""
        if self.p or self.flat is None or not self.matrices:
            return
        wait(self.work, self.flat)
        parts = unflatten(self.flat, self._first_shapes())
        self.summed_rest = parts[len(self.matrices) :]
        for index, product in zip(self.matrices, parts, strict=False):
            self.p[index] = torch.linalg.qr(product.float()).Q
            self.q[index] = self.errors[index].T @ self.p[index]
            self.errors[index].addmm_(self.p[index], self.q[index].T, alpha=-1)
            self.errors[index].nan_to_num_(0.0, 0.0, 0.0)  # a gradient that was not finite must not stay forever
        qs = [self.q[index] for index in self.matrices]
        self.flat = flatten(qs, [q.shape for q in qs], torch.float32, qs[0].device)
        self.work = collectives.start_sum(self.flat, self.axis)

    def finish(self) -> list[Tensor]:
        self.advance()
        assert self.flat is not None
        wait(self.work, self.flat)
        if not self.matrices:
            self.summed_rest = unflatten(self.flat, self._first_shapes())
        results = dict(zip(self.rest, self.summed_rest, strict=True))
        q_shapes = [self.q[index].shape for index in self.matrices]
        for index, q in zip(self.matrices, unflatten(self.flat, q_shapes) if q_shapes else [], strict=True):
            results[index] = self.p[index] @ q.T
            self.q[index] = q.nan_to_num(0.0, 0.0, 0.0)
        self.p, self.summed_rest, self.flat, self.work = {}, [], None, None
        return [results[index] for index in range(len(self.shapes))]

    def _first_shapes(self) -> list[torch.Size]:
        thin = [torch.Size((self.shapes[index][0], self.rank)) for index in self.matrices]
        return thin + [self.shapes[index] for index in self.rest]

    def memory(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(error, Q) of a matrix. Every replica starts with the same Q."""
        if index not in self.q:
            generator = torch.Generator().manual_seed(zlib.crc32(self.names[index].encode()))
            rows, columns = self.shapes[index]
            self.q[index] = torch.randn(columns, self.rank, generator=generator).to(device)
            self.errors[index] = torch.zeros(rows, columns, device=device)
        return self.errors[index], self.q[index]


def wait(work: collectives.Started | None, flat: Tensor) -> None:
    """Wait until `flat` holds the sum; this is the part of the communication that nothing hides."""
    assert work is not None
    with exposed.waiting(flat.device):
        work.wait()


def is_worthwhile(shape: torch.Size, rank: int) -> bool:
    """Whether the two thin matrices of this rank are smaller than the matrix."""
    return len(shape) == 2 and rank <= min(shape) and sum(shape) * rank < math.prod(shape)


def flatten(
    tensors: Sequence[Tensor | None], shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One vector of all the tensors, with zeros for those that are None."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    parts, there = [], []
    for part, tensor in zip(flat.split(sizes), tensors, strict=True):
        if tensor is None:
            part.zero_()
        else:
            parts.append(part)
            there.append(tensor.detach().reshape(-1))
    if parts:
        torch._foreach_copy_(parts, there)
    return flat


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
