"""Which optimizer is built, with which kernels and groups, and its state as named tensors."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardline import registry
from shardline.config.schema import Lora, LRScheduler
from shardline.errors import ConfigError, UserError
from shardline.optim import optimizer as module
from shardline.optim.optimizer import build_optimizer, scaled_lr
from shardline.optim.state import optimizer_state
from tests.unit.optim.optimizer_state import load_optimizer_state

USUAL = {
    "name": "AdamW",
    "lr": 0.01,
    "beta1": 0.8,  # here and below other numbers than the defaults of the config
    "beta2": 0.85,
    "eps": 1e-6,
    "weight_decay": 0.2,
    "implementation": "fused",
    "decay_norms": True,
    "state_dtype": "parameter",
    "lr_scaling": "none",
    "lr_scaling_base_batch": 256,
}


def config(**options):
    section = SimpleNamespace(**{**USUAL, **options})
    return SimpleNamespace(optimizer=section, lora=Lora(), lr_scheduler=LRScheduler())


class Tiny(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.RMSNorm(6)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x).relu()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    for step in range(steps):
        random = torch.Generator().manual_seed(seed + step)
        data = torch.randn(5, 4, generator=random).to(next(model.parameters()))
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize(
    ("implementation", "fused", "foreach"),
    [("fused", True, False), ("foreach", False, True), ("for-loop", False, False)],
)
def test_the_implementation_reaches_torch(name, implementation, fused, foreach):
    optimizer = build_optimizer(config(name=name, implementation=implementation), Tiny())
    assert type(optimizer) is getattr(torch.optim, name)
    for group in optimizer.param_groups:
        assert (group["fused"], group["foreach"]) == (fused, foreach)
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.01, (0.8, 0.85), 1e-6, 0.2)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_all_implementations_agree(name):
    models = []
    for implementation in ("fused", "foreach", "for-loop"):
        model = Tiny()
        train(model, build_optimizer(config(name=name, implementation=implementation, decay_norms=False), model), 5)
        models.append(model)
    start = Tiny()
    for first, *others in zip(*(model.parameters() for model in models), strict=True):
        for other in others:
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(models[0].last.weight, start.last.weight)


def test_adamw_decay_is_decoupled_and_adam_decay_is_not():
    moved = {}
    for name in ("AdamW", "Adam"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model.weight.grad = torch.zeros(1, 1)
        build_optimizer(config(name=name), model).step()
        moved[name] = 1 - model.weight.item()
    assert moved["AdamW"] == pytest.approx(0.01 * 0.2, rel=1e-3)
    assert moved["Adam"] == pytest.approx(0.01, rel=1e-3)  # the decay went through the moments


def test_norms_and_biases_are_not_decayed_by_option():
    model = Tiny()
    (group,) = build_optimizer(config(), model).param_groups
    assert len(group["params"]) == 4
    decayed, spared = build_optimizer(config(decay_norms=False), model).param_groups
    assert {id(p) for p in decayed["params"]} == {id(model.first.weight), id(model.last.weight)}
    assert {id(p) for p in spared["params"]} == {id(model.first.bias), id(model.norm.weight)}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.2, 0.0)


def test_biases_of_experts_are_not_decayed_either():
    model = Tiny()
    model.experts = nn.ParameterDict({"weight": torch.zeros(2, 3, 4), "bias": torch.zeros(2, 3)})
    decayed, spared = build_optimizer(config(decay_norms=False), model).param_groups
    assert any(p is model.experts["weight"] for p in decayed["params"])
    assert any(p is model.experts["bias"] for p in spared["params"])


def test_frozen_parameters_are_left_out():
    model = Tiny()
    model.first.requires_grad_(False)
    optimizer = build_optimizer(config(), model)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert {key.split(".", 1)[1] for key in optimizer_state(optimizer, model)} == {"norm.weight", "last.weight"}
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        build_optimizer(config(), model)


def test_a_registered_function_must_give_an_optimizer(monkeypatch):
    monkeypatch.setitem(registry.optimizers, "Mine", lambda groups, section: None)
    with pytest.raises(ConfigError, match=r"optimizer.name = 'Mine': its function returned NoneType"):
        build_optimizer(config(name="Mine"), Tiny())


def test_a_registered_optimizer_gets_the_groups_and_the_section(monkeypatch):
    def sgd(groups, section):
        return torch.optim.SGD(groups, lr=section.lr, momentum=0.9)

    monkeypatch.setitem(registry.optimizers, "MySGD", sgd)
    model = Tiny()
    optimizer = build_optimizer(config(name="MySGD", decay_norms=False), model)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert optimizer_state(optimizer, model) == {}
    train(model, optimizer, 2)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    assert set(saved) == {f"momentum_buffer.{name}" for name, _ in model.named_parameters()}
    other = Tiny()
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(config(name="MySGD", decay_norms=False), other)
    load_optimizer_state(resumed, other, saved)
    train(model, optimizer, 2, seed=9)
    train(other, resumed, 2, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_where_fused_does_not_run_a_line_says_what_does(monkeypatch, caplog):
    def picky(*args, fused, **options):
        if fused:
            raise RuntimeError("no fused kernel for this device")
        return torch.optim.AdamW(*args, fused=fused, **options)

    monkeypatch.setitem(module.BUILT_IN, "AdamW", picky)
    with caplog.at_level(logging.WARNING, logger="shardline"):
        optimizer = build_optimizer(config(), Tiny())
    assert optimizer.param_groups[0]["foreach"] is True
    assert "no fused kernel for this device" in caplog.text
    assert "foreach is used instead" in caplog.text


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("steps", [0, 3])
def test_state_saved_and_loaded_continues_bitwise(implementation, steps):
    model = Tiny()
    optimizer = build_optimizer(config(implementation=implementation), model)
    train(model, optimizer, steps)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    names = [name for name, _ in model.named_parameters()]
    assert set(saved) == {f"{kind}.{name}" for kind in ("step", "exp_avg", "exp_avg_sq") for name in names}
    assert saved["step.norm.weight"].item() == steps
    other = Tiny(seed=5)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(config(implementation=implementation), other)
    load_optimizer_state(resumed, other, saved)
    train(model, optimizer, 3, seed=9)
    train(other, resumed, 3, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_asking_for_the_state_before_the_first_step_changes_nothing():
    asked, silent = Tiny(), Tiny()
    optimizer = build_optimizer(config(), asked)
    optimizer_state(optimizer, asked)
    train(asked, optimizer, 3)
    train(silent, build_optimizer(config(), silent), 3)
    assert all(torch.equal(a, b) for a, b in zip(asked.parameters(), silent.parameters(), strict=True))


def test_state_has_the_dtype_of_its_parameter():
    model = Tiny().bfloat16()
    optimizer = build_optimizer(config(), model)
    before = {key: tensor.dtype for key, tensor in optimizer_state(optimizer, model).items()}
    train(model, build_optimizer(config(), model), 1)
    assert before["exp_avg.norm.weight"] == torch.bfloat16
    assert before["step.norm.weight"] == torch.float32
    wide = {key: tensor.float() for key, tensor in optimizer_state(optimizer, model).items()}
    load_optimizer_state(optimizer, model, wide)
    assert {key: tensor.dtype for key, tensor in optimizer_state(optimizer, model).items()} == before


def test_state_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded():
    model = Tiny()
    optimizer = build_optimizer(config(), model)
    good = {key: torch.ones_like(tensor) for key, tensor in optimizer_state(optimizer, model).items()}

    def refused(tensors, match):
        with pytest.raises(UserError, match=match):
            load_optimizer_state(optimizer, model, tensors)
        assert not any(tensor.any() for tensor in optimizer_state(optimizer, model).values())

    refused({k: v for k, v in good.items() if k != "exp_avg.norm.weight"}, "missing: exp_avg.norm.weight")
    refused({**good, "exp_avg.other.weight": torch.zeros(1)}, "unexpected: exp_avg.other.weight")
    refused({**good, "momentum_buffer.norm.weight": torch.zeros(6)}, "unexpected: momentum_buffer.norm.weight")
    refused({}, "missing: .* and 8 more")
    refused({**good, "exp_avg.norm.weight": torch.ones(7)}, r"exp_avg.norm.weight: shape \(7,\) was saved, but \(6,\)")


def test_state_that_is_no_tensor_is_named():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.norm.weight]["calls"] = 3
    with pytest.raises(UserError, match=r"'calls' of norm\.weight as a int"):
        optimizer_state(optimizer, model)


def test_the_learning_rate_grows_with_the_batch_by_option():
    assert scaled_lr(config(), 512) == 0.01
    linear = config(lr_scaling="linear")
    assert scaled_lr(linear, 512) == pytest.approx(0.02)
    assert scaled_lr(config(lr_scaling="linear", lr_scaling_base_batch=32), 8) == pytest.approx(0.0025)


def test_a_parameter_that_is_not_contiguous_is_not_stepped_wrongly():
    model = Tiny()
    model.last.weight = nn.Parameter(torch.zeros(3, 12)[:, ::2])
    with pytest.raises(ValueError, match=r"last\.weight is not contiguous"):
        build_optimizer(config(), model)
