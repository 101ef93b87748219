"""Config files: reads TOML or YAML into nested tables, with the line of every key."""

from __future__ import annotations

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

PRESETS = Path(__file__).parent / "presets"


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


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_path(name: str) -> Path:
    """The packaged file of a preset."""
    stem = name.removesuffix(".toml")
    if stem not in preset_names():
        raise ConfigError(
            f"there is no preset {name!r}{nearest(stem, preset_names())}; presets: {', '.join(preset_names())}"
        )
    return PRESETS / f"{stem}.toml"


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
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file (byte {error.start})") from None
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a TOML or YAML file{_inside(path)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _missing(path: str) -> str:
    stem = Path(path).name.removesuffix(".toml")
    if stem in preset_names():
        return f"{path}: there is no such file; the preset of that name is --preset {stem}"
    folder = Path(path).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return f"{path}: there is no such file{nearest(Path(path).name, names)}"


def _inside(path: str) -> str:
    return f", such as {Path(path) / 'config.toml'}" if (Path(path) / "config.toml").is_file() else ""


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
    if base.removesuffix(".toml") in preset_names():
        return preset_path(base)
    close = nearest(base, [*preset_names(), *(entry.name for entry in folder.iterdir())])
    raise ConfigError(
        f"{file.where('extends')}: extends: {base!r} is neither a file in {folder} nor a preset"
        f" ({', '.join(preset_names())}){close}"
    )


def _parse_toml(path: str, text: str) -> tuple[dict[str, Any], dict[str, int]]:
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
    """The line of every table and key. Lines are joined until they parse as one statement."""
    lines: dict[str, int] = {}
    header, pending, start = "", "", 0
    tables: dict[str, int] = {}  # name of a list of tables -> tables of it seen
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        start = start if pending else number
        pending = f"{pending}\n{line}" if pending else line
        try:
            statement = tomllib.loads(pending)
        except ValueError:
            continue
        is_header = pending.lstrip().startswith("[")
        prefix = "" if is_header else header
        for key in _dotted(statement, prefix):
            lines.setdefault(_numbered(key, tables), start)
            header = key if is_header else header
        if pending.lstrip().startswith("[["):
            tables[header] = tables.get(header, -1) + 1
            lines.setdefault(_numbered(header, tables), start)
        pending = ""
    return lines


def _numbered(key: str, tables: dict[str, int]) -> str:
    """The key with the number of its table where it lies in a list of tables: `data.sources.0.path`."""
    for name, number in tables.items():
        if key == name or key.startswith(name + "."):
            return f"{name}.{number}{key.removeprefix(name)}"
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

    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not valid YAML: it holds control characters") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        lines: dict[str, int] = {}
        _yaml_lines(node, "", lines, repeated, depth=0)
        tables = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: expected sections with keys, such as 'training:' over '  steps: 100'")
    return tables, lines


def _yaml_lines(node: Any, prefix: str, lines: dict[str, int], repeated: dict[str, int], depth: int) -> None:
    """Collect the line of every key, and the first one of those that are given twice: YAML takes the last."""
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
