"""JSON that others wrote: what was read, or a ValueError that says what is wrong. Nothing may nest deeply.

Whoever walks through a value may then do so by recursion. How deep the library of Python goes depends on its version.
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100  # tables and lists inside each other
_TOO_DEEP = f"nested more than {DEEPEST} deep"
_decoder = json.JSONDecoder()


def parse_json(text: str | bytes) -> Any:
    """`json.loads` whose only error is ValueError, also for bytes that are no UTF-8 and for what nests too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    marks = (text.count("["), text.count("{")) if isinstance(text, str) else (text.count(b"["), text.count(b"{"))
    _refuse_depth(value, sum(marks))
    return value


def parse_one(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and where it ends."""
    try:
        value, end = _decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _refuse_depth(value, text.count("[", start, end) + text.count("{", start, end))
    return value, end


def _refuse_depth(value: Any, brackets: int) -> None:
    """Look at one level after the other, where there are brackets enough to nest too deeply at all."""
    level = [value] if brackets > DEEPEST else []
    for _ in range(DEEPEST):
        rows = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for row in rows for inner in row if type(inner) in (dict, list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
