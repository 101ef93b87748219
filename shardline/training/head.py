"""The loss of a micro-batch under tensor parallelism: who has which tokens and which rows of the vocabulary.

loss parallel       every rank sees all tokens and its rows of the vocabulary; the softmax is put together from them
not, with sequence  every rank sees its own tokens and the whole vocabulary; the loss is a sum over ranks
not, without        every rank computes everything
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.comm import collectives
from shardline.models.decoder import Decoder
from shardline.parallel.tensor.tensor import TensorParallel, vocabulary_rows
from shardline.training.loss import Losses, choose_chunk_tokens, chunked_cross_entropy


@dataclass(frozen=True)
class Head:
    """`share` is what this rank's loss is of the whole: losses of ranks that compute the same are counted once."""

    tensor: TensorParallel | None
    chunk_tokens: int
    compiled: bool
    backend: str

    @property
    def share(self) -> float:
        if self.tensor is None or (self.tensor.sequence_parallel and not self.tensor.loss_parallel):
            return 1.0
        return 1.0 / self.tensor.degree

    def loss(self, model: Decoder, hidden: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
        """scale x sum of token losses over what this rank sees."""
        weight, plan = model.output_weight(), self.tensor
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        losses, chunk_tokens = None, self.chunk_tokens
        if plan is not None and plan.loss_parallel:
            hidden = collectives.all_gather(hidden, "tp") if plan.sequence_parallel else collectives.copy(hidden, "tp")
            largest = len(vocabulary_rows(model.arch.vocab_size, plan.degree, 0))  # ranks add up the same chunks
            chunk_tokens = chunk_tokens or choose_chunk_tokens(hidden, largest)
            first = vocabulary_rows(model.arch.vocab_size, plan.degree, collectives.axis("tp").rank).start
            losses = vocabulary_losses(first, self.backend if self.compiled else None)
        elif plan is not None and plan.sequence_parallel:
            labels = labels.chunk(plan.degree)[collectives.axis("tp").rank]
        return chunked_cross_entropy(
            hidden,
            weight,
            labels,
            scale=scale,
            chunk_tokens=chunk_tokens,
            compiled=self.compiled,
            backend=self.backend,
            losses=losses,
        )


@functools.cache
def vocabulary_losses(first: int, backend: str | None) -> Losses:
    """Losses from the logits of this rank's rows of the vocabulary, from `first` on: two small all-reduces a chunk."""
    sums, write = _sums, _write_gradient
    if backend is not None:
        sums, write = torch.compile(sums, backend=backend), torch.compile(write, backend=backend)

    def losses(logits: Tensor, target: Tensor, scale: Tensor | float | None) -> Tensor:
        place = target - first
        here = (place >= 0) & (place < logits.shape[1])
        place = torch.where(here, place, 0)[:, None]
        peak = collectives.max_in_place(logits.amax(1, keepdim=True).float(), "tp")
        both = collectives.sum_in_place(sums(logits, place, here[:, None], peak), "tp")  # (C, 2)
        log_sum = both[:, :1].log()
        loss = log_sum - both[:, 1:]
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
            write(logits, place, here[:, None], peak, log_sum, loss, scale)
        return loss.squeeze(1)

    return losses


def _sums(logits: Tensor, place: Tensor, here: Tensor, peak: Tensor) -> Tensor:
    """(C, 2): the sum of exponentials below the peak, and the target's logit below it where this rank has it."""
    wide = logits.to(peak.dtype) - peak
    picked = torch.where(here, wide.gather(1, place), 0)
    return torch.cat([wide.exp().sum(1, keepdim=True), picked], dim=1)


def _write_gradient(
    logits: Tensor, place: Tensor, here: Tensor, peak: Tensor, log_sum: Tensor, loss: Tensor, scale: Tensor
) -> None:
    columns = torch.arange(logits.shape[1], device=logits.device)
    probability = (logits.to(peak.dtype) - peak - log_sum).exp()
    target = here & (columns == place)
    logits.copy_(torch.where(target, torch.expm1(-loss), probability) * scale)
