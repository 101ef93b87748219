"""Adam with moments in bfloat16 or 8 bits: close to float32's, rounded without bias, equal after a resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.optim import narrow_adam
from shardline.optim.int8_moments import code_step, decode, encode, int8_bytes, spread
from shardline.optim.narrow_adam import NarrowAdam
from shardline.optim.optimizer import build_optimizer
from shardline.optim.state import optimizer_state
from tests.unit.optim.optimizer_state import load_optimizer_state
from tests.unit.optim.test_optimizer import Tiny, config, train


def narrow(state_dtype="bfloat16", **options):
    return config(state_dtype=state_dtype, **options)


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
@pytest.mark.parametrize(("dtype", "first"), [("bfloat16", torch.bfloat16), ("int8", torch.int8)])
def test_state_saved_and_loaded_continues_bitwise(steps, dtype, first):
    model = Tiny()
    optimizer = build_optimizer(narrow(dtype), model)
    train(model, optimizer, steps)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, model).items()}
    assert saved["exp_avg.last.weight"].dtype == first
    assert saved["step.norm.weight"].item() == steps
    other = Tiny(seed=5)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(narrow(dtype), other)
    load_optimizer_state(resumed, other, saved)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in optimizer_state(resumed, other).items())
    train(model, optimizer, 3, seed=9)
    train(other, resumed, 3, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2**-8), ("int8", 0.05)])
def test_wide_state_loads_into_narrow_and_back(dtype, step):
    model, other = Tiny(), Tiny()
    wide, thin = build_optimizer(config(), model), build_optimizer(narrow(dtype), other)
    train(model, wide, 2)
    load_optimizer_state(thin, other, optimizer_state(wide, model))
    again = build_optimizer(config(), model)
    load_optimizer_state(again, model, optimizer_state(thin, other))
    first, second = optimizer_state(wide, model), optimizer_state(again, model)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=step, atol=1e-6 * tensor.abs().max().item())


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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pieces_of_large_parameters_add_up(monkeypatch, dtype):
    """Parameters cut to fit a scratch, and several together in one, give the steps of whole ones."""
    results = []
    for scratch in (1 << 20, 7):
        monkeypatch.setitem(narrow_adam.SCRATCH, "cpu", scratch)
        model = Tiny()
        train(model, build_optimizer(narrow(dtype), model), 1)
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


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def test_8_bits_take_a_byte_and_a_sixty_fourth_for_each_element_of_a_matrix():
    model = torch.nn.ModuleDict({"even": torch.nn.Linear(512, 30), "odd": torch.nn.Linear(300, 7, bias=False)})
    optimizer = build_optimizer(narrow("int8"), model)
    state = optimizer_state(optimizer, model)
    sizes = {key: tensor.nbytes for key, tensor in state.items() if not key.startswith("step")}
    assert sizes["exp_avg.even.weight"] == sizes["exp_avg_sq.even.weight"] == 512 * 30
    assert sizes["exp_avg_scale.even.weight"] == 512 * 30 * 4 // 256 == 30 * 2 * 4
    assert sizes["exp_avg_scale.odd.weight"] == 7 * 2 * 4, "the last block of a row is shorter"
    assert sizes["exp_avg.even.bias"] == 30 * 4, "vectors keep float32"
    assert "exp_avg_scale.even.bias" not in sizes
    assert sum(size for key, size in sizes.items() if ".even.weight" in key) == 2 * int8_bytes((30, 512), 512)


blocks_of_values = st.tuples(st.integers(0, 2**32), st.integers(1, 600), st.floats(-38, 12), st.floats(0, 12))


@settings(max_examples=100, deadline=None)
@given(blocks_of_values, st.sampled_from([torch.int8, torch.uint8]), st.sampled_from([256, 64, 1]), st.booleans())
def test_values_that_were_coded_have_the_same_code_again(drawn, dtype, block, random):
    """Whatever their size and spread: a resumed run has the bits that were saved."""
    seed, columns, size, spread_of = drawn
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(3, columns, generator=chance) * 10.0**size
    values *= torch.exp(spread_of * torch.randn(3, columns, generator=chance))
    values[1] *= torch.rand(columns, generator=chance) < 0.5
    values = (values.abs() if dtype == torch.uint8 else values).clamp(-1e30, 1e30)
    bits = torch.rand(3, columns, generator=chance) if random else None
    codes, scales = encode(values, dtype, block, bits)
    again = encode(decode(codes, spread(scales, block, columns)), dtype, block)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_every_value_has_the_same_relative_precision(dtype):
    """Down to a part of the largest that is far below what a step would show."""
    values = torch.logspace(-4.5, 0, 2000).mul(7.0).view(1, -1)
    codes, scales = encode(values, dtype, 4096)
    half = 2 ** (code_step(dtype) / 2)
    ratio = decode(codes, spread(scales, 4096, 2000)) / values
    assert 1 / half - 1e-4 < ratio.min() < ratio.max() < half + 1e-4


def test_no_decay_stands_still_in_8_bits():
    """Beside one that stays: with 0.95 a step takes one code, somewhat more than 5 %; 0.999 has the right mean."""
    for beta2, steps, error in ((0.95, 20, 0.3), (0.999, 300, 0.03)):
        parameter = torch.nn.Parameter(torch.zeros(100, 256))
        model = torch.nn.ParameterList([parameter])
        optimizer = build_optimizer(narrow("int8", beta2=beta2), model)
        wide = torch.ones(100, 256)
        load_optimizer_state(optimizer, model, {"exp_avg_sq.0": wide, "exp_avg.0": wide * 0, "step.0": torch.zeros(())})
        for _ in range(steps):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[:, 0] = 1.0
            optimizer.step()
        state = optimizer_state(optimizer, model)
        second = decode(state["exp_avg_sq.0"], spread(state["exp_avg_sq_scale.0"], 256, 256))
        assert second[:, 0].mean().item() == pytest.approx(1.0, rel=1e-3)
        assert second[:, 1:].mean().item() == pytest.approx(beta2**steps, rel=error)


def test_a_second_moment_never_becomes_zero():
    values = torch.tensor([[1.0, 1e-20, 0.0]])
    codes, scales = encode(values, torch.uint8, 256)
    assert codes.tolist() == [[255, 1, 0]]
    assert decode(codes, spread(scales, 256, 3))[0, 1] > 0
    assert encode(values, torch.int8, 256)[0].tolist() == [[127, 0, 0]], "a first moment may"


def final_loss(state_dtype: str, beta2: float) -> float:
    """The mean loss of the last 20 of 120 steps of a small network on one task."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    optimizer = build_optimizer(config(state_dtype=state_dtype, beta2=beta2, lr=0.01, weight_decay=0.0), model)
    losses = []
    for step in range(120):
        data = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - teacher(data).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3 * losses[-1]
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_8_bits_learn_as_float32_does(beta2):
    assert final_loss("int8", beta2) < 1.1 * final_loss("parameter", beta2)
