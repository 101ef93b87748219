"""Routed experts against a loop over tokens, however unevenly the tokens are spread."""

import pytest
import torch
from torch.nn import functional as F

from shardline.config.architecture import MixtureOfExperts
from shardline.models.experts import rows
from shardline.models.experts.moe import ExpertExchange, ExpertWeights, RouterRun, moe, route

DIM, WIDTH, EXPERTS = 16, 12, 5


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(balance: list[float], router: torch.Tensor) -> ExpertWeights:
    tensors = [router, drawn(EXPERTS, 2, WIDTH, DIM, seed=2), drawn(EXPERTS, DIM, WIDTH, seed=3)]
    gate, w13, w2 = (tensor.requires_grad_() for tensor in tensors)
    return ExpertWeights(gate, None, torch.tensor(balance), w13, None, w2, None)


def one_by_one(x: torch.Tensor, w: ExpertWeights, spec: MixtureOfExperts) -> torch.Tensor:
    out = []
    for token in x:
        scores = (w.router @ token).softmax(0)
        best = sorted(range(EXPERTS), key=lambda e: (-(scores[e] + w.balance[e]).item(), e))[: spec.top_k]
        mixed = [scores[e] * (w.w2[e] @ (F.silu(w.w13[e, 0] @ token) * (w.w13[e, 1] @ token))) for e in best]
        out.append(torch.stack(mixed).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("tokens", [1, 2, 23])
@pytest.mark.parametrize(("top_k", "balance"), [(1, [9.0, 0, 0, 0, 0]), (2, [0, 0, -9.0, 0, 0]), (5, [0.0] * 5)])
def test_output_and_gradients(tokens, top_k, balance):
    spec = MixtureOfExperts(n_experts=EXPERTS, top_k=top_k, expert_dim=WIDTH, balance_coeff=0.1)
    grouped = lambda x, w: moe(x, w, spec, ExpertExchange(), (1, tokens), RouterRun())[0]  # noqa: E731
    results = []
    for function in (grouped, lambda x, w: one_by_one(x, w, spec)):
        x, w = drawn(tokens, DIM, seed=1).requires_grad_(), weights(balance, drawn(EXPERTS, DIM, seed=4))
        out = function(x, w)
        out.square().sum().backward()
        results.append((out, x.grad, w.router.grad, w.w13.grad, w.w2.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_counts_of_skewed_tokens():
    spec = MixtureOfExperts(n_experts=EXPERTS, top_k=1, expert_dim=WIDTH, balance_coeff=0.1)
    w = weights([0, 0, 0, 9.0, 0], drawn(EXPERTS, DIM, seed=4))
    _, tally = moe(drawn(7, DIM, seed=1), w, spec, ExpertExchange(), (1, 7), RouterRun())
    assert tally.tolist() == [0, 0, 0, 7, 0]


def test_equal_scores_choose_different_experts():
    spec = MixtureOfExperts(n_experts=EXPERTS, top_k=3, expert_dim=WIDTH, balance_coeff=0.1)
    routing = route(drawn(9, DIM, seed=1), weights([0.0] * EXPERTS, torch.zeros(EXPERTS, DIM)), spec)
    assert all(len(set(chosen)) == 3 for chosen in routing.chosen.tolist())
    assert int(routing.counts.sum()) == 27
    torch.testing.assert_close(routing.weights, torch.full((9, 3), 1 / EXPERTS))


def test_frozen_experts_cost_no_gradient(monkeypatch):
    computed = []
    plain = rows.weight_gradient
    monkeypatch.setattr(rows, "weight_gradient", lambda *given: computed.append(given) or plain(*given))
    spec = MixtureOfExperts(n_experts=EXPERTS, top_k=2, expert_dim=WIDTH)
    w = weights([0.0] * EXPERTS, drawn(EXPERTS, DIM, seed=4))
    w.w13.requires_grad_(False)
    x = drawn(7, DIM, seed=1).requires_grad_()
    moe(x, w, spec, ExpertExchange(), (1, 7), RouterRun())[0].sum().backward()
    assert w.w13.grad is None
    assert w.w2.grad is not None
    assert x.grad is not None
    assert len(computed) == 1
