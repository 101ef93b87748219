"""Every command of README and docs runs as it stands there, or has a reason why it does not run here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardline.cli.main import COMMANDS
from shardline.cli.parser import parse
from shardline.errors import UserError
from tests.docs import workspace
from tests.docs.fences import Shown, commands, commands_of, pages
from tests.docs.not_run import NOT_RUN


def reasons(command: str) -> list[str]:
    return [part for part in NOT_RUN if part in command]


def once(shown: list[Shown]) -> list[Shown]:
    """A command that several pages show runs once, except for the tutorial's, which have a folder of their own."""
    found: dict[tuple[str, str], Shown] = {}
    for one in shown:
        place = "tutorial" if one.page == "tutorial.md" else "lora" if one.page == "lora.md" else ""
        found.setdefault((place, one.command), one)
    return list(found.values())


RUN = once([shown for shown in commands() if not reasons(shown.command)])


def test_each_reason_belongs_to_a_command() -> None:
    shown = [one.command for one in commands()]
    assert [part for part in NOT_RUN if not any(part in command for command in shown)] == []
    assert len(RUN) > 70


def test_commands_are_taken_from_blocks_as_a_reader_would() -> None:
    text = (
        "```\n$ shardline a \\\n    --b   # why it's so\nshardline output\n```\n"
        "```toml\nmake = 1\n```\n```\nmake x\n```\n"
        "\n    shardline c \\\n        --d  # why\n    output\n\n    make y\n- a list\n    make z\n"
    )
    assert commands_of(text) == ["shardline a --b", "shardline output", "make x", "shardline c --d", "make y"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_of_the_help_are_commands(name: str) -> None:
    for example in COMMANDS[name].examples:
        inner = re.search(r"\$\((.*)\)|-m (shardline .*)", example)
        words = shlex.split(re.split(r" [|>] ", next(filter(None, inner.groups())) if inner else example)[0])
        found = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
        parse(COMMANDS[found], words[1 + len(found.split()) :])


def refusal(command: str) -> str:
    """What the command line finds wrong with a command, but for words that a page leaves out."""
    words = shlex.split(re.sub(r" [|>] .*| \[.*", "", command))[1:]  # without what follows it, or may be left out
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    try:
        parse(COMMANDS[name], words[len(name.split()) :])
    except UserError as error:
        return "" if re.search(r" is missing|needs a value", str(error)) else f"{command}: {error}"
    return ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_have_options_that_exist_also_where_nothing_runs_them(page: Path) -> None:
    text = page.read_text()
    inline = re.findall(r"`(shardline [^`|]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    shown = [one for one in (*inline, *commands_of(text)) if one.startswith("shardline ") and "..." not in one]
    assert [found for one in shown if (found := refusal(one))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace.make(tmp_path_factory.mktemp("docs"))


@pytest.mark.slow
@pytest.mark.parametrize("shown", RUN, ids=lambda shown: f"{shown.page}: {shown.command}")
def test_a_command_of_a_page(folder: Path, shown: Shown) -> None:
    if shown.page == "tutorial.md":  # begins with nothing; its steps follow from each other
        folder = folder / "tutorial"
        folder.mkdir(exist_ok=True)
        workspace.shell(folder, shown.command)
        return
    adapter = shown.page == "lora.md" or "./adapter" in shown.command
    workspace.take(folder, "lora" if adapter else "plain")
    done = workspace.shell(folder, shown.command)
    assert "Traceback" not in done.stdout + done.stderr
