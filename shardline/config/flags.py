"""Reads keys and values from command-line words such as `--training.steps 5`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from shardline.config.assemble import annotation_of, line, unknown_key
from shardline.config.types import is_optional, kinds, show
from shardline.errors import ConfigError

WHERE = "command line"
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass
class Flags:
    """The keys (older names included), the file and the preset that the words give."""

    values: dict[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    preset: str | None = None


def parse_flags(words: Sequence[str]) -> Flags:
    """Read `--a.b value`, `--a.b=value`, `--a.b`, `--a.no_b`, `--preset NAME` and `--job.config_file FILE`."""
    flags, problems, rest = Flags(), [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(f"{WHERE}: {show(word)}: expected a flag such as --training.steps=100")
        elif problem := _take(flags, word, rest):
            problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def _take(flags: Flags, word: str, rest: list[str]) -> str | None:
    """Store one flag, with its value from the rest; return what is wrong with it, or None."""
    name, equals, text = word[2:].partition("=")
    key = name.replace("-", "_")
    value = text if equals else rest.pop(0) if takes_value(word, rest) else None
    annotation = annotation_of(key)
    if key == "preset":
        flags.preset = value
        return None if value else line(WHERE, "--preset", "needs a name")
    if annotation is None and _negated(key):
        flags.values[_negated(key)] = False
        return None if value is None else line(WHERE, key, f"takes no value; write --{_negated(key)}=true or false")
    if annotation is None:
        return unknown_key(WHERE, key)
    if bool in kinds(annotation) and value is None:
        flags.values[key] = True
    elif value is None:
        return line(WHERE, key, f"needs a value: --{key}=VALUE")
    elif key != "job.config_file":
        flags.values[key] = from_text(value, annotation)
    elif flags.config_file not in (None, value):
        return line(WHERE, key, f"given twice: {show(flags.config_file)} and {show(value)}")
    else:
        flags.config_file = value
    return None


def takes_value(word: str, rest: Sequence[str]) -> bool:
    """Whether the word after a flag is its value: not after `=` or `--a.no_b`; after a boolean, only true or false."""
    name, equals, _ = word[2:].partition("=")
    if equals or not rest:
        return False
    key = name.replace("-", "_")
    annotation = annotation_of(key)
    if annotation is None and _negated(key):
        return False
    if annotation is not None and bool in kinds(annotation):
        return rest[0].lower() in BOOLEANS
    return not rest[0].startswith("--")


def _negated(key: str) -> str:
    """The boolean key that `--a.no_b` turns off; empty for any other key."""
    section, _, name = key.rpartition(".")
    positive = f"{section}.{name.removeprefix('no_')}"
    annotation = annotation_of(positive) if name.startswith("no_") else None
    return positive if annotation is not None and bool in kinds(annotation) else ""


def from_text(text: str, annotation: Any) -> Any:
    """The value that a text stands for, or the text itself, which the schema then refuses."""
    accepted = kinds(annotation)
    lowered = text.strip().lower()
    if lowered == "none" and is_optional(annotation):
        return None
    if bool in accepted and lowered in BOOLEANS:
        return BOOLEANS[lowered]
    if accepted & {list, dict} and lowered[:1] in ("[", "{"):
        return _toml_value(text)
    if list in accepted:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [_number(part, int) for part in parts] if int in _items(annotation) else parts
    if accepted & {int, float}:
        return _number(text, int if int in accepted else float)
    return text


def _number(text: str, kind: type[int] | type[float]) -> int | float | str:
    try:
        return kind(text)
    except ValueError:
        return text


def _items(annotation: Any) -> set[type]:
    """The item types of a list type."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) in (list, tuple):
            return kinds(get_args(candidate)[0])
    return set()


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
