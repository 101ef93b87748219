"""Command-line words such as `--training.steps 5` into keys and values."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from shardline.config.assemble import annotation_of, line, show, unknown_key
from shardline.config.types import is_optional, kinds
from shardline.errors import ConfigError

WHERE = "command line"
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass
class Flags:
    """What the words gave: keys (older names included), the file and the preset they name."""

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
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        problem = _take(flags, key, text if equals else None, rest)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def _take(flags: Flags, key: str, text: str | None, rest: list[str]) -> str | None:
    """Store one flag; what is wrong with it, or None."""
    if key == "preset":
        flags.preset = text if text is not None else _next(rest)
        return None if flags.preset else line(WHERE, "--preset", "needs a name")
    annotation = annotation_of(key)
    if annotation is None and _negated(key):
        if text is not None:
            return line(WHERE, key, f"takes no value; write --{_negated(key)}=true or false")
        flags.values[_negated(key)] = False
        return None
    if annotation is None:
        if text is None:
            _next(rest)
        return unknown_key(WHERE, key)
    if bool in kinds(annotation) and text is None:
        flags.values[key] = BOOLEANS[rest.pop(0).lower()] if rest and rest[0].lower() in BOOLEANS else True
        return None
    text = text if text is not None else _next(rest)
    if text is None:
        return line(WHERE, key, f"needs a value: --{key}=VALUE")
    if key == "job.config_file":
        if flags.config_file not in (None, text):
            return line(WHERE, key, f"given twice: {show(flags.config_file)} and {show(text)}")
        flags.config_file = text
        return None
    flags.values[key] = from_text(text, annotation)
    return None


def span(words: Sequence[str]) -> int:
    """How many words the first flag takes: itself, or itself and its value."""
    name, equals, _ = words[0][2:].partition("=")
    if equals or len(words) == 1:
        return 1
    key = name.replace("-", "_")
    annotation = annotation_of(key)
    if annotation is None and _negated(key):
        return 1
    if annotation is not None and bool in kinds(annotation):
        return 2 if words[1].lower() in BOOLEANS else 1
    return 1 if words[1].startswith("--") else 2


def _next(rest: list[str]) -> str | None:
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _negated(key: str) -> str:
    """The boolean key that `--a.no_b` switches off, or nothing."""
    section, _, name = key.rpartition(".")
    positive = f"{section}.{name.removeprefix('no_')}"
    annotation = annotation_of(positive) if name.startswith("no_") else None
    return positive if annotation is not None and bool in kinds(annotation) else ""


def from_text(text: str, annotation: Any) -> Any:
    """The value a text stands for; the text itself when it does not fit (the schema then says what was expected)."""
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
    """What a list type holds."""
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
