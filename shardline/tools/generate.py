"""`shardline generate`: text from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardline.adapters.lora import own_parameters, trained_parameters
from shardline.checkpoint.assets import end_tokens, tokenizer_of_checkpoint
from shardline.checkpoint.fetch import local_path
from shardline.checkpoint.format import find_checkpoint
from shardline.checkpoint.lora.adapter import Adapter, find_adapter
from shardline.config.architecture import Architecture
from shardline.data.prompts import prompt_tokens
from shardline.data.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_file
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.generate import generate
from shardline.models.huggingface.files import read_hf
from shardline.models.state import load_logical_state
from shardline.precision.mixed import Precision
from shardline.run.device import choose_device, supports_bf16
from shardline.training.setup import build_model


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
    where, folder = _device(device), local_path(folder)
    adapter = find_adapter(folder, base)
    saved = _open(folder) if adapter is None else _adapted(adapter)
    location = tokenizer or saved.tokenizer
    words = _tokenizer(folder, location, saved.architecture)
    ids = prompt_tokens(words, prompt)
    if not ids:
        raise UserError("--prompt is empty and the tokenizer has no start token: give at least one character")
    model = _build(saved, where)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    sys.stdout.write(prompt)
    stream = TextStream(words, ids)
    try:
        ends = end_tokens(words, location)
        for token in generate(model, torch.tensor([ids], device=where), eos_id=ends, **sampling):
            sys.stdout.write(stream.add(token))
            sys.stdout.flush()
    except UserError:
        sys.stdout.write("\n")  # its message gets a line of its own
        sys.stdout.flush()
        raise
    sys.stdout.write(stream.rest() + "\n")
    return 0


class TextStream:
    """Turns tokens into text one by one; a character of several tokens is shown when it is complete.

    Each token is decoded together with the ones shown last: a tokenizer may drop the space at the beginning of a text.

        ids  | shown before     | shown last | not shown yet |
                                start        end
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self.start, self.end = 0, len(prompt)

    def add(self, token: int) -> str:
        """The text that can be shown after this token, often a word or nothing."""
        self.ids.append(token)
        text = self.rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.end = self.end, len(self.ids)
        return text

    def rest(self) -> str:
        """The text that was not shown yet, with replacement characters for incomplete ones."""
        shown = self.tokenizer.decode(self.ids[self.start : self.end])
        return self.tokenizer.decode(self.ids[self.start :])[len(shown) :]


class SavedModel(NamedTuple):
    architecture: Architecture
    read: Callable[[], Mapping[str, torch.Tensor]]
    tokenizer: str  # where it is
    adapter: Adapter | None = None


def _adapted(adapter: Adapter) -> SavedModel:
    return SavedModel(adapter.architecture, adapter.frozen, adapter.tokenizer, adapter)


def _open(folder: Path) -> SavedModel:
    """The model in `folder`: a checkpoint, a run or a Hugging Face model."""
    if (folder / "config.json").is_file() and not (folder / "manifest.json").is_file():
        tensors = read_hf(folder)
        return SavedModel(tensors.arch, lambda: tensors, str(folder))
    saved = find_checkpoint(folder)

    def read() -> Mapping[str, torch.Tensor]:
        if saved.is_hf:  # our own format is verified while it is read
            saved.verify()
        return saved.weights()

    return SavedModel(saved.architecture, read, tokenizer_of_checkpoint(saved))


def _build(saved: SavedModel, device: torch.device) -> Decoder:
    """The model with its weights, in bfloat16 if the GPU supports it."""
    compute = torch.bfloat16 if device.type == "cuda" and supports_bf16(device) else torch.float32
    precision, adapter = Precision(compute, compute, torch.float32), saved.adapter
    how = None if adapter is None else adapter.how
    model, _ = build_model(saved.architecture, device, precision, how=how)
    load_logical_state(own_parameters(model), saved.read())
    if adapter is not None:
        load_logical_state(trained_parameters(model), adapter.tensors, strict=False)
    return model.eval()


def _tokenizer(folder: Path, location: str, architecture: Architecture) -> Tokenizer:
    if location != BYTES and (not location or tokenizer_file(Path(location)) is None):
        place = f"no tokenizer.json at {location}" if location else f"{folder} has no tokenizer"
        raise UserError(f"{place}: give --tokenizer=FOLDER with a tokenizer.json, or --tokenizer=bytes")
    tokenizer = load_tokenizer(location)
    if tokenizer.vocab_size > architecture.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, but the model {architecture.vocab_size}:"
            " give the model's own as --tokenizer=FOLDER"
        )
    return tokenizer


def _device(name: str | None) -> torch.device:
    if name is None:
        return choose_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here")
    return device
