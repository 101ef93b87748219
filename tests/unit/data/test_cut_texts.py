"""A large text is tokenized in pieces, and its tokens are those of the whole text, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from shardline.data import chunks
from shardline.data.prepare import prepare
from shardline.data.sources import open_source
from shardline.data.tokenize_workers import TextEncoder, encode_all
from shardline.data.tokenizer import Additions, ByteTokenizer, JsonTokenizer
from tests.examples import examples

WORDS = ["the", "green", "bottle", "on", "wall", "Hügel", "緑の丘", "😀", "don't", "x=3;", "</s>", "<s>", "1234567"]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", " \n  ", "\t", "\r\n", "\u3000", ".", ", "]


def text_of(chance: random.Random, words: int) -> str:
    return "".join(chance.choice(WORDS) + chance.choice(GAPS) for _ in range(words))


def gpt(tokenizer: Tokenizer) -> None:
    pattern = r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def llama2(tokenizer: Tokenizer) -> None:
    """A mark at the beginning and for every space, and no words: merges may reach anywhere."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def metaspace(scheme: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme)

    return change


def bert(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def stripped(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")


KINDS: dict[str, tuple[Any, Any, Callable[[Tokenizer], None]]] = {
    "byte-level BPE": (models.BPE, trainers.BpeTrainer, gpt),
    "BPE without words": (lambda: models.BPE(byte_fallback=True, fuse_unk=True), trainers.BpeTrainer, llama2),
    "BPE, mark always": (models.BPE, trainers.BpeTrainer, metaspace("always")),
    "BPE, mark first": (models.BPE, trainers.BpeTrainer, metaspace("first")),
    "BPE, no mark": (models.BPE, trainers.BpeTrainer, metaspace("never")),
    "unigram": (models.Unigram, trainers.UnigramTrainer, metaspace("always")),
    "unigram, stripped": (models.Unigram, trainers.UnigramTrainer, stripped),
    "word pieces": (lambda: models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, bert),
}


@pytest.fixture(scope="module", params=[*KINDS, "bytes", "bytes with more tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param.startswith("bytes"):
        return ByteTokenizer(Additions(added=("green bottle", "\n\n")) if "more" in request.param else None)
    model, trainer, change = KINDS[request.param]
    backend = Tokenizer(model())
    change(backend)
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": ["<unk>", "<s>"], "show_progress": False}
    if trainer is trainers.UnigramTrainer:
        options["unk_token"] = "<unk>"
    if request.param == "byte-level BPE":
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([text_of(random.Random(seed), 60) for seed in range(40)], trainer(**options))
    backend.add_special_tokens([AddedToken("</s>", lstrip=True)])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(file))
    return JsonTokenizer(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def in_pieces(tokenizer: Any, file: Path) -> tuple[list[int], int, list[tuple[bytes, bytes]]]:
    """The tokens of a file as `prepare` makes them, how many pieces there were, and what they say of their ends."""
    found = [TextEncoder(tokenizer).encode(chunk) for chunk in open_source("mine", str(file)).chunks()]
    ids = np.concatenate([one.tokens for one in found]).tolist()
    return ids, len(found), [one.seams for one in found]


def whole(tokenizer: Any, text: str) -> list[int]:
    marks = [[] if mark is None else [mark] for mark in (tokenizer.bos_id, tokenizer.eos_id)]
    return [*marks[0], *tokenizer.encode(text), *marks[1]]


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(150, 700))
def test_tokens_of_pieces_are_those_of_the_whole_text(tokenizer: Any, folder: Path, seed: int, size: int) -> None:
    text = text_of(random.Random(seed), 300)
    file = folder / "a.txt"
    file.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", size)
        patch.setattr(chunks, "CONTEXT_BYTES", 1200)
        ids, count, seams = in_pieces(tokenizer, file)
    assert ids == whole(tokenizer, text)
    assert count > 2 or len(text.encode()) < 1200 + 2 * size
    assert [right for _, right in seams[:-1]] == [left for left, _ in seams[1:]]


def test_a_text_in_which_everything_hangs_together_is_said_once(
    tmp_path: Path, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of one letter are merged from the left: where one begins depends on where the text does."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "aa": 2, "aaa": 3}, [("a", "a"), ("aa", "a")]))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("b" + "a" * 5000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(chunks, "CONTEXT_BYTES", 301)
    source, tokenizer = open_source("mine", str(tmp_path / "a.txt")), JsonTokenizer(tmp_path / "tokenizer.json")
    prepare(source, tokenizer, tmp_path / "out", workers=1)
    assert said().count("tokens depend on text that is more than") == 1
    (tmp_path / "b.txt").write_text("ab" * 3000)
    prepare(open_source("mine", str(tmp_path / "b.txt")), tokenizer, tmp_path / "other", workers=1)
    assert "tokens depend on text" not in said()


@pytest.mark.parametrize("gap", ["", " ", "\n \t\n", "\u3000"])
def test_documents_of_white_space_are_left_out_wherever_they_are(tmp_path: Path, gap: str) -> None:
    (tmp_path / "a.txt").write_text(gap)
    (tmp_path / "b.txt").write_text(f"{gap}text{gap}")
    store = prepare(open_source("mine", str(tmp_path)), ByteTokenizer(), tmp_path / "out", workers=1)
    assert (store.documents, store.manifest["empty_documents"]) == (1, 1)
    assert store.read(0, store.tokens).tolist() == [256, *f"{gap}text{gap}".encode(), 257]


def test_workers_give_pieces_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(random.Random(1), 2000)
    (tmp_path / "a.txt").write_text(text, newline="")
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)
    found = encode_all(open_source("mine", str(tmp_path / "a.txt")).chunks(), TextEncoder(ByteTokenizer()), 2)
    assert np.concatenate([one.tokens for one in found]).tolist() == whole(ByteTokenizer(), text)
