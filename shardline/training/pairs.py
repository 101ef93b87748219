"""Direct preference optimization: the passes of a model that learns to prefer the better answer of each pair.

    rows of a batch     | better 0 | worse 0 | better 1 | worse 1 | ...      a pair is never split
    log p of each row   policy (B, 2), reference (B, 2)                      sums over the answer's tokens
    difference          (policy - reference) of the better answer, minus that of the worse one

    1. the reference's hidden states and log p, without gradients
    2. the policy's hidden states, with their graph, and log p from the head, without gradients
    3. the loss of each pair and its gradient with respect to the two log p: a number for each row
    4. the head once more, with each row's tokens weighted by that number, and backward

The head's float32 logits never exist as a whole, in either pass. The loss is a mean over the pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardline.adapters.lora import Adaptation, frozen_alone
from shardline.comm import collectives
from shardline.comm.mesh import Mesh
from shardline.config.schema import Config, Dpo
from shardline.data.batch import IGNORE, Batch
from shardline.errors import ConfigError
from shardline.models.decoder import Decoder
from shardline.parallel.data.fsdp import free_gathered
from shardline.training.loss import Head
from shardline.training.whole_model import WholeModel

# name -> loss of each pair (B,), from the difference of its log-probability ratios, beta and label smoothing
LOSSES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "sigmoid": lambda x, beta, swapped: -(1 - swapped) * F.logsigmoid(beta * x) - swapped * F.logsigmoid(-beta * x),
    "robust": lambda x, beta, swapped: (
        (swapped * F.logsigmoid(-beta * x) - (1 - swapped) * F.logsigmoid(beta * x)) / (1 - 2 * swapped)
    ),
    "hinge": lambda x, beta, _: torch.relu(1 - beta * x),
    "ipo": lambda x, beta, _: (x - 1 / (2 * beta)) ** 2,
}


class Reference(NamedTuple):
    """The source of the reference's log-probabilities: LoRA's frozen weights, a `copy` of the model, or none."""

    kind: str  # "base", "copy" or "none"
    copy: Decoder | None = None


def reference_kind(config: Config, how: Adaptation | None) -> str | None:
    """The kind of reference for a run that trains the model as `how` says; None if its objective needs none."""
    if config.training.objective != "dpo":
        return None
    asked = config.dpo.reference
    if asked == "base" and how is not None and how.changes_model:  # an adapter loaded by the user may do so
        what = how.saved[0] if how.saved else "each bias of lora.bias"
        raise ConfigError(f"dpo.reference = 'base': {what} is trained whole, and changes; set it to 'copy'")
    if asked != "auto":
        return asked
    return "copy" if how is None or how.changes_model else "base"


def pair_losses(policy: Tensor, reference: Tensor, tokens: Tensor, section: Dpo) -> Tensor:
    """(B,): the loss of each pair, from its answers' log-probabilities (B, 2) and numbers of `tokens` (B, 2)."""
    ratios = policy - reference
    if section.loss == "ipo":  # a mean over tokens, so that the target of the square does not depend on the length
        ratios = ratios / tokens.clamp(min=1)
    return LOSSES[section.loss](ratios[:, 0] - ratios[:, 1], section.beta, section.label_smoothing)


class PairedModel(WholeModel):
    """Its passes return loss, reward margin and the share of pairs whose better answer has the higher reward."""

    names = ("loss", "reward_margin", "reward_accuracy")

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, head: Head, reference: Reference) -> None:
        super().__init__(config, model, mesh, head)
        self.options, self.reference = config.dpo, reference
        self.cp, self.tp = mesh.layout.cp, mesh.layout.tp

    @property
    def share(self) -> float:
        """Context- and tensor-parallel ranks all have the numbers of the same pairs."""
        return 1.0 / (self.cp * self.tp)

    def count(self, batch: Batch) -> Tensor:
        """The number of pairs, divided by the number of context-parallel ranks that share them."""
        return _real(batch).sum() / self.cp

    def _loss(self, batch: Batch, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        reference = self._reference(batch)
        hidden = self.model.hidden(batch.tokens, documents=batch.documents)
        policy = self.head.log_probabilities(self.model, hidden.detach(), batch.labels)
        sums = torch.stack([policy, reference, (batch.labels != IGNORE).sum(1).to(policy.dtype)])  # (3, 2B)
        if self.cp > 1:
            collectives.sum_in_place(sums, "cp")
        policy, reference, tokens = sums.unflatten(1, (-1, 2))  # (B, 2) each
        real = _real(batch)
        with torch.enable_grad():
            leaf = policy.requires_grad_()
            losses = torch.where(real, pair_losses(leaf, reference, tokens, self.options), 0)
            (slope,) = torch.autograd.grad(losses.sum(), leaf)
        rewards = self.options.beta * (leaf.detach() - reference)
        margins = rewards[:, 0] - rewards[:, 1]
        numbers = torch.stack([losses.detach(), margins, (margins > 0).to(margins.dtype)])  # (3, B)
        loss = self.head.loss(self.model, hidden, batch.labels, scale, rows=-slope.flatten())
        return loss, torch.where(real, numbers, 0).sum(1) * scale

    @torch.no_grad()
    def _reference(self, batch: Batch) -> Tensor:
        """(2B,): the reference's log-probability of each row, over this rank's slice of it."""
        if self.reference.kind == "none":
            return torch.zeros(len(batch.tokens), device=batch.tokens.device)
        model = self.reference.copy or self.model
        was_training = model.training
        with ExitStack() as around:
            if self.reference.copy is None:
                around.enter_context(frozen_alone(model))
                model.eval()
                around.callback(model.train, was_training)
            hidden = model.hidden(batch.tokens, documents=batch.documents)
            found = self.head.log_probabilities(model, hidden, batch.labels)
        if self.reference.copy is not None:
            free_gathered(model)
        return found


def _real(batch: Batch) -> Tensor:
    """(B,): which pairs are not padding."""
    return batch.sample_ids >= 0
