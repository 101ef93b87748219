"""A rule of the config, and the helpers that write rows of the table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardline.config.schema import Config, leaves
from shardline.config.types import show

Kind = Literal["refused", "pending", "missing", "idle", "note"]
Test = Callable[[Config], bool]
Words = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    """A row of the table: where the test holds, its keys are refused, not built yet, missing a package, without effect
    (idle), or worth a note.

    A key that ends in `.` stands for every key below it. `words` is the reason, or the feature that is missing.
    """

    kind: Kind
    keys: tuple[str, ...]
    when: Test
    words: Words
    remedy: str = ""

    def sentence(self, config: Config) -> str:
        words = self.words if isinstance(self.words, str) else self.words(config)
        return words + (f"; {self.remedy}" if self.remedy else "")


# ---- keys ------------------------------------------------------------------------------------------------------------


def differs(config: Config, key: str) -> bool:
    return bool(config.value(key) != leaves()[key].default)


def below(section: str, names: str) -> tuple[str, ...]:
    """The keys of a section with these names, separated by spaces."""
    return tuple(f"{section}.{name}" for name in names.split())


def starting(words: str) -> tuple[str, ...]:
    """The keys that start with these words."""
    return tuple(key for key in leaves() if key.startswith(words))


# ---- kinds of rows ---------------------------------------------------------------------------------------------------


def refuse(key: str, when: Test, words: Words, remedy: str = "") -> Rule:
    return Rule("refused", (key,), when, words, remedy)


def note(key: str, when: Test, words: Words) -> Rule:
    return Rule("note", (key,), when, words)


def not_built(feature: Words, *keys: str, when: Test = lambda config: True) -> Rule:
    return Rule("pending", keys, when, feature)


def missing(package: str, key: str, when: Test, instead: str, of: Callable[[Config], Any] | None = None) -> Rule:
    """A key that needs a package where the test holds: `train` refuses it if the package is not installed.

    `of` returns what needs the package, where that is not the key's value.
    """

    def is_missing(config: Config) -> bool:
        return importlib.util.find_spec(package) is None and when(config)

    def words(config: Config) -> str:
        return f"{show(of(config) if of else config.value(key))} needs the package {package}, which is not installed"

    return Rule("missing", (key,), is_missing, words, instead)


def idle(reason: str, when: Test, *keys: str) -> Rule:
    """Keys that have no effect where the test holds."""
    return Rule("idle", keys, when, f"has no effect: {reason}")


def idle_if(key: str, values: Sequence[Any], *keys: str) -> Rule:
    """Keys that have no effect while another key has one of these values."""
    reason = f"{key} is {' or '.join(map(show, values))}"
    return idle(reason, lambda config: config.value(key) in values, *keys)


def idle_unless(key: str, values: Sequence[Any], *keys: str) -> Rule:
    """Keys that have an effect only while another key has one of these values."""
    names = " nor ".join(map(show, values))
    reason = f"{key} is {f'not {names}' if len(values) == 1 else f'neither {names}'}"
    return idle(reason, lambda config: config.value(key) not in values, *keys)


def idle_without(switch: str, *keys: str) -> Rule:
    """Keys that have no effect while a switch has its default: off, a degree of 1, no workers."""
    return idle_if(switch, [leaves()[switch].default], *keys)


def instead(key: str, other: str) -> Rule:
    """Two keys that say the same thing in different ways: only one may be given."""
    return refuse(
        key,
        lambda config: config.value(key) is not None and config.is_set(other),
        lambda config: f"conflicts with {other} = {config.value(other)}",
        remedy="set only one of them",
    )
