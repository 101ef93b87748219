"""Reading the options of a command: a small parser over tables of options, and the help text made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.errors import UserError
from shardline.registry import nearest


@dataclass(frozen=True)
class Option:
    """`--name VALUE`, or a switch when `kind` is bool. Underscores in a given name count as dashes."""

    name: str
    help: str
    kind: type = str
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: Any = None
    low: int | None = None  # smallest number allowed
    count: int = 1  # values it takes


@dataclass(frozen=True)
class Command:
    """A subcommand: its words, positionals, options; `config_flags` lets `--section.key` flags through."""

    name: str
    summary: str
    positionals: tuple[str, ...] = ()  # "[FILE]" may be left out, "FILE..." be several
    options: tuple[Option, ...] = ()
    config_flags: bool = False
    details: str = ""
    examples: tuple[str, ...] = ()


@dataclass
class Parsed:
    options: dict[str, Any]
    positionals: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)  # config flags, as given
    words: tuple[str, ...] = ()  # all of it, as given


COMMON = (
    Option("debug", "Show the traceback of an error.", bool, default=False),
    Option("help", "Show this text.", bool, default=False),
)


def parse(command: Command, words: Sequence[str]) -> Parsed:
    """Split words into options, positionals and config flags; what does not fit is a UserError."""
    known = {name: option for option in (*command.options, *COMMON) for name in (option.name, *option.aliases)}
    parsed = Parsed({option.name.replace("-", "_"): option.default for option in known.values()}, words=tuple(words))
    rest = list(words)
    while rest:
        if not rest[0].startswith("-") or rest[0] == "-":
            parsed.positionals.append(rest.pop(0))
            continue
        name, equals, text = rest[0].lstrip("-").partition("=")
        option = known.get({"h": "help"}.get(name, name).replace("_", "-"))
        if option is not None:
            del rest[0]
            parsed.options[option.name.replace("-", "_")] = _value(option, text if equals else None, rest)
        elif command.config_flags and rest[0].startswith("--") and ("." in name or name == "preset"):
            from shardline.config.flags import span

            taken = span(rest)
            parsed.flags += rest[:taken]
            del rest[:taken]
        else:
            raise UserError(_unknown(command, name, known))
    if not parsed.options["help"]:
        _check_positionals(command, parsed.positionals)
    return parsed


def help_text(command: Command) -> str:
    usage = ["shardline", command.name, *command.positionals]
    usage += ["[--section.key=value ...]"] if command.config_flags else []
    lines = [f"usage: {' '.join([*usage, '[options]'])}", "", command.summary]
    lines += ["", command.details] if command.details else []
    rows = [(_left(option), option.help + _allowed(option)) for option in (*command.options, *COMMON)]
    width = max(len(left) for left, _ in rows)
    lines += ["", "options:", *(f"  {left:<{width}}  {right}" for left, right in rows)]
    lines += ["", "examples:", *(f"  {example}" for example in command.examples)] if command.examples else []
    return "\n".join(lines)


def _left(option: Option) -> str:
    return f"--{option.name}" + ("" if option.kind is bool else f" {option.metavar or 'VALUE'}")


def _allowed(option: Option) -> str:
    names = f" Also: {', '.join('--' + name for name in option.aliases)}." if option.aliases else ""
    shown = option.default is not None and option.kind is not bool and option.default != ""
    default = f" Default: {option.default}." if shown else ""
    return default + names


def _value(option: Option, text: str | None, rest: list[str]) -> Any:
    if option.kind is bool:
        if text not in (None, "true", "false"):
            raise UserError(f"--{option.name} is a switch, it takes no value (got {text!r})")
        return text != "false"
    if option.count > 1:
        if text is not None or len(rest) < option.count:
            raise UserError(f"--{option.name} needs {option.count} values: {option.metavar}")
        values = rest[: option.count]
        del rest[: option.count]
        return values
    if text is None:
        if not rest or rest[0].startswith("--"):
            raise UserError(f"--{option.name} needs a value: --{option.name} {option.metavar or 'VALUE'}")
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
        missing = " ".join(required[len(given) :])
        raise UserError(
            f"shardline {command.name}: {missing} is missing: shardline {command.name} {' '.join(command.positionals)}"
        )
    several = bool(command.positionals) and command.positionals[-1].endswith("...")
    if len(given) > len(command.positionals) and not several:
        extra = given[len(command.positionals)]
        raise UserError(f"shardline {command.name}: unexpected argument {extra!r}")
