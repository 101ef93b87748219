"""Prompts of `[generation]` that cannot be continued are refused before ranks start."""

import pytest

from shardline.config.check import notes
from shardline.config.load import load_config
from shardline.data.formats.prompts import check_prompts, prompt_tokens
from shardline.data.tokenizer import ByteTokenizer
from shardline.errors import ConfigError


def config(**keys):
    return load_config(overrides={f"generation.{key}": value for key, value in keys.items()} | {"training.seq_len": 16})


def test_a_prompt_begins_as_documents_do():
    words = ByteTokenizer()
    assert prompt_tokens(words, "ab") == [words.bos_id, *words.encode("ab")]


def test_prompt_and_sample_fit_into_a_sequence():
    check_prompts(config(prompts=["abcd"], max_new_tokens=11), ByteTokenizer())  # and the start token: 16
    with pytest.raises(ConfigError, match=r"'abcd' has 5 tokens, .*max_new_tokens = 12 .*seq_len = 16"):
        check_prompts(config(prompts=["abcd"], max_new_tokens=12), ByteTokenizer())


def test_an_empty_prompt_needs_a_start_token(monkeypatch):
    words = ByteTokenizer()
    monkeypatch.setattr(words, "bos_id", None)
    with pytest.raises(ConfigError, match="empty and the tokenizer has no start token"):
        check_prompts(config(prompts=[""], max_new_tokens=4), words)


def test_keys_without_effect_are_said():
    assert any("generation.freq" in line and "prompts is empty" in line for line in notes(config(freq=3)))
    assert any("generation.top_k" in line for line in notes(config(prompts=["a"], max_new_tokens=4, top_k=3)))
