"""Config files: reads TOML or YAML into nested tables, with the line of every key."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.errors import ConfigError
from shardline.registry import nearest
from shardline.words import sized

PRESETS = Path(__file__).parent / "presets"
MOST_BYTES = 4 << 20
MOST_VALUES = 20_000  # of a YAML file; its reader takes a tenth of a millisecond for each
MOST_EXPANDED = 100_000  # counting what aliases stand for: each may stand for many others
# Brackets and line ends in TOML, and what may hide them: strings of four kinds, and comments
# Without possessive groups: Python 3.11.2 (Debian 12) matches `(?:a|b)*+` wrongly. The alternatives begin differently.
_TOML_TOKEN = re.compile(
    r"""(?s)\"{3}(?:[^"\\]++|\\.|"(?!""))*"{3,5}|'{3}.*?'{3,5}|"(?:[^"\\\n]++|\\.)*"|'[^'\n]*'|\#[^\n]*|[\[\]{}\n]"""
)
# A key of 64 parts, once strings are replaced by words: tomllib takes quadratic time for a key's parts
_TOML_DEEP_KEY = re.compile(r"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){63}")


@dataclass(frozen=True)
class ConfigFile:
    """A parsed file. `lines` maps dotted keys and table names to line numbers."""

    path: str
    tables: dict[str, Any]
    lines: dict[str, int]
    is_yaml: bool
    repeated: dict[str, int] = field(default_factory=dict)  # keys that YAML has twice -> the first line of each

    def where(self, key: str) -> str:
        number = self.lines.get(key)
        return f"{self.path}:{number}" if number else self.path


@functools.cache
def _presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted(PRESETS.iterdir()) if path.suffix in (".toml", ".yaml")}


def preset_names() -> list[str]:
    return list(_presets())


def is_preset(name: str) -> bool:
    """Whether a preset has this name; it may end as its file does."""
    return name in _presets() or any(name == path.name for path in _presets().values())


def preset_path(name: str) -> Path:
    """The packaged file of a preset."""
    if not is_preset(name):
        known = ", ".join(preset_names())
        raise ConfigError(f"there is no preset {name!r}{nearest(Path(name).stem, preset_names())}; presets: {known}")
    return _presets()[name] if name in _presets() else PRESETS / name


def preset_lines() -> Iterator[tuple[str, list[str]]]:
    """Each preset, and the comment at its beginning."""
    for name, path in _presets().items():
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        yield name, [line.lstrip("# ") for line in lines]


def read_chain(path: str | Path, above: tuple[Path, ...] = ()) -> list[ConfigFile]:
    """The file and everything it extends, lowest precedence first."""
    file = read_file(path)
    resolved = Path(path).resolve()
    chain: list[ConfigFile] = []
    for base in _bases(file):
        target = _find_base(base, file, resolved.parent)
        if target.resolve() in (*above, resolved):
            loop = " -> ".join(str(step) for step in (*above, resolved, target.resolve()))
            raise ConfigError(f"{file.where('extends')}: extends: files extend each other in a circle: {loop}")
        chain += read_chain(target, (*above, resolved))
    return [*chain, file]


def read_file(path: str | Path) -> ConfigFile:
    text = _read_text(str(path))
    is_yaml = str(path).lower().endswith((".yaml", ".yml"))
    repeated: dict[str, int] = {}
    try:
        tables, lines = _parse_yaml(str(path), text, repeated) if is_yaml else _parse_toml(str(path), text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    return ConfigFile(str(path), tables, lines, is_yaml, repeated)


def _read_text(path: str) -> str:
    try:
        if not path.startswith("/dev/") and stat.S_ISFIFO(os.stat(path).st_mode):  # `<(...)` of a shell is in /dev
            raise ConfigError(f"{path}: is a FIFO, expected a TOML or YAML file")
        content = Path(path).read_bytes()
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: has {sized(len(content))}; a config has at most {sized(MOST_BYTES)}")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file (byte {error.start})") from None
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a TOML or YAML file{_inside(path)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _missing(path: str) -> str:
    if is_preset(Path(path).name):
        return f"{path}: there is no such file; the preset of that name is --preset {preset_path(Path(path).name).stem}"
    if re.match(r"[a-z_]+\.[\w.]+=", path):
        return f"{path}: there is no such file; a key needs two dashes: --{path}"
    folder = Path(path).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return f"{path}: there is no such file{nearest(Path(path).name, names)}"


def _inside(path: str) -> str:
    if (Path(path) / "config.toml").is_file():
        return f", such as {Path(path) / 'config.toml'}"
    is_model = (Path(path) / "config.json").is_file()
    return f"; for a Hugging Face model: --preset finetune --model.hf_assets_path {path}" if is_model else ""


def _bases(file: ConfigFile) -> list[str]:
    given = file.tables.pop("extends", None)
    bases = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{file.where('extends')}: extends: expected a file or preset name, or a list of them")
    return bases


def _find_base(base: str, file: ConfigFile, folder: Path) -> Path:
    """The path of a base: a file beside the one that extends it, or a packaged preset."""
    try:
        if (folder / base).is_file():
            return folder / base
    except (OSError, ValueError):
        pass
    if is_preset(base):
        return preset_path(base)
    close = nearest(base, [*preset_names(), *(entry.name for entry in folder.iterdir())])
    raise ConfigError(
        f"{file.where('extends')}: extends: {base!r} is neither a file in {folder} nor a preset"
        f" ({', '.join(preset_names())}){close}"
    )


def _parse_toml(path: str, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    if _TOML_DEEP_KEY.search(_TOML_TOKEN.sub(lambda found: "s" if found[0][0] in "\"'" else found[0][:1], text)):
        raise ConfigError(f"{path}: nested too deeply")
    try:
        return tomllib.loads(text), toml_lines(text)
    except ValueError as error:  # TOMLDecodeError, and integers too long for Python to read
        message = str(error)
        place = re.search(r" \(at line (\d+), column \d+\)$", message)
        number = place.group(1) if place else text.count("\n") + 1
        message = message[: place.start()] if place else message.removesuffix(" (at end of document)")
        raise ConfigError(f"{path}:{number}: not valid TOML: {message}{_toml_hint(text, int(number))}") from None


def _toml_hint(text: str, number: int) -> str:
    lines = text.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    if re.search(r"=\s*(True|False|None)\b", line):
        return ' (TOML writes true, false and "none")'
    if re.match(r"[\w.-]+\s*:\s", line):
        return " (this looks like YAML: name the file .yaml)"
    return ""


def toml_lines(text: str) -> dict[str, int]:
    """The line of every table and key of a text that is valid."""
    lines: dict[str, int] = {}
    header = ""
    tables: dict[str, int] = {}  # name of a list of tables -> tables of it seen
    for number, statement in _statements(text.replace("\r\n", "\n")):
        is_header = statement.lstrip().startswith("[")
        prefix = "" if is_header else header
        for key in _dotted(tomllib.loads(statement), prefix):
            lines.setdefault(_numbered(key, tables), number)
            header = key if is_header else header
        if statement.lstrip().startswith("[["):
            tables[header] = tables.get(header, -1) + 1
            lines.setdefault(_numbered(header, tables), number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield headers and keys with their values, each with the number of its first line; all end at a line end."""
    start, number, depth = 0, 1, 0
    for found in _TOML_TOKEN.finditer(text + "\n"):
        token = found.group()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token, 0)
        if token == "\n" and not depth:
            statement = text[start : found.start()]
            if statement.strip():
                yield number, statement
            number += statement.count("\n") + 1
            start = found.end()


def _numbered(key: str, tables: dict[str, int]) -> str:
    """The key with the number of its table where it lies in a list of tables: `data.sources.0.path`."""
    names = key.split(".")
    for count in range(1, len(names) + 1):
        if (name := ".".join(names[:count])) in tables:
            return f"{name}.{tables[name]}{key.removeprefix(name)}"
    return key


def _dotted(value: Any, prefix: str) -> Iterator[str]:
    """Every dotted key in a nested table, outer ones first."""
    tables = value if isinstance(value, list) else [value]
    for table in tables:
        for name, inner in table.items() if isinstance(table, dict) else ():
            key = f"{prefix}.{name}" if prefix else str(name)
            yield key
            if isinstance(inner, dict) or (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
                yield from _dotted(inner, key)


def _parse_yaml(path: str, text: str, repeated: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """The tables and lines of a file; `repeated` gets the keys that it has twice."""
    import yaml

    class Bounded(yaml.SafeLoader):
        """A loader that stops at more values than any config has."""

        values = 0

        def compose_node(self, *place: Any) -> Any:
            self.values += 1
            if self.values > MOST_VALUES:
                raise ConfigError(f"{path}: has more than {MOST_VALUES:,} values, which no config needs")
            return super().compose_node(*place)

    try:
        loader = Bounded(text)
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not valid YAML: it holds control characters") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if (values := _expanded(node, {})) > MOST_EXPANDED:
            more = "a value that contains them" if values == math.inf else f"more than {MOST_EXPANDED:,} values"
            raise ConfigError(f"{path}: its aliases stand for {more}")
        lines: dict[str, int] = {}
        _yaml_lines(node, "", lines, repeated, depth=0)
        tables = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}" if mark else ""
        hint = " (YAML indents with spaces, not with tabs)" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {error.problem or error.context}{hint}") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: expected sections with keys, such as 'training:' over '  steps: 100'")
    return tables, lines


def _expanded(node: Any, known: dict[int, float]) -> float:
    """How many values a YAML node holds if each alias counts as what it stands for; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(node.value, list) else []
        nodes = [one for pair in inner for one in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_expanded(one, known) for one in nodes)
    return known[id(node)]


def _yaml_lines(node: Any, prefix: str, lines: dict[str, int], repeated: dict[str, int], depth: int) -> None:
    """Collect the line of every key, and the first line of keys that are given twice; YAML takes the last."""
    if depth > 8 or not isinstance(getattr(node, "value", None), list):
        return
    seen: set[str] = set()
    for place, pair in enumerate(node.value):
        if not isinstance(pair, tuple):
            lines.setdefault(f"{prefix}.{place}", pair.start_mark.line + 1)
            _yaml_lines(pair, f"{prefix}.{place}", lines, repeated, depth + 1)
            continue
        name, number = str(pair[0].value), pair[0].start_mark.line + 1
        key = f"{prefix}.{name}" if prefix else name
        if name in seen and name != "<<":
            repeated.setdefault(key, lines[key])
            lines[key] = number
        seen.add(name)
        lines.setdefault(key, number)
        _yaml_lines(pair[1], key, lines, repeated, depth + 1)
