"""From sources to rows: packing, lengths, masks, held-out records, and the loss of packed and unpacked rows."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.load import load_config
from shardline.data.batch import IGNORE
from shardline.data.loader import build_loader, fitted, steps_for_epochs
from shardline.data.packing import LengthReport, Piece, fit_lengths, fit_pairs, one_each, pack
from shardline.data.tokenizer import choose_tokenizer
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.flavors import resolve
from shardline.models.init import init_weights
from shardline.training.loss import chunked_cross_entropy

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 320}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def segments(count=40, start=0):
    return [
        {"segments": [{"text": f"{n}? ", "label": False}, {"text": "x" * (1 + n * 7 % 23), "label": True}]}
        for n in range(start, start + count)
    ]


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    file = write(tmp_path / "records.jsonl", segments())

    def config(**changes):
        values = {
            "model.overrides": SIZES,
            "model.tokenizer_path": "bytes",
            "training.seq_len": 48,
            "training.local_batch_size": 4,
            "validation.seq_len": 48,
            "validation.local_batch_size": 4,
            "data.sources": [{"path": file, "type": "input_output"}],
        }
        return load_config(None, values | {key.replace("__", "."): value for key, value in changes.items()})

    return config


def loader_of(config, section="training", **ranks):
    tokenizer = choose_tokenizer(config)
    return build_loader(config, section, fitted(resolve(config.model), config, tokenizer), tokenizer, **ranks)


def total_loss(config):
    """The sum of the losses of all targets of an epoch, and their number."""
    tokenizer = choose_tokenizer(config)
    arch = fitted(resolve(config.model), config, tokenizer)
    model = Decoder(arch)
    init_weights(model, 0)
    loader = build_loader(config, "training", arch, tokenizer)
    loss, count = 0.0, 0
    for batch in loader.epoch():
        documents = batch.documents if arch.attn_mask_type == "block_causal" else None
        hidden = model.hidden(batch.tokens, documents=documents)
        loss += float(chunked_cross_entropy(hidden, model.output_weight(), batch.labels, scale=1.0))
        count += int((batch.labels != IGNORE).sum())
    return loss, count


def test_packed_rows_have_the_loss_of_unpacked_ones(make):
    with torch.no_grad():
        packed, targets = total_loss(make())
        alone, same = total_loss(make(data__packing="none"))
        mixed, _ = total_loss(make(model__overrides=SIZES | {"attn_mask_type": "causal"}, data__packing="none"))
    assert targets == same == sum(1 + n * 7 % 23 for n in range(40))
    assert packed == pytest.approx(alone, rel=1e-6)
    assert mixed == pytest.approx(alone, rel=1e-6)


def test_a_row_holds_records_one_after_the_other(make):
    loader = loader_of(make())
    (batch, *_) = list(loader.epoch())
    tokens, labels, documents = batch.tokens[0], batch.labels[0], batch.documents[0]
    records = len(list(loader.samples.rows.pieces(0)))
    for number in range(records):
        text = bytes(tokens[documents == number].tolist()).decode()
        question, answer = text.split(" ")
        assert set(answer) == {"x"}
        targets = labels[documents == number]
        assert targets[-1] == IGNORE  # nothing follows the last token of a record
        assert (targets != IGNORE).sum() == len(answer)
        assert (targets[: len(question)] == IGNORE).all()
    assert (labels[documents == records] == IGNORE).all()  # the padding
    (alone, *_) = list(loader_of(make(data__packing="none")).epoch())
    assert [set(row.tolist()) for row in alone.documents] == [{0, 1}] * 4, "padding is no part of a record"


def test_tokens_count_without_padding(make):
    loader = loader_of(make(data__packing="none"))
    loader.step()
    _, shown = loader.position, loader.step_tokens
    assert 0 < shown < 4 * 48
    rows = loader.samples.order.starts(np.arange(4))
    assert shown == loader.samples.rows.tokens_of(rows).sum()


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=200),
    st.integers(10, 60),
    st.integers(0, 2**32),
    st.sampled_from(["drop", "truncate"]),
)
@settings(max_examples=60, deadline=None)
def test_every_record_is_packed_once_and_no_row_is_too_long(lengths, room, seed, excess):
    lengths = np.array(lengths)
    starts = np.cumsum(lengths) - lengths
    records, report = Piece(starts, lengths, np.zeros(len(lengths), int)), LengthReport()
    fits = fit_lengths(records, room, excess, None, np.zeros(len(lengths), bool), report)
    rows = pack(fits, room, seed, report)
    assert sorted(rows.starts.tolist()) == [
        s for s, n in zip(starts, lengths, strict=True) if n <= room or excess != "drop"
    ]
    sizes = rows.tokens_of(np.arange(len(rows)))
    assert (sizes <= room).all()
    assert (sizes > 0).all()
    assert len(rows) <= len(one_each(fits, room, report))
    again = pack(fits, room, seed, report)
    assert np.array_equal(again.starts, rows.starts)
    assert np.array_equal(again.offsets, rows.offsets)
    halves = sum(sizes[:-1] + sizes[1:] <= room)
    assert halves <= 1 or len(rows) <= 2 * int(np.ceil(sizes.sum() / room)) + 1


def test_records_that_do_not_fit_are_dropped_cut_or_refused(make, said):
    longest = max(len(f"{n}? ") + 1 + n * 7 % 23 for n in range(40))
    loader = loader_of(make(training__seq_len=16, data__packing="none"))
    dropped = 40 - len(loader.samples.rows)
    assert dropped > 0
    assert f"{dropped} longer than 16 tokens, dropped" in said()
    loader = loader_of(make(training__seq_len=16, data__packing="none", data__excess_length="truncate"))
    assert len(loader.samples.rows) == 40
    assert "longer than 16 tokens, cut" in said()
    with pytest.raises(UserError, match=rf"more than seq_len = 16 tokens \(the longest has {longest}\)"):
        loader_of(make(training__seq_len=16, data__excess_length="raise"))
    loader = loader_of(make(data__packing="none", data__min_length=10))
    assert loader.samples.rows.lengths.min() == 10
    assert "shorter than 10 tokens, dropped" in said()


def test_long_texts_are_split(make, tmp_path):
    file = write(tmp_path / "text.jsonl", [{"text": "a" * 100}, {"text": "b" * 10}])
    loader = loader_of(make(data__sources=[{"path": file, "type": "completion"}], data__packing="none"))
    assert loader.samples.rows.lengths.tolist() == [48, 48, 6, 12]


def test_held_out_records_are_in_validation_and_nowhere_else(make):
    config = make(data__held_out=0.2, data__packing="none", validation__enable=True)
    kept = set(loader_of(config).samples.rows.starts.tolist())
    held = set(loader_of(config, "validation").samples.rows.starts.tolist())
    assert len(held) == 8
    assert len(kept) == 32
    assert not kept & held
    other = config.replace({"debug.seed": 5})
    assert set(loader_of(other, "validation").samples.rows.starts.tolist()) == held
    for number in (3, 1):
        of_number = config.replace({"data.held_out": float(number)})
        assert len(loader_of(of_number, "validation").samples.rows) == number
    with pytest.raises(UserError, match="none is left"):
        loader_of(config.replace({"data.held_out": 40.0}))


def test_duplicates_are_left_out_wherever_they_are(make, tmp_path, said):
    some, others = segments(12), segments(6, start=8)
    unlike = {"segments": [{"text": "0? ", "label": True}, {"text": "x", "label": True}]}  # trained are other tokens
    files = [write(tmp_path / "a.jsonl", [*some, some[3], unlike]), write(tmp_path / "b.jsonl", others)]
    sources = [{"path": file, "type": "input_output"} for file in files]
    config = make(data__sources=sources, data__packing="none")
    assert len(loader_of(config).samples.rows) == 20
    single = config.replace({"data.deduplicate": True})
    assert len(loader_of(single).samples.rows) == 12 + 1 + 2
    assert "5 duplicate records of 20 left out" in said()
    held = single.replace({"data.held_out": 0.4, "validation.enable": True})
    seen = [loader_of(held, section).samples for section in ("training", "validation")]
    both = [(batch.tokens[0], batch.labels[0]) for samples in seen for batch in _rows_of(samples)]
    texts = [(*tokens.tolist(), *labels.tolist()) for tokens, labels in both]
    assert len(texts) == len(set(texts)) == 15


def _rows_of(samples):
    return [samples[np.array([0]), np.array([row])] for row in range(len(samples.rows))]


def test_validation_sources(make, tmp_path):
    file = write(tmp_path / "validation.jsonl", segments(5, 100))
    config = make(data__validation_sources=[{"path": file, "type": "input_output"}], data__packing="none")
    assert len(loader_of(config, "validation").samples.rows) == 5


def test_ranks_share_rows_and_epochs_read_each_once(make):
    config = make(data__packing="none", training__local_batch_size=2, training__global_batch_size=8)
    loaders = [loader_of(config, rank=rank, ranks=2) for rank in range(2)]
    assert steps_for_epochs(loaders[0], 1.0) == 5
    seen = [int(i) for loader in loaders for _ in range(5) for batch in loader.step() for i in batch.sample_ids]
    assert sorted(seen) == list(range(40))
    alone = loader_of(config.replace({"training.local_batch_size": 8}))
    texts = {}
    for _ in range(5):
        for batch in alone.step():
            texts |= {int(i): row.tolist() for i, row in zip(batch.sample_ids, batch.tokens, strict=True)}
    assert len({tuple(row) for row in texts.values()}) == 40
    resumed = loader_of(config, rank=1, ranks=2)
    resumed.seek(16)
    for batch in resumed.step():
        for number, row in zip(batch.sample_ids, batch.tokens, strict=True):
            assert texts[int(number)] == row.tolist()


def test_without_shuffling_rows_come_in_order(make):
    loader = loader_of(make(data__packing="none", data__shuffle=False))
    assert loader.samples.order.starts(np.arange(42)).tolist() == [*range(40), 0, 1]


def test_the_seed_decides_which_records_share_a_row_and_their_order(make):
    packed = [loader_of(make(debug__seed=seed)).samples.rows.starts.tolist() for seed in (1, 2, 1)]
    assert packed[0] == packed[2] != packed[1]
    assert sorted(packed[0]) == sorted(packed[1])
    loaders = [loader_of(make(data__packing="none", debug__seed=seed)) for seed in (1, 2, 1)]
    orders = [loader.samples.order.starts(np.arange(40)).tolist() for loader in loaders]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("lengths", "rows", "filled"),
    [([8, 7, 5, 4, 3, 3, 2], [[2, 8], [3], [3, 7], [4, 5]], 0.8), ([3, 5, 7], [[3, 7], [5]], 0.75)],
)
def test_the_longest_come_first_and_go_into_the_fullest_row(lengths, rows, filled):
    records = Piece(np.arange(len(lengths)), np.array(lengths), np.zeros(len(lengths), np.int64))
    packed = pack(records, 10, 0, LengthReport())
    assert sorted(sorted(length for _, length in packed.pieces(row)) for row in range(len(packed))) == rows
    assert packed.filled == filled


def test_the_parts_of_sources_are_those_of_all_epochs(make, tmp_path, said):
    files = [write(tmp_path / "a.jsonl", segments(12)), write(tmp_path / "b.jsonl", segments(6, start=30))]
    sources = [{"path": file, "type": "input_output"} for file in files]
    samples = loader_of(make(data__sources=sources, data__packing="none")).samples
    order, rows = samples.order.starts(np.arange(45)), samples.rows  # two epochs and a half
    read = [rows.tokens_of(order[rows.sources[order] == source]).sum() for source in (0, 1)]
    said()
    samples.report_read(45)
    shares = ", ".join(f"{file} {100 * part / sum(read):.1f}%" for file, part in zip(files, read, strict=True))
    assert f"of {sum(read):,} tokens read: {shares}" in said()


def test_records_without_a_trained_token_are_left_out(make, tmp_path):
    rows = [*segments(3), {"segments": [{"text": "only a question", "label": False}]}]
    file = write(tmp_path / "some.jsonl", rows)
    config = make(data__sources=[{"path": file, "type": "input_output"}], data__packing="none")
    assert len(loader_of(config).samples.rows) == 3


def test_records_whose_trained_tokens_are_cut_off_are_left_out(make, tmp_path):
    long = [{"segments": [{"text": "q" * n, "label": False}, {"text": "answer", "label": True}]} for n in (46, 47, 48)]
    changes = {"data__sources": [{"path": write(tmp_path / "long.jsonl", long), "type": "input_output"}]}
    config = make(data__packing="none", data__excess_length="truncate", **changes)
    assert len(loader_of(config).samples.rows) == 2, "of 48 tokens, the last two or the last one are trained"
    rows = [{"p": "q" * n, "c": "good", "r": "bad"} for n in (20, 60)]
    kind = {"field_prompt": "p", "field_chosen": "c", "field_rejected": "r"}
    pairs = {"data__sources": [{"path": write(tmp_path / "pairs.jsonl", rows), "type": kind}]}
    config = make(training__objective="dpo", data__excess_length="truncate", **pairs)
    assert loader_of(config).samples_per_epoch == 1, "both answers of the second pair are cut off"


def test_a_sample_of_pairs_is_two_rows(make, tmp_path):
    rows = [{"p": f"{n}? ", "c": "good" * (n % 3 + 1), "r": "bad" * (20 if n == 4 else 1)} for n in range(8)]
    file = write(tmp_path / "pairs.jsonl", rows)
    kind = {"field_prompt": "p", "field_chosen": "c", "field_rejected": "r"}
    config = make(data__sources=[{"path": file, "type": kind}])
    with pytest.raises(UserError, match="holds pairs of answers"):
        loader_of(config)
    pairs = {"training.objective": "dpo"}
    loader = loader_of(config.replace(pairs))
    assert loader.samples_per_epoch == 7  # one answer of a pair is too long
    (batch,) = loader.step()
    assert batch.tokens.shape == (8, 48)
    assert batch.sample_ids.tolist() == [0, 1, 2, 3]
    targets = [bytes(i for i in row[row != IGNORE].tolist() if i < 256).decode() for row in batch.labels]
    assert all(set(text) == set("good") for text in targets[::2])
    assert targets[1::2] == ["bad"] * 4
    assert loader.step_tokens == sum(int((row != 257).sum()) + 1 for row in batch.tokens)
    assert len(loader_of(config.replace(pairs | {"data.excess_length": "truncate"})).samples.rows) == 16
    with pytest.raises(UserError, match="holds single answers"):
        loader_of(make().replace(pairs))


def test_pairs_are_kept_dropped_or_cut_together():
    lengths = np.array([5, 9, 9, 3, 20, 6, 7, 7])
    records = Piece(np.arange(8), lengths, np.zeros(8, np.int64))
    report = LengthReport()
    assert fit_pairs(records, 10, "drop", 5, report).starts.tolist() == [0, 1, 6, 7]
    assert (report.records, report.too_long, report.too_short, report.cut) == (4, 1, 1, 0)
    report = LengthReport()
    assert fit_pairs(records, 10, "truncate", 5, report).lengths.tolist() == [5, 9, 10, 6, 7, 7]
    assert (report.too_long, report.too_short, report.cut) == (0, 1, 1)
    with pytest.raises(UserError, match=r"1 record with more than seq_len = 10 tokens \(the longest has 20\)"):
        fit_pairs(records, 10, "raise", 5, LengthReport())


def test_keys_that_nothing_reads_are_named(make, said):
    config = make(data__chat_template="chatml")
    tables = [config.data.sources[0] | {"roles_to_train": ["user"], "weight": 2.0, "field": "segments"}]
    loader_of(config.replace({"data.sources": tables}))
    lines = said()
    assert "data.sources[0].roles_to_train has no effect: type is 'input_output'" in lines
    assert "data.sources[0].weight has no effect: data.mixture is 'concatenate'" in lines
    assert "data.chat_template has no effect: no source has a chat template" in lines
    assert "field has" not in lines
