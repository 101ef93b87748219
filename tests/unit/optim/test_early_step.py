"""The optimizer's step in backward: same numbers as the ordinary one, few gradients alive at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shardline.config.load import load_config
from shardline.optim.early_step import EarlyStep, step_early
from shardline.optim.lr_schedule import set_lr
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.unit.optim.optimizer_state import load_optimizer_state

LAYERS = 8


def config(**options):
    changes = {f"optimizer.{key}": value for key, value in options.items()}
    return load_config(overrides={"optimizer.lr": 0.01, "optimizer.decay_norms": False, **changes})


class Layers(nn.Module):
    """The first and the last product share a weight, as a tied embedding does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Parameter(torch.randn(16, 16) / 4)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(16)

    def forward(self, x):
        x = x @ self.tied
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x) @ self.tied.T


def loss_of(model: nn.Module, step: int, micro_batches: int = 1, micro_batch: int = 0) -> torch.Tensor:
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(micro_batches)[micro_batch]
    return model(data).square().sum() / 8


def ordinary_step(model, optimizer, step: int, max_norm: float = 0.0, micro_batches: int = 1) -> float:
    for number in range(micro_batches):
        loss_of(model, step, micro_batches, number).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def early(model, optimizer, early_step, step: int, max_norm: float = 0.0, micro_batches: int = 1):
    def backward() -> torch.Tensor:
        total = torch.zeros(())
        for number in range(micro_batches):
            early_step.enabled = number == micro_batches - 1
            loss = loss_of(model, step, micro_batches, number)
            loss.backward()
            total += loss.detach()
        return total

    outcome, changed = step_early(early_step, backward, one_rank, max_norm)
    return outcome.loss, outcome.grad_norm, changed


class Outcome(NamedTuple):
    loss: float
    grad_norm: float


def one_rank(loss: torch.Tensor, squares: torch.Tensor) -> Outcome:
    return Outcome(loss.item(), squares.sqrt().item())


def pair(**options):
    models = Layers(), Layers()
    optimizers = tuple(build_optimizer(config(**options), model) for model in models)
    return (*models, *optimizers, EarlyStep(optimizers[1]))


def difference(a: nn.Module, b: nn.Module) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_without_clipping_the_numbers_are_bitwise_the_ordinary_ones(implementation, micro_batches):
    ordinary, model, one, other, early_step = pair(implementation=implementation)
    for step in range(4):
        lr = 0.01 / (step + 1)
        set_lr(one, lr)
        set_lr(other, lr)
        norm = ordinary_step(ordinary, one, step, micro_batches=micro_batches)
        loss, measured, changed = early(model, other, early_step, step, micro_batches=micro_batches)
        assert changed
        assert measured == pytest.approx(norm, rel=1e-6)
        assert math.isfinite(loss)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert difference(ordinary, model) == 0
    assert difference(ordinary, Layers()) > 1e-3


@pytest.mark.parametrize(
    "options", [{"name": "LAMB"}, {"name": "LARS"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}]
)
def test_other_optimizers_step_in_backward_too(options):
    ordinary, model, one, other, early_step = pair(**options)
    for step in range(4):
        ordinary_step(ordinary, one, step)
        early(model, other, early_step, step)
    # bfloat16 moments are rounded with other random bits when each parameter is stepped alone
    assert difference(ordinary, model) < (2e-4 if "state_dtype" in options else 1e-6)
    assert difference(ordinary, Layers()) > 1e-3


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_two_passes_clip_exactly(micro_batches, max_norm):
    ordinary, model, one, other, early_step = pair(name="LARS", lr=1.0)  # its step has the length of the gradient
    for step in range(4):
        norm = ordinary_step(ordinary, one, step, max_norm, micro_batches)
        _, measured, changed = early(model, other, early_step, step, max_norm, micro_batches)
        assert changed
        assert measured == pytest.approx(norm, rel=1e-5)
    assert difference(ordinary, model) < 1e-6
    assert difference(ordinary, Layers()) > 1e-4


def test_two_passes_change_nothing_when_a_gradient_is_not_finite():
    _, model, _, optimizer, early_step = pair()
    early(model, optimizer, early_step, 0, max_norm=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    state = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    model.layers[3].weight.register_hook(lambda gradient: gradient * math.inf)
    _, norm, changed = early(model, optimizer, early_step, 1, max_norm=1.0)
    assert not math.isfinite(norm)
    assert not changed
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(state[key], tensor) for key, tensor in optimizer_state(optimizer, model).items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_pass_still_tells_that_a_gradient_was_not_finite():
    _, model, _, optimizer, early_step = pair()
    model.layers[3].weight.register_hook(lambda gradient: gradient * math.nan)
    _, norm, changed = early(model, optimizer, early_step, 0)
    assert math.isnan(norm)
    assert changed


def live_gradient_bytes(model: nn.Module) -> int:
    return sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("micro_batches", "freed"), [(1, True), (2, False)])
def test_gradients_are_freed_as_they_are_used(micro_batches, freed):
    """Most bytes of gradients alive at once: a layer's or two; with accumulation they wait for the last micro-batch."""
    _, model, _, optimizer, _ = pair()
    peak = 0

    def look(parameter):
        nonlocal peak
        peak = max(peak, live_gradient_bytes(model))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    early_step = EarlyStep(optimizer)  # its hooks run after those that look
    early(model, optimizer, early_step, 0, micro_batches=micro_batches)
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (0 < peak < every / 4) if freed else peak == every


def test_late_parameters_wait_for_the_end_of_backward():
    ordinary, model = Layers(), Layers()
    one, other = (build_optimizer(config(), each) for each in (ordinary, model))
    late = [p for p in model.parameters() if p.ndim == 1]
    early_step = EarlyStep(other, late=late)
    left = []

    def backward():
        loss = loss_of(model, 0)
        loss.backward()
        left.extend(parameter for parameter in model.parameters() if parameter.grad is not None)
        for parameter in late:
            parameter.grad *= 2  # what a sum over ranks would do
        return loss.detach()

    step_early(early_step, backward, one_rank, max_norm=0.0)
    assert {id(p) for p in left} == {id(p) for p in late}
    loss_of(ordinary, 0).backward()
    for parameter in ordinary.parameters():
        if parameter.ndim == 1:
            parameter.grad *= 2
    one.step()
    assert difference(ordinary, model) == 0


def test_shares_weigh_the_squares_of_what_several_ranks_hold():
    _, model, _, optimizer, _ = pair()
    halved = EarlyStep(optimizer, share=lambda parameter: 0.5)
    with halved.using(steps=False):
        loss_of(model, 0).backward()
    loss_of(model, 0).backward()
    whole = sum(parameter.grad.square().sum() for parameter in model.parameters())
    torch.testing.assert_close(halved.norm_squared(), whole / 2)


def test_outside_of_a_step_gradients_are_left_alone():
    _, model, _, _, early_step = pair()
    with early_step.using(steps=True):
        pass
    loss_of(model, 0).backward()
    assert live_gradient_bytes(model) > 0


def test_state_saved_and_loaded_continues_bitwise_also_as_an_ordinary_run():
    _, model, _, optimizer, early_step = pair()
    for step in range(3):
        early(model, optimizer, early_step, step)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    assert saved["step.norm.weight"].item() == 3
    ordinary, again, one, other, again_early = pair()
    for each, its_optimizer in ((ordinary, one), (again, other)):
        each.load_state_dict(model.state_dict())
        load_optimizer_state(its_optimizer, each, saved)
    for step in range(5, 8):
        early(model, optimizer, early_step, step)
        early(again, other, again_early, step)
        ordinary_step(ordinary, one, step)
    assert difference(model, again) == 0
    assert difference(model, ordinary) == 0


def test_both_passes_drop_the_same_elements():
    _, model, _, _, early_step = pair()
    drawn = []

    def backward() -> torch.Tensor:
        mask = torch.nn.functional.dropout(torch.ones(8, 16), 0.5)
        drawn.append(mask)
        loss = (model(torch.ones(8, 16)) * mask).square().sum()
        loss.backward()
        return loss.detach()

    torch.manual_seed(3)
    step_early(early_step, backward, one_rank, 1e-3)
    first, second = drawn
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.nn.functional.dropout(torch.ones(8, 16), 0.5)), "later steps draw anew"
