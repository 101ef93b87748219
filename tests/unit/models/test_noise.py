"""Noise on embeddings: uniform, bounded, and a function of seed, sample, position and dimension alone."""

import pytest
import torch

from shardline.models import noise
from shardline.models.noise import add_noise, noise_keys

SAMPLES = torch.tensor([0, 1, 2**33 + 1])


def drawn(seed: int = 7, samples: torch.Tensor = SAMPLES, length: int = 64, dim: int = 96) -> torch.Tensor:
    return add_noise(torch.zeros(len(samples), length, dim), noise_keys(seed, samples, length), 2.0)


def test_it_is_uniform_between_the_bounds() -> None:
    values = drawn(length=512).flatten()
    assert float(values.abs().max()) < 2.0
    assert float(values.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(values.var()) == pytest.approx(4 / 3, rel=0.01)
    counts = torch.histc(values, bins=16, min=-2, max=2) / len(values)
    assert float((counts * 16 - 1).abs().max()) < 0.03


def test_neighbours_are_not_alike() -> None:
    values = drawn(length=512, dim=256)
    for dim in (0, 1, 2):
        a, b = values.narrow(dim, 0, values.shape[dim] - 1), values.narrow(dim, 1, values.shape[dim] - 1)
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.01


def test_what_it_depends_on() -> None:
    values = drawn()
    assert torch.equal(values, drawn())
    assert torch.equal(values[1:], drawn(samples=SAMPLES[1:]))
    assert torch.equal(values[:, :5], drawn(length=5))
    assert torch.equal(values[..., :8], drawn(dim=8))
    assert not torch.equal(values, drawn(seed=8))
    assert not torch.equal(values[1], values[2])  # of which the numbers have the same low bits


def test_it_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn()
    monkeypatch.setattr(noise, "ELEMENTS_AT_ONCE", 1000)
    assert torch.equal(values, drawn())


def test_rows_in_another_shape_and_type() -> None:
    keys, x = noise_keys(7, SAMPLES, 64), torch.ones(3 * 64, 96, dtype=torch.bfloat16)
    expected = (1 + drawn().flatten(0, 1).bfloat16().float()).bfloat16()
    assert torch.equal(add_noise(x, keys, 2.0), expected)
