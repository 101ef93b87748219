"""The losses of a router against loops over sequences, tokens and experts."""

import pytest
import torch

from shardline.config.architecture import MixtureOfExperts
from shardline.models.experts.moe import ExpertExchange, ExpertWeights, RouterRun, moe, route

BATCH, LENGTH, DIM, WIDTH = 3, 8, 16, 12
RUN = RouterRun(sequences=2 * BATCH, seq_len=LENGTH)  # this is one of two micro-batches


def weights(spec: MixtureOfExperts) -> ExpertWeights:
    chance = torch.Generator().manual_seed(3)
    shapes = [(spec.n_experts, DIM), (spec.n_experts, 2, WIDTH, DIM), (spec.n_experts, DIM, WIDTH)]
    router, w13, w2 = (torch.randn(shape, generator=chance).requires_grad_() for shape in shapes)
    return ExpertWeights(router, None, None, w13, None, w2, None)


def tokens() -> torch.Tensor:
    return torch.randn(BATCH * LENGTH, DIM, generator=torch.Generator().manual_seed(4)).requires_grad_()


def auxiliary(logits: torch.Tensor, chosen: torch.Tensor, spec: MixtureOfExperts) -> torch.Tensor:
    """The mean over the sequences of the global batch, one token and one expert at a time."""
    total = torch.zeros(())
    for b in range(BATCH):
        rows = range(b * LENGTH, (b + 1) * LENGTH)
        for expert in range(spec.n_experts):
            count = sum(int(expert in chosen[t]) for t in rows)
            scores = [logits[t].softmax(-1) if spec.score == "softmax" else logits[t].sigmoid() for t in rows]
            mean = sum(s[expert] / s.sum() for s in scores) / LENGTH
            total = total + spec.n_experts / (spec.top_k * LENGTH) * count * mean
    return total / RUN.sequences


def z(logits: torch.Tensor) -> torch.Tensor:
    return sum(torch.log(row.exp().sum()) ** 2 for row in logits) / (RUN.sequences * LENGTH)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("coefficients", [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_losses_add_their_gradient_and_report_their_value(score, coefficients):
    plain = MixtureOfExperts(n_experts=6, top_k=2, expert_dim=WIDTH, score=score)
    spec = plain.model_copy(update=dict(zip(("aux_loss_coeff", "z_loss_coeff"), coefficients, strict=True)))
    w, x = weights(spec), tokens()
    out, tally = moe(x, w, spec, ExpertExchange(), (BATCH, LENGTH), RUN)
    out.square().sum().backward()
    seen = x.grad, w.router.grad

    again, y = weights(spec), tokens()
    same, counts = moe(y, again, plain, ExpertExchange(), (BATCH, LENGTH), RUN)
    logits = y @ again.router.T
    losses = [auxiliary(logits, route(y, again, plain).chosen, spec), z(logits)]
    (same.square().sum() + sum(c * loss for c, loss in zip(coefficients, losses, strict=True))).backward()
    assert torch.equal(out, same)
    torch.testing.assert_close(seen, (y.grad, again.router.grad), rtol=1e-4, atol=1e-5)
    reported = torch.stack([loss for c, loss in zip(coefficients, losses, strict=True) if c])
    torch.testing.assert_close(tally, torch.cat([counts, reported.detach()]))


def test_the_auxiliary_loss_is_one_where_experts_are_used_alike():
    spec = MixtureOfExperts(n_experts=4, top_k=1, expert_dim=WIDTH, aux_loss_coeff=1.0)
    w = weights(spec)._replace(router=torch.zeros(4, DIM, requires_grad=True))
    run = RouterRun(forced=True, sequences=BATCH, seq_len=LENGTH)
    _, tally = moe(tokens(), w, spec, ExpertExchange(), (BATCH, LENGTH), run)
    assert tally.tolist() == [6.0, 6.0, 6.0, 6.0, pytest.approx(1.0)]


def test_outside_of_training_there_are_no_losses():
    spec = MixtureOfExperts(n_experts=4, top_k=1, expert_dim=WIDTH, aux_loss_coeff=1.0, z_loss_coeff=1.0)
    with torch.no_grad():
        _, tally = moe(tokens(), weights(spec), spec, ExpertExchange(), (BATCH, LENGTH), RUN)
    assert tally[-2:].tolist() == [0.0, 0.0]
