"""Tokenizers: ids, special tokens, which one a config chooses, and the messages when there is none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.load import load_config
from shardline.data.tokenizer import ByteTokenizer, JsonTokenizer, check_vocabulary, choose_tokenizer, load_tokenizer
from shardline.errors import UserError


def write_tokenizer(folder: Path, special: list[str] | None = None) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special or [], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 5, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([256, *ids, 257]) == text
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.encode_arrays([text])[0].tolist() == ids


def test_bytes_take_lone_surrogates_and_ignore_foreign_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a\ud800b") == list(b"a?b")
    assert tokenizer.decode([104, 999, 105]) == "hi"


def test_json_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, ["<s>", "</s>"]))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode([0, *ids, 1]) == "the cat"
    assert [a.tolist() for a in tokenizer.encode_arrays(["the cat", ""])] == [ids, []]
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint
    assert pickle.loads(pickle.dumps(tokenizer)).encode("the cat") == ids


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer_config.json", {"bos_token": "<x>", "eos_token": {"content": "<y>"}}, ("<x>", "<y>")),
        ("special_tokens_map.json", {"bos_token": {"content": "<y>"}, "eos_token": "<x>"}, ("<y>", "<x>")),
        ("config.json", {"bos_token_id": 1, "eos_token_id": [0, 1]}, ("<y>", "<x>")),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1}, ("<x>", "<y>")),
        ("tokenizer_config.json", {"bos_token": None, "eos_token": "<y>"}, (None, "<y>")),
        ("config.json", {"bos_token_id": 99999, "eos_token_id": None}, ("<s>", None)),
    ],
)
def test_special_tokens_are_taken_from_the_files_beside(
    tmp_path: Path, file: str, content: dict[str, object], expected: tuple[str | None, str | None]
) -> None:
    names = ["<x>", "<y>", "<s>"]
    (write_tokenizer(tmp_path, names) / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    ids = tuple(None if name is None else names.index(name) for name in expected)
    assert (tokenizer.bos_id, tokenizer.eos_id) == ids


def test_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    one = load_tokenizer(write_tokenizer(tmp_path / "a", ["<s>", "</s>"]))
    same = load_tokenizer(write_tokenizer(tmp_path / "b", ["<s>", "</s>"]))
    other = load_tokenizer(write_tokenizer(tmp_path / "c", ["<s>"]))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_saved_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<s>"])
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=50)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert 2 < len(load_tokenizer(tmp_path).encode("the cat sat on xyz")) < 50


def test_missing_and_broken_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set --tokenizer=FOLDER, a folder .*, or --tokenizer=bytes$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UserError, match=r"tokenizer.model files are not read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assets = str(write_tokenizer(tmp_path / "assets", ["<s>"]))
    assert choose_tokenizer(load_config()).name == "bytes"
    assert choose_tokenizer(load_config(overrides={"model.hf_assets_path": assets})).name == assets
    both = {"model.hf_assets_path": assets, "model.tokenizer_path": "bytes"}
    assert choose_tokenizer(load_config(overrides=both)).name == "bytes"
    with pytest.raises(UserError, match=r"dataset = 'c4' needs a tokenizer.*--model.tokenizer_path"):
        choose_tokenizer(load_config(overrides={"training.dataset": "c4"}))
    with pytest.raises(UserError, match=r"^model.tokenizer_path: no tokenizer at 'x'.* --model.tokenizer_path=bytes$"):
        choose_tokenizer(load_config(overrides={"model.tokenizer_path": "x"}))
    with pytest.raises(UserError, match=r"needs a tokenizer"):
        choose_tokenizer(load_config(overrides={"training.dataset_path": "x.jsonl"}))
    with pytest.raises(UserError, match=r"hf_assets_path = 'nowhere'.*it does not exist"):
        choose_tokenizer(load_config(overrides={"model.hf_assets_path": "nowhere"}))


def test_vocabulary_must_fit() -> None:
    check_vocabulary(ByteTokenizer(), SimpleNamespace(vocab_size=258))
    with pytest.raises(UserError, match=r"--model.overrides.vocab_size=258"):
        check_vocabulary(ByteTokenizer(), SimpleNamespace(vocab_size=257))


def test_half_a_surrogate_pair_does_not_end_the_work(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path) / "tokenizer.json")
    text = json.loads('"cut \\ud83d off"')
    assert tokenizer.encode(text) == tokenizer.encode("cut ? off")
    assert [row.tolist() for row in tokenizer.encode_arrays([text])] == [tokenizer.encode("cut ? off")]
    assert tokenizer.encode_pieces(text).ids.tolist() == tokenizer.encode("cut ? off")
    assert tokenizer.encode("é") != tokenizer.encode("?")
