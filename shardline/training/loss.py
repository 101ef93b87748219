"""Cross entropy of the output head, computed in chunks of tokens so that the float32 logits never exist as a whole.

Shapes: B batch, S sequence, T = B * S tokens, C tokens of one chunk, V vocabulary.

    hidden (T, dim) --chunk--> (C, dim) @ weight.T (dim, V) -> logits (C, V) -> losses (C,), dlogits (C, V)
                                                               dlogits @ weight     -> grad_hidden[chunk]
                                                               dlogits.T @ hidden   -> grad_weight +=

The gradients are computed in the forward pass, while a chunk's logits exist, so the head's product is not computed a
second time; backward only multiplies them by the incoming gradient.

Under tensor parallelism, `Head` decides which rank has which tokens and which rows of the vocabulary:

    loss parallel            every rank has all tokens and its rows of the vocabulary, and the ranks share one softmax
    only sequence parallel   every rank has its own tokens and the whole vocabulary; the loss is a sum over ranks
    neither                  every rank computes everything
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.comm import collectives
from shardline.data.batch import IGNORE
from shardline.models.adapted.low_rank import operands
from shardline.models.decoder import Decoder
from shardline.models.norms import cap_slope, capped
from shardline.models.products.cpu_product import multiply, served
from shardline.parallel.tensor.tensor import TensorParallel, vocabulary_rows

# Logits of one chunk. Larger chunks read and write grad_weight less often, smaller ones take less memory. On a GPU they
# take at most a 64th of its memory.
CHUNK_BYTES = {"cuda": 2**31, "cpu": 32 * 2**20}
SMALLEST_CHUNK = 128
# Eager elementwise work runs over slices of a chunk, so that its float32 copies stay this small: on a CPU they fit into
# the cache, on a GPU they are large enough to keep it busy.
SLICE_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}


def count_targets(labels: Tensor) -> Tensor:
    """Number of valid targets, a 0-d int64 tensor on the labels' device; the scale is 1 / max(1, global count)."""
    return (labels != IGNORE).sum()


@dataclass(frozen=True)
class Head:
    """The loss of a micro-batch. `share` is the fraction of a rank's loss that counts in the sum over all ranks."""

    tensor: TensorParallel | None
    chunk_tokens: int
    backend: str | None  # the compiler's backend; None: eager

    @property
    def share(self) -> float:
        if self.tensor is None or (self.tensor.sequence_parallel and not self.tensor.loss_parallel):
            return 1.0
        return 1.0 / self.tensor.degree

    def loss(
        self, model: Decoder, hidden: Tensor, labels: Tensor, scale: Tensor | float, rows: Tensor | None = None
    ) -> Tensor:
        """scale * sum of the losses of the tokens that this rank has; `rows` (B,) says how much each row counts."""
        weights = None if rows is None else rows[:, None].expand(labels.shape)
        if model.gives_logits:
            losses = logits_losses(hidden, labels)
            return scale * (losses if weights is None else losses * weights.flatten()).sum()
        hidden, options = self._prepared(model, hidden)
        own = None if weights is None else self._own(weights)
        hidden, weight = operands(hidden, model.output_weight())
        return chunked_cross_entropy(hidden, weight, self._own(labels), scale=scale, weights=own, **options)

    @torch.no_grad()
    def log_probabilities(self, model: Decoder, hidden: Tensor, labels: Tensor) -> Tensor:
        """(B,) float32: the log-probability of each row's targets that are in this rank's slice of the sequence."""
        if model.gives_logits:
            return -logits_losses(hidden, labels).view(labels.shape).sum(1)
        hidden, options = self._prepared(model, hidden)
        hidden, weight = operands(hidden, model.output_weight())
        here = chunked_losses(hidden, weight, self._own(labels), **options)
        if not self._shares_tokens:
            return -here.view(labels.shape).sum(1)
        whole = here.new_zeros(labels.numel())
        whole.chunk(collectives.axis("tp").size)[collectives.axis("tp").rank].copy_(here)
        return -collectives.sum_in_place(whole.view(labels.shape).sum(1), "tp")

    @torch.no_grad()
    def logits_at(self, model: Decoder, hidden: Tensor, places: Sequence[int]) -> Tensor:
        """(B, V) float32: the logits after one token of each row; zero if another rank has them.

        `places` are indices among the tokens of a row that this rank has; -1: the token is not among them.
        """
        plan, logits = self.tensor, torch.zeros((len(places), model.arch.vocab_size), device=hidden.device)
        rows = [row for row, place in enumerate(places) if place >= 0]
        if model.gives_logits:
            logits[rows] = hidden[rows, [places[row] for row in rows]].float()
            return logits
        shares, width = self._shares_tokens, hidden.numel() // hidden.shape[-1]  # tokens in `hidden`
        if plan is not None and plan.sequence_parallel:
            width *= plan.degree
        hidden, _ = self._prepared(model, hidden)
        rank = 0 if plan is None else collectives.axis("tp").rank
        first = rank * hidden.shape[0] if shares else 0
        flat = [row * (width // len(places)) + places[row] - first for row in rows]
        if shares:
            kept = [(row, place) for row, place in zip(rows, flat, strict=True) if 0 <= place < hidden.shape[0]]
            rows, flat = [row for row, _ in kept], [place for _, place in kept]
        part = model.logits(hidden[flat]).float()
        if plan is not None and plan.loss_parallel:
            start = vocabulary_rows(model.arch.vocab_size, plan.degree, rank).start
            logits[rows, start : start + part.shape[1]] = part
        elif shares or rank == 0:
            logits[rows] = part
        return logits

    @property
    def _shares_tokens(self) -> bool:
        """Whether each tensor-parallel rank computes the losses of its own tokens."""
        return self.tensor is not None and self.tensor.sequence_parallel and not self.tensor.loss_parallel

    def _own(self, of_tokens: Tensor) -> Tensor:
        """(T,): the entries of `of_tokens` (B, S) for the tokens whose losses this rank computes."""
        flat = of_tokens.reshape(-1)
        return flat.chunk(collectives.axis("tp").size)[collectives.axis("tp").rank] if self._shares_tokens else flat

    def _prepared(self, model: Decoder, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states (T, dim) that this rank multiplies, and the options for computing their losses."""
        plan, cap = self.tensor, model.arch.logit_cap
        hidden = hidden.reshape(-1, hidden.shape[-1])
        losses, chunk_tokens = None, self.chunk_tokens
        if plan is not None and plan.loss_parallel:
            hidden = collectives.all_gather(hidden, "tp") if plan.sequence_parallel else collectives.copy(hidden, "tp")
            largest = len(vocabulary_rows(model.arch.vocab_size, plan.degree, 0))  # all ranks must use the same chunks
            chunk_tokens = chunk_tokens or choose_chunk_tokens(hidden, largest)
            first = vocabulary_rows(model.arch.vocab_size, plan.degree, collectives.axis("tp").rank).start
            losses = _fused_losses(self.backend, first, cap)
        return hidden, {"chunk_tokens": chunk_tokens, "backend": self.backend, "losses": losses, "cap": cap}


def logits_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(T,): -log p(label) of each target from full logits (B, S, V), for models that change their logits at the end."""
    wide = logits.flatten(0, -2).to(_wide(logits.dtype))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="none")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: Tensor | float,
    chunk_tokens: int = 0,
    backend: str | None = None,
    losses: Losses | None = None,
    cap: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """scale * sum of -log p(label) over the targets: hidden (B, S, dim), weight (V, dim), labels (B, S), IGNORE = none.

    Products run in hidden's dtype; the softmax and the sum of the weight's gradient over the chunks in float32. With
    `chunk_tokens` 0, V determines the chunk size. `backend` compiles the softmax; `losses` replaces the one over all of
    V. Logits may have a soft `cap`, which `losses` must apply itself. `weights` (B, S) weigh each target.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    how = _chosen(hidden, weight, labels, chunk_tokens, backend, losses, cap)
    if weights is not None:
        wide = _wide(hidden.dtype)
        scale = torch.as_tensor(scale, dtype=wide, device=hidden.device) * weights.reshape(-1, 1).to(wide)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _CrossEntropy.apply(hidden, weight, labels, scale, *how)
    per_token, _, _ = _walk(hidden, weight, labels, scale, *how, for_hidden=False, for_weight=False)
    return _total(per_token, scale)


@torch.no_grad()
def chunked_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = 0,
    backend: str | None = None,
    losses: Losses | None = None,
    cap: float | None = None,
) -> Tensor:
    """(T,): -log p(label) of each target, 0 for IGNORE; the options are those of `chunked_cross_entropy`."""
    how = _chosen(hidden, weight, labels, chunk_tokens, backend, losses, cap)
    return _walk(hidden, weight, labels, 1.0, *how, for_hidden=False, for_weight=False)[0]


def _chosen(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    backend: str | None,
    losses: Losses | None,
    cap: float | None,
) -> tuple[int, Losses]:
    """Choose the chunk size and the function that computes the losses of a chunk."""
    if labels.shape[0] != hidden.shape[0]:
        raise ValueError(f"{labels.shape[0]} labels for {hidden.shape[0]} tokens of hidden states")
    if hidden.shape[0] == 0:
        raise ValueError("there are no tokens to compute a loss over")
    size = chunk_tokens or choose_chunk_tokens(hidden, weight.shape[0])
    return size, losses or _losses_on(hidden.device, hidden.dtype, backend, cap)


def _total(per_token: Tensor, scale: Tensor | float) -> Tensor:
    """The sum of losses (T,) times the scale, which may be one number or (T, 1), one for each loss."""
    one_each = isinstance(scale, Tensor) and scale.ndim > 0
    return (per_token * scale.flatten()).sum() if one_each else per_token.sum() * scale  # type: ignore[union-attr]


def choose_chunk_tokens(hidden: Tensor, vocabulary: int) -> int:
    """Choose tokens per chunk, a multiple of 128: chunks have nearly equal size, near the byte limit of the device."""
    tokens = hidden.shape[0]
    limit = CHUNK_BYTES[hidden.device.type]
    if hidden.is_cuda and torch.cuda.is_available():  # a dry run has no GPU
        limit = min(limit, torch.cuda.get_device_properties(hidden.device).total_memory // 64)
    most = max(SMALLEST_CHUNK, limit // (vocabulary * hidden.element_size()))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, math.ceil(tokens / chunks / SMALLEST_CHUNK)) * SMALLEST_CHUNK


class _CrossEntropy(torch.autograd.Function):
    """(T, dim), (V, dim), (T,) -> scalar; saves the two gradients themselves instead of their inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor | float,
        chunk_tokens: int,
        losses: Losses,
    ) -> Tensor:
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        per_token, grad_hidden, grad_weight = _walk(
            hidden, weight, labels, scale, chunk_tokens, losses, for_hidden=for_hidden, for_weight=for_weight
        )
        ctx.save_for_backward(grad_hidden, grad_weight)
        return _total(per_token, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if getattr(grad_output, _IS_ONE, False):
            return (*ctx.saved_tensors, None, None, None, None)
        # In place, because grad_weight can take gigabytes; but not if the graph is kept for another backward.
        multiply = torch.mul if _graph_is_kept() else Tensor.mul_
        gradients = [
            None if saved is None else multiply(saved, grad_output.to(saved.dtype)) for saved in ctx.saved_tensors
        ]
        return (*gradients, None, None, None, None)


def run_backward(loss: Tensor) -> None:
    """Run `loss.backward()`, but skip multiplying a head's gradients, which can take gigabytes, by one."""
    one = torch.ones_like(loss)
    setattr(one, _IS_ONE, True)
    torch.autograd.backward(loss, one)


_IS_ONE = "shardline_is_one"  # an attribute of the gradient tensor that starts backward


def _walk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    chunk_tokens: int,
    losses: Losses,
    *,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses (T,), and the requested gradients of their sum times `scale`, which may be (T, 1), one for each loss.

    The scale is applied to dlogits in float32: a scale rounded to bfloat16 would bias every gradient.
    """
    tokens = hidden.shape[0]
    head = weight.to(hidden.dtype)
    buffer = hidden.new_empty(min(tokens, chunk_tokens), weight.shape[0])
    per_token = hidden.new_empty(tokens, dtype=_wide(hidden.dtype))
    grad_hidden = hidden.new_empty(hidden.shape) if for_hidden else None
    grad_weight = weight.new_empty(weight.shape, dtype=_wide(weight.dtype)) if for_weight else None
    for rows in _chunks(tokens, chunk_tokens):
        valid = labels[rows] != IGNORE
        target = torch.where(valid, labels[rows], 0)
        # Rows without a target become zeros, so they add nothing to grad_weight, even if they hold NaN.
        inputs = torch.where(valid[:, None], hidden[rows], 0)  # (C, dim)
        logits = _product(inputs, head, out=buffer[: valid.shape[0]])  # (C, V)
        here = scale[rows] if isinstance(scale, Tensor) and scale.ndim else scale
        per_token[rows] = torch.where(valid, losses(logits, target, here if for_hidden or for_weight else None), 0)
        if grad_hidden is not None:
            _product(logits, head.T, out=grad_hidden[rows]).masked_fill_(~valid[:, None], 0)
        if grad_weight is not None:
            _add_product(grad_weight, logits.T, inputs, keep=rows.start > 0)
    return per_token, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


# (logits (C, V), target (C,), scale) -> losses (C,); with a scale, scaled dlogits overwrite the logits.
# A scale is one number, or (C, 1), one for each row.
Losses = Callable[[Tensor, Tensor, "Tensor | float | None"], Tensor]


def _losses_on(device: torch.device, dtype: torch.dtype, backend: str | None, cap: float | None = None) -> Losses:
    """Choose our kernel on a GPU, elsewhere the compiled or the eager form."""
    if device.type == "cuda" and dtype != torch.float64 and find_spec("triton"):
        return functools.partial(_kernel_losses, cap=cap)
    return functools.partial(_chunk_losses, cap=cap) if backend is None else _fused_losses(backend, cap=cap)


def _kernel_losses(logits: Tensor, target: Tensor, scale: Tensor | float | None, cap: float | None = None) -> Tensor:
    from shardline.training.loss_kernel import BLOCK, WARPS, loss_kernel

    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    factor = losses if scale is None else torch.as_tensor(scale, dtype=losses.dtype, device=losses.device)
    switches = {"GRADIENT": scale is not None, "CAPPED": cap is not None, "WEIGHTED": factor.ndim > 1}
    options: dict[str, Any] = {**switches, "BLOCK": BLOCK}
    width, grid = logits.shape[1], (logits.shape[0],)
    loss_kernel[grid](logits, target, losses, factor, width, cap or 1.0, **options, num_warps=WARPS)
    return losses


def _chunk_losses(logits: Tensor, target: Tensor, scale: Tensor | float | None, cap: float | None = None) -> Tensor:
    """The eager form: slices of rows, so that the float32 log probabilities of only one slice exist."""
    losses = []
    slice_rows = max(1, SLICE_BYTES[logits.device.type] // (4 * logits.shape[1]))
    for rows in _chunks(logits.shape[0], slice_rows):
        index = target[rows, None]
        wide = logits[rows] if cap is None else _capped_wide(logits[rows], cap)
        log_p = torch.log_softmax(wide, 1, dtype=_wide(logits.dtype))  # (slice, V)
        loss = -log_p.gather(1, index)
        if scale is not None:
            # p - 1 of the target without cancellation: rounding p first would lose it if p is near 1
            here = scale[rows] if isinstance(scale, Tensor) and scale.ndim else scale
            change = log_p.exp_().scatter_(1, index, torch.expm1(-loss)).mul_(here)
            logits[rows] = change if cap is None else change.mul_(cap_slope(wide, cap))
        losses.append(loss.squeeze(1))
    return torch.cat(losses)


def _capped_wide(logits: Tensor, cap: float | None) -> Tensor:
    """The logits in the type of the softmax, with their cap if they have one."""
    return capped(logits.to(_wide(logits.dtype)), cap)


def _statistics(logits: Tensor, target: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each row, the log of its sum of exponentials relative to it, and the loss: (C, 1) each."""
    wide = _capped_wide(logits, cap)
    peak = wide.amax(1, keepdim=True)
    log_sum = (wide - peak).exp().sum(1, keepdim=True).log()
    return peak, log_sum, log_sum - (wide.gather(1, target[:, None]) - peak)


def _write_gradient(
    logits: Tensor,
    target: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    loss: Tensor,
    scale: Tensor,
    cap: float | None = None,
) -> None:
    """Overwrite the logits with scale * dlogits; a negative target is in no column of this rank."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    wide = _capped_wide(logits, cap)
    probability = (wide - peak - log_sum).exp()
    change = torch.where(columns == target[:, None], torch.expm1(-loss), probability) * scale
    logits.copy_(change if cap is None else change * cap_slope(wide, cap))


@functools.cache
def _fused_losses(backend: str | None, first: int | None = None, cap: float | None = None) -> Losses:
    """The compiled form, in two functions: from one, the compiler would write dlogits elsewhere and copy them back.

    With `first`, logits are for this rank's rows of the vocabulary, from `first` on: two small all-reduces per chunk.
    """
    functions: list[Any] = [_statistics, _sums, _write_gradient]
    if backend is not None:
        functions = [torch.compile(function, backend=backend) for function in functions]
    statistics, sums, write_gradient = functions

    def losses(logits: Tensor, target: Tensor, scale: Tensor | float | None) -> Tensor:
        if first is None:
            peak, log_sum, loss = statistics(logits, target, cap)
        else:
            held = (target >= first) & (target < first + logits.shape[1])
            target = torch.where(held, target - first, -1)
            peak = collectives.max_in_place(capped(logits.amax(1, keepdim=True).float(), cap), "tp")
            both = collectives.sum_in_place(sums(logits, target, peak, cap), "tp")  # (C, 2)
            log_sum = both[:, :1].log()
            loss = log_sum - both[:, 1:]
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
            write_gradient(logits, target, peak, log_sum, loss, scale, cap)
        return loss.squeeze(1)

    return losses


def _sums(logits: Tensor, target: Tensor, peak: Tensor, cap: float | None = None) -> Tensor:
    """(C, 2): the sum of exponentials and the target's logit (if this rank has it), both relative to the peak."""
    wide = _capped_wide(logits, cap).to(peak.dtype) - peak
    index = target[:, None]
    picked = torch.where(index >= 0, wide.gather(1, index.clamp(min=0)), 0)
    return torch.cat([wide.exp().sum(1, keepdim=True), picked], dim=1)


def _product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write x (a, b) times the transpose of weight (c, b) to `out` (a, c)."""
    return out.copy_(multiply(x, weight)) if served(x) else torch.mm(x, weight.T, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor, keep: bool) -> None:
    """total (V, dim) = (total if keep else 0) + left (V, C) @ right (C, dim), summed in total's dtype."""
    beta = 1 if keep else 0
    if served(left):
        (total.add_ if keep else total.copy_)(multiply(left, right.T))
    elif total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda:
        # bfloat16 operands added to the float32 sum, without a temporary of size (V, dim)
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def _graph_is_kept() -> bool:
    """Whether the current backward was called with retain_graph, from a private function of torch."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
