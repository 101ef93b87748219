"""Translates an Axolotl config, a YAML file with `base_model` at its top, into native keys.

Every key of the file is in one of three lists, which are printed: understood, accepted without effect (with the
reason), and unknown, which is an error with the nearest name. So is a key whose feature is not built.
"""

from __future__ import annotations

from typing import Any

from shardline.config.axolotl import adapter, datasets, saving, sizes, training, update
from shardline.config.axolotl.reader import Reader, Translation
from shardline.config.axolotl.table import (
    BY_RULE,
    DIRECT,
    PLUGINS,
    REFUSED,
    REFUSED_PLUGINS,
    WITHOUT_EFFECT,
    known_keys,
)
from shardline.config.files import ConfigFile
from shardline.config.types import show
from shardline.registry import nearest

MARK = "base_model"
OFF: tuple[Any, ...] = (None, False, 0, "", "false", "none")


def is_axolotl(file: ConfigFile) -> bool:
    return file.is_yaml and MARK in file.tables


def translate(file: ConfigFile) -> Translation:
    """The native keys that the file means, where each comes from, lines to print, and what is wrong."""
    reader = Reader(file)
    for name, value in file.tables.items():
        _sort(reader, str(name), value)
    for name, first in file.repeated.items():
        reader.note(name, f"given twice, first on line {first}: the last one counts")
    for name, to in DIRECT.items():
        value = reader.get(name, to.read, to.default)
        if value is not None:
            reader.set(to.native, value, name)
    if not reader.has(MARK):
        reader.problem(MARK, "is empty: set it to the folder of a model")
    if not reader.has("learning_rate"):
        reader.problem("learning_rate", "is missing")
    for part in (training, update, datasets, adapter, sizes, saving):
        for handler in part.HANDLERS:
            handler(reader)
    _plugins(reader)
    _lists(reader)
    return reader.out


def _sort(reader: Reader, name: str, value: Any) -> None:
    """Note a key without effect; an unknown key, or one that is refused and on, is a problem."""
    if name in DIRECT or name in BY_RULE or value is None:
        return  # an empty key means the default, whatever its name
    if name in WITHOUT_EFFECT:
        reader.idle(name, WITHOUT_EFFECT[name])
    elif name not in REFUSED:
        close = nearest(name, known_keys())
        reader.problem(name, f"Axolotl has no such key, and would drop it silently{close}")
    elif value not in OFF and value not in ([], {}):
        reader.problem(name, f"{show(value)} is refused: {REFUSED[name]}")


def _plugins(reader: Reader) -> None:
    for plugin in reader.get("plugins") or []:
        name = str(plugin).rpartition(".")[2]
        if name in REFUSED_PLUGINS:
            reader.problem("plugins", f"{name} is refused: {REFUSED_PLUGINS[name]}")
        elif name not in PLUGINS:
            known = (*PLUGINS, *REFUSED_PLUGINS)
            reader.problem("plugins", f"{plugin}: no such plugin is known{nearest(name, known)} ({', '.join(known)})")
        elif PLUGINS[name]:
            reader.idle(f"plugins.{name}", PLUGINS[name])


def _lists(reader: Reader) -> None:
    """Put the lines that say what became of the keys before the notes about single keys."""
    out, path = reader.out, reader.file.path
    known = [name for name in map(str, reader.file.tables) if name not in out.idle and name not in WITHOUT_EFFECT]
    given = [name for name in known if reader.has(name)]
    empty = [name for name in map(str, reader.file.tables) if not reader.has(name)]
    lines = [f"{path}: an Axolotl config; understood: {', '.join(given)}"]
    if empty:
        lines.append(f"{path}: empty, so the default: {', '.join(empty)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in out.idle.items():
        number = reader.file.lines.get(name)
        reasons.setdefault(reason, []).append(f"{name} (line {number})" if number else name)
    lines += [f"{path}: without effect: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    out.notes[:0] = lines
