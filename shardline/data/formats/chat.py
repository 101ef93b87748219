"""`chat_template`: messages of a record, by the names that the template has for them, and which turns are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.config.sources import SourceTable
from shardline.data.formats.base import FormatOptions, Record, Tokens
from shardline.data.formats.template import ChatTemplate, Message
from shardline.data.formats.turns import EndTokens, Wanted, trained_tokens
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.registry import nearest

ROLES = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "model"),
    "system": ("system",),
    "tool": ("tool",),
}
KNOWN_ROLES = ("developer", "ipython", "function")  # some templates use these names unchanged
THINKING_TAGS = (  # around reasoning, as models write it into their answers
    ("<think>", "</think>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
SOLUTION_TAGS = ("<|begin_of_solution|>", "<|end_of_solution|>")  # around what follows the last of them


@dataclass(frozen=True)
class MessageFields:
    """How the messages of a record are read."""

    field: str
    properties: dict[str, str]  # name in the template -> field of a message
    roles: dict[str, str]  # role in the data -> role of the template
    system_field: str | None = None
    drop_system: bool = False
    default_system: str | None = None
    training: str | None = None
    detail: str | None = None
    split_thinking: str | None = None  # the template's name for reasoning, where it is taken out of the content

    @classmethod
    def of(cls, table: SourceTable, options: FormatOptions) -> MessageFields:
        mapping = table.message_property_mappings or {}
        names = {
            "role": mapping.get("role") or table.message_field_role or "role",
            "content": mapping.get("content") or table.message_field_content or "content",
            table.template_thinking_key or "reasoning_content": table.field_thinking or "reasoning_content",
        }
        given = table.roles or ROLES
        return cls(
            table.field_messages or "messages",
            names | mapping,
            {source: target for target, sources in given.items() for source in sources},
            table.field_system or "system",
            bool(table.drop_system_message),
            options.default_system_message,
            table.message_field_training,
            table.message_field_training_detail,
            (table.template_thinking_key or "reasoning_content") if table.split_thinking else None,
        )

    def read(self, record: Record) -> tuple[list[Message], list[Mapping[str, Any]]]:
        """The messages of a record, and the row of each; the row of a system message that was added is empty."""
        if self.field not in record:
            fields = ", ".join(sorted(map(str, record))) or "none"
            raise UserError(f"no field {self.field!r}; its fields: {fields} (set field_messages to use another)")
        rows = record[self.field]
        messages = self.messages(rows)
        if not messages:
            raise UserError(f"field {self.field!r} holds no message")
        kept = [row for row, made in zip(rows, messages, strict=True) if not self._dropped(made)]
        messages = self.with_system(messages, record)
        return messages, [{}] * (len(messages) - len(kept)) + kept

    def with_system(self, messages: list[Message], record: Record) -> list[Message]:
        """The messages with a system message in front where the record or `default_system_message` has one."""
        messages = [message for message in messages if not self._dropped(message)]
        system = None if self.drop_system else record.get(self.system_field or "") or self.default_system
        has_one = bool(messages) and messages[0]["role"] == "system"
        return [{"role": "system", "content": system}, *messages] if system and not has_one else messages

    def _dropped(self, message: Message) -> bool:
        return self.drop_system and message["role"] == "system"

    def messages(self, rows: Any, name: str | None = None) -> list[Message]:
        name = name or self.field
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise UserError(f"field {name!r} holds {type(rows).__name__}, expected a list of messages")
        return [self.message(row, f"{name}[{place}]") for place, row in enumerate(rows)]

    def message(self, row: Any, where: str) -> Message:
        """One message under the template's names; fields that are not mapped keep their own."""
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: expected a message with a role and content, got {type(row).__name__}")
        mapped = set(self.properties.values()) | set(filter(None, (self.training, self.detail)))
        message = {key: value for key, value in row.items() if key not in mapped and value is not None}
        message |= {key: row[source] for key, source in self.properties.items() if row.get(source) is not None}
        if "role" not in message:
            fields = ", ".join(map(str, row))
            raise UserError(
                f"{where}: no field {self.properties['role']!r} with the role; its fields: {fields}"
                " (set message_property_mappings to use others)"
            )
        message["role"] = self._role(str(message["role"]), where)
        if all(message.get(part) is None for part in ("content", "tool_calls", *self.properties.keys() - {"role"})):
            raise UserError(
                f"{where}: no field {self.properties['content']!r} with the content; its fields:"
                f" {', '.join(map(str, row))} (set message_property_mappings to use others)"
            )
        message.setdefault("content", "")
        if self.split_thinking is not None and message["role"] == "assistant":
            return _without_thinking(message, self.split_thinking)
        return message

    def _role(self, role: str, where: str) -> str:
        targets = {*self.roles.values(), *ROLES, *KNOWN_ROLES}
        if role not in self.roles and role not in targets:
            known = sorted({*self.roles, *targets})
            raise UserError(f"{where}: unknown role {role!r}{nearest(role, known)}; roles: {', '.join(known)}")
        return self.roles.get(role, role)


def _without_thinking(message: Message, name: str) -> Message:
    """An answer whose reasoning, in tags inside its content, is under a `name` of its own."""
    content = message["content"]
    for opening, closing in THINKING_TAGS if isinstance(content, str) else ():
        _, found, after = content.partition(opening)
        thinking, ended, rest = after.partition(closing)
        if found and ended:
            first, last = SOLUTION_TAGS
            solution, closed, _ = rest.partition(first)[2].partition(last)
            return message | {name: thinking.strip(), "content": solution.strip() if closed else rest.lstrip()}
    return message


@dataclass(frozen=True)
class Chat:
    """Conversations in a chat template; the turns of some roles are trained, or those that say so themselves."""

    tokenizer: Tokenizer
    template: ChatTemplate
    messages: MessageFields
    ends: EndTokens
    roles_to_train: frozenset[str]
    eos: str = "turn"
    eot: str = "turn"
    tools: str = "tools"
    train_on_inputs: bool = False
    pairs: bool = field(default=False, init=False)
    splits: bool = field(default=False, init=False)

    @classmethod
    def of(cls, table: SourceTable, options: FormatOptions, tokenizer: Tokenizer, template: ChatTemplate) -> Chat:
        messages = MessageFields.of(table, options)
        wanted = ["assistant"] if table.roles_to_train is None else table.roles_to_train
        return cls(
            tokenizer,
            template,
            messages,
            EndTokens.of(tokenizer, options.eot_tokens),
            frozenset(messages.roles.get(role, role) for role in wanted),
            table.train_on_eos or "turn",
            table.train_on_eot or table.train_on_eos or "turn",
            table.field_tools or "tools",
            options.train_on_inputs,
        )

    def rows(self, record: Record) -> list[Tokens]:
        messages, rows = self.messages.read(record)
        turns, details = set(), {}
        for number, (message, row) in enumerate(zip(messages, rows, strict=True)):
            detail = row.get(self.messages.detail) if self.messages.detail else None
            flag = row.get(self.messages.training) if self.messages.training else None
            if flag is None and detail is not None:
                flag = bool(detail)
            elif flag is None:
                flag = self.train_on_inputs or message["role"] in self.roles_to_train
            if not isinstance(flag, bool):
                raise UserError(f"{self.messages.training}: expected true or false, got {flag!r}")
            if flag:
                turns.add(number)
            if flag and detail:
                details[number] = [_detail(part) for part in detail if part.get("train", True)]
        return [self.tokens(messages, record.get(self.tools), turns, details)]

    def tokens(
        self,
        messages: list[Message],
        tools: Any,
        turns: set[int],
        details: dict[int, list[tuple[int, int]]] | None = None,
    ) -> Tokens:
        """The tokens of a conversation of which these turns are trained."""
        wanted = Wanted(frozenset(turns), details or {}, self.eos, self.eot)
        ids, trained = trained_tokens(self.template, messages, tools, wanted, self.tokenizer, self.ends)
        return Tokens(ids, trained)


def _detail(part: Any) -> tuple[int, int]:
    """A part of a content: characters from begin_offset to end_offset, both included."""
    try:
        return int(part["begin_offset"]), int(part["end_offset"]) + 1
    except (TypeError, KeyError, ValueError):
        raise UserError(f"expected begin_offset, end_offset and train in the training detail, got {part!r}") from None
