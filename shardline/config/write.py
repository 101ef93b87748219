"""Writes configs: as TOML that loads back to the same config, as the difference of two, and as the reference page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardline.config.architecture import OVERRIDABLE, TABLES, Architecture
from shardline.config.assemble import OVERRIDES
from shardline.config.axolotl.reader import source_of
from shardline.config.check import pending
from shardline.config.names import ALTERNATIVES, is_demo
from shardline.config.rules.parallelism import LESS_LAYERS
from shardline.config.schema import Config, leaves, tables
from shardline.config.types import short_type, words


def to_toml(config: Config, comments: bool = False, sources: bool = False) -> str:
    """The config as TOML, with every key.

    `comments` adds type, default and meaning above each, `sources` the key of another trainer that it comes from.
    """
    marks = {key: f"  # {source}" for key in leaves() if sources and (source := source_of(config.origin(key)))}
    marks |= {key: f"  # not built yet: {feature}" for key, feature in pending(config).items()}
    blocks = []
    for table, keys in _keys_by_table():
        title = f"[{table}]" + (f"  # {_meaning(table)}" if comments and _meaning(table) else "")
        lines = [line for key in keys for line in _lines(config, key, marks.get(key, ""), comments)]
        blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks) + "\n"


def diff(a: Config, b: Config) -> str:
    """One line for each key that differs: `training.steps: 100 -> 200`."""
    before, after = dict(shown(a)), dict(shown(b))
    keys = dict.fromkeys([*before, *after])
    rows = [(key, before.get(key, "unset"), after.get(key, "unset")) for key in keys]
    return "".join(f"{key}: {old} -> {new}\n" for key, old, new in rows if old != new)


def markdown() -> str:
    """The reference page of all keys, `docs/config.md`."""
    parts = [_PAGE_HEAD]
    for table, keys in _keys_by_table():
        parts.append(f"## [{table}]\n" + (f"\n{_meaning(table)}\n" if _meaning(table) else ""))
        parts.append("| key | value | default | meaning |\n| --- | --- | --- | --- |")
        parts += [_row(key, leaves()[key]) for key in keys]
        parts.append("")
        if table == "model":
            parts += _fields("model.overrides", Architecture)
            for name, fields in TABLES.items():
                parts += _fields(f"model.overrides.{name}", fields)
    return "\n".join(parts)


def toml_value(value: Any) -> str:
    """A value as TOML writes it; None is the string "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def _toml_key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else toml_value(name)


def _keys_by_table() -> Iterator[tuple[str, list[str]]]:
    """Yield the tables that have keys of their own, with these keys."""
    for table in tables():
        if keys := [key for key in leaves() if key.rpartition(".")[0] == table]:
            yield table, keys


def _lines(config: Config, key: str, mark: str, comments: bool) -> Iterator[str]:
    name, field, why = key.rpartition(".")[2], leaves()[key], _why_unset(config, key)
    if comments:
        yield f"# {short_type(field.annotation)}, default {_default(field)}. {field.description}"
    yield f"# {name} is unset{why}" if why is not None else f"{name} = {toml_value(config.value(key))}{mark}"
    if comments:
        yield ""


def _why_unset(config: Config, key: str) -> str | None:
    """Why a key must stay out of the file; None for a key that is written."""
    if key == "job.config_file":
        return ": it is given on the command line only"
    if not config.is_set(key):
        if key == "training.mixed_precision_param":
            return ": bfloat16, or float32 on CPU"
        if key == "training.dataset" and is_demo(config.training):
            return ": generated text, for a model of up to 100M parameters"
        if key in LESS_LAYERS:
            return ": 1; if both ends of the pipeline have that, stages are split by weights"
        if key in ALTERNATIVES and config.value(ALTERNATIVES[key]) is not None:
            return f": {ALTERNATIVES[key]} is set"
    return "" if config.value(key) is None and leaves()[key].default is None else None


def shown(config: Config) -> Iterator[tuple[str, str]]:
    for key in leaves():
        if key == OVERRIDES:
            for name, value in config.model.overrides.items():
                yield f"{OVERRIDES}.{name}", toml_value(value)
        elif _why_unset(config, key) is None:
            yield key, toml_value(config.value(key))


def _default(field: FieldInfo) -> str:
    return "unset" if field.default is None else toml_value(field.default)


def _meaning(table: str) -> str:
    """The description of a section; none for a table inside one."""
    return (Config.model_fields[table].description or "") if table in Config.model_fields else ""


def _row(key: str, field: FieldInfo) -> str:
    short = short_type(field.annotation)
    kind = short if " | " in short else words(field.annotation, field.metadata)
    cells = [f"`{key}`", kind, f"`{_default(field)}`", field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _fields(table: str, model: type[BaseModel]) -> Iterator[str]:
    """Rows of architecture fields, whose defaults come from the flavor."""
    yield f"### {table}\n\n| key | value | meaning |\n| --- | --- | --- |"
    for name, field in model.model_fields.items():
        if model is Architecture and name not in OVERRIDABLE:
            continue
        kind = short_type(field.annotation).replace("|", "\\|")
        yield f"| `{table}.{name}` | {kind} | {field.description} |"
    yield ""


_PAGE_HEAD = """# Configuration

All sections and keys. This page is generated by `make docs`.

The names are those of TorchTitan 0.2.2's TOML files, so such a file runs unchanged. Keys of older versions are
translated, with a note. Precedence: command line, then file, then what it extends, then defaults.

- `--preset NAME` starts from a packaged file: `--preset text` for text of your own, `--preset finetune` for a Hugging
  Face model. `shardline config --presets` describes all of them.
- `shardline config FILE` prints the resolved config, `--comments` explains each key, `--diff A B` compares two.
- Flags: `--training.steps 100`, `--training.steps=100`, `--compile.enable`, `--compile.no_enable`, with dashes or
  underscores; lists are comma separated. `"none"` unsets a key that can be unset.
- `extends = "base.toml"` at the top of a file inherits from a file beside it or from a preset. A list inherits from
  several; later ones take precedence.
- `model.overrides` changes architecture fields of a flavor: `--model.overrides.n_layers=8`. A file or a flag that names
  another model drops those of the previous model, with a note.
- YAML files with the same sections and keys work too. An empty value (`steps:`, `steps: null`) unsets a key that can be
  unset. For any other key it means the default, and for an override the flavor's own value; a note reports it.
- `shardline config` marks a key whose feature is not built yet; `shardline train` refuses it and names it.
"""
