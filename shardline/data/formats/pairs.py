"""Preference pairs: a prompt with a better and a worse answer, each a row of tokens of which the answer is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config.sources import PromptTable, SourceTable
from shardline.data.formats.base import Record, Tokens, join_segments, text_of
from shardline.data.formats.chat import Chat
from shardline.data.formats.template import Message
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError

PROMPTS = ("prompt", "input", "question", "instruction")
ANSWERS = {"chosen": ("chosen", "chosen_response"), "rejected": ("rejected", "rejected_response")}


def _first(record: Record, names: tuple[str, ...]) -> str:
    found = next((name for name in names if name in record), None)
    if found is None:
        raise UserError(f"no field {' or '.join(map(repr, names))}; its fields: {', '.join(sorted(map(str, record)))}")
    return found


def _asked(name: str) -> Callable[[Record], str]:
    return lambda record: text_of(record, name)


# Shapes of records with a plain prompt: name -> where the prompt is. Answers are texts, or the last of some messages.
SHAPES: dict[str, Callable[[Record], str]] = {
    "argilla": lambda record: text_of(record, _first(record, PROMPTS)),
    "icr": _asked("input"),
    "intel": _asked("question"),
    "prompt_pairs": _asked("prompt"),
    "ultra": _asked("prompt"),
}
CONVERSATIONS = ("argilla_chat", "argilla")  # chosen and rejected are whole conversations
TEMPLATES = {"chatml": "chatml", "llama3": "llama3"}


def pair_types() -> list[str]:
    shapes = [*SHAPES, "argilla_chat"]
    return ["chat_template.default", "chat_template.argilla_chat", *(f"{t}.{s}" for t in TEMPLATES for s in shapes)]


def is_pairs(kind: str | PromptTable | None) -> bool:
    if isinstance(kind, PromptTable):
        return any(getattr(kind, name) is not None for name in ("field_chosen", "field_rejected", "chosen_format"))
    if kind is None:
        return False
    return kind in pair_types() or kind in ("chat_template.argilla", "user_defined.default")


@dataclass(frozen=True)
class ChatPairs:
    """Two conversations that differ in their last turn, the only one that is trained."""

    chat: Chat
    table: SourceTable
    shape: str
    pairs: bool = field(default=True, init=False)
    splits: bool = field(default=False, init=False)

    def rows(self, record: Record) -> list[Tokens]:
        prompt = self._prompt(record)
        tools = record.get(self.chat.tools)
        both = (self._answer(record, "chosen"), self._answer(record, "rejected"))
        return [self.chat.tokens([*prompt, answer], tools, {len(prompt)}) for answer in both]

    def _prompt(self, record: Record) -> list[Message]:
        messages, name = self.chat.messages, self.table.field_messages or "messages"
        if self.shape in SHAPES and not (self.shape == "argilla" and self._are_messages(record)):
            prompt: list[Message] = [{"role": "user", "content": SHAPES[self.shape](record)}]
        elif self.shape in CONVERSATIONS:
            prompt = messages.messages(self._field(record, "chosen"), "chosen")[:-1]
        else:
            name = name if name in record else self.table.field_prompt or _first(record, (name, "prompt"))
            given = record.get(name)
            is_text = isinstance(given, str)
            prompt = [{"role": "user", "content": given}] if is_text else messages.messages(given, name)
        if not prompt:
            raise UserError("the conversation has no message before the answer")
        return messages.with_system(prompt, record)

    def _are_messages(self, record: Record) -> bool:
        return isinstance(self._field(record, "chosen"), list) and not any(name in record for name in PROMPTS)

    def _field(self, record: Record, which: str) -> Any:
        own = getattr(self.table, f"field_{which}")
        return record[_first(record, (own,) if own else ANSWERS[which])]

    def _answer(self, record: Record, which: str) -> Message:
        value = self._field(record, which)
        if isinstance(value, str):
            return {"role": "assistant", "content": value}
        rows = [value] if isinstance(value, Mapping) else value
        messages = self.chat.messages.messages(rows, which)
        if not messages:
            raise UserError(f"field {which!r} holds no message")
        return messages[-1]


@dataclass(frozen=True)
class TextPairs:
    """Pairs of plain texts, surrounded as a `type` table says."""

    tokenizer: Tokenizer
    prompt: PromptTable
    pairs: bool = field(default=True, init=False)
    splits: bool = field(default=False, init=False)

    def rows(self, record: Record) -> list[Tokens]:
        asked = self._text(record, "prompt")
        return [
            join_segments([(asked, False), (self._text(record, which), True)], self.tokenizer)
            for which in ("chosen", "rejected")
        ]

    def _text(self, record: Record, which: str) -> str:
        text = text_of(record, getattr(self.prompt, f"field_{which}") or which)
        form = getattr(self.prompt, f"{which}_format") or f"{{{which}}}"
        return str(form).replace(f"{{{which}}}", text)
