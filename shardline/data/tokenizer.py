"""Text to token ids and back: `tokenizer.json` files, and an embedded byte tokenizer that needs no file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardline.errors import UserError, blame

BYTES = "bytes"
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>")
EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
OPTION = "--model.tokenizer_path"  # for a run; other commands have --tokenizer


class Tokenizer(Protocol):
    """Text to ids and back. `encode` adds no special tokens: callers add `bos_id` and `eos_id` where they exist."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, begin of document 256, end of document 257."""

    name = BYTES
    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = hashlib.sha256(b"shardline byte tokenizer 1").hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # lone surrogates, which JSON escapes can make, become '?'


class JsonTokenizer:
    """A `tokenizer.json`; begin and end of document come from the files beside it, or from their usual names."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Backend

        content = file.read_bytes()
        try:
            self.backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file} is not a tokenizer.json that can be read: {error}") from error
        # A file saved with truncation or padding would cut or fill documents.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.file = file
        self.name = str(file.parent)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.bos_id = _special_id("bos", BOS_NAMES, file.parent, vocabulary)
        self.eos_id = _special_id("eos", EOS_NAMES, file.parent, vocabulary)
        special = f"{self.bos_id} {self.eos_id}".encode()
        self.fingerprint = hashlib.sha256(content + b"\0" + special).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        return (JsonTokenizer, (self.file,))

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)  # fast: no character offsets
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


def load_tokenizer(path: str | Path, option: str = "--tokenizer") -> Tokenizer:
    """The tokenizer named by "bytes", a folder that holds tokenizer.json, or that file itself.

    Errors name `option` as the way to choose another one.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = tokenizer_file(Path(path))
    if file is None:
        raise UserError(f"no tokenizer at {str(path)!r}{_what_is_there(Path(path))}: {_remedy(option)}")
    return JsonTokenizer(file)


def choose_tokenizer(config: Any) -> Tokenizer:
    """`model.tokenizer_path`, else `model.hf_assets_path`; the demo needs neither and falls back to bytes."""
    model, training = config.model, config.training
    if model.tokenizer_path:
        with blame("model.tokenizer_path"):
            return load_tokenizer(model.tokenizer_path, OPTION)
    if model.hf_assets_path and tokenizer_file(Path(model.hf_assets_path)) is not None:
        with blame("model.hf_assets_path"):
            return load_tokenizer(model.hf_assets_path, OPTION)
    if model.hf_assets_path and model.hf_assets_path != type(model).model_fields["hf_assets_path"].default:
        there = _what_is_there(Path(model.hf_assets_path))
        raise UserError(f"model.hf_assets_path = {model.hf_assets_path!r} holds no tokenizer{there}: {_remedy(OPTION)}")
    if training.dataset == "demo" and not training.dataset_path:
        return ByteTokenizer()
    key = "dataset_path" if training.dataset_path else "dataset"
    raise UserError(f"training.{key} = {getattr(training, key)!r} needs a tokenizer: {_remedy(OPTION)}")


def _remedy(option: str) -> str:
    return f"give a folder with tokenizer.json as {option}=FOLDER, or {option}=bytes"


def check_vocabulary(tokenizer: Tokenizer, arch: Any) -> None:
    """Refuse a model that has fewer rows than the tokenizer has ids."""
    if tokenizer.vocab_size > arch.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, the model has {arch.vocab_size} rows:"
            f" give --model.overrides.vocab_size={tokenizer.vocab_size} (or more), or another tokenizer"
        )


def tokenizer_file(path: Path) -> Path | None:
    """The tokenizer.json that a path names, None where there is none."""
    for file in (path / "tokenizer.json", path):
        if file.is_file() and file.suffix == ".json":
            return file
    return None


def _what_is_there(path: Path) -> str:
    if path.name == "tokenizer.model" or (path / "tokenizer.model").is_file():
        return " (tokenizer.model files are not read, only tokenizer.json)"
    return " (it holds no tokenizer.json)" if path.is_dir() else " (it does not exist)"


def _special_id(kind: str, usual: Sequence[str], folder: Path, vocabulary: dict[str, int]) -> int | None:
    """The id of `bos` or `eos`; where tokenizer_config.json says that bos is null, the tokenizer has none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        entries = _read_json(folder / name)
        token = entries.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            return vocabulary[token]
        if kind == "bos" and f"{kind}_token" in entries and token is None:
            return None
    known = set(vocabulary.values())
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get(f"{kind}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and first in known:
            return first
    return next((vocabulary[token] for token in usual if token in vocabulary), None)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
