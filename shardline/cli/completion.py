"""`shardline completion`: scripts that complete commands, options, config keys and their values in a shell.

A script is static: it holds all names, so that the Tab key starts no Python. It is made from the tables of the parser
and from the schema of the config.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from shardline.cli.parser import COMMON, Command, Option
from shardline.config.files import preset_names
from shardline.config.names import SCHEDULES
from shardline.config.schema import leaves
from shardline.config.types import kinds

FILES = "FILES"  # in the place of values: names of files
NAMED = {"parallelism.pipeline_parallel_schedule": SCHEDULES}  # choices that are no Literal of the schema


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """The script of a shell; `eval` or `source` reads it."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _key_values() -> dict[str, tuple[str, ...]]:
    """Config key -> the values it may have, none where that is not a choice."""
    return {key: NAMED.get(key) or tuple(_choices(field.annotation)) for key, field in leaves().items()}


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif bool in kinds(annotation) or get_origin(annotation) is not None:
        for part in get_args(annotation):
            yield from _choices(part)


def _values(option: Option) -> str:
    """What follows an option: choices, files, or nothing that is known."""
    if option.choices:
        return " ".join(option.choices)
    return FILES if option.kind is str else ""


def _options(command: Command) -> list[Option]:
    return [*command.options, *COMMON]


def _seconds(commands: Mapping[str, Command]) -> dict[str, list[str]]:
    """First word -> the second words of two-word commands."""
    found: dict[str, list[str]] = {}
    for name in commands:
        first, _, second = name.partition(" ")
        if second:
            found.setdefault(first, []).append(second)
    return found


def _positional(command: Command) -> str:
    """What comes where no option stands."""
    return " ".join(command.choices) if command.choices else FILES


# ---- bash and zsh: the same tables, as cases that set variables ------------------------------------------------------


def _tables(commands: Mapping[str, Command]) -> str:
    lines = ["  case $command in"]
    for name, command in commands.items():
        flags = " ".join(f"--{option.name}" for option in _options(command))
        rest = _positional(command)
        lines.append(f'    "{name}") options="{flags}"; config={int(command.config_flags)}; others="{rest}";;')
    lines += ["  esac", '  case "$command $flag" in']
    for name, command in commands.items():
        for option in _options(command):
            kind = "switch" if option.kind is bool else _values(option) or "none"
            names = "|".join(f'"{name} --{one}"' for one in (option.name, *option.aliases))
            lines.append(f'    {names}) values="{kind}";;')
    lines += ["  esac", "  if [[ $config == 1 ]]; then", f'    keys="--preset {_all_keys()}"', "    case $flag in"]
    lines.append(f'      --preset) values="{" ".join(preset_names())}";;')
    lines += [f'      --{key}) values="{" ".join(values)}";;' for key, values in _key_values().items() if values]
    lines += [f'      --*.*) values="${{values:-{FILES}}}";;', "    esac", "  fi"]
    return "\n".join(lines)


def _all_keys() -> str:
    return " ".join(f"--{key}" for key in leaves())


def _first_words(commands: Mapping[str, Command]) -> str:
    return " ".join(dict.fromkeys(name.partition(" ")[0] for name in commands))


def _second_words(commands: Mapping[str, Command]) -> str:
    rows = [f'    {first}) seconds="{" ".join(words)}";;' for first, words in _seconds(commands).items()]
    return "\n".join(["  case $command in", *rows, "  esac"])


_BASH = """\
# Completion of shardline for bash: eval "$(shardline completion bash)", or put this file where bash-completion looks.
_shardline() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" before=""
  local flag="" options="" config=0 others="" values="" keys="" seconds=""
  COMPREPLY=()
  if [[ $cur == "=" ]]; then flag=$prev; cur=""
  elif [[ $prev == "=" ]]; then flag="${COMP_WORDS[COMP_CWORD-2]}"
  elif [[ $cur == --*=* ]]; then flag="${cur%%=*}"; before="$flag="; cur="${cur#*=}"
  elif [[ $prev == --* && $cur != -* ]]; then flag=$prev
  fi
@SECONDS@
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "@FIRST@" -- "$cur")); return
  fi
  if [[ -n $seconds ]]; then
    if (( COMP_CWORD == 2 )); then COMPREPLY=($(compgen -W "$seconds" -- "$cur")); return; fi
    command="$command ${COMP_WORDS[2]}"
  fi
@TABLES@
  if [[ $values == switch ]]; then flag=""; values=""; fi
  if [[ -z $flag && $cur == -* ]]; then values="$options $keys"
  elif [[ -z $flag ]]; then values=$others
  fi
  case $values in
    FILES) compopt -o filenames 2>/dev/null; local IFS=$'\\n'; COMPREPLY=($(compgen -P "$before" -f -- "$cur"));;
    none) ;;
    *) COMPREPLY=($(compgen -P "$before" -W "$values" -- "$cur"));;
  esac
}
complete -F _shardline shardline
"""

_ZSH = """\
#compdef shardline
# Completion of shardline for zsh: eval "$(shardline completion zsh)" after compinit, or a file _shardline in $fpath.
_shardline() {
  local cur="${words[CURRENT]}" prev="${words[CURRENT-1]}" command="${words[2]}"
  local flag="" options="" config=0 others="" values="" keys="" seconds=""
  if [[ $cur == --*=* ]]; then flag="${cur%%=*}"; compset -P '*='
  elif [[ $prev == --* && $cur != -* ]]; then flag=$prev
  fi
  if (( CURRENT == 2 )); then compadd -- @FIRST@; return; fi
@SECONDS@
  if [[ -n $seconds ]]; then
    if (( CURRENT == 3 )); then compadd -- ${=seconds}; return; fi
    command="$command ${words[3]}"
  fi
@TABLES@
  if [[ $values == switch ]]; then flag=""; values=""; fi
  if [[ -z $flag && $cur == -* ]]; then values="$options $keys"
  elif [[ -z $flag ]]; then values=$others
  fi
  case $values in
    FILES) _files;;
    none) ;;
    *) compadd -- ${=values};;
  esac
}
if [[ "${funcstack[1]}" == _shardline ]]; then _shardline "$@"; else compdef _shardline shardline; fi
"""


def _filled(text: str, commands: Mapping[str, Command]) -> str:
    text = text.replace("@FIRST@", _first_words(commands)).replace("@SECONDS@", _second_words(commands))
    return text.replace("@TABLES@", _tables(commands))


def _bash(commands: Mapping[str, Command]) -> str:
    return _filled(_BASH, commands)


def _zsh(commands: Mapping[str, Command]) -> str:
    return _filled(_ZSH, commands)


# ---- fish: a line for each option ------------------------------------------------------------------------------------

_FISH = """\
# Completion of shardline for fish: shardline completion fish > ~/.config/fish/completions/shardline.fish
function __shardline_in
    set -l given (commandline -opc)
    set -e given[1]
    string match -q -- "$argv *" "$given "
end
"""


def _fish(commands: Mapping[str, Command]) -> str:
    lines = [
        _FISH,
        f"complete -c shardline -n 'test (count (commandline -opc)) -eq 1' -f -a '{_first_words(commands)}'",
    ]
    for first, seconds in _seconds(commands).items():
        condition = f"__shardline_in {first}; and test (count (commandline -opc)) -eq 2"
        lines.append(f"complete -c shardline -n '{condition}' -f -a '{' '.join(seconds)}'")
    for name, command in commands.items():
        if command.choices:
            lines.append(f"complete -c shardline -n '__shardline_in {name}' -f -a '{_positional(command)}'")
        for option in _options(command):
            given = "" if option.kind is bool else _fish_values(_values(option))
            words = f"-d {shlex.quote(option.help)}"
            lines.append(f"complete -c shardline -n '__shardline_in {name}' -l {option.name}{given} {words}")
    where = "; or ".join(f"__shardline_in {name}" for name, command in commands.items() if command.config_flags)
    lines += ["function __shardline_config", f"    {where}", "end"]
    lines.append(f"complete -c shardline -n __shardline_config -l preset{_fish_values(' '.join(preset_names()))}")
    for key, values in _key_values().items():
        words = f"-d {shlex.quote(leaves()[key].description or '')}"
        given = _fish_values(" ".join(values) or FILES)
        lines.append(f"complete -c shardline -n __shardline_config -l {key}{given} {words}")
    return "\n".join(lines) + "\n"


def _fish_values(values: str) -> str:
    return {FILES: " -r -F", "": " -x"}.get(values, f" -x -a '{values}'")
