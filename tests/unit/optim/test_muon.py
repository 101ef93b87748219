"""Muon against torch's own on every logical matrix, and its AdamW part against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch

from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.optim import muon
from shardline.optim.lr_schedule import set_lr
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.model_state import logical_state
from tests.parity.cases import EXPERTS
from tests.unit.optim.optimizer_state import load_optimizer_state
from tests.unit.optim.test_lamb import SIZES, logical_gradients, set_gradients

LR, FACTOR, DECAY, MOMENTUM = 0.02, 3.0, 0.2, 0.9
MODELS = {"dense": SIZES, "experts": SIZES | EXPERTS["model.overrides"] | {"mlp_bias": True}}


def config(model="dense", **options):
    keys = {f"optimizer.{name}": value for name, value in options.items()}
    given = {"lr": LR, "muon_lr_factor": FACTOR, "weight_decay": DECAY, "muon_momentum": MOMENTUM, "name": "Muon"}
    given |= {"beta1": 0.8, "beta2": 0.85, "eps": 1e-6}
    usual = {f"optimizer.{name}": value for name, value in given.items()}
    return load_config(overrides={"model.overrides": MODELS[model], **usual, **keys})


def decoder(model="dense") -> Decoder:
    built = Decoder(resolve(config(model).model))
    init_weights(built, seed=3)
    return built


def is_orthogonal(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight") and "norm" not in name and "router" not in name


def expected_steps(model, options, steps):
    """The model's logical tensors after torch's own optimizers, experts apart."""
    tensors, parts = {}, {}
    for name, tensor in logical_state(model).items():
        whole = [tensor] if not is_orthogonal(name) or tensor.ndim == 2 else list(tensor)
        tensors[name] = [torch.nn.Parameter(one.clone()) for one in whole]
        parts.setdefault("router.balance" in name or is_orthogonal(name), []).append(name)
    matrices = [one for name in tensors if is_orthogonal(name) for one in tensors[name]]
    others = [tensors[name][0] for name in tensors if not is_orthogonal(name) and "balance" not in name]
    plain = [one for one in others if one.ndim == 1] if not options.get("decay_norms", True) else []
    groups = [{"params": [one for one in others if all(one is not two for two in plain)]}]
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    made = [
        torch.optim.Muon(
            matrices,
            lr=LR * FACTOR,
            momentum=MOMENTUM,
            weight_decay=DECAY,
            adjust_lr_fn=options.get("muon_adjust_lr"),
            ns_steps=options.get("muon_ns_steps", 5),
        ),
        torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.85), eps=1e-6, weight_decay=DECAY, fused=True),
    ]
    for step in range(1, steps + 1):
        set_gradients(model, step)
        for name, gradient in logical_gradients(model).items():
            for one, its in zip(tensors[name], [gradient] if len(tensors[name]) == 1 else gradient, strict=True):
                one.grad = its.clone()
        for optimizer in made:
            optimizer.step()
    return {
        name: ones[0].detach() if len(ones) == 1 else torch.stack(list(ones)).detach() for name, ones in tensors.items()
    }


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {}),
        ("dense", {"muon_adjust_lr": "match_rms_adamw", "decay_norms": False}),
        ("dense", {"muon_ns_steps": 3}),
        ("experts", {}),
    ],
)
def test_steps_are_torchs_for_every_logical_matrix(monkeypatch, model, options):
    """Bit by bit, in the type that torch's Muon works in everywhere."""
    monkeypatch.setitem(muon.TYPES, "cpu", torch.bfloat16)
    built = decoder(model)
    expected = expected_steps(built, options, steps=3)
    optimizer = build_optimizer(config(model, **options), built)
    for step in range(1, 4):
        set_gradients(built, step)
        optimizer.step()
    for name, tensor in logical_state(built).items():
        if "balance" not in name:
            assert torch.equal(tensor, expected[name]), name


def test_an_update_is_nearly_orthogonal():
    """In float32, as on a CPU: all singular values of the step of a square matrix are near each other."""
    model = decoder()
    optimizer = build_optimizer(config(weight_decay=0.0), model)
    weight = model.layers["0"].attention.wo.weight
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    spread = torch.linalg.svdvals(weight.grad)
    optimizer.step()
    step = torch.linalg.svdvals(before - weight.detach()) / (LR * FACTOR)
    assert spread[0] / spread[-1] > 20
    assert 0.3 < step[-1] < step[0] < 1.4


def test_float32_is_close_to_torchs_bfloat16():
    model = decoder()
    expected = expected_steps(model, {}, steps=1)
    optimizer = build_optimizer(config(), model)
    set_gradients(model, 1)
    optimizer.step()
    for name, tensor in logical_state(model).items():
        assert (tensor - expected[name]).norm() < 0.02 * expected[name].norm(), name


def test_both_parts_follow_the_schedule():
    model = decoder()
    optimizer = build_optimizer(config(weight_decay=0.0), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_lr(optimizer, 0.0)
    set_gradients(model, 1)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    set_lr(optimizer, LR)
    set_gradients(model, 2)
    optimizer.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("steps", [0, 2])
def test_state_saved_and_loaded_continues_bitwise(steps):
    model = decoder()
    optimizer = build_optimizer(config(), model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    kinds = {name: {key.split(".", 1)[0] for key in saved if key.endswith(f".{name}")} for name in before_names(model)}
    assert kinds["layers.0.attention.wqkv.weight"] == {"momentum_buffer"}
    assert kinds["layers.0.attention.wqkv.bias"] == kinds["output.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    other = decoder()
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(config(), other)
    load_optimizer_state(resumed, other, saved)
    for each, its_optimizer in ((model, optimizer), (other, resumed)):
        set_gradients(each, 9)
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def before_names(model) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_a_model_without_blocks_or_with_nothing_else():
    for model in (torch.nn.Linear(3, 2), torch.nn.ModuleDict({"layers": torch.nn.Linear(3, 2, bias=False)})):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        build_optimizer(config(), model).step()
        assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_parameters_without_a_gradient_are_left_alone():
    model = decoder()
    set_gradients(model, 1)
    idle = {"norm.weight", "layers.1.feed_forward.w2.weight"}
    for name in idle:
        model.get_parameter(name).grad = None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = build_optimizer(config(), model)
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - idle
    set_gradients(model, 2)
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before)
