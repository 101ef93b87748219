"""Tokenizers and chat templates that are malformed, or take all memory and time they can get: an error names them."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.data import tokenize_workers
from shardline.data.chunks import chunks_of_texts
from shardline.data.formats import template
from shardline.data.formats.template import ChatTemplate
from shardline.data.prepare import prepare
from shardline.data.sources import Source
from shardline.data.tokenize_workers import memory_limit
from shardline.data.tokenizer import ByteTokenizer, load_tokenizer
from shardline.data.tokenizer_growth import check_growth, growth
from shardline.errors import UserError
from tests import bad_values
from tests.examples import examples

from .test_tokenizer import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", ["<s>", "</s>"])


def change(folder: Path, **parts: Any) -> None:
    """Write other parts into tokenizer.json; those of `model` beside what it has."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content |= parts | ({"model": content["model"] | parts["model"]} if "model" in parts else {})
    (folder / "tokenizer.json").write_text(json.dumps(content))


def use(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "the cat, 猫, <s> sat\n"
    tokenizer.encode(text)
    tokenizer.encode_arrays([text, ""])
    tokenizer.encode_pieces(text)
    tokenizer.decode(range(20))


@pytest.mark.parametrize("content", [b"hello", b"", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"model": null}'])
def test_files_that_are_no_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json that can be read: .+"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": {"merges": [["zz", "qq"]]}}, "is not a tokenizer.json that can be read: "),
        ({"model": {"vocab": {"a": 4_000_000_000}, "merges": []}}, "its largest id is 4,000,000,000, expected 0 to"),
        ({"model": {"vocab": {}, "merges": []}, "added_tokens": []}, "its largest id is -1"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "can be read: "),  # a panic
        (
            {
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(b"\x28\0\0\0" + random.Random(1).randbytes(40)).decode(),
                }
            },
            "cannot tokenize this text: ",  # a panic
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot tokenize this text: "),  # a panic
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, "Missing [UNK] token"),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}, "`unk_id` is missing"),
    ],
)
def test_errors_and_panics_of_the_library_name_the_file(folder: Path, parts: dict[str, Any], words: str) -> None:
    if parts.get("model", {}).get("type"):
        file = folder / "tokenizer.json"
        whole = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        content = json.loads(file.read_text()) | {"model": {**whole, **parts["model"]}, "added_tokens": []}
        file.write_text(json.dumps(content))
    else:
        change(folder, **parts)
    with pytest.raises(UserError) as error:
        use(folder)
    assert str(folder / "tokenizer.json") in str(error.value)
    assert words in str(error.value)


def test_any_value_in_any_place_of_a_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    good, chance = json.loads(file.read_text()), random.Random(0)
    cases = list(itertools.product([*bad_values.places(good)], bad_values.VALUES.values()))
    for place, value in chance.sample(cases, examples(1500)):
        if place[:2] != ("model", "vocab") or chance.random() < 0.1:
            file.write_text(bad_values.text_of(bad_values.changed(good, place, value)))
            with contextlib.suppress(UserError):
                use(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", "[]", "expected a JSON object, got []"),
        ("tokenizer_config.json", "[" * 100_000, "cannot be read: nested more than 100 deep"),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token: expected a text, got 5"),
        ("tokenizer_config.json", '{"eos_token": {"content": []}}', "eos_token: expected a text, got {'content': []}"),
        (
            "tokenizer_config.json",
            '{"chat_template": 7}',
            "chat_template: expected a text or a list of named ones, got 7",
        ),
        ("special_tokens_map.json", '{"eos_token": ["</s>"]}', "eos_token: expected a text, got ['</s>']"),
        ("generation_config.json", '{"eos_token_id": [[]]}', "eos_token_id: expected a whole number, got [[]]"),
        ("config.json", '{"bos_token_id": "1"}', "bos_token_id: expected a whole number, got '1'"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read: "),
    ],
)
def test_files_beside_a_tokenizer(folder: Path, name: str, content: str | bytes, words: str) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert str(error.value).startswith(str(folder / name))
    assert words in str(error.value)


def test_any_value_in_the_files_beside_a_tokenizer(folder: Path) -> None:
    named = [{"name": "default", "template": "{{ 1 }}"}]
    good = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": named}
    for place, value in itertools.product([*bad_values.places(good)], bad_values.VALUES.values()):
        (folder / "tokenizer_config.json").write_text(bad_values.text_of(bad_values.changed(good, place, value)))
        with contextlib.suppress(UserError):
            load_tokenizer(folder)


MORE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
NORMAL = {"id": 300, "content": "eee", "single_word": False, "lstrip": False, "rstrip": False, "special": False}


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        ({"decoder": {"type": "Sequence", "decoders": [MORE] * 4}}, "decoder"),
        ({"decoder": {"type": "Sequence", "decoders": [MORE | {"pattern": {"String": ""}}] * 2}}, "decoder"),
        ({"decoder": {"type": "Sequence", "decoders": [MORE | {"pattern": {"Regex": "."}}] * 2}}, "decoder"),
        # A token that is normalized is so while the file is read.
        (
            {
                "normalizer": {"type": "Sequence", "normalizers": [MORE] * 4},
                "added_tokens": [NORMAL | {"normalized": True}],
            },
            "normalizer",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 30}}, "pre_tokenizer"),
    ],
)
def test_rules_that_make_texts_endless_are_refused_before_the_library_reads_them(
    folder: Path, capfd: pytest.CaptureFixture[str], parts: dict[str, Any], part: str
) -> None:
    change(folder, **parts)
    (folder / "mine.jsonl").write_text('{"text": "one two three"}')
    assert main(["data", "show", str(folder / "mine.jsonl"), f"--model.tokenizer_path={folder}"]) == 2
    assert f"{folder}/tokenizer.json is not a tokenizer.json that can be read: its {part} writes up to" in (
        capfd.readouterr().err
    )


def test_growth_is_refused_by_its_part() -> None:
    for part, rules in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        with pytest.raises(UserError, match=f"its {part} writes up to 1,000,000 characters for one"):
            check_growth({part: {"type": "Sequence", rules: [MORE, MORE]}})
        check_growth({part: MORE})


def test_a_token_that_is_a_book(folder: Path) -> None:
    change(folder, model={"vocab": {"a": 0, "b" * 70_000: 1}, "merges": []})
    with pytest.raises(UserError, match="it has a text of 70,000 characters; tokens and rules may have at most 65,536"):
        load_tokenizer(folder)


def test_what_comes_of_a_letter_by_known_rules() -> None:
    def replace(before: str, after: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"String": before}, "content": after}

    quotes = [replace(letter, "''") for letter in "\u201c\u201d\u201e\u00ab\u00bb"] * 10
    assert growth(None) == growth({"type": "ByteFallback"}) == 1
    assert growth({"type": "Sequence", "decoders": [replace("\u2581", " "), {"type": "Fuse"}]}) == 1
    assert growth({"type": "Sequence", "normalizers": [*quotes, {"type": "NFC"}]}) == 6
    assert growth({"type": "Sequence", "normalizers": [replace("a", "bb"), replace("b", "ccc")]}) == 6
    assert growth({"type": "Sequence", "normalizers": [replace("b", "ccc"), replace("a", "bb")]}) == 3
    assert growth(replace("ab", "xxxx")) == 2


@pytest.fixture
def exploding(folder: Path) -> Path:
    """Each letter becomes a thousand, which is allowed, of each of which tokens are made."""
    change(folder, normalizer=MORE)
    return folder


LONG = "one two three " * 200_000


def test_a_tokenizer_that_explodes_ends_its_process_and_not_the_machine(exploding: Path) -> None:
    source = Source("mine", "mine 1", None, lambda: chunks_of_texts([LONG]))
    with pytest.raises(
        UserError, match=rf"tokenizing with '{exploding}' took more than 2.00 GiB of memory|cannot tokenize"
    ):
        prepare(source, load_tokenizer(exploding), exploding / "out", workers=1)


@pytest.mark.slow
def test_showing_data_with_a_tokenizer_that_explodes(exploding: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (exploding / "mine.jsonl").write_text(json.dumps({"text": LONG}))
    assert main(["data", "show", str(exploding / "mine.jsonl"), f"--model.tokenizer_path={exploding}"]) == 2
    assert f"tokenizing with '{exploding}' took more than 2.00 GiB of memory" in capfd.readouterr().err


def test_a_chunk_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_workers, "CHUNK_SECONDS", 0.0)
    monkeypatch.setattr(tokenize_workers, "LEAST_SPEED", 1e12)
    source = Source("mine", "mine 1", None, lambda: chunks_of_texts(["one two three"]))
    with pytest.raises(UserError, match=r"tokenizing with 'bytes' took more than 0 s for \d+ bytes of text"):
        prepare(source, ByteTokenizer(), tmp_path / "out", workers=1)


# ---- templates -------------------------------------------------------------------------------------------------------

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ENDLESS, "it takes more than 0.2 s for one conversation"),
        (ENDLESS.replace("BODY", "{% set x = 1 %}"), "it takes more than 0.2 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than 0.2 s",
        ),
        ("{{ lipsum(n=100000) }}", "it takes more than 0.2 s"),
        ("{{ 9 ** 99999999 }}", "9 ** 99999999 is too large"),
        ("{{ 'x' * 10000000000 }}", "takes more memory than it may have"),
        ("{{ '%10000000000d' % 1 }}", "'of a test'"),
        ("{{ 'x' | center(10000000000) }}", "takes more memory than it may have"),
        ("{{ [1] * 10 ** 10 }}", "takes more memory than it may have"),
        ("{{ 'x' * 20000000 }}", "it writes 20,000,000 characters for one conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ " + "(" * 50_000, "recursion"),
        ("{% for", "unexpected 'end of template'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
    ],
)
def test_templates_that_do_not_end_or_take_everything(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setattr(template, "MOST_SECONDS", 0.2 if "0.2 s" in words else 30.0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError) as error, memory_limit(512 << 20):
        ChatTemplate("of a test", text, ()).render([{"role": "user", "content": "hi"}])
    assert words in str(error.value)
    assert str(error.value).startswith("the chat template 'of a test'")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
