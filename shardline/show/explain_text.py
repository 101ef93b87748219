"""Chapters of `shardline explain` as text for a terminal, a pipe or a file."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from shardline.show.chapters import Chapter
from shardline.words import TableRows, sized, table_lines, wrapped

NARROWEST = 24  # least width of the last column, if a table is wider than the terminal
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "whole": lambda value: f"{value:,}",
    "bytes": sized,
    "share": lambda value: f"{100 * value:.1f}%",
}


def write_text(name: str, facts: TableRows, chapters: Callable[[int], Sequence[Chapter]], stream: TextIO) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    lines = [name, "", *("".join(pair) for pair in table_lines(facts, width))]
    for chapter in chapters(width):
        lines += ["", chapter.title, "-" * len(chapter.title), *chapter_lines(chapter, width)]
    stream.write("\n".join(line.rstrip() for line in lines) + "\n")


def chapter_lines(chapter: Chapter, width: int) -> Iterator[str]:
    yield from (line for words in chapter.words for line in wrapped(words, width).split("\n"))
    if chapter.drawing:
        yield from ("", *chapter.drawing)
    if not chapter.rows:
        return
    if chapter.words or chapter.drawing:
        yield ""
    if chapter.key == "life":
        yield from life_lines(chapter.rows, width)
    else:
        yield from text_table(chapter.columns, chapter.rows, width)


def life_lines(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    for number, (where, what) in enumerate(rows, 1):
        text = f"{number:>2}. {where}: {what}"
        yield from textwrap.wrap(text, max(width, NARROWEST), subsequent_indent=" " * 4)


def text_table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]], width: int) -> Iterator[str]:
    """Format aligned columns, numbers at the right; the last column is wrapped if the line is too long."""
    kinds = [kind for _, kind in columns]
    cells = [[name for name, _ in columns], *([*map(cell_text, row, kinds)] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    used = sum(widths[:-1]) + 2 * (len(columns) - 1)
    for row in cells:
        sides = zip(row[:-1], widths, kinds, strict=False)
        aligned = [cell.ljust(wide) if kind == "text" else cell.rjust(wide) for cell, wide, kind in sides]
        first, *more = textwrap.wrap(row[-1], max(NARROWEST, width - used)) or [""]
        yield "  ".join([*aligned, first])
        yield from (" " * used + line for line in more)


def cell_text(value: Any, kind: str) -> str:
    return "-" if value is None else FORMATS[kind](value)
