"""The tables of `data.sources`: where records are, which format they have, and which of their tokens are trained.

Sub-keys have Axolotl's names. The config keeps the tables as they were given; `source_tables` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from shardline.config.types import Name, NonNegative, Positive, PositiveFloat, Section, Text, show, words
from shardline.registry import nearest

SOURCE_LISTS = ("data.sources", "data.validation_sources")
Eos = Literal["turn", "all", "last", "none"]


def _field(meaning: str) -> Any:
    return Field(default=None, description=meaning)


class PromptTable(Section):
    """`type` as a table: how a prompt is made of the fields of a record."""

    field_system: Name | None = _field("Field with the system prompt of a record.")
    field_instruction: Name | None = _field("Field with the instruction; unset: instruction.")
    field_input: Name | None = _field("Field with the input; unset: input.")
    field_output: Name | None = _field("Field with the answer; unset: output.")
    field_prompt: Name | None = _field("Pairs: field with the prompt; unset: prompt.")
    field_chosen: Name | None = _field("Pairs: field with the better answer; unset: chosen.")
    field_rejected: Name | None = _field("Pairs: field with the worse answer; unset: rejected.")
    system_prompt: Text | None = _field("System prompt of records that have none.")
    system_format: Text | None = _field("Text around the system prompt, with {system}.")
    format: Text | None = _field("The prompt, with {instruction} and {input}.")
    no_input_format: Text | None = _field("The prompt of a record without an input, with {instruction}.")
    prompt_format: Text | None = _field("Pairs: text around the prompt, with {prompt}.")
    chosen_format: Text | None = _field("Pairs: text around the better answer, with {chosen}.")
    rejected_format: Text | None = _field("Pairs: text around the worse answer, with {rejected}.")


class SourceTable(Section):
    """One table of `data.sources`."""

    path: Name = Field(description="File, folder or glob; on the Hub owner/name, or hf://datasets/owner/name/path.")
    type: Text | PromptTable | None = _field("Format of the records, such as chat_template or alpaca; unset: tokens.")
    split: Name | None = _field("Split, or a part of one such as train[:10%]; unset: train.")
    name: Name | None = _field("Configuration of a Hub dataset.")
    data_files: list[Name] | Name | None = _field("Files inside the path to read.")
    revision: Name | None = _field("Commit, tag or branch of a Hub dataset.")
    ds_type: Literal["json", "jsonl", "parquet", "text", "arrow"] | None = _field("File format; unset: by ending.")
    shards: Positive | None = _field("Cut the records into this many parts and read one of them.")
    shards_idx: NonNegative | None = _field("Which part, counted from 0.")
    weight: PositiveFloat | None = _field("Share in a mixture, relative to the other sources.")
    field: Name | None = _field("completion: field with the text; unset: text.")
    field_instruction: Name | None = _field("Instruction formats: field with the instruction.")
    field_input: Name | None = _field("Instruction formats: field with the input.")
    field_output: Name | None = _field("Instruction formats: field with the answer.")
    field_system: Name | None = _field("Instruction formats: field with the system prompt.")
    field_messages: Name | None = _field("chat_template: field with the list of messages; unset: messages.")
    field_tools: Name | None = _field("chat_template: field with the tools; unset: tools.")
    field_thinking: Name | None = _field("Field of a message with the reasoning; unset: reasoning_content.")
    split_thinking: bool | None = _field("Take reasoning in tags such as <think> out of an answer's content.")
    template_thinking_key: Name | None = _field("The template's name for the reasoning; unset: reasoning_content.")
    field_prompt: Name | None = _field("Pairs: field with the prompt; unset: prompt.")
    field_chosen: Name | None = _field("Pairs: field with the better answer; unset: chosen.")
    field_rejected: Name | None = _field("Pairs: field with the worse answer; unset: rejected.")
    message_field_role: Name | None = _field("Older form of message_property_mappings.role.")
    message_field_content: Name | None = _field("Older form of message_property_mappings.content.")
    message_property_mappings: dict[str, Name] | None = _field("Name in the template -> field of a message.")
    message_field_training: Name | None = _field("Field of a message: whether to train on it.")
    message_field_training_detail: Name | None = _field("Field of a message: which characters to train on.")
    roles: dict[str, list[Name]] | None = _field("Role of the template -> roles in the data that mean it.")
    roles_to_train: list[Name] | None = _field("Roles whose messages are trained; unset: assistant.")
    train_on_eos: Eos | None = _field("End tokens to train: of trained turns, of all, the last, none; unset: turn.")
    train_on_eot: Eos | None = _field("The same for data.eot_tokens; unset: as train_on_eos.")
    drop_system_message: bool | None = _field("Leave out system messages of the data.")
    chat_template: Name | None = _field("Template of this source; unset: data.chat_template.")
    chat_template_jinja: Text | None = _field("Its text or file; unset: data.chat_template_jinja.")


def source_tables(given: Sequence[Mapping[str, Any]]) -> list[SourceTable]:
    """The tables of a checked config."""
    return [SourceTable.model_validate(plain_table(table)) for table in given]


def plain_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without its empty keys, which YAML files have."""
    kept = {key: plain_table(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value is not None}


def source_problems(key: str, given: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with a list of sources: (key inside the config, message)."""
    if not isinstance(given, list):
        return  # the schema reports it
    for number, table in enumerate(given):
        place = f"{key}.{number}"
        if not isinstance(table, Mapping):
            yield place, f"expected a table with path and type, got {show(table)}"
            continue
        table = plain_table(table)
        unknown = dict(_unknown(table, SourceTable, place))
        yield from unknown.items()
        try:
            SourceTable.model_validate(table)
        except ValidationError as error:
            yield from dict(_problem(row, place, table) for row in error.errors() if _counts(row, table)).items()
        else:
            yield from _together(place, table)


def _unknown(table: Mapping[str, Any], model: type[Section], place: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if name not in model.model_fields:
            known = f"; keys: {', '.join(model.model_fields)}"
            yield f"{place}.{name}", f"there is no such key{nearest(str(name)[:100], model.model_fields) or known}"
        elif name == "type" and isinstance(value, Mapping):
            yield from _unknown(value, PromptTable, f"{place}.type")


def _counts(row: Any, table: Mapping[str, Any]) -> bool:
    """Whether to report this error: unknown names were reported already, and a table need not be a string."""
    if not row["loc"]:  # a name that is no text
        return False
    is_table = row["loc"][0] == "type" and isinstance(table["type"], Mapping)
    return row["type"] != "extra_forbidden" and not (is_table and row["loc"][1] != "PromptTable")


def _problem(row: Any, place: str, table: Mapping[str, Any]) -> tuple[str, str]:
    """The key and the message of one of pydantic's errors, whose location goes on into unions and lists."""
    name, value = str(row["loc"][0]), row["input"]
    model: type[Section] = SourceTable
    if row["type"] == "missing":
        return place, f"{name} is missing: set it to a file, a folder, a glob or a Hub name"
    if name == "type" and isinstance(table["type"], Mapping):
        place, name, model = f"{place}.type", str(row["loc"][-1]), PromptTable
    else:
        value = table[name]
    expected = words(model.model_fields[name].annotation).removesuffix(' (or "none")')
    return f"{place}.{name}", f"expected {expected}, got {show(value)}"


def _together(place: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Report keys that do not fit together."""
    if ("shards" in table) != ("shards_idx" in table):
        missing = "shards_idx" if "shards" in table else "shards"
        yield f"{place}.{missing}", "is missing: shards and shards_idx belong together"
    elif table.get("shards_idx", 0) >= table.get("shards", 1):
        yield f"{place}.shards_idx", f"expected a number below shards = {table['shards']}, got {table['shards_idx']}"
