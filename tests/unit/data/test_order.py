"""Who reads what: the order is a bijection, depends on the seed alone, and no layout changes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.data.order import Order, micro_batches, permute, resolve_global_batch
from shardline.errors import UserError

seeds = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(st.integers(1, 3000), seeds)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    places = permute(np.arange(size), size, np.full(size, key, dtype=np.uint64))
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**40 - 1), max_size=20), seeds)
def test_permutation_of_huge_sizes_stays_inside_and_apart(size: int, numbers: list[int], key: int) -> None:
    index = np.unique(np.array(numbers, dtype=np.int64) % size)
    places = permute(index, size, np.full(len(index), key, dtype=np.uint64))
    assert len(np.unique(places)) == len(index)
    assert ((places >= 0) & (places < size)).all()


@settings(deadline=None)
@given(st.integers(2, 5000), st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 50))
def test_each_window_once_per_epoch(tokens: int, seq_len: int, seed: int, epoch: int) -> None:
    if tokens < seq_len + 1:
        return
    order = Order(tokens, seq_len, seed)
    size = order.samples_per_epoch
    starts = np.sort(order.starts(np.arange(epoch * size, (epoch + 1) * size)))
    assert (np.diff(starts) == seq_len).all()  # inputs and labels: each token at most once
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= tokens
    assert size * seq_len > tokens - 1 - seq_len  # nothing but a rest shorter than a window is left out


@settings(deadline=None)
@given(st.integers(100, 5000), st.integers(0, 2**31), st.integers(0, 10**9), st.integers(1, 64))
def test_stream_from_any_position_is_the_same_stream(tokens: int, seed: int, position: int, count: int) -> None:
    order = Order(tokens, 16, seed)
    samples = np.arange(position, position + count)
    together = order.starts(samples)
    alone = [int(Order(tokens, 16, seed).starts(np.array([n]))[0]) for n in samples]
    assert together.tolist() == alone


def test_known_order_never_changes() -> None:
    """A resumed run of an older version must read the same data: these numbers are a promise."""
    assert Order(1001, 10, 0).starts(np.arange(6)).tolist() == [760, 770, 420, 320, 90, 220]
    assert Order(1001, 10, 7).starts(np.arange(98, 104)).tolist() == [260, 600, 10, 350, 40, 640]


def test_seeds_and_epochs_shuffle_differently() -> None:
    order = Order(10_001, 10, 1)
    first, second = order.starts(np.arange(1000)), order.starts(np.arange(1000, 2000))
    other = Order(10_001, 10, 2).starts(np.arange(1000))
    for a, b in ((first, second), (first, other), (first, np.arange(1000) * 10)):
        assert (a == b).mean() < 0.02


def test_shuffle_looks_random() -> None:
    """Over many keys each index lands on each place about equally often, and neighbours are torn apart."""
    size, trials = 7, 7000
    keys = np.arange(trials, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for index in range(size):
        counts = np.bincount(permute(np.full(trials, index), size, keys), minlength=size)
        assert (np.abs(counts - 1000) < 6 * np.sqrt(1000 * 6 / 7)).all()
    places = permute(np.arange(10_000), 10_000, np.full(10_000, 5, dtype=np.uint64))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(places, np.arange(10_000))[0, 1]) < 0.05


def test_borders_of_windows_vary_by_epoch() -> None:
    order = Order(1000, 64, 3)
    size = order.samples_per_epoch
    offsets = {int(order.starts(np.array([epoch * size]))[0]) % 64 for epoch in range(30)}
    assert len(offsets) > 5


def test_every_token_is_in_a_window_of_some_epoch() -> None:
    order = Order(1 + 2 * 8 + 3, 8, 5)  # 3 tokens more than two windows
    firsts = {int(order.starts(np.array([2 * epoch, 2 * epoch + 1])).min()) for epoch in range(60)}
    assert firsts == {0, 1, 2, 3}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_every_cut_covers_each_position_once(ranks: int, local: int, accumulation: int, step: int) -> None:
    global_batch = ranks * local * accumulation
    read = [micro_batches(step * global_batch, global_batch, local, rank, ranks) for rank in range(ranks)]
    assert {len(batches) for batches in read} == {accumulation}
    everything = np.sort(np.concatenate([batch for batches in read for batch in batches]))
    assert np.array_equal(everything, np.arange(step * global_batch, (step + 1) * global_batch))


def test_cut_follows_the_formula() -> None:
    batches = micro_batches(48, 24, local_batch=3, rank=2, ranks=4)
    assert [batch.tolist() for batch in batches] == [[54, 55, 56], [66, 67, 68]]


def test_global_batch_size() -> None:
    assert resolve_global_batch(-1, 4, 3) == 12
    assert resolve_global_batch(36, 4, 3) == 36
    with pytest.raises(UserError, match=r"4 x 3 = 12; nearest: 24 or 36"):
        resolve_global_batch(30, 4, 3)
    with pytest.raises(UserError, match=r"nearest: 12$"):
        resolve_global_batch(5, 4, 3)


def test_too_few_tokens_says_the_numbers() -> None:
    assert Order(9, 8, 0).samples_per_epoch == 1
    with pytest.raises(UserError, match=r"holds 8 tokens, one sample needs 9"):
        Order(8, 8, 0)
