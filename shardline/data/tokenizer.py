"""Text to token ids and back: `tokenizer.json` files, and an embedded byte tokenizer that needs no file."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardline.config.architecture import ROWS
from shardline.config.types import show
from shardline.data.tokenizer_growth import check_growth
from shardline.errors import UserError, blame
from shardline.hub import local_path
from shardline.json_text import parse_json

BYTES = "bytes"
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>")
EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
UNREADABLE = "is not a tokenizer.json that can be read"
BROKEN = "cannot tokenize this text"
OPTION = "--model.tokenizer_path"  # for a run; other commands have --tokenizer


class Pieces(NamedTuple):
    """Tokens of a text: ids, and the characters [start, end) of each, all (T,)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Additions:
    """Tokens beyond those of the files: `special` by name (eos_token, ...), and `added` ones."""

    special: Mapping[str, Any] = field(default_factory=dict)
    added: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.special or self.added)

    def names(self) -> dict[str, str]:
        """The special tokens that have a name of their own."""
        return {name: token for name, token in self.special.items() if isinstance(token, str)}

    def special_texts(self) -> list[str]:
        lists = [[token] if isinstance(token, str) else token for token in self.special.values()]
        return list(dict.fromkeys(token for tokens in lists for token in tokens))

    def fingerprint(self) -> str:
        return json.dumps([dict(self.special), self.added], sort_keys=True)


class Tokenizer(Protocol):
    """Text to ids and back. `encode` adds no special tokens: callers add `bos_id` and `eos_id` where they exist.

    `special_tokens` holds the texts of bos_token, eos_token and others, and `special_ids` the ids of all special ones.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    fingerprint: str
    special_tokens: dict[str, str]
    special_ids: frozenset[int]
    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...

    def encode_pieces(self, text: str) -> Pieces: ...

    def token_id(self, token: str) -> int | None: ...

    def token_text(self, token: int) -> str: ...

    def is_named(self, token: int) -> bool: ...  # special or added: `decode` leaves it out or cannot split it

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, begin of document 256, end of document 257, then tokens that were added."""

    name = BYTES
    bos_id: int | None = 256
    chat_template: str | None = None

    def __init__(self, additions: Additions | None = None) -> None:
        self.additions = additions or Additions()
        special = self.additions.special_texts()
        extra = list(dict.fromkeys([*special, *self.additions.added]))
        self.extra = {token: 258 + place for place, token in enumerate(extra)}
        self.vocab_size = 258 + len(extra)
        self.special_tokens = self.additions.names()
        self.special_ids = frozenset({256, 257, *(self.extra[token] for token in special)})
        self.eos_id: int | None = self.extra.get(self.special_tokens.get("eos_token", ""), 257)
        self.pad_id: int | None = self.extra.get(self.special_tokens.get("pad_token", ""), 257)
        mark = "shardline byte tokenizer 1" + (self.additions.fingerprint() if self.additions else "")
        self.fingerprint = hashlib.sha256(mark.encode()).hexdigest()[:32]
        self._cut = re.compile("|".join(map(re.escape, sorted(extra, key=len, reverse=True)))) if extra else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (ByteTokenizer, (self.additions,))

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text)) if self._cut is None else self.encode_pieces(text).ids.tolist()

    def encode_pieces(self, text: str) -> Pieces:
        parts, at = list[tuple[np.ndarray, ...]](), 0
        for found in [*(self._cut.finditer(text) if self._cut else ()), None]:
            ids = np.frombuffer(_utf8(text[at : found.start() if found else None]), np.uint8).astype(np.int64)
            starts = at + np.cumsum((ids & 0xC0) != 0x80) - 1  # other bytes continue a character
            parts.append((ids, starts, starts + 1))
            if found is not None:
                parts.append(tuple(np.array([n]) for n in (self.extra[found.group()], found.start(), found.end())))
                at = found.end()
        return Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._cut is not None:
            return [self.encode_pieces(text).ids for text in texts]
        return [np.frombuffer(_utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return self.extra.get(token, ord(token) if len(token) == 1 and token.isascii() else None)

    def is_named(self, token: int) -> bool:
        return token > 255

    def token_text(self, token: int) -> str:
        special = {256: "<begin>", 257: "<end>"} | {number: text for text, number in self.extra.items()}
        return special.get(token) or bytes([token]).decode("utf-8", errors="replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # lone surrogates, which JSON escapes can make, become '?'


class JsonTokenizer:
    """A `tokenizer.json`; begin and end of document come from the files beside it, or from their usual names."""

    def __init__(self, file: Path, additions: Additions | None = None) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        content = file.read_bytes()
        with _reported(file, UNREADABLE):
            text = content.decode("utf-8")
        _check_text(file, text)
        with _reported(file, UNREADABLE):
            self.backend = Backend.from_str(text)
        # A file saved with truncation or padding would cut or pad documents.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.file, self.additions = file, additions or Additions()
        self.name = str(file.parent)
        if self.additions:
            special = [AddedToken(token, normalized=False, special=True) for token in self.additions.special_texts()]
            self.backend.add_special_tokens(special)
            self.backend.add_tokens([AddedToken(token, normalized=False) for token in self.additions.added])
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        if not 0 < self.vocab_size <= ROWS:
            raise UserError(f"{file}: its largest id is {self.vocab_size - 1:,}, expected 0 to {ROWS - 1:,}")
        chosen = {name: vocabulary[token] for name, token in self.additions.names().items()}
        self.bos_id = chosen.get("bos_token", _special_id("bos", BOS_NAMES, file.parent, vocabulary))
        self.eos_id = chosen.get("eos_token", _special_id("eos", EOS_NAMES, file.parent, vocabulary))
        marks = f"{self.bos_id} {self.eos_id}" + (self.additions.fingerprint() if self.additions else "")
        self.fingerprint = hashlib.sha256(content + b"\0" + marks.encode()).hexdigest()[:32]
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.special_tokens = self._special_tokens()
        pad = self.special_tokens.get("pad_token")
        self.pad_id = self.eos_id if pad is None else vocabulary.get(pad, self.eos_id)
        self.chat_template = chat_template_of(file.parent)
        self._pieces: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (JsonTokenizer, (self.file, self.additions))

    def _special_tokens(self) -> dict[str, str]:
        """The texts by which templates name special tokens."""
        found = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        named = {name: self.token_text(number) for name, number in found.items() if number is not None}
        for name, token in _read_json(self.file.parent / "tokenizer_config.json").items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                named.setdefault(name, text)
        return named | self.additions.names()

    def encode_pieces(self, text: str) -> Pieces:
        if self._pieces is None:  # without the post-processor, which would leave white space out of the offsets
            from tokenizers.processors import ByteLevel

            self._pieces = copy.deepcopy(self.backend)
            self._pieces.post_processor = ByteLevel(trim_offsets=False, add_prefix_space=False)
        with _reported(self.file, BROKEN):
            found = self._pieces.encode(_encodable(text), add_special_tokens=False)
        places = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Pieces(np.array(found.ids, dtype=np.int64), places[:, 0], places[:, 1])

    def token_id(self, token: str) -> int | None:
        number: int | None = self.backend.token_to_id(token)
        return number

    def is_named(self, token: int) -> bool:
        return token in self.special_ids

    def token_text(self, token: int) -> str:
        added = self.backend.get_added_tokens_decoder().get(token)
        if added is not None:
            return str(added.content)
        with _reported(self.file, BROKEN):
            return str(self.backend.decode([token], skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        with _reported(self.file, BROKEN):
            return self.backend.encode(_encodable(text), add_special_tokens=False).ids

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _reported(self.file, BROKEN):  # fast: no character offsets
            encodings = self.backend.encode_batch_fast([_encodable(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with _reported(self.file, BROKEN):
            return self.backend.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


def _encodable(text: str) -> str:
    """The text with question marks for single halves of surrogate pairs: JSON can have them, UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _check_text(file: Path, text: str) -> None:
    """Refuse what would make the library abort this process."""
    try:
        check_growth(parse_json(text))
    except UserError as error:
        raise UserError(f"{file} {UNREADABLE}: {error}") from error
    except ValueError as error:
        if "deep" in str(error):  # for any other error the library names the line
            raise UserError(f"{file} {UNREADABLE}: {error}") from error


@contextlib.contextmanager
def _reported(file: Path, what: str) -> Iterator[None]:
    """Name the file in an error of the library: bare exceptions, and those of a panic, which are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UserError):
        raise
    except BaseException as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file} {what}: {first[:300]}") from error


def load_tokenizer(path: str | Path, option: str = "--tokenizer", additions: Additions | None = None) -> Tokenizer:
    """The tokenizer named by "bytes", a folder that holds tokenizer.json, or that file itself.

    Errors name `option` as the way to choose another one.
    """
    if str(path) == BYTES:
        return ByteTokenizer(additions)
    file = tokenizer_file(Path(local_path(str(path))))
    if file is None:
        raise UserError(f"no tokenizer at {str(path)!r}{_what_is_there(Path(path))}: {_remedy(option)}")
    return JsonTokenizer(file, additions)


def choose_tokenizer(config: Any) -> Tokenizer:
    """`model.tokenizer_path`, else `model.hf_assets_path`; the demo needs neither and falls back to bytes."""
    model, training = config.model, config.training
    additions = Additions(config.data.special_tokens, tuple(config.data.added_tokens))
    if model.tokenizer_path:
        with blame("model.tokenizer_path"):
            return load_tokenizer(model.tokenizer_path, OPTION, additions)
    assets = Path(local_path(model.hf_assets_path))
    if model.hf_assets_path and tokenizer_file(assets) is not None:
        with blame("model.hf_assets_path"):
            return load_tokenizer(model.hf_assets_path, OPTION, additions)
    if model.hf_assets_path and model.hf_assets_path != type(model).model_fields["hf_assets_path"].default:
        there = _what_is_there(assets)
        raise UserError(f"model.hf_assets_path = {model.hf_assets_path!r} holds no tokenizer{there}: {_remedy(OPTION)}")
    if training.dataset == "demo" and not training.dataset_path and not config.data.sources:
        return ByteTokenizer(additions)
    if config.data.sources:
        raise UserError(f"data.sources needs a tokenizer: {_remedy(OPTION)}")
    key = "dataset_path" if training.dataset_path else "dataset"
    raise UserError(f"training.{key} = {getattr(training, key)!r} needs a tokenizer: {_remedy(OPTION)}")


def chat_template_of(folder: Path) -> str | None:
    """The chat template in the files of a tokenizer: chat_template.jinja, else tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
    found = given = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(given, list):  # several, by name
        rows = [row for row in given if isinstance(row, dict) and row.get("name") == "default"]
        found = rows[0].get("template") if rows else None
    if found is not None and not isinstance(found, str):
        file = folder / "tokenizer_config.json"
        raise UserError(f"{file}: chat_template: expected a text or a list of named ones, got {show(given)}")
    return found


def _remedy(option: str) -> str:
    return f"set {option}=FOLDER, a folder with tokenizer.json, or {option}=bytes"


def check_vocabulary(tokenizer: Tokenizer, arch: Any) -> None:
    """Refuse a model that has fewer rows than the tokenizer has ids."""
    if tokenizer.vocab_size > arch.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, but the model has {arch.vocab_size}"
            f" rows: set --model.overrides.vocab_size={tokenizer.vocab_size} (or more), or use another tokenizer"
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
        given = entries.get(f"{kind}_token")
        token = given.get("content") if isinstance(given, dict) else given
        if token is not None and not isinstance(token, str):
            raise UserError(f"{folder / name}: {kind}_token: expected a text, got {show(given)}")
        if token in vocabulary:
            return vocabulary[token]
        if kind == "bos" and f"{kind}_token" in entries and token is None:
            return None
    known = set(vocabulary.values())
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get(f"{kind}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        if not (first is None or value == [] or type(first) is int):
            raise UserError(f"{folder / name}: {kind}_token_id: expected a whole number, got {show(value)}")
        if isinstance(first, int) and first in known:
            return first
    return next((vocabulary[token] for token in usual if token in vocabulary), None)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = parse_json(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, got {show(value)}")
    return value
