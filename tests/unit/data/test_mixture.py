"""Mixtures: the next row is a pure function of seed and position, and shares hold after any number of samples."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.load import load_config
from shardline.data.loader import build_loader, fitted
from shardline.data.mixture import Mixture, shares_of
from shardline.data.tokenizer import choose_tokenizer
from shardline.errors import UserError
from shardline.models.flavors import resolve

BANKS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 10)), min_size=2, max_size=6)


def mixture(banks, seed, temperature=1.0):
    shares = shares_of([weight for _, weight in banks], temperature)
    return Mixture(tuple(count for count, _ in banks), seed, True, tuple(shares))


@given(BANKS, st.integers(0, 2**40), st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_a_sample_does_not_depend_on_what_is_read_with_it(banks, seed, position):
    order = mixture(banks, seed)
    together = order.starts(np.arange(position, position + 30))
    alone = [int(order.starts(np.array([position + n]))[0]) for n in range(30)]
    assert together.tolist() == alone
    assert all(0 <= row < order.samples_per_epoch for row in alone)


@given(BANKS, st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_sources_keep_their_shares_and_read_every_row_once_an_epoch(banks, seed):
    order = mixture(banks, seed)
    samples = 400
    drawn, numbers = order.draw(np.arange(samples))
    for bank in range(len(banks)):
        of_bank = numbers[drawn == bank]
        assert of_bank.tolist() == list(range(len(of_bank)))  # in order, none left out
        for n in (1, 17, 100, samples):
            assert abs((drawn[:n] == bank).sum() - n * order.shares[bank]) <= len(banks)
        first = sum(order.counts[:bank])
        rows = order.starts(np.flatnonzero(drawn == bank)) - first
        count = order.counts[bank]
        for epoch in range(len(rows) // count):
            assert sorted(rows[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))
    for n in (0, 1, 50, samples):
        assert order.drawn(n).tolist() == np.bincount(drawn[:n], minlength=len(banks)).tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_concatenated_rows_are_read_once_an_epoch(counts, seed):
    order = Mixture(tuple(counts), seed)
    size = sum(counts)
    rows = order.starts(np.arange(2 * size))
    assert sorted(rows[:size].tolist()) == list(range(size))
    assert sorted(rows[size:].tolist()) == list(range(size))


def test_temperature_flattens_shares():
    assert shares_of([8, 1, 1], 1.0) == pytest.approx([0.8, 0.1, 0.1])
    assert shares_of([4, 1], 2.0) == pytest.approx([2 / 3, 1 / 3])
    assert shares_of([9, 1], 1e6) == pytest.approx([0.5, 0.5], abs=1e-3)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    sources = []
    for name, count in (("a", 30), ("b", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * 20}) + "\n" for _ in range(count)))
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "type": "pretrain"})

    def make(*weights, **changes):
        tables = [
            s | ({} if w is None else {"weight": w}) for s, w in zip(sources, weights or (None, None), strict=True)
        ]
        values = {
            "model.overrides": {"vocab_size": 320},
            "model.tokenizer_path": "bytes",
            "training.seq_len": 64,
            "training.local_batch_size": 4,
            "data.sources": tables,
        }
        return load_config(None, values | {f"data.{key}": value for key, value in changes.items()})

    return make


def letters(config, samples, position=0):
    """The letter of each row that is read."""
    tokenizer = choose_tokenizer(config)
    loader = build_loader(config, "training", fitted(resolve(config.model), config, tokenizer), tokenizer)
    loader.seek(position)
    found = []
    while len(found) < samples:
        for batch in loader.step():
            found += [chr(int(row[1])) for row in batch.tokens]
    loader.samples.report_read(loader.position)
    return found[:samples]


def test_weights_decide_how_often_texts_are_read(config, said):
    found = letters(config(1.0, 3.0, mixture="weights"), 80)
    assert found.count("b") == pytest.approx(60, abs=2)
    lines = said()
    assert "shares of samples: " in lines
    assert "a.jsonl 25.0%" in lines
    assert "of 80 samples read: " in lines
    again = letters(config(1.0, 3.0, mixture="weights"), 40, position=40)
    assert again == found[40:]


def test_without_weights_sizes_count_and_temperature_flattens_them(config):
    assert letters(config(mixture="weights"), 80).count("b") == pytest.approx(20, abs=6)
    assert letters(config(mixture="weights", temperature=100.0), 80).count("b") == pytest.approx(40, abs=2)
    with pytest.raises(UserError, match=r"data.sources\[1\].weight is missing"):
        letters(config(1.0, None, mixture="weights"), 4)
