"""NEFTune: uniform noise on the embeddings of training tokens (arXiv 2310.05914).

The noise of an element is a pure function of (seed, number of the sample, position in it, dimension): a hash of them.
So every layout and every resumed run adds the same noise, and there is no generator state to save.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF  # numbers here are of 32 bits, in int64
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: spreads neighbours far apart
ELEMENTS_AT_ONCE = 2**22  # a few int64 copies of them are in memory


def noise_keys(seed: int, samples: Tensor, length: int) -> Tensor:
    """A number for each token: (B, length) for the samples (B,) of a batch."""
    of_samples = _mixed(_mixed((samples >> 32) ^ _mixed_number(seed)) ^ (samples & LOW))
    positions = torch.arange(length, device=samples.device)
    return _mixed(of_samples[:, None] ^ _mixed(positions * GOLDEN & LOW))


def add_noise(x: Tensor, keys: Tensor, bound: float) -> Tensor:
    """x (..., dim) plus noise between -bound and bound; `keys` (...) has a number for each row of x."""
    dimensions = torch.arange(x.shape[-1], device=x.device) * GOLDEN & LOW
    noise = torch.empty_like(x).flatten(0, -2)
    step = max(1, ELEMENTS_AT_ONCE // x.shape[-1])
    for some, of_rows in zip(noise.split(step), keys.reshape(-1).split(step), strict=True):
        bits = _mixed(of_rows[:, None] ^ dimensions) >> 8  # 24 bits, all of which float32 keeps
        some.copy_((bits.float() / 2**23 - 1) * bound)
    return x + noise.view_as(x)


def _mixed(number: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit of the result depends on every bit of the number."""
    number = number & LOW
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & LOW
    number = ((number ^ (number >> 15)) * 0x846CA68B) & LOW
    return number ^ (number >> 16)


def _mixed_number(number: int) -> int:
    return int(_mixed(torch.tensor(number & LOW)))
