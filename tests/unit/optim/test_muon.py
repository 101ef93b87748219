"""Muon against torch's own on every logical matrix, and its AdamW part against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch

from shardline.config.load import load_config
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.optim import muon
from shardline.optim.optimizer import build_optimizer
from tests.model_state import logical_state
from tests.parity.cases import EXPERTS
from tests.unit.optim.test_lamb import SIZES, logical_gradients, set_gradients

LR, FACTOR, DECAY, MOMENTUM = 0.02, 3.0, 0.1, 0.9
MODELS = {"dense": SIZES, "experts": SIZES | EXPERTS["model.overrides"] | {"mlp_bias": True}}


def config(model="dense", **options):
    keys = {f"optimizer.{name}": value for name, value in options.items()}
    given = {"lr": LR, "muon_lr_factor": FACTOR, "weight_decay": DECAY, "muon_momentum": MOMENTUM, "name": "Muon"}
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
        torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, fused=True),
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
