"""Adam with moments in bfloat16: close to float32's, rounded without bias, equal after a resume."""

from __future__ import annotations

import pytest
import torch

from shardline.optim import narrow_adam as narrow_adam
from shardline.optim.narrow_adam import NarrowAdam
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.unit.optim.optimizer_state import load_optimizer_state
from tests.unit.optim.test_optimizer import Tiny, config, train


def narrow(**options):
    return config(state_dtype="bfloat16", **options)


def bytes_of_state(optimizer, model) -> int:
    return sum(t.numel() * t.element_size() for t in optimizer_state(optimizer, model).values() if t.ndim)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_steps_are_those_of_torch_within_the_rounding_of_the_moments(name, implementation):
    model, other = Tiny(), Tiny()
    optimizer = build_optimizer(narrow(name=name, implementation=implementation, decay_norms=False), model)
    wide = build_optimizer(config(name=name, implementation=implementation, decay_norms=False), other)
    assert isinstance(optimizer, NarrowAdam)
    train(model, optimizer, 1)
    train(other, wide, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), "the first step uses the moments before they are rounded"
    train(model, optimizer, 10, seed=5)
    train(other, wide, 10, seed=5)
    start = Tiny()
    for a, b, c in zip(model.parameters(), other.parameters(), start.parameters(), strict=True):
        assert (a - b).abs().max() < 0.02 * (b - c).abs().max()
    assert bytes_of_state(optimizer, model) * 2 == bytes_of_state(wide, other)


@pytest.mark.parametrize("steps", [0, 3])
def test_state_saved_and_loaded_continues_bitwise(steps):
    model = Tiny()
    optimizer = build_optimizer(narrow(), model)
    train(model, optimizer, steps)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    assert saved["exp_avg.norm.weight"].dtype == saved["exp_avg_sq.norm.weight"].dtype == torch.bfloat16
    assert saved["step.norm.weight"].item() == steps
    other = Tiny(seed=5)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(narrow(), other)
    load_optimizer_state(resumed, other, saved)
    train(model, optimizer, 3, seed=9)
    train(other, resumed, 3, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_wide_state_loads_into_narrow_and_back():
    model, other = Tiny(), Tiny()
    wide, thin = build_optimizer(config(), model), build_optimizer(narrow(), other)
    train(model, wide, 2)
    load_optimizer_state(thin, other, optimizer_state(wide, model))
    again = build_optimizer(config(), model)
    load_optimizer_state(again, model, optimizer_state(thin, other))
    first, second = optimizer_state(wide, model), optimizer_state(again, model)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=2**-8, atol=0)


def test_rounding_has_no_bias_and_does_not_stop_a_slow_decay():
    """With beta2 = 0.999 each step is below half a bfloat16 step: rounded to nearest, the moment would stand still."""
    parameter = torch.nn.Parameter(torch.zeros(20_000))
    model = torch.nn.ParameterList([parameter])
    optimizer = build_optimizer(narrow(beta2=0.999), model)
    optimizer_state(optimizer, model)["exp_avg_sq.0"].fill_(1.0)
    for _ in range(300):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    second = optimizer_state(optimizer, model)["exp_avg_sq.0"].float()
    assert second.mean().item() == pytest.approx(0.999**300, rel=2e-3)
    assert torch.tensor(1.0).bfloat16().mul(0.999).bfloat16() == 1.0  # what nearest would do


def test_pieces_of_large_parameters_add_up(monkeypatch):
    """Parameters cut to fit a scratch, and several together in one, give the steps of whole ones."""
    results = []
    for scratch in (1 << 20, 7):
        monkeypatch.setitem(narrow_adam.SCRATCH, "cpu", scratch)
        model = Tiny()
        train(model, build_optimizer(narrow(), model), 1)
        results.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in results), strict=True))


def test_a_gradient_that_is_not_contiguous_is_read_right():
    models = [Tiny(), Tiny()]
    for model, turned in zip(models, (False, True), strict=True):
        for parameter in model.parameters():
            gradient = torch.arange(1.0, parameter.numel() + 1).reshape(parameter.shape).cos()
            parameter.grad = gradient.T.contiguous().T if turned and parameter.ndim == 2 else gradient
        build_optimizer(narrow(), model).step()
    assert not models[1].last.weight.grad.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_bfloat16_parameters_have_narrow_moments_already():
    model = Tiny().bfloat16()
    assert type(build_optimizer(narrow(), model)) is torch.optim.AdamW
