"""How replicas exchange the gradients of one bucket: whole, rounded to bfloat16, or as low-rank products (PowerSGD).

Exchanges in 8 bits and of the largest elements are in error_feedback.py.

PowerSGD keeps for each matrix M (n rows, m columns) a thin Q (m, r) and the accumulated error of its approximation:

    M = gradient + error    P = sum over ranks of M Q, made orthonormal    Q = M^T P    error = M - P Q^T
                                                                           sum over ranks of Q; result = P Q^T

so a rank sends (n + m) r numbers instead of n m. Q starts with its value after the last step, which makes each product
a step of the power method. The error is added to the next gradient, so that nothing is lost for good. The errors take
as much memory as the gradients in float32. They differ between ranks; each rank saves its own (checkpoint/replicas).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.comm.exposed_time import exposed


class GradientExchange:
    """Sums one bucket's gradients over an axis. A missing gradient counts as zero.

    All ranks call these methods in the same order, since each may issue a collective.
    """

    timed = True  # whether its waits count as exposed; False if the caller measures them

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str) -> None:
        self.shapes, self.dtype, self.axis = list(shapes), dtype, axis
        self._sending: tuple[Tensor, collectives.Started] | None = None

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        raise NotImplementedError

    def advance(self) -> None:
        """Issue the next collective, if the result needs one more."""

    def finish(self) -> list[Tensor]:
        """Wait and return the sums in the shapes of the gradients; the caller owns them."""
        raise NotImplementedError

    def _send(
        self, tensors: Sequence[Tensor | None], shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> None:
        flat = flatten(tensors, shapes, dtype, device)
        self._sending = flat, collectives.start_sum(flat, self.axis)

    def _received(self) -> Tensor:
        """Wait for the running collective; this wait is the exposed part of the communication."""
        assert self._sending is not None
        (flat, work), self._sending = self._sending, None
        with exposed.waiting(flat.device) if self.timed else contextlib.nullcontext():
            work.wait()
        return flat

    def _sums(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        return unflatten(self._received().to(dtype), shapes)


class WholeExchange(GradientExchange):
    """Sums the gradients themselves, sent (and therefore added) in the type `sent`; the result has the type `dtype`."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, axis: str, sent: torch.dtype) -> None:
        super().__init__(shapes, dtype, axis)
        self.sent = sent

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        self._send(gradients, self.shapes, self.sent, device)

    def finish(self) -> list[Tensor]:
        return self._sums(self.shapes, self.dtype)


class LowRankExchange(GradientExchange):
    """PowerSGD for the matrices that it makes smaller; other gradients are sent whole, together with the Ps."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[torch.Size], rank: int, dtype: torch.dtype, axis: str
    ) -> None:
        super().__init__(shapes, dtype, axis)
        self.names, self.rank = list(names), rank
        self.matrices = [index for index, shape in enumerate(shapes) if is_worthwhile(shape, rank)]
        self.rest = [index for index in range(len(shapes)) if index not in self.matrices]
        self.errors: dict[int, Tensor] = {}  # M during an exchange
        self.q: dict[int, Tensor] = {}
        self.p: dict[int, Tensor] = {}
        self.summed_rest: list[Tensor] = []

    def start(self, gradients: Sequence[Tensor | None], device: torch.device) -> None:
        products: list[Tensor | None] = []
        for index in self.matrices:
            error, q = self.memory(index, device)
            gradient = gradients[index]
            if gradient is not None:
                error.add_(gradient)
            products.append(error @ q)
        parts = [*products, *(gradients[index] for index in self.rest)]
        self._send(parts, self._first_shapes(), self.dtype, device)

    def advance(self) -> None:
        """Project this rank's matrices onto the summed Ps, and start to sum the Qs."""
        if self.p or self._sending is None or not self.matrices:
            return
        parts = self._sums(self._first_shapes(), self.dtype)
        self.summed_rest = parts[len(self.matrices) :]
        for index, product in zip(self.matrices, parts, strict=False):
            self.p[index] = torch.linalg.qr(product.float()).Q
            self.q[index] = self.errors[index].T @ self.p[index]
            self.errors[index].addmm_(self.p[index], self.q[index].T, alpha=-1)
            self.errors[index].nan_to_num_(0.0, 0.0, 0.0)  # otherwise a nonfinite gradient would stay forever
        qs = [self.q[index] for index in self.matrices]
        self._send(qs, [q.shape for q in qs], torch.float32, qs[0].device)

    def finish(self) -> list[Tensor]:
        self.advance()
        if not self.matrices:
            return self._sums(self.shapes, self.dtype)
        results = dict(zip(self.rest, self.summed_rest, strict=True))
        sums = self._sums([self.q[index].shape for index in self.matrices], torch.float32)
        for index, q in zip(self.matrices, sums, strict=True):
            results[index] = self.p[index] @ q.T
            self.q[index] = q.nan_to_num(0.0, 0.0, 0.0)
        self.p, self.summed_rest = {}, []
        return [results[index] for index in range(len(self.shapes))]

    def _first_shapes(self) -> list[torch.Size]:
        thin = [torch.Size((self.shapes[index][0], self.rank)) for index in self.matrices]
        return thin + [self.shapes[index] for index in self.rest]

    def memory(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (error, Q) of a matrix. Every replica starts with the same Q."""
        if index not in self.q:
            generator = torch.Generator().manual_seed(zlib.crc32(self.names[index].encode()))
            rows, columns = self.shapes[index]
            self.q[index] = torch.randn(columns, self.rank, generator=generator).to(device)
            self.errors[index] = torch.zeros(rows, columns, device=device)
        return self.errors[index], self.q[index]


def is_worthwhile(shape: torch.Size, rank: int) -> bool:
    """Whether the two thin matrices of this rank are smaller than the matrix."""
    return len(shape) == 2 and rank <= min(shape) and sum(shape) * rank < math.prod(shape)


def flatten(
    tensors: Sequence[Tensor | None], shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Concatenate all tensors into one vector, with zeros for those that are None."""
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
