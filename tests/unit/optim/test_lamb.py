"""LAMB and LARS against the papers' formulas, written out for one tensor at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.optim.lamb import fused_parts, whole_norms
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.model_state import logical_state
from tests.unit.optim.optimizer_state import load_optimizer_state

# None of them is a default.
LR, BETA1, BETA2, EPS, DECAY, TRUST = 0.02, 0.8, 0.85, 1e-6, 0.2, 0.01
SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 40,
    "vocab_size": 50,
    "qkv_bias": True,
}


def config(name: str):
    return load_config(
        overrides={
            "model.overrides": SIZES,
            "optimizer.name": name,
            "optimizer.lr": LR,
            "optimizer.beta1": BETA1,
            "optimizer.beta2": BETA2,
            "optimizer.eps": EPS,
            "optimizer.weight_decay": DECAY,
            "optimizer.trust_coefficient": TRUST,
        }
    )


def decoder(name: str) -> Decoder:
    model = Decoder(resolve(config(name).model))
    init_weights(model, seed=3)
    return model


def set_gradients(model: nn.Module, step: int) -> None:
    """Gradients that differ in size between parameters and parts."""
    for number, parameter in enumerate(model.parameters()):
        random = torch.Generator().manual_seed(1000 * step + number)
        scale = torch.logspace(-3, 1, parameter.shape[0]).reshape(-1, *[1] * (parameter.ndim - 1))
        parameter.grad = torch.randn(parameter.shape, generator=random) * scale


def logical_gradients(model: Decoder) -> dict[str, torch.Tensor]:
    shadow = Decoder(model.arch)
    with torch.no_grad():
        for own, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
            own.copy_(parameter.grad)
    return {name: tensor.clone() for name, tensor in logical_state(shadow).items()}


def norm(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().sqrt().item()


def lamb(w, g, state, step):
    m = state["m"] = BETA1 * state.get("m", torch.zeros_like(w)) + (1 - BETA1) * g
    v = state["v"] = BETA2 * state.get("v", torch.zeros_like(w)) + (1 - BETA2) * g * g
    r = (m / (1 - BETA1**step)) / ((v / (1 - BETA2**step)).sqrt() + EPS)
    if w.ndim == 1:
        return w - LR * r
    u = r + DECAY * w
    ratio = norm(w) / norm(u) if norm(w) > 0 and norm(u) > 0 else 1.0
    return w - LR * ratio * u


def lars(w, g, state, step):
    if w.ndim == 1:
        local_lr, update = 1.0, g
    else:
        local_lr = TRUST * norm(w) / (norm(g) + DECAY * norm(w)) if norm(w) > 0 and norm(g) > 0 else 1.0
        update = g + DECAY * w
    state["b"] = BETA1 * state.get("b", torch.zeros_like(w)) + LR * local_lr * update
    return w - state["b"]


@pytest.mark.parametrize(("name", "reference"), [("LAMB", lamb), ("LARS", lars)])
def test_steps_follow_the_paper_for_every_logical_weight(name, reference):
    model = decoder(name)
    optimizer = build_optimizer(config(name), model)
    expected = {key: tensor.clone() for key, tensor in logical_state(model).items()}
    states = {key: {} for key in expected}
    for step in range(1, 5):
        set_gradients(model, step)
        gradients = logical_gradients(model)
        expected = {key: reference(w, gradients[key], states[key], step) for key, w in expected.items()}
        optimizer.step()
        optimizer.zero_grad()
    for key, tensor in logical_state(model).items():
        torch.testing.assert_close(
            tensor, expected[key], rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key} {text}"
        )


def test_parts_of_a_fused_weight_have_ratios_of_their_own():
    """Scaling the gradients of wk leaves LARS's step of wq and wv as it was."""
    moved = []
    for scale in (1.0, 100.0):
        model = decoder("LARS")
        optimizer = build_optimizer(config("LARS"), model)
        before = {key: tensor.clone() for key, tensor in logical_state(model).items()}
        set_gradients(model, 1)
        weight = model.layers["0"].attention.wqkv.weight
        rows = fused_parts(model)[weight][1].bool()
        weight.grad[rows] *= scale
        optimizer.step()
        moved.append({key: tensor - before[key] for key, tensor in logical_state(model).items()})
    for part in ("wq", "wv"):
        name = f"layers.0.attention.{part}.weight"
        torch.testing.assert_close(moved[0][name], moved[1][name], rtol=1e-5, atol=1e-8)
    name = "layers.0.attention.wk.weight"
    assert not torch.allclose(moved[0][name], moved[1][name], rtol=1e-2)


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_a_weight_of_zeros_takes_a_step_of_ratio_one(name):
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.ones(2, 3)
    build_optimizer(config(name), model).step()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), -LR))


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_an_update_of_zeros_changes_nothing(name):
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros(2, 3)
    build_optimizer(config(name).replace({"optimizer.weight_decay": 0.0}), model).step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_saved_and_loaded_continues_bitwise(name, steps):
    model = decoder(name)
    optimizer = build_optimizer(config(name), model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    kinds = {"LAMB": {"step", "exp_avg", "exp_avg_sq"}, "LARS": {"momentum_buffer"}}[name]
    assert {key.split(".", 1)[0] for key in saved} == kinds
    other = decoder(name)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(config(name), other)
    load_optimizer_state(resumed, other, saved)
    for each, its_optimizer in ((model, optimizer), (other, resumed)):
        set_gradients(each, 9)
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_parameters_without_a_gradient_are_left_alone():
    model = decoder("LAMB")
    set_gradients(model, 1)
    model.norm.weight.grad = model.tok_embeddings.weight.grad = None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    build_optimizer(config("LAMB"), model).step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - {"norm.weight", "tok_embeddings.weight"}


def test_norms_of_plain_tensors_and_parts():
    tensors = [torch.randn(3, 4), torch.randn(0, 4), torch.randn(4, 5).bfloat16()]
    parts = [None, None, torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0]])]
    found = whole_norms(tensors, parts).tolist()
    fused = tensors[2].float()
    expected = [norm(tensors[0]), 0.0, norm(fused[[0, 3]]), norm(fused[[1, 2]])]
    assert found == pytest.approx(expected, rel=1e-6)
    assert whole_norms([]).shape == (0,)


def test_gradients_are_used_up_not_copied():
    """The update stands where the gradient was: no third copy of the model while it steps."""
    model = decoder("LAMB")
    optimizer = build_optimizer(config("LAMB"), model)
    set_gradients(model, 1)
    gradient = model.layers["0"].feed_forward.w2.weight.grad
    before, weight = gradient.clone(), model.layers["0"].feed_forward.w2.weight.detach().clone()
    optimizer.step()
    moved = weight - model.layers["0"].feed_forward.w2.weight.detach()
    torch.testing.assert_close(gradient * LR, moved, rtol=1e-4, atol=1e-6)
    assert math.isclose(norm(moved), LR * norm(weight), rel_tol=1e-4)
    assert not torch.equal(gradient, before)
