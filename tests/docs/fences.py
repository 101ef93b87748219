"""The shell commands in the pages: lines of fenced or indented blocks that begin with a program."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = (
    "config.md",
    "compatibility.md",
    "axolotl-keys.md",
    "cli.md",
)  # by make docs
SHELL = ("", "bash", "sh", "console")  # languages of blocks
PROGRAMS = ["shardline", "make", "pip", "python", ".venv/bin/python", "torchrun", "srun", "tensorboard"]
LEFT_OUT = "..."  # stands for lines or words that a page does not show


class Shown(NamedTuple):
    """A command and the page that shows it."""

    page: str
    command: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)]


def commands() -> list[Shown]:
    """Every command once for each page, in the order of the pages."""
    return list(dict.fromkeys(Shown(page.name, one) for page in pages() for one in commands_of(page.read_text())))


def commands_of(text: str) -> list[str]:
    found = []
    blocks = r"^```([a-z]*)\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n|\n(?=    ))+)"
    for language, fenced, indented in re.findall(blocks, text, re.MULTILINE | re.DOTALL):
        block = textwrap.dedent(fenced or indented)
        if language in SHELL and not block.startswith("#!"):  # a script of another program
            lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
            found += [line for line in map(_without_comment, lines) if line.partition(" ")[0] in PROGRAMS]
    return found


def _without_comment(line: str) -> str:
    return re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
