"""Builds a Config from flat `section.key -> value` pairs. Errors name key, place, what was expected and seen."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError

from shardline.config.aliases import ALIASES, NO_EFFECT
from shardline.config.architecture import OVERRIDABLE, TABLES, Architecture, field_problem, unknown_override
from shardline.config.schema import Config, leaves, tables
from shardline.config.sources import SOURCE_LISTS, plain_table, source_problems
from shardline.config.types import is_optional, show, words
from shardline.errors import ConfigError
from shardline.registry import nearest
from shardline.words import password_problem

OVERRIDES = "model.overrides"
OVERRIDE_TABLES = tuple(f"{OVERRIDES}.{name}" for name in TABLES)

# A valid decoder and valid tables, in which each override is checked by itself before the flavor is known.
_SAMPLE: dict[str, Any] = {
    "dim": 64,
    "n_layers": 1,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 64,
    "ffn_dim": 64,
    "vocab_size": 64,
}
_SAMPLE_TABLES: dict[str, dict[str, Any]] = {
    "rope_scaling": {"type": "linear", "factor": 1.0},
    "latent": {"kv_rank": 1, "nope_dim": 1, "rope_dim": 2, "v_dim": 1},
    "moe": {"n_experts": 1, "top_k": 1, "expert_dim": 1},
}


def build_config(values: Mapping[str, Any], origins: Mapping[str, str], alias_notes: Sequence[str] = ()) -> Config:
    """Check the values and build the Config; `origins` holds the place where each key was given."""
    found = ((key, password_problem(text)) for key, value in values.items() for text in _texts(value))
    passwords = [line(origins.get(key, ""), key, problem) for key, problem in found if problem]
    if passwords:
        raise ConfigError("\n".join(passwords))
    nested: dict[str, Any] = {}
    for name in tables():
        _put(nested, name, {})
    for key, value in values.items():
        _put(nested, key, _without_none(key, value))
    problems = _override_problems(nested["model"].get("overrides", {}), origins)
    problems += [
        line(origins.get(place) or origins.get(key, ""), shown_place(place), message)
        for key in SOURCE_LISTS
        for place, message in source_problems(key, values.get(key))
    ]
    config = None
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(row, origins) for row in error.errors())) + problems
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    config._origins = dict(origins)
    config._alias_notes = tuple(alias_notes)
    return config


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, and in the lists and tables in it."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def line(where: str, key: str, message: str) -> str:
    """One line of an error: `file:line: key: message`."""
    return f"{where}: {key}: {message}" if where else f"{key}: {message}"


def shown_place(key: str) -> str:
    """`data.sources.0.path` as users write it: `data.sources[0].path`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)


def annotation_of(key: str) -> Any:
    """The type of a key, an older key or an override field; None if there is no such key."""
    if key in leaves():
        return leaves()[key].annotation
    if key in ALIASES:
        alias = ALIASES[key]
        return bool if alias.values is not None else leaves()[alias.new].annotation
    if key in NO_EFFECT:
        return NO_EFFECT[key]
    if key.startswith(OVERRIDES + "."):
        name, _, inner = key.removeprefix(OVERRIDES + ".").partition(".")
        fields = TABLES[name].model_fields if name in TABLES and inner else Architecture.model_fields
        field = fields.get(inner or name)
        return field.annotation if field is not None else None
    return None


@cache
def nearest_key(key: str) -> str:
    """`, did you mean 'x'?` for a key close to a known one in any section."""
    section, _, name = key.rpartition(".")
    best, best_score = "", 0.0
    for known in leaves():
        known_section, _, known_name = known.rpartition(".")
        same = _alike(name, known_name)
        if same < 0.6:
            continue
        score = 0.75 * same + 0.25 * _alike(section, known_section)
        if score > best_score:
            best, best_score = known, score
    return f", did you mean {best!r}?" if best_score >= 0.6 else ""


def unknown_key(where: str, key: str) -> str:
    if key.startswith(OVERRIDES + "."):
        name, _, inner = key.removeprefix(OVERRIDES + ".").partition(".")
        if inner and name in TABLES:
            return line(where, shorten(key), "there is no such field" + nearest(inner[:100], TABLES[name].model_fields))
        message = unknown_override(shorten(f"{name}.{inner}" if inner else name))
        return f"{where}: {message}" if where else message
    return line(where, shorten(key), f"there is no such key{nearest_key(key[:100])}")


def unknown_table(where: str, name: str) -> str:
    sections = Config.model_fields
    close = difflib.get_close_matches(name[:100], sections, n=1)
    hint = f", did you mean [{close[0]}]?" if close else f"; sections: {', '.join(sections)}"
    return line(where, f"[{shorten(name)}]", f"there is no such section{hint}")


def shorten(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _alike(a: str, b: str) -> float:
    if a == b:
        return 1.0
    matcher = difflib.SequenceMatcher(None, a, b)
    return matcher.ratio() if matcher.real_quick_ratio() >= 0.3 else 0.0


def _put(nested: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        if nested.get(part) is None:
            nested[part] = {}
        elif not isinstance(nested[part], dict):
            return  # not a table: pydantic reports the error
        nested = nested[part]
    nested[name] = value


def _without_none(key: str, value: Any) -> Any:
    """The text "none" means unset for a key that can be unset, in override tables too."""
    if key in SOURCE_LISTS and isinstance(value, list):
        return [plain_table(table) if isinstance(table, Mapping) else table for table in value]
    if key in ("data.special_tokens", "data.chat_template_kwargs") and isinstance(value, Mapping):
        return plain_table(value)
    if isinstance(value, dict) and key in (OVERRIDES, *OVERRIDE_TABLES):
        return {name: _without_none(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, str) and value.lower() == "none" and is_optional(annotation_of(key)):
        return None
    return value


def _problem(row: Any, origins: Mapping[str, str]) -> str:
    key = _leaf_key(row["loc"])
    leaf = leaves().get(key)
    if leaf is None:
        return unknown_key(origins.get(key, ""), key)
    value = row["input"]
    return line(origins.get(key, ""), key, f"expected {words(leaf.annotation, leaf.metadata)}, got {show(value)}")


def _leaf_key(location: Sequence[Any]) -> str:
    """The config key in pydantic's location, which continues into list items and union members."""
    parts = [str(part) for part in location]
    for length in range(1, len(parts) + 1):
        if ".".join(parts[:length]) in leaves():
            return ".".join(parts[:length])
    return ".".join(parts)


def _override_problems(overrides: Any, origins: Mapping[str, str]) -> list[str]:
    """Unknown names, and values of the wrong type or range. Whether fields fit together is checked with the flavor."""
    if not isinstance(overrides, Mapping):
        return []
    problems = []
    for name, value in overrides.items():
        key = f"{OVERRIDES}.{name}"
        where = origins.get(key, "")
        if name not in OVERRIDABLE:
            problems.append(unknown_key(where, key))
            continue
        problems += [line(origins.get(at, where), at, message) for at, message in _field_problems(name, value)]
    return problems


def _field_problems(name: str, value: Any) -> list[tuple[str, str]]:
    table = _SAMPLE_TABLES[name] if name in TABLES and isinstance(value, Mapping) else {}
    try:
        Architecture.model_validate(_SAMPLE | {name: table | dict(value) if table else value})
    except ValidationError as error:
        rows = [row for row in error.errors() if row["loc"][:1] == (name,)]
        return [field_problem(row) for row in rows if name != "moe" or row["type"] != "value_error"]
    return []
