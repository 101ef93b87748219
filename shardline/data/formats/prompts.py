"""Prompts that a model continues: their tokens, and whether they fit."""

from __future__ import annotations

from shardline.config.schema import Config
from shardline.data.tokenizer import Tokenizer
from shardline.errors import ConfigError


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt: documents that are trained on begin with the start token, so prompts do too."""
    return [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(text)]


def check_prompts(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse prompts of `[generation]` that are empty, or that leave no room for their samples."""
    new, length = config.generation.max_new_tokens, config.training.seq_len
    for text in config.generation.prompts:
        tokens = len(prompt_tokens(tokenizer, text))
        if not tokens:
            raise ConfigError("generation.prompts: '' is empty and the tokenizer has no start token: set some text")
        if tokens + new > length:
            raise ConfigError(
                f"generation.prompts: {text[:40]!r} has {tokens} tokens, which with generation.max_new_tokens = {new}"
                f" are more than training.seq_len = {length}: shorten the prompt or the sample, or raise seq_len"
            )
