"""A small parser over tables of options, and the help text made from them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.errors import UserError
from shardline.registry import nearest
from shardline.words import ShellCommand, TableRows, flowing, password_problem, table_lines, wrapped


@dataclass(frozen=True)
class Option:
    """`--name VALUE`, or a switch when `kind` is bool. Underscores in a given name count as dashes."""

    name: str
    help: str
    kind: type = str
    metavar: str = "VALUE"
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: Any = None
    low: int | None = None  # smallest number allowed
    count: int = 1  # values it takes

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


@dataclass
class Parsed:
    """The words of a command, sorted."""

    options: dict[str, Any]
    positionals: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)  # config flags, as given
    words: tuple[str, ...] = ()  # all of it, as given
    given: set[str] = field(default_factory=set)  # the options that stand on the command line

    @property
    def file(self) -> str | None:
        return self.positionals[0] if self.positionals else None

    def named(self, *names: str) -> dict[str, Any]:
        """These options, by default all that are not common to every command."""
        return {name: self.options[name] for name in names or self.options.keys() - {option.key for option in COMMON}}


@dataclass(frozen=True)
class Command:
    """A command: its words, positionals and options; `config_flags` lets `--section.key` flags through.

    `run` is a function of what was parsed, or `module:function`, called with the positionals and the options by name.
    """

    name: str
    summary: str
    positionals: tuple[str, ...]  # "[FILE]" is optional, "FILE..." takes several
    options: tuple[Option, ...]
    run: str | Callable[[Parsed], int]
    config_flags: bool = False
    details: str = ""
    examples: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # of its positional

    @property
    def takes_several(self) -> bool:
        return bool(self.positionals) and self.positionals[-1].endswith("...")

    def __call__(self, parsed: Parsed) -> int:
        if not isinstance(self.run, str):
            return self.run(parsed)
        module, _, function = self.run.partition(":")
        positionals = [parsed.positionals] if self.takes_several else parsed.positionals
        code: int = getattr(importlib.import_module(module), function)(*positionals, **parsed.named())
        return code


COMMON = (Option("debug", "Show the traceback of an error.", bool), Option("help", "Show this text.", bool))


def parse(command: Command, words: Sequence[str]) -> Parsed:
    """Sort words into options, positionals and config flags; a word that fits nowhere is a UserError."""
    for problem in filter(None, map(password_problem, words)):
        raise UserError(problem)
    options = (*command.options, *COMMON)
    known = {name: option for option in options for name in (option.name, *option.aliases)}
    defaults = {option.key: False if option.kind is bool else option.default for option in options}
    parsed, rest = Parsed(defaults, words=tuple(words)), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        option = known.get({"h": "help"}.get(name, name).replace("_", "-"))
        if not word.startswith("-") or word == "-":
            parsed.positionals.append(word)
        elif option is not None:
            parsed.given.add(option.key)
            parsed.options[option.key] = _value(option, text if equals else None, rest)
        elif command.config_flags and word.startswith("--") and ("." in name or name == "preset"):
            from shardline.config.flags import takes_value

            parsed.flags += [word, *([rest.pop(0)] if takes_value(word, rest) else [])]
        else:
            raise UserError(_unknown(command, name, known))
    if not parsed.options["help"]:
        _check_positionals(command, parsed.positionals)
    return parsed


def help_text(command: Command, width: int | None = None) -> str:
    """The help, in `width` columns if that is given."""
    usage = ["shardline", command.name, *command.positionals]
    usage += ["[--section.key=value ...]"] if command.config_flags else []
    lines = [f"usage: {' '.join([*usage, '[options]'])}", "", command.summary]
    if command.details:
        lines += ["", command.details if width is None else flowing(command.details)]
    lines = lines if width is None else [wrapped(line, width) for line in lines]
    lines += ["", "options:", *help_rows([_help_row(option) for option in (*command.options, *COMMON)], width)]
    examples = [("", ShellCommand(example)) for example in command.examples]
    lines += ["", "examples:", *_joined(examples, width)] if examples else []
    return "\n".join(lines)


def help_rows(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Indented lines of a name and its text."""
    return _joined([(f"  {left}", right) for left, right in rows], width)


def _joined(rows: TableRows, width: int | None) -> list[str]:
    return [left + right for left, right in table_lines(rows, width)]


def _help_row(option: Option) -> tuple[str, str]:
    left = f"--{option.name}" + ("" if option.kind is bool else f" {option.metavar}")
    default = "" if option.default in (None, "") else f" Default: {option.default}."
    names = f" Also: {', '.join('--' + name for name in option.aliases)}." if option.aliases else ""
    return left, option.help + default + names


def _value(option: Option, text: str | None, rest: list[str]) -> Any:
    """The option's value, from the text after `=` or from the next words, which it removes."""
    if option.kind is bool:
        if text not in (None, "true", "false"):
            raise UserError(f"--{option.name} is a switch and takes no value (got {text!r})")
        return text != "false"
    if option.count > 1:
        if text is not None or len(rest) < option.count:
            raise UserError(f"--{option.name} needs {option.count} values: {option.metavar}")
        return [rest.pop(0) for _ in range(option.count)]
    if text is None:
        if not rest or rest[0].startswith("--"):
            raise UserError(f"--{option.name} needs a value: --{option.name} {option.metavar}")
        text = rest.pop(0)
    return _typed(option, text)


def _typed(option: Option, text: str) -> Any:
    if option.choices and text not in option.choices:
        names = ", ".join(option.choices)
        raise UserError(f"--{option.name}: expected one of {names}, got {text!r}{nearest(text, option.choices)}")
    try:
        value = option.kind(text)
        fits = option.low is None or value >= option.low
    except ValueError:
        fits = False
    if not fits:
        kind = "a whole number" if option.kind is int else "a number"
        least = f", {option.low} or more" if option.low is not None else ""
        raise UserError(f"--{option.name}: expected {kind}{least}, got {text!r}")
    return value


def _unknown(command: Command, name: str, known: dict[str, Option]) -> str:
    close = nearest(name.replace("_", "-"), known)
    if not close and command.config_flags:
        from shardline.config.assemble import nearest_key

        close = nearest_key(name.replace("-", "_")[:100])
    hint = close.replace("mean '", "mean '--") or f" (shardline {command.name} --help)"
    return f"shardline {command.name}: there is no option --{name}{hint}"


def _check_positionals(command: Command, given: list[str]) -> None:
    required = [name for name in command.positionals if not name.startswith("[")]
    if len(given) < len(required):
        missing, usage = " ".join(required[len(given) :]), " ".join(("shardline", command.name, *command.positionals))
        raise UserError(f"shardline {command.name}: {missing} is missing: {usage}")
    for one in given if command.choices else ():
        if one not in command.choices:
            names = ", ".join(command.choices)
            raise UserError(
                f"shardline {command.name}: expected one of {names}, got {one!r}{nearest(one, command.choices)}"
            )
    if len(given) > len(command.positionals) and not command.takes_several:
        extra = given[len(command.positionals)]
        is_key = command.config_flags and re.match(r"[a-z_]+\.[\w.]+=", extra)
        hint = f", did you mean '--{extra}'?" if is_key else ""
        raise UserError(f"shardline {command.name}: unexpected argument {extra!r}{hint}")
