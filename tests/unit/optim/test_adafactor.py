"""Adafactor against the one of transformers, step by step, on the logical weights of a fused model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Reference

from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.optim import adafactor
from shardline.optim.lr_schedule import learning_rate, set_lr
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.model_state import logical_state
from tests.unit.optim.optimizer_state import load_optimizer_state
from tests.unit.optim.test_lamb import SIZES, logical_gradients, set_gradients

LR, DECAY = 0.02, 0.1
EXPERTS = {"moe": {"n_experts": 3, "top_k": 2, "expert_dim": 24, "shared_dim": 16}}
# our keys; those of transformers have the same names, but for momentum
OPTIONS = [
    {},
    {"scale_parameter": True, "momentum": 0.9},
    {"clip_threshold": 0.25, "decay_rate": -0.5, "eps": [1e-6, 1e-3]},
    {"relative_step": True, "scale_parameter": True, "eps": [1e-30, 0.05]},
    {"relative_step": True, "warmup_init": True},
]


def reference(weights: list[nn.Parameter], momentum: float | None = None, **options) -> Reference:
    plain = {"scale_parameter": False, "relative_step": False, "weight_decay": DECAY, "beta1": momentum}
    return Reference(weights, lr=None if options.get("relative_step") else LR, **{**plain, **options})


def config(model: dict | None = None, **options):
    keys = {f"optimizer.adafactor_{name}": value for name, value in options.items()}
    fixed = {"optimizer.name": "Adafactor", "optimizer.lr": LR, "optimizer.weight_decay": DECAY}
    schedule = {"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_type": "constant"}
    return load_config(overrides={"model.overrides": {**SIZES, **(model or {})}, **fixed, **schedule, **keys})


def decoder(made) -> Decoder:
    model = Decoder(resolve(made.model))
    init_weights(model, seed=3)
    return model


def steps(made, model: Decoder, optimizer: torch.optim.Optimizer, first: int, last: int):
    for step in range(first, last):
        set_gradients(model, step)
        set_lr(optimizer, learning_rate(LR, step, made))
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("scratch", [1 << 20, 64], ids=["at-once", "in-pieces"])
def test_steps_are_those_of_transformers(options, scratch, monkeypatch):
    monkeypatch.setitem(adafactor.SCRATCH, "cpu", scratch)
    made = config(**options)
    model = decoder(made)
    optimizer = build_optimizer(made, model)
    logical = {name: nn.Parameter(tensor.clone()) for name, tensor in logical_state(model).items()}
    theirs = reference(list(logical.values()), **options)
    for step in range(4):
        steps(made, model, optimizer, step, step + 1)
        for name, gradient in logical_gradients(model).items():
            logical[name].grad = gradient
        theirs.step()
        for name, tensor in logical_state(model).items():
            torch.testing.assert_close(tensor, logical[name].detach(), rtol=2e-6, atol=2e-7, msg=f"{name}, {step}")


def test_experts_are_factored_one_by_one_and_clipped_together():
    """As transformers does with a tensor of three dimensions; gate and up are two tensors."""
    made = config(EXPERTS)
    model = decoder(made)
    optimizer = build_optimizer(made, model)
    names = [name for name in logical_state(model) if ".experts." in name]
    logical = {name: nn.Parameter(logical_state(model)[name].clone()) for name in names}
    theirs = reference(list(logical.values()))
    for step in range(3):
        steps(made, model, optimizer, step, step + 1)
        for name, gradient in logical_gradients(model).items():
            if name in logical:
                logical[name].grad = gradient
        theirs.step()
    assert any(name.endswith("w3.weight") for name in names)
    for name in names:
        torch.testing.assert_close(logical_state(model)[name], logical[name].detach(), rtol=2e-6, atol=2e-7)


def test_state_is_one_number_for_each_row_and_column():
    made = config()
    model = decoder(made)
    state = optimizer_state(build_optimizer(made, model), model)
    fused = dict(model.named_parameters())["layers.0.attention.wqkv.weight"]
    assert state["exp_avg_sq_row.layers.0.attention.wqkv.weight"].shape == (len(fused), 1)
    assert state["exp_avg_sq_col.layers.0.attention.wqkv.weight"].shape == (3, fused.shape[1])
    assert state["exp_avg_sq.norm.weight"].shape == (SIZES["dim"],)
    assert not any(key.startswith("exp_avg.") for key in state)
    numbers = sum(tensor.numel() for tensor in state.values())
    assert numbers < 0.15 * sum(parameter.numel() for parameter in model.parameters())


def test_a_resumed_optimizer_goes_on_bit_for_bit():
    made = config(momentum=0.9)
    model = decoder(made)
    optimizer = build_optimizer(made, model)
    steps(made, model, optimizer, 0, 2)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    other = decoder(made)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(made, other)
    load_optimizer_state(resumed, other, saved)
    steps(made, model, optimizer, 2, 4)
    steps(made, other, resumed, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_in_bfloat16_have_state_in_float32_and_step_as_those_of_transformers():
    torch.manual_seed(0)
    weight = nn.Linear(24, 40, bias=False, dtype=torch.bfloat16)
    twin = nn.Parameter(weight.weight.detach().clone())
    made = config()
    optimizer, theirs = build_optimizer(made, weight), reference([twin])
    assert {tensor.dtype for tensor in optimizer_state(optimizer, weight).values()} == {torch.float32}
    for step in range(3):
        twin.grad = torch.randn(twin.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        weight.weight.grad = twin.grad.clone()
        optimizer.step()
        theirs.step()
    torch.testing.assert_close(weight.weight, twin, rtol=2**-7, atol=0)  # one unit in the last place
    assert (weight.weight == twin).float().mean() > 0.99  # where a rounding is close, sums of another order decide
