"""Loads a config. The command line overrides the file, the file what it extends, and that the defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.config.aliases import ALIASES, CONVERTER_NAMES, FLOAT8, NO_EFFECT, OLD_TABLES
from shardline.config.assemble import (
    OVERRIDE_TABLES,
    OVERRIDES,
    annotation_of,
    build_config,
    line,
    unknown_key,
    unknown_table,
)
from shardline.config.axolotl.translate import is_axolotl, translate
from shardline.config.experiments import translate_experiments
from shardline.config.files import ConfigFile, preset_path, read_chain
from shardline.config.flags import WHERE, from_text, parse_flags
from shardline.config.names import ALTERNATIVES, LAUNCHER_VARIABLE
from shardline.config.schema import Config, leaves, tables
from shardline.config.sources import SOURCE_LISTS
from shardline.config.types import is_optional, kinds, show
from shardline.errors import ConfigError
from shardline.words import listed

Where = Callable[[str], str]  # key -> where it was given

HANDED_OVER = "SHARDLINE_CONFIG"  # variable: the launcher's config as JSON
LONGEST_VARIABLE = 100_000  # Linux takes 128 KiB
MOST_PROBLEMS = 30  # to collect: each unknown name is compared with all known ones
RESET = object()  # an empty value in a file: the default is used
MODEL_NAMES = {"model.name", "model.flavor"}


@dataclass
class Given:
    """A key as it was given: its name there, the place and the value."""

    name: str
    where: str
    value: Any
    inside: dict[str, str] = field(default_factory=dict)  # where the keys of tables in a list are


@dataclass
class Layer:
    """Everything that one file or the command line gives, by the current name of each key."""

    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load_config(
    source: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    preset: str | None = None,
) -> Config:
    """Read a TOML or YAML file or a preset, and apply flags (`["--training.steps", "5"]`) or a mapping to it."""
    if isinstance(overrides, Mapping):
        top = _layer(dict(overrides), lambda key: "overrides")
        file: str | None = os.fspath(source) if source is not None else None
    else:
        flags = parse_flags(overrides)
        file = _one_file(source, flags.config_file)
        preset = flags.preset or preset
        top = _layer(flags.values, lambda key: WHERE)
    sources = read_chain(preset_path(preset)) if preset else []
    sources += read_chain(file) if file is not None else []
    layers = [*(_file_layer(one) for one in sources), top]
    problems = [problem for layer in layers for problem in layer.problems]
    try:
        config = _merge(layers, file if file is not None or preset is None else str(preset_path(preset)))
    except ConfigError as error:  # both kinds of problems are reported together
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def handed_over(config: Config) -> dict[str, str]:
    """The variable that hands the config to a launcher's ranks; none if it is too long: ranks then load it again."""
    values = {key: config.value(key) for key in leaves()}
    origins = {key: config.origin(key) for key in config.given()}
    text = json.dumps({"values": values, "origins": origins, "alias_notes": config.alias_notes})
    return {HANDED_OVER: text} if len(text) < LONGEST_VARIABLE else {}


def take_handed_over() -> Config | None:
    """The config of the launcher that started this process; None without one."""
    text = os.environ.pop(HANDED_OVER, None)  # not for processes that this one starts
    if text is None or LAUNCHER_VARIABLE not in os.environ:
        return None
    return build_config(**json.loads(text))


def _one_file(positional: str | os.PathLike[str] | None, flag: str | None) -> str | None:
    if positional is None:
        return flag
    name = os.fspath(positional)
    if flag is not None and os.path.abspath(flag) != os.path.abspath(name):
        raise ConfigError(f"{WHERE}: two config files: {name!r} and --job.config_file {flag!r}; pass only one")
    return name


def _merge(layers: Sequence[Layer], file: str | None) -> Config:
    merged: dict[str, Given] = {}
    emptied: dict[str, Given] = {}
    notes: list[str] = []
    for layer in layers:
        notes += [*layer.notes, *_replaced(merged, layer), *_left_with_its_model(merged, layer)]
        for key, given in layer.given.items():
            for covered in [old for old in merged if old.startswith(key + ".")]:
                del merged[covered]
            merged.pop(key, None)
            emptied.pop(key, None)
            (emptied if given.value is RESET else merged)[key] = given
    notes += [f"{given.where}: {given.name} is empty: the default is used" for given in emptied.values()]
    values = {key: given.value for key, given in merged.items()}
    if file is not None:
        values["job.config_file"] = str(file)
    origins = {key: given.where for key, given in merged.items()}
    origins |= {key: place for given in merged.values() for key, place in given.inside.items()}
    notes += translate_experiments(values, origins)
    return build_config(values, origins, notes)


def _replaced(merged: dict[str, Given], layer: Layer) -> Iterator[str]:
    """Let a key from a higher layer replace one from a lower layer that says the same thing in another way."""
    for key, other in (*ALTERNATIVES.items(), *((other, key) for key, other in ALTERNATIVES.items())):
        given = layer.given.get(key)
        if other in merged and other not in layer.given and given is not None and given.value not in (None, RESET):
            replaced = merged.pop(other)
            yield f"{given.where}: {key} replaces {other} = {show(replaced.value)} ({replaced.where})"


def _left_with_its_model(merged: dict[str, Given], layer: Layer) -> Iterator[str]:
    """Where a higher layer names another model, drop the overrides that lower layers have for theirs, and their
    tokenizer if the new model is a Hugging Face folder.
    """
    before, after = _model_of(merged), _model_of(merged | layer.given)
    if before == after or not MODEL_NAMES & merged.keys():  # overrides without a model hold for any model
        return
    own = [key for key in merged if key == OVERRIDES or key.startswith(f"{OVERRIDES}.")]
    if after == ("auto",) and "model.tokenizer_path" in merged:
        own.append("model.tokenizer_path")
    dropped = {key: merged.pop(key) for key in own}
    if dropped:
        given, first = next(layer.given[key] for key in layer.given if key in MODEL_NAMES), dropped[own[0]]
        said = f"{first.where} sets for {' '.join(map(str, before))}"
        yield f"{given.where}: {given.name} = {show(given.value)} drops what {said}: {listed(own, most=10)}"


def _model_of(given: Mapping[str, Given]) -> tuple[Any, ...]:
    """The name and the flavor of a model; a Hugging Face folder has no flavor."""
    known = {key: given[key].value for key in MODEL_NAMES if key in given and given[key].value is not RESET}
    name, flavor = (known.get(key, leaves()[key].default) for key in ("model.name", "model.flavor"))
    return ("auto",) if name == "auto" else (name, flavor)


def _file_layer(file: ConfigFile) -> Layer:
    """The keys of a file; those of an Axolotl config are translated."""
    if not is_axolotl(file):
        for key, first in file.repeated.items():
            raise ConfigError(f"{file.where(key)}: {key}: given twice, first on line {first}")
        return _layer(file.tables, file.where, file.is_yaml)
    found = translate(file)
    layer = Layer(notes=found.notes, problems=found.problems)
    for key, value in found.values.items():
        inside = {name: place for name, place in found.places.items() if name.startswith(f"{key}.")}
        layer.given[key] = Given(key, found.places[key], value, inside if key in SOURCE_LISTS else {})
    return layer


def _layer(tables: Mapping[Any, Any], where: Where, is_yaml: bool = False) -> Layer:
    """The keys in a file's tables or in flags, by their current names."""
    layer = Layer()
    for name, value in _flatten(tables, "", where, layer.problems):
        value = _coerce(name, value, is_yaml)
        if name == "job.config_file" and value is not None:
            layer.notes.append(f"{where(name)}: job.config_file has no effect here; pass it on the command line")
        elif name in NO_EFFECT:
            layer.notes.append(f"{where(name)}: {name} is a key of an older version and has no effect")
        elif name in ALIASES:
            _add_alias(layer, name, value, where(name))
        else:
            inside = _places(name, value, where) if name in SOURCE_LISTS else {}
            _add(layer, name, Given(name, where(name), _with_new_names(layer, name, value, where(name)), inside))
    if len(layer.problems) >= MOST_PROBLEMS:
        layer.problems.append("there may be more problems: only the first are listed")
    return layer


def _places(key: str, value: Any, where: Where) -> dict[str, str]:
    """Where each key inside a list of tables was given."""
    rows = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, str] = {}
    for name, inner in rows:
        found |= {f"{key}.{name}": where(f"{key}.{name}")} | _places(f"{key}.{name}", inner, where)
    return found


def _flatten(table: Mapping[Any, Any], prefix: str, where: Where, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The (dotted key, value) pairs of nested tables; unknown names become problems."""
    for name, value in table.items():
        if len(problems) >= MOST_PROBLEMS:
            return
        key = f"{prefix}{name}"
        is_table = key in tables() or key in OLD_TABLES or key in (OVERRIDES, *OVERRIDE_TABLES)
        if is_table and isinstance(value, Mapping):
            yield from _flatten(value, key + ".", where, problems)
        elif annotation_of(key) is not None:
            yield key, value
        elif is_table and value is None:
            continue  # an empty YAML section
        elif is_table:
            problems.append(line(where(key), key, f"expected a section with keys, got {show(value)}"))
        elif isinstance(value, Mapping) and not prefix and "." not in key:
            problems.append(unknown_table(where(key), key))
        else:
            problems.append(unknown_key(where(key), key))


def _coerce(key: str, value: Any, is_yaml: bool) -> Any:
    """The meaning of a value in a file: YAML keys may be empty, and YAML reads numbers such as 2e-5 as text."""
    annotation = annotation_of(key)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_yaml and value is None:
        can_be_unset = is_optional(annotation) and not key.startswith(OVERRIDES)  # a flavor's own value stays
        return None if can_be_unset else RESET
    if is_yaml and isinstance(value, str) and float in kinds(annotation):
        return from_text(value, annotation)
    return value


def _add_alias(layer: Layer, name: str, value: Any, where: str) -> None:
    alias = ALIASES[name]
    if alias.values is not None and value is not RESET:
        if not isinstance(value, bool):
            layer.problems.append(line(where, name, f"expected true or false, got {show(value)}"))
            return
        value = alias.values[value]
    layer.notes.append(f"{where}: {name} is an older name of {alias.new}")
    _add(layer, alias.new, Given(name, where, value))


def _add(layer: Layer, key: str, given: Given) -> None:
    other, value = layer.given.get(key), given.value
    if other is not None and other.name != given.name:
        contradicts = type(value) is not type(other.value) or value != other.value
        if key == "model.converters":
            given.value = _joined(other.value, value)
            contradicts = given.value is None
        if contradicts:
            seen = f"{show(value)} contradicts {other.name} = {show(other.value)} ({other.where})"
            layer.problems.append(line(given.where, given.name, f"{seen}; both are names of {key}"))
            return
    layer.given[key] = given


def _joined(a: Any, b: Any) -> list[Any] | None:
    """Join the list of converters and the older float8 switch: on adds it, off contradicts a list that has it."""
    are_lists = isinstance(a, list) and isinstance(b, list)
    if not are_lists or (a == [] and FLOAT8 in b) or (b == [] and FLOAT8 in a):
        return None
    return [*a, *(item for item in b if item not in a)]


def _with_new_names(layer: Layer, key: str, value: Any, where: str) -> Any:
    """Converters by their current names, each once."""
    if key != "model.converters" or not isinstance(value, list):
        return value
    renamed = [CONVERTER_NAMES.get(item, item) if isinstance(item, str) else item for item in value]
    for old, new in zip(value, renamed, strict=True):
        if old is not new:
            layer.notes.append(f"{where}: model.converters: {old!r} is an older name of {new!r}")
    return [item for place, item in enumerate(renamed) if item not in renamed[:place]]
