"""Formats of records: what `type` of a source means, and how a record becomes tokens of which some are trained.

completion, pretrain      a text, all of it trained
alpaca and its siblings   a prompt made of fields, and an answer, which is trained
input_output              segments of text, each trained or not
chat_template             messages (chat.py); chat_template.default and others: pairs of answers (pairs.py)
unset                     tokens that are already there: input_ids, and labels or attention_mask
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shardline.config.sources import SourceTable
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError

Record = Mapping[str, Any]
IGNORED = -100  # in the labels of records that are tokens already


@dataclass(frozen=True)
class Tokens:
    """One row of ids (T,) and whether each is trained (T,)."""

    ids: np.ndarray
    trained: np.ndarray


class Format(Protocol):
    """Turns a record into rows of tokens: one, or two where records are `pairs` of a better and a worse answer.

    `splits`: a record that is too long is cut into several, as plain text can be.
    """

    @property
    def pairs(self) -> bool: ...

    @property
    def splits(self) -> bool: ...

    def rows(self, record: Record) -> list[Tokens]: ...


@dataclass(frozen=True)
class FormatOptions:
    """Keys of `[data]` that apply to all sources."""

    train_on_inputs: bool = False
    chat_template: str | None = None
    chat_template_jinja: str | None = None
    default_system_message: str | None = None
    eot_tokens: tuple[str, ...] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Any) -> FormatOptions:
        """The options in a config's `[data]` section."""
        ends = None if section.eot_tokens is None else tuple(section.eot_tokens)
        return cls(
            section.train_on_inputs,
            section.chat_template,
            section.chat_template_jinja,
            section.default_system_message,
            ends,
            dict(section.chat_template_kwargs),
        )

    def fingerprint(self, table: SourceTable, template: str) -> str:
        """A fingerprint of everything but the tokenizer that decides which tokens a record becomes."""
        own, left_out = dict(vars(self)), {"weight"}
        if not self.chat_template_kwargs:  # without them, stores from before these keys stay valid
            del own["chat_template_kwargs"]
        if not table.split_thinking:
            left_out.add("split_thinking")
        values = [table.model_dump(exclude=left_out), own, template, 1]
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=list).encode()).hexdigest()[:32]


def text_of(record: Record, name: str, *, needed: bool = True) -> str:
    """The text in a field; an empty one where the field is absent and not needed."""
    value = record.get(name)
    if value is None:
        if needed and name not in record:
            raise UserError(f"no field {name!r}; its fields: {', '.join(sorted(map(str, record))) or 'none'}")
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"field {name!r} holds {type(value).__name__}, expected text")
    return str(value)


def join_segments(segments: Sequence[tuple[str, bool]], tokenizer: Tokenizer, *, ends: bool = True) -> Tokens:
    """Tokenize each text alone and join the results; `ends` adds the begin token and a trained end token."""
    arrays = tokenizer.encode_arrays([text for text, _ in segments])
    parts = [(array.astype(np.int64), trained) for array, (_, trained) in zip(arrays, segments, strict=True)]
    if ends and tokenizer.bos_id is not None:
        parts.insert(0, (np.array([tokenizer.bos_id], np.int64), False))
    if ends and tokenizer.eos_id is not None:
        parts.append((np.array([tokenizer.eos_id], np.int64), True))
    ids = np.concatenate([array for array, _ in parts]) if parts else np.empty(0, np.int64)
    trained = np.concatenate([np.full(len(array), flag) for array, flag in parts]) if parts else np.empty(0, bool)
    return Tokens(ids, trained)


@dataclass(frozen=True)
class Completion:
    """A text, trained as a whole."""

    tokenizer: Tokenizer
    field: str = "text"
    pairs: bool = False
    splits: bool = True

    def rows(self, record: Record) -> list[Tokens]:
        text = text_of(record, self.field)
        return [join_segments([(text, True)], self.tokenizer)] if text.strip() else []


@dataclass(frozen=True)
class Segments:
    """`input_output`: texts with a label that is true where they are trained; no token is added to them."""

    tokenizer: Tokenizer
    field: str = "segments"
    pairs: bool = False
    splits: bool = False

    def rows(self, record: Record) -> list[Tokens]:
        segments = record.get(self.field)
        if not isinstance(segments, Sequence) or isinstance(segments, str):
            raise UserError(f"field {self.field!r}: expected a list of segments with text and label")
        found = []
        for place, segment in enumerate(segments):
            label = segment.get("label") if isinstance(segment, Mapping) else None
            if not isinstance(label, bool) or not isinstance(segment.get("text"), str):
                raise UserError(
                    f"{self.field}[{place}]: expected text and a label that is true or false, got {segment!r}"
                )
            found.append((segment["text"], label))
        return [join_segments(found, self.tokenizer, ends=False)]


@dataclass(frozen=True)
class Ready:
    """Records that are tokens: `input_ids`; `labels` (-100: not) or `attention_mask` say which are trained."""

    vocab_size: int
    pairs: bool = False
    splits: bool = False

    def rows(self, record: Record) -> list[Tokens]:
        if "input_ids" not in record:
            fields = ", ".join(sorted(map(str, record)))
            raise UserError(f"no field 'input_ids', which a source without a type needs; its fields: {fields}")
        if record["input_ids"] is None:
            return []
        labels, mask = record.get("labels"), record.get("attention_mask")
        try:
            ids = np.array(record["input_ids"], dtype=np.int64).reshape(-1)
            trained = np.ones(len(ids), bool) if labels is None else np.array(labels, dtype=np.int64) != IGNORED
            real = np.ones(len(ids), bool) if mask is None else np.array(mask, dtype=np.int64) != 0
        except (TypeError, ValueError) as error:
            raise UserError(f"input_ids, labels and attention_mask must be lists of whole numbers ({error})") from error
        if len(trained) != len(ids) or len(real) != len(ids):
            raise UserError(f"{len(ids)} input_ids, but {len(trained)} labels and {len(real)} in attention_mask")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise UserError(f"input_ids up to {ids.max()}, but the tokenizer has {self.vocab_size} ids")
        return [Tokens(ids[real], trained[real])]
