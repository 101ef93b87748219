"""docs/cli.md: the help of every command as a page."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.cli.parser import Command, help_text

INTRODUCTION = """\
# Commands

Made by `make docs` from the tables that the command line is parsed by; `shardline COMMAND --help` prints the same.
`--section.key=value` stands for any [key of a config](config.md). A command ends with 0, with 1 where what it checked
or trained failed, or with 2 where an input was wrong, after one message that names it.
"""


def commands_page(commands: Mapping[str, Command]) -> str:
    parts = [INTRODUCTION]
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {command.summary} |" for name, command in commands.items()]
    parts.append("\n".join(["| command | what it does |", "|---|---|", *rows, ""]))
    parts += [f"## {name}\n\n```text\n{help_text(command)}\n```\n" for name, command in commands.items()]
    return "\n".join(parts)
