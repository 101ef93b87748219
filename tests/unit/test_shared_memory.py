"""What products over shared memory tell the rest of a run; the products themselves need GPUs (test_fused_gpu.py)."""

import pytest
import torch

from shardline.parallel import comm, shared_memory, watchdog


class Dog:
    def __init__(self):
        self.told = []

    def enter(self, tag, axis):
        self.told.append((axis, tag))

    def leave(self, on_device):
        self.told.append(on_device)


@pytest.fixture
def dog(monkeypatch):
    monkeypatch.setattr(comm, "axis_size", {"tp": 4}.get)
    monkeypatch.setattr(comm, "traffic", comm.Traffic())
    monkeypatch.setattr(watchdog, "current", Dog())
    return watchdog.current


TAG = "reduce_scatter over tp, inside a product of (8, 3) bfloat16"


def test_a_product_counts_what_it_sends_and_is_watched_until_the_device_is_through(dog):
    with shared_memory.inside_product("tp", "reduce_scatter", torch.zeros(8, 3, dtype=torch.bfloat16), 10):
        assert dog.told == [("tp", TAG)]
    assert dog.told == [("tp", TAG), True]
    assert comm.traffic.take() == {"tp": 3 * 10 * 2}


def test_a_product_that_fails_is_left(dog):
    with pytest.raises(ValueError, match="refused"), shared_memory.inside_product("tp", "all_gather", torch.ones(2), 2):
        raise ValueError("refused")
    assert dog.told[-1] is True


def test_without_cuda_it_says_so():
    assert shared_memory.unusable(torch.device("cpu")) == "it needs CUDA"
