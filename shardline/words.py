"""How messages write lists, plurals, ranges, sizes and tables, and what they leave out of texts that others wrote."""

from __future__ import annotations

import functools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO


def listed(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """`a, b and 3 more`."""
    rest = len(names) - most
    return between.join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-6, 8`."""
    numbers = sorted(numbers)
    return f"{noun if len(numbers) == 1 else f'{noun}s'} {ranges(numbers)}"


def ranges(numbers: Iterable[int]) -> str:
    """`0-6, 8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def sized(size: float) -> str:
    """`1.50 GiB`."""
    number, unit = _in_units(size)
    return f"{number:.2f} {unit}" if unit != "bytes" else f"{size:.0f} bytes"


def roughly(size: float) -> str:
    """`1.5 GiB`, `240 MiB`: three digits of a number that is an estimate."""
    number, unit = _in_units(size)
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _in_units(size: float) -> tuple[float, str]:
    for unit, bytes_of_it in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_of_it:
            return size / bytes_of_it, unit
    return size, "bytes"


# ---- tables and lines of a given width -------------------------------------------------------------------------------

TableRows = Sequence[tuple[str, str]]  # label and value
_SPACE = "\0"  # stands for a space between quotes
_wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


class ShellCommand(str):
    """A command to copy: broken lines end with a backslash, and none is broken between quotes."""


class Part(NamedTuple):
    """A part of a line. Those with the highest `place` are dropped first; 0 never is."""

    text: str
    place: int = 0


def table_lines(rows: TableRows, width: int | None = None) -> Iterator[tuple[str, str]]:
    """(label, padded; rest of the line) of each line; in `width` columns a value may need several."""
    indent = 2 + max(len(label) for label, _ in rows)
    for label, value in rows:
        first, *more = _broken(value, None if width is None else max(width - indent, 1))
        yield label.ljust(indent), first
        yield from ((" " * indent, line) for line in more)


def _broken(value: str, width: int | None) -> list[str]:
    if width is None or len(value) <= width:
        return [value]
    if not isinstance(value, ShellCommand):
        return _wrap(value, width)
    whole = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", _SPACE), value)
    *most, last = _wrap(whole, max(width - 2, 1), subsequent_indent="  ")
    return [line.replace(_SPACE, " ") for line in (*(f"{line} \\" for line in most), last)]


def wrapped(text: str, width: int) -> str:
    """Lines broken between words; a word that is longer than a line, as a path may be, stays one."""
    lines = (line if len(line) <= width else "\n".join(_wrap(line, width)) for line in text.split("\n"))
    return "\n".join(lines)


def flowing(text: str) -> str:
    """Join lines of a source that end inside a sentence."""
    return re.sub(r"(?<![.:\n])\n(?!\n)", " ", text)


def width_of(stream: TextIO) -> int | None:
    """The columns of a terminal; None for a pipe or a file, whose lines may have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def for_stream(text: str, stream: TextIO) -> str:
    """The text as it is, or wrapped where the stream is a terminal."""
    width = width_of(stream)
    if width is None:
        return text
    return "\n".join(_broken(text, width)) if isinstance(text, ShellCommand) else wrapped(text, width)


def to_stderr(text: str) -> None:
    """Print a message, wrapped on a terminal."""
    print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)


def fitted(parts: Sequence[Part], width: int) -> str:
    """The parts of a line that fit into `width` columns."""
    left = list(parts)
    while len(line := "  ".join(part.text for part in left)) > width:
        last = max(left, key=lambda part: part.place)
        if last.place == 0:
            break
        left.remove(last)
    return line


# ---- texts that others wrote -----------------------------------------------------------------------------------------

ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", re.DOTALL)  # of a terminal


def printable(text: str) -> str:
    """Remove escape sequences and control characters from a text; line breaks and tabs stay."""
    if text.isprintable():
        return text
    kept = ESCAPES.sub("", text)
    return "".join(one for one in kept if one.isprintable() or one in "\n\t")


# Passwords in URLs: user:password@ (no port of a host, no IPv6 address), anything before @ of http and of the Hub,
# signed queries; and tokens of the Hub wherever they stand.
_PASSWORDS = (
    re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}"),
    re.compile(r"(?<=://)(?!\[)[^\s@/:]*:(?!\d{1,5}(?:/|$))[^\s@]+(?=@)"),
    re.compile(r"(?<=http://)[^\s/@]+(?=@)|(?<=https://)[^\s/@]+(?=@)|(?<=hf://)[^\s/@]+(?=@)"),
    re.compile(
        r"(?<=[?&])([\w-]*(?:token|signature|secret|passw(?:or)?d|api_?key|access_?key|credential)|sig)=[^\s&#]+", re.I
    ),
)


def masked(text: str) -> str:
    """A text without tokens of the Hub and the passwords of the URLs in it."""
    for pattern in _PASSWORDS if "://" in text or "hf_" in text else ():
        text = pattern.sub("***", text)
    return text


def password_problem(text: str) -> str:
    """Why a text that holds a password is refused; "" for any other."""
    shown = masked(text)
    if shown == text:
        return ""
    return (
        f"{shown} holds a password, which would be written into files and logs: leave it out, and let fsspec read it"
        " from its settings (~/.config/fsspec/conf.json, FSSPEC_S3_SECRET) or the environment (AWS_SECRET_ACCESS_KEY);"
        " for the Hub, HF_TOKEN or `hf auth login`"
    )
