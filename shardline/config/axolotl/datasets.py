"""Axolotl's keys of data: each dataset is a table of `data.sources`, which has Axolotl's own sub-keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardline.config.axolotl.reader import Reader, number, switch, table, tables, text, texts
from shardline.config.sources import SourceTable
from shardline.registry import nearest

FILE_FORMATS = ("json", "jsonl", "parquet", "text", "arrow", "csv")  # also names of readers: path: json
IDLE = {
    "trust_remote_code": "code in a dataset is never run",
    "preprocess_shards": "data is tokenized piece by piece",
    "input_format": "type names the format",
    "step_separator": "it belongs to process_reward_model",
    "max_completion_length": "it belongs to process_reward_model",
    "train_on_last_step_only": "it belongs to process_reward_model",
}
REFUSED = {
    "input_transform": "records are read as they are",
    "logprobs_field": "the loss is cross-entropy",
    "temperature": "the loss is cross-entropy",
    **dict.fromkeys(
        ("length", "sequence_length", "min_input_id", "max_input_id", "seed"), "rows are read from data, not made up"
    ),
}
_OWN_PROMPT = "its prompt is not built; a type that is a table describes one"
REFUSED_TYPES = {  # of Axolotl's: up to a dot or a colon, or whole
    **dict.fromkeys(("bradley_terry", "stepwise_supervised"), "rewards are not trained"),
    "_synthetic": "rows are read from data, not made up",
    **dict.fromkeys(("reflection", "explainchoice", "concisechoice", "pygmalion", "creative_acr"), _OWN_PROMPT),
    **dict.fromkeys(("llama2_chat", "alpaca_chat.load_concise"), _OWN_PROMPT),
    **dict.fromkeys(("context_qa.load_v2", "context_qa.load_404"), _OWN_PROMPT),
    **dict.fromkeys(("passthrough", "zephyr"), "pairs of this kind are not built; chat_template.default reads most"),
}
AS_OTHERS = ("train_on_split", "field_human", "field_model")  # older keys, which set others
IDLE_PROMPTS = {  # of a type that is a table
    "field": "a prompt names its fields one by one",
    "field_completion": "it belongs to rl: kto",
    "field_label": "it belongs to rl: kto",
    "completion_format": "it belongs to rl: kto",
}
# Loaders of ShareGPT's records -> where their messages are, and the fields of a message
SHAREGPT = {
    "load_role": ("conversations", "role", "value"),
    "load_ultrachat": ("messages", "role", "content"),
}
ROLES = {"user": ["human", "user"], "assistant": ["gpt", "assistant"], "system": ["system"], "tool": ["tool"]}
# FastChat's names of conversations, which `sharegpt` datasets have -> templates
CONVERSATIONS = {"chatml": "chatml", "llama-3": "llama3", "llama3": "llama3", "mistral": "mistral_v1", "gemma": "gemma"}

# Templates of model families that Axolotl has a copy of and this package has not: the tokenizer has the original.
OF_TOKENIZERS = (
    *("jamba", "qwen3_5", "deepseek_v2", "gemma4", "gemma4_unified", "exaone", "exaone4", "nemotron_h"),
    *("command_a_tool_use", "command_a_rag"),
)


def data(reader: Reader) -> None:
    """The sources, their packing, and what is held out of them."""
    pretraining = reader.has("pretraining_dataset")
    if not pretraining and not reader.has("datasets"):
        reader.problem("datasets", "is missing: set datasets or pretraining_dataset")
    if pretraining and reader.has("datasets"):
        reader.problem("pretraining_dataset", "conflicts with datasets; set only one of them")
    elif pretraining:
        _sources(reader, "pretraining_dataset", "data.sources")
    else:
        _sources(reader, "datasets", "data.sources")
    packs = reader.get("sample_packing", switch, pretraining)
    reader.set("data.packing", "first_fit" if packs else "none", "sample_packing")
    if reader.on("curriculum_sampling"):
        reader.set("data.shuffle", False, "curriculum_sampling")
    _tokens(reader)
    if (template := _template(reader)) is not None:
        reader.set("data.chat_template", template, "chat_template")
    held_out = reader.get("val_set_size", number, 0.0)
    if reader.has("test_datasets"):
        if held_out:
            reader.together("test_datasets", "val_set_size")
        _sources(reader, "test_datasets", "data.validation_sources")
    elif held_out:
        reader.set("data.held_out", held_out, "val_set_size")


def _template(reader: Reader) -> str | None:
    """The native name of a chat template."""
    name: str | None = reader.get("chat_template", text)
    if name not in OF_TOKENIZERS:
        return name
    reader.note("chat_template", f"{name} is not packaged: the tokenizer's own template is used")
    return "tokenizer_default"


def _tokens(reader: Reader) -> None:
    """Read special tokens, and plain ones to add; `tokens` as a table names special ones, as in older versions."""
    named: dict[str, Any] = {}
    for name in ("tokens", "special_tokens"):
        if name == "tokens" and not isinstance(reader.get(name), Mapping):
            if added := reader.get(name, texts, []):
                reader.set("data.added_tokens", added, name)
        elif found := reader.get(name, _special_tokens, {}):
            named |= found
            reader.set("data.special_tokens", named, name)


def _special_tokens(value: Any) -> dict[str, Any]:
    return {name: texts(one) if isinstance(one, list) else text(one) for name, one in table(value).items()}


def _sources(reader: Reader, name: str, native: str) -> None:
    given = reader.get(name)
    rows = [{"path": row} if isinstance(row, str) else row for row in (given if isinstance(given, list) else [given])]
    reader.values[name] = rows  # a single path or table is a list of one
    found: list[dict[str, Any]] = []
    for number_, row in enumerate(reader.get(name, tables, [])):
        entry = reader.below(f"{name}.{number_}", row)
        for source, names in _entry(entry, pretraining=name == "pretraining_dataset"):
            place = f"{native}.{len(found)}"
            reader.out.places[place] = reader.place(f"{name}.{number_}")
            for key in source:
                reader.out.places[f"{place}.{key}"] = entry.place(names.get(key, key))
            found.append(source)
    if found or not reader.out.problems:
        reader.set(native, found, name)


def _entry(entry: Reader, pretraining: bool) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The tables that one dataset becomes, each with the names under which its keys were given."""
    source, names = {}, {"field": "text_column"} if pretraining else {}
    aside = ("conversation", *(("text_column", "skip") if pretraining else AS_OTHERS))
    for name, value in entry.values.items():
        if name in IDLE:
            entry.idle(name, IDLE[name])
        elif name in REFUSED:
            if value not in (None, False, ""):
                entry.problem(name, f"{REFUSED[name]}; remove the key")
        elif name in SourceTable.model_fields:
            source[name] = value
        elif name not in aside:
            known = (*SourceTable.model_fields, *aside)
            entry.problem(name, f"there is no such key{nearest(name, known) or '; keys: ' + ', '.join(known)}")
    if pretraining:
        _pretraining(entry, source)
    if entry.has("train_on_split"):
        source["split"] = entry.get("train_on_split", text)
    if "shards" in source:
        source.setdefault("shards_idx", 0)  # Axolotl reads the first part
    if isinstance(source.get("type"), Mapping):
        prompt = entry.below("type", source["type"])
        for name in prompt.values.keys() & IDLE_PROMPTS:
            prompt.idle(name, IDLE_PROMPTS[name])
        source["type"] = {name: value for name, value in prompt.values.items() if name not in IDLE_PROMPTS}
    if "chat_template" in source:
        source["chat_template"] = _template(entry)
    _named_type(entry, source)
    return [(one, names) for one in _by_files(source)]


def _pretraining(entry: Reader, source: dict[str, Any]) -> None:
    """Read plain texts; `skip` becomes a split that begins later."""
    if source.get("type", "pretrain") == "pretrain":
        source["type"] = "completion"
    if entry.has("text_column"):
        source["field"] = entry.get("text_column", text)
    if skip := entry.get("skip"):
        source["split"] = f"{source.get('split', 'train')}[{skip}:]"


def _named_type(entry: Reader, source: dict[str, Any]) -> None:
    """ShareGPT's records are messages under other names; types with a loader after a dot are the format itself."""
    kind = source.get("type")
    if not str(kind).startswith("sharegpt"):
        for name in ("field_human", "field_model"):
            if entry.has(name):
                entry.idle(name, "type is not sharegpt")
    if not isinstance(kind, str):
        return
    if reason := REFUSED_TYPES.get(kind, REFUSED_TYPES.get(re.split("[.:]", kind)[0])):
        entry.problem("type", f"{kind!r} is refused: {reason}")
    if kind.startswith("sharegpt"):
        messages, role, content = SHAREGPT.get(kind.partition(".")[2], ("conversations", "from", "value"))
        entry.note("type", f"{kind} is chat_template, with the fields {messages}, {role} and {content}")
        source["type"] = "chat_template"
        source.setdefault("field_messages", source.pop("field", messages))
        source.setdefault("message_property_mappings", {"role": role, "content": content})
        _roles(entry, source)
    conversation = entry.get("conversation", text)
    if conversation is not None and source["type"] != "chat_template":
        entry.idle("conversation", f"type is {kind}")
    elif conversation is not None and "chat_template" not in source:
        if conversation not in CONVERSATIONS:
            entry.problem("conversation", f"{conversation!r}: set a chat_template ({', '.join(CONVERSATIONS)})")
        else:
            source["chat_template"] = CONVERSATIONS[conversation]


def _roles(entry: Reader, source: dict[str, Any]) -> None:
    """Roles under names of their own, beside the usual ones."""
    named = {"user": entry.get("field_human", text), "assistant": entry.get("field_model", text)}
    if any(named.values()):
        source["roles"] = {role: [*names, *filter(None, [named.get(role)])] for role, names in ROLES.items()}


def _by_files(source: dict[str, Any]) -> list[dict[str, Any]]:
    """`path: json` with data_files names a reader: the files are the sources."""
    files = source.get("data_files")
    if source.get("path") not in FILE_FORMATS or not files:
        return [source]
    kept = {name: value for name, value in source.items() if name != "data_files"}
    named = files if isinstance(files, list) else [files]
    return [{**kept, "path": file, "ds_type": source["path"]} for file in named]


HANDLERS = (data,)
