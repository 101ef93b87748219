"""Parses JSON that others wrote, or raises a ValueError that says what is wrong. Deep nesting is refused.

So code may walk through a value by recursion. How deep Python's own parser goes depends on its version.
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100  # tables and lists inside each other
_TOO_DEEP = f"nested more than {DEEPEST} deep"
_decoder = json.JSONDecoder()


def parse_json(text: str | bytes) -> Any:
    """`json.loads` that raises only ValueError, also for bytes that are not UTF-8 and values that nest too deeply."""
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
    """Refuse a value that nests too deeply: look level by level, if there are enough brackets for that."""
    level = [value] if brackets > DEEPEST else []
    for _ in range(DEEPEST):
        rows = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for row in rows for inner in row if type(inner) in (dict, list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
