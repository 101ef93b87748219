"""The format of a source: its `type`, as the functions that read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardline.config.sources import PromptTable, SourceTable
from shardline.data.formats.base import Completion, Format, FormatOptions, Ready, Segments
from shardline.data.formats.chat import Chat
from shardline.data.formats.instruction import INSTRUCTIONS, STYLES, custom_instruction, named_instruction
from shardline.data.formats.pairs import TEMPLATES, ChatPairs, TextPairs, is_pairs, pair_types
from shardline.data.formats.template import choose_template
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError
from shardline.registry import nearest

# Keys of a source that every format reads, and those of each kind of format.
EVERYWHERE = frozenset(
    {"path", "type", "split", "name", "data_files", "revision", "ds_type", "shards", "shards_idx", "weight"}
)
_CHAT = frozenset(
    {
        *("field_messages", "field_tools", "field_thinking", "template_thinking_key", "field_system"),
        "split_thinking",
        *("message_field_role", "message_field_content", "message_property_mappings", "roles"),
        *("drop_system_message", "chat_template", "chat_template_jinja", "train_on_eos", "train_on_eot"),
    }
)
READ_BY = {
    "text": frozenset({"field"}),
    "instruction": frozenset({"field_instruction", "field_input", "field_output", "field_system"}),
    "chat": _CHAT | {"roles_to_train", "message_field_training", "message_field_training_detail"},
    "pairs": _CHAT | {"field_prompt", "field_chosen", "field_rejected"},
    "none": frozenset[str](),
}
TEXT_TYPES = ("completion", "pretrain", "text")


def format_types() -> list[str]:
    return [*TEXT_TYPES, "chat_template", "input_output", *INSTRUCTIONS, *pair_types()]


def kind_of(table: SourceTable) -> str:
    """The kind of format of a source: a key of READ_BY."""
    kind = table.type
    if kind is None or isinstance(kind, PromptTable):
        return "none"
    if kind in TEXT_TYPES or kind == "input_output":
        return "text"
    return "chat" if kind == "chat_template" else "pairs" if is_pairs(kind) else "instruction"


def idle_notes(name: str, tables: Sequence[SourceTable], section: Any) -> Iterator[str]:
    """Lines about keys of sources and of `[data]` that nothing reads."""
    for place, table in enumerate(tables):
        idle = table.model_fields_set - EVERYWHERE - READ_BY[kind_of(table)]
        idle |= {"weight"} & table.model_fields_set if section.mixture == "concatenate" else set()
        for key in sorted(idle):
            why = "data.mixture is 'concatenate'" if key == "weight" else f"type is {table.type!r}"
            yield f"{name}[{place}].{key} has no effect: {why}"
    kinds = {kind_of(table) for table in tables}
    for key in ("chat_template", "chat_template_jinja", "chat_template_kwargs", "default_system_message", "eot_tokens"):
        if getattr(section, key) not in (None, {}) and not kinds & {"chat", "pairs"}:
            yield f"data.{key} has no effect: no source has a chat template"


def choose_format(table: SourceTable, options: FormatOptions, tokenizer: Tokenizer) -> tuple[Format, str]:
    """The format of a source, and a fingerprint of all that decides what it makes of a record."""
    kind, template = table.type, None
    if isinstance(kind, str) and (kind == "chat_template" or is_pairs(kind)):
        family = TEMPLATES.get(kind.partition(".")[0])
        name, jinja = (table.chat_template, table.chat_template_jinja)
        if name is None and jinja is None:
            name, jinja = (family, None) if family else (options.chat_template, options.chat_template_jinja)
        template = choose_template(name, jinja, tokenizer, options.chat_template_kwargs)
    mark = options.fingerprint(table, "" if template is None else template.text)
    if kind is None:
        return Ready(tokenizer.vocab_size), mark
    if isinstance(kind, PromptTable):
        made: Format = (
            TextPairs(tokenizer, kind)
            if is_pairs(kind)
            else custom_instruction(kind, tokenizer, options.train_on_inputs)
        )
        return made, mark
    if kind in TEXT_TYPES:
        return Completion(tokenizer, table.field or "text"), mark
    if kind == "input_output":
        return Segments(tokenizer, table.field or "segments"), mark
    if template is not None:
        chat = Chat.of(table, options, tokenizer, template)
        shape = kind.partition(".")[2]
        return (ChatPairs(chat, table, shape) if shape else chat), mark
    found = named_instruction(kind, table, tokenizer, options.train_on_inputs)
    if found is None:
        raise UserError(_unknown(kind))
    return found, mark


def _unknown(kind: str) -> str:
    if kind.startswith("sharegpt"):
        return (
            f"type {kind!r}: set type = 'chat_template' with field_messages = 'conversations' and"
            " message_property_mappings = { role = 'from', content = 'value' }"
        )
    base, _, style = kind.partition(":")
    if base in INSTRUCTIONS and style:
        return f"type {kind!r}: there is no prompt style {style!r}{nearest(style, STYLES)}; styles: {', '.join(STYLES)}"
    return f"there is no type {kind!r}{nearest(kind, format_types())}; types: {', '.join(format_types())}"
