"""Batches: what a row holds, who reads which row, workers, seeking, validation."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.load import load_config
from shardline.data import demo
from shardline.data.loader import Loader, Samples, build_loader, steps_for_epochs
from shardline.data.order import Order
from shardline.data.prepare import prepare
from shardline.data.sources import open_source
from shardline.data.token_store import TokenStore
from shardline.data.tokenizer import ByteTokenizer
from shardline.errors import UserError

LENGTH = 8


def store_of(lengths: list[int]) -> TokenStore:
    """Token t has the id t, so that a batch shows what was read."""
    return TokenStore.from_arrays(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths))


def make(
    store: TokenStore,
    local: int = 2,
    accumulate: int = 1,
    rank: int = 0,
    ranks: int = 1,
    documents: bool = False,
    device: str = "cpu",
    **options: Any,
) -> Loader:
    dataloader = {"num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None}
    return Loader(
        Samples(store, Order(store.tokens, LENGTH, 0), documents),
        local_batch_size=local,
        global_batch_size=local * ranks * accumulate,
        rank=rank,
        ranks=ranks,
        device=torch.device(device),
        options=SimpleNamespace(**dataloader | options),
    )


def stream(loader: Loader, steps: int) -> list[tuple[list[int], list[list[int]]]]:
    return [(b.sample_ids.tolist(), b.tokens.tolist()) for _ in range(steps) for b in loader.step()]


def test_a_row_is_consecutive_tokens_and_their_successors() -> None:
    loader = make(store_of([100]))
    (batch,) = loader.step()
    assert (batch.tokens.dtype, batch.labels.dtype, batch.sample_ids.dtype) == (torch.int64,) * 3
    assert batch.tokens.shape == batch.labels.shape == (2, LENGTH)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(LENGTH))
    assert batch.documents is None
    assert batch.sample_ids.tolist() == [0, 1]
    assert loader.position == 2


def test_one_epoch_reads_every_window_once() -> None:
    store = store_of([5, 44, 32])
    loader = make(store, local=5)
    assert loader.samples_per_epoch == 10
    starts = sorted(row[0] for _, rows in stream(loader, 2) for row in rows)
    assert starts == list(range(0, 80, LENGTH))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=4, max_size=30))
def test_no_target_crosses_a_document_when_block_causal(lengths: list[int]) -> None:
    store = store_of(lengths)
    if store.tokens <= LENGTH:
        return
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for batch in make(store, local=3, documents=True).epoch():
        assert batch.documents is not None
        assert batch.documents.dtype == torch.int32
        for tokens, labels, numbers, sample in zip(
            batch.tokens, batch.labels, batch.documents, batch.sample_ids, strict=True
        ):
            if sample < 0:
                continue
            expected = owner[tokens.numpy()]
            assert numbers.tolist() == (expected - expected[0]).tolist()
            crosses = owner[tokens.numpy() + 1] != expected
            assert torch.equal(labels == -100, torch.from_numpy(crosses))
            assert torch.equal(labels[~crosses], tokens[~crosses] + 1)


def test_causal_rows_have_targets_across_documents() -> None:
    batches = list(make(store_of([3] * 30)).epoch())
    assert all((batch.labels[batch.sample_ids >= 0] >= 0).all() for batch in batches)


@pytest.mark.parametrize(("ranks", "local", "accumulate"), [(1, 12, 1), (1, 2, 6), (2, 3, 2), (4, 3, 1), (3, 2, 2)])
def test_layouts_read_the_same_steps(ranks: int, local: int, accumulate: int) -> None:
    store = store_of([300])
    whole = make(store, local=12)
    loaders = [make(store, local, accumulate, rank, ranks) for rank in range(ranks)]
    for _ in range(5):  # 60 samples: more than an epoch of 37
        rows: dict[int, list[int]] = {}
        for loader in loaders:
            batches = loader.step()
            assert len(batches) == accumulate
            rows |= {int(n): row.tolist() for b in batches for n, row in zip(b.sample_ids, b.tokens, strict=True)}
        (expected,) = whole.step()
        assert rows == {int(n): r.tolist() for n, r in zip(expected.sample_ids, expected.tokens, strict=True)}
    assert {loader.position for loader in loaders} == {60}


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}]
)
def test_workers_and_seeking_change_nothing(options: dict[str, Any]) -> None:
    store = store_of([7] * 50)
    expected = stream(make(store, 2, 3), 12)
    loader = make(store, 2, 3, **options)
    assert stream(loader, 5) == expected[:15]
    loader.seek(6 * 9)
    assert stream(loader, 3) == expected[27:]
    loader.seek(6)
    assert stream(loader, 2) == expected[3:9]
    once = [batch.sample_ids.tolist() for batch in loader.epoch()]
    assert once == [batch.sample_ids.tolist() for batch in make(store, 2, 3).epoch()]
    assert loader.position == 18
    assert stream(loader, 1) == expected[9:12]
    loader.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="closed"):
        loader.step()


def test_persistent_workers_stay_and_others_are_started_again() -> None:
    for persistent in (True, False):
        loader = make(store_of([200]), num_workers=1, persistent_workers=persistent)
        pids = []
        for _ in range(2):
            loader.seek(0)
            loader.step()
            pids.append({child.pid for child in multiprocessing.active_children()})
        assert (pids[0] == pids[1]) == persistent
        loader.close()


def test_prefetch_factor_is_how_far_a_worker_reads_ahead() -> None:
    for factor in (1, 4):
        loader = make(store_of([800]), num_workers=1, prefetch_factor=factor)
        loader.step()
        asked = next(rows for rows, _ in loader._sampler.rows)  # the first row that was not yet handed to the worker
        assert asked.tolist() == [2 * (factor + 1), 2 * (factor + 1) + 1]
        loader.close()


def test_a_dead_worker_is_an_error() -> None:
    loader = make(store_of([200]), num_workers=1, prefetch_factor=1)
    loader.step()
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):
        stream(loader, 5)
    loader.close()


def test_workers_outlive_an_interrupt() -> None:
    loader = make(store_of([200]), num_workers=1, prefetch_factor=1)
    loader.step()
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    assert stream(loader, 5) == stream(make(store_of([200])), 6)[1:]
    loader.close()


def test_reading_does_not_touch_the_global_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make(store_of([200])).step()
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=40, deadline=None)
@given(st.integers(9, 400), st.integers(1, 4), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 5)))
def test_validation_reads_each_sample_once(tokens: int, local: int, ranks: int, limit: int | None) -> None:
    store = store_of([tokens])
    read = [list(make(store, local, rank=rank, ranks=ranks).epoch(limit)) for rank in range(ranks)]
    size = (tokens - 1) // LENGTH
    count = math.ceil(size / (local * ranks))
    assert {len(batches) for batches in read} == {count if limit is None else min(count, limit)}
    samples = sorted(int(n) for batches in read for batch in batches for n in batch.sample_ids if n >= 0)
    assert samples == list(range(min(size, len(read[0]) * local * ranks)))
    for batch in (batch for batches in read for batch in batches):
        real = batch.sample_ids >= 0
        assert torch.equal(batch.tokens[real][:, 0], batch.sample_ids[real] * LENGTH)
        assert (batch.labels[~real] == -100).all()
        assert batch.tokens.shape == (local, LENGTH)


def test_steps_for_epochs() -> None:
    loader = make(store_of([81]), local=3)
    assert [steps_for_epochs(loader, epochs) for epochs in (1, 0.5, 2.4, 3)] == [4, 2, 8, 10]
    one = make(store_of([81]), local=1)
    assert steps_for_epochs(one, 0.1) == 1  # 0.1 of 10 samples, without a rounding error above it


@pytest.mark.parametrize(("ranks", "batches", "samples"), [(1, 2, 6), (2, 2, 10), (2, 1, 6), (2, -1, 10), (1, 9, 10)])
def test_an_epoch_of_so_many_batches_reads_so_many_samples(ranks: int, batches: int, samples: int) -> None:
    loaders = [make(store_of([81]), local=3, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [loader.samples_in(batches) for loader in loaders] == [samples] * ranks
    read = [batch.sample_ids for loader in loaders for batch in loader.epoch(None if batches < 0 else batches)]
    assert int((torch.cat(read) >= 0).sum()) == samples


ARCH = SimpleNamespace(vocab_size=258, attn_mask_type="causal")


def build(section: Any = "training", arch: Any = ARCH, ranks: int = 1, **keys: Any) -> Loader:
    given = {"training.seq_len": 128, "training.local_batch_size": 4, "validation.seq_len": 128}
    config = load_config(overrides=given | {key.replace("__", "."): value for key, value in keys.items()})
    return build_loader(config, section, arch, ByteTokenizer(), ranks=ranks, device="cpu")


def test_build_from_a_config() -> None:
    loader = build(training__global_batch_size=8)
    batches = loader.step()
    assert len(batches) == 2
    assert loader.position == 8
    again = build(training__local_batch_size=8).step()[0]
    assert torch.equal(torch.cat([batch.tokens for batch in batches]), again.tokens)
    other = build(training__global_batch_size=8, debug__seed=5).step()
    assert not torch.equal(other[0].tokens, batches[0].tokens)
    masked = build(arch=SimpleNamespace(vocab_size=300, attn_mask_type="block_causal")).step()[0]
    assert masked.documents is not None
    validation = next(build("validation").epoch(1))
    assert validation.tokens.shape == (8, 128)


def test_build_refuses_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 x 3 = 12; nearest: 12 or 24"):
        build(ranks=3, training__global_batch_size=16)
    with pytest.raises(UserError, match=r"--model.overrides.vocab_size=258"):
        build(arch=SimpleNamespace(vocab_size=200, attn_mask_type="causal"))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"holds 7 tokens, one sample needs 129"):
        build(training__dataset_path=str(tmp_path / "a.txt"), training__cache_folder=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("workers", "verified", "words"),
    [
        (0, True, r"bytes 0 to 4404 fail their checksum"),
        (1, True, r"bytes 0 to 4404 fail their checksum"),
        (1, False, r"its token 700 is 65535, but the vocabulary has 258 ids"),
    ],
)
def test_a_damaged_store_is_named_and_its_workers_end(tmp_path: Path, workers: int, verified: bool, words: str) -> None:
    (tmp_path / "a.txt").write_text("some words " * 200)
    prepare(open_source("mine", str(tmp_path / "a.txt")), ByteTokenizer(), tmp_path / "store", workers=1)
    file = tmp_path / "store" / "part-00000.tokens"
    content = bytearray(file.read_bytes())
    content[1400:1402] = b"\xff\xff"
    file.write_bytes(content)
    loader = build(
        training__dataset_path=str(tmp_path / "store"),
        training__dataloader__num_workers=workers,
        training__verify_data=verified,
    )
    said = f"is damaged: {words}: prepare it again"
    with pytest.raises(UserError, match=rf"^{re.escape(str(file))} {said}") as caught:
        stream(loader, 20)
    loader.close()
    assert not multiprocessing.active_children()  # though the error still holds the frames it came through
    assert caught.value.__traceback__ is not None


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory_on_cuda(workers: int) -> None:
    for pinned in (True, False):
        loader = make(store_of([200]), device="cuda", num_workers=workers, pin_memory=pinned)
        on_the_way = next(loader._start(loader._endless()))
        assert on_the_way.tokens.is_pinned() == on_the_way.labels.is_pinned() == pinned
        loader.seek(0)
        (batch,) = loader.step()
        assert batch.tokens.is_cuda
        assert torch.equal(batch.tokens.cpu(), on_the_way.tokens)
        loader.close()


def test_demo_corpus() -> None:
    training, validation = demo.documents("training"), demo.documents("validation")
    assert training == demo.documents("training")
    assert 1e6 < sum(map(len, training)) < 6e6
    assert training[:50] != validation[:50]
    stories = {text for text in validation if text.startswith("Once")}
    assert stories
    assert not stories & set(training)
    store = demo.demo_store("validation", ByteTokenizer())
    assert store.documents == len(validation)
    first = store.read(0, len(validation[0]) + 2).tolist()
    assert first == [256, *validation[0].encode(), 257]
