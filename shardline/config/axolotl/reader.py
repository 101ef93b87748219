"""Reads the values of an Axolotl config, and collects what they become, with the place of each.

YAML gives numbers as text (`2e-5`), booleans for `no`, and nothing for an empty value, which means the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config.files import ConfigFile
from shardline.config.types import LARGEST, show

Read = Callable[[Any], Any]  # a value in the file -> what it stands for; raises ValueError with what was expected
DEFAULT = "default of"  # in the place of a key that the file does not give
_ORIGIN = re.compile(r"(?::(\d+))?: (default of )?([\w.\[\]]+)$")


def whole(value: Any) -> int:
    number = _number(value, "a whole number")
    if not -LARGEST <= number <= LARGEST or number != int(number):
        raise ValueError("a whole number")
    return int(number)


def or_if_zero(default: int) -> Read:
    """A whole number for which Axolotl puts a default in place of 0."""
    return lambda value: whole(value) or default


def number(value: Any) -> float:
    number = _number(value, "a number")
    if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
        raise ValueError("a number")
    return float(number)


def switch(value: Any) -> bool:
    names = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    found = value if isinstance(value, bool) else names.get(str(value).lower())
    if found is None:
        raise ValueError("true or false")
    return found


def text(value: Any) -> str:
    if isinstance(value, bool | list | dict):
        raise ValueError("a string")
    return str(value)


def texts(value: Any) -> list[str]:
    return [text(item) for item in value] if isinstance(value, list) else [text(value)]


def table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("a table of keys")
    return {str(name): inner for name, inner in value.items() if inner is not None}


def tables(value: Any) -> list[dict[str, Any]]:
    rows = [value] if isinstance(value, Mapping) else value
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("a list of tables")
    return [dict(row) for row in rows]


def choice(*names: Any) -> Read:
    """One of these values; a YAML `no` is false."""

    def read(value: Any) -> Any:
        if not any(value == name and type(value) is type(name) for name in names):
            raise ValueError("one of " + ", ".join(show(name) for name in names))
        return value

    return read


def _number(value: Any, expected: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return value if isinstance(value, int) else float(value)
    except ValueError:
        raise ValueError(expected) from None


@dataclass
class Translation:
    """Native keys with their values and places, lines to print, and what is wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # of native keys, and of keys inside lists of tables
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)  # key -> why it has no effect


class Reader:
    """The keys of one file, by name, and the translation that they are collected into."""

    def __init__(self, file: ConfigFile, prefix: str = "", inner: Mapping[str, Any] | None = None) -> None:
        self.file, self.prefix, self.out = file, prefix, Translation()
        given = file.tables if inner is None else inner
        self.values = {str(name): value for name, value in given.items() if value is not None}

    def below(self, name: str, inner: Mapping[str, Any]) -> Reader:
        """A reader of the table under a key, with the same translation."""
        reader = Reader(self.file, f"{self.prefix}{name}.", inner)
        reader.out = self.out
        return reader

    def has(self, name: str) -> bool:
        """Whether the file gives the key a value."""
        return name in self.values

    def get(self, name: str, read: Read = lambda value: value, default: Any = None) -> Any:
        """The value of a key, or the default where it is not given, empty or wrong, which is a problem."""
        if name not in self.values:
            return default
        try:
            return read(self.values[name])
        except ValueError as error:
            self.problem(name, f"expected {error}, got {show(self.values[name])}")
            return default

    def on(self, name: str) -> bool:
        return bool(self.get(name, switch, False))

    def set(self, native: str, value: Any, name: str) -> None:
        """Set a native key to a value that comes from the key `name`."""
        self.out.values[native] = value
        self.out.places[native] = self.place(name) if self.has(name) else f"{self.file.path}: {DEFAULT} {name}"

    def place(self, name: str) -> str:
        """`file:line: key`, as errors and comments name it."""
        full = self.prefix + name
        shown = re.sub(r"[.](\d+)(?=[.]|$)", r"[\1]", full)
        return f"{self.file.where(full)}: {shown}"

    def problem(self, name: str, message: str) -> None:
        self.out.problems.append(f"{self.place(name)}: {message}")

    def idle(self, name: str, reason: str) -> None:
        self.out.idle[self.prefix + name] = reason

    def note(self, name: str, message: str) -> None:
        self.out.notes.append(f"{self.place(name)}: {message}")

    def together(self, name: str, other: str) -> bool:
        """Whether two keys that exclude each other are both given, which is a problem."""
        if self.has(name) and self.has(other):
            self.problem(name, f"conflicts with {other}; set only one of them")
            return True
        return False


def source_of(origin: str) -> str:
    """The comment of a native key that was translated: `from micro_batch_size (line 12)`; else empty."""
    found = _ORIGIN.search(origin)
    if found is None:
        return ""
    number, is_default, name = found.groups()
    return f"Axolotl's default of {name}" if is_default else f"from {name}" + (f" (line {number})" if number else "")
