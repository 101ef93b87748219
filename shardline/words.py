"""How messages write lists, plurals, ranges and sizes, and what they leave out of texts that others wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


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
    for unit, bytes_of_it in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_of_it:
            return f"{size / bytes_of_it:.2f} {unit}"
    return f"{size:.0f} bytes"


ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", re.DOTALL)  # of a terminal


def printable(text: str) -> str:
    """A text of others without escape sequences and control characters; line breaks and tabs stay."""
    if text.isprintable():
        return text
    kept = ESCAPES.sub("", text)
    return "".join(one for one in kept if one.isprintable() or one in "\n\t")


# Passwords in URLs: user:password@ (no port of a host, no IPv6 address), anything before @ of http, signed queries.
_PASSWORDS = (
    re.compile(r"(?<=://)(?!\[)[^\s@/:]*:(?!\d{1,5}(?:/|$))[^\s@]+(?=@)"),
    re.compile(r"(?<=http://)[^\s/@]+(?=@)|(?<=https://)[^\s/@]+(?=@)"),
    re.compile(
        r"(?<=[?&])([\w-]*(?:token|signature|secret|passw(?:or)?d|api_?key|access_?key|credential)|sig)=[^\s&#]+", re.I
    ),
)


def masked(text: str) -> str:
    """A text without the passwords of the URLs in it."""
    for pattern in _PASSWORDS if "://" in text else ():
        text = pattern.sub("***", text)
    return text


def password_problem(text: str) -> str:
    """Why a URL is refused that holds a password; "" for any other text."""
    shown = masked(text)
    if shown == text:
        return ""
    return (
        f"{shown} holds a password, which would be written into files and logs: leave it out, and let fsspec read it"
        " from its settings (~/.config/fsspec/conf.json, FSSPEC_S3_SECRET) or the environment (AWS_SECRET_ACCESS_KEY)"
    )
