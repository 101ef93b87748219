"""SGD against torch's, Lion against the paper's formula; both keep one moment."""

from __future__ import annotations

import pytest
import torch

from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.unit.optim.test_lamb import BETA1, BETA2, DECAY, LR, config, decoder, set_gradients


def stepped(name: str, steps: int = 3):
    model = decoder(name)
    optimizer = build_optimizer(config(name), model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return model, optimizer


def test_sgd_is_that_of_torch():
    model, _ = stepped("SGD")
    other = decoder("SGD")
    theirs = torch.optim.SGD(other.parameters(), lr=LR, momentum=BETA1, weight_decay=DECAY)
    for step in range(3):
        set_gradients(other, step)
        theirs.step()
    for ours, parameter in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter)


def test_lion_is_that_of_the_paper():
    model, _ = stepped("Lion")
    other = decoder("Lion")
    moments = [torch.zeros_like(parameter) for parameter in other.parameters()]
    for step in range(3):
        set_gradients(other, step)
        with torch.no_grad():
            for parameter, moment in zip(other.parameters(), moments, strict=True):
                update = torch.sign(BETA1 * moment + (1 - BETA1) * parameter.grad)
                parameter -= LR * (update + DECAY * parameter)
                moment.mul_(BETA2).add_(parameter.grad, alpha=1 - BETA2)
    for ours, parameter in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter)


@pytest.mark.parametrize(("name", "moment"), [("SGD", "momentum_buffer"), ("Lion", "exp_avg")])
def test_one_moment_of_each_parameter_is_saved(name, moment):
    model = decoder(name)
    state = optimizer_state(build_optimizer(config(name), model), model)
    assert set(state) == {f"{moment}.{parameter}" for parameter, _ in model.named_parameters()}
