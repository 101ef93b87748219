"""`shardline generate`: text from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint.assets import end_tokens
from shardline.checkpoint.fetch import local_path
from shardline.data.formats.prompts import prompt_tokens
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.models.generate import generate
from shardline.tools.saved_model import device_named, open_model, tokenizer_at


def command(
    folder: str | Path,
    *,
    prompt: str,
    device: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
    **sampling: Any,
) -> int:
    """Print the prompt and the text that the model adds to it, as `models.generate` samples it."""
    where, folder = device_named(device), local_path(folder)
    saved = open_model(folder, base)
    location = tokenizer or saved.tokenizer
    words = tokenizer_at(location, folder, saved.architecture)
    ids = prompt_tokens(words, prompt)
    if not ids:
        raise UserError("--prompt is empty and the tokenizer has no start token: write at least one character")
    model = saved.build(where)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # do not stop at a character that the terminal cannot show
    sys.stdout.write(prompt)
    stream = TextStream(words, ids)
    try:
        ends = end_tokens(words, location)
        for token in generate(model, torch.tensor([ids], device=where), eos_id=ends, **sampling):
            sys.stdout.write(stream.add(token))
            sys.stdout.flush()
    except UserError:
        sys.stdout.write("\n")  # so that the error message starts on a new line
        sys.stdout.flush()
        raise
    sys.stdout.write(stream.rest() + "\n")
    return 0


class TextStream:
    """Turns tokens into text one by one; a character of several tokens is shown when it is complete.

    Each token is decoded together with those shown last, because a tokenizer may drop a space at the start of a text.

        ids  | shown before     | shown last | not shown yet |
                                start        end
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self.start, self.end = 0, len(prompt)

    def add(self, token: int) -> str:
        """Return the text that can be shown after this token, often a word or nothing."""
        self.ids.append(token)
        text = self.rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.end = self.end, len(self.ids)
        return text

    def rest(self) -> str:
        """Return the text that was not shown yet, with replacement characters for incomplete ones."""
        shown = self.tokenizer.decode(self.ids[self.start : self.end])
        return self.tokenizer.decode(self.ids[self.start :])[len(shown) :]
