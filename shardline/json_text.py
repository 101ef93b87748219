"""JSON that others wrote: what was read, or a ValueError that says what is wrong. Nothing is allowed to nest deeply."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100  # tables and lists inside each other; whoever walks through the value may do so by recursion


def parse_json(text: str | bytes, deepest: int = DEEPEST) -> Any:
    """`json.loads` whose only error is ValueError, also for bytes that are no UTF-8 and for what nests too deeply."""
    too_deep = f"nested more than {deepest} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    brackets = [text.count("["), text.count("{")] if isinstance(text, str) else [text.count(b"["), text.count(b"{")]
    if sum(brackets) > deepest and _is_deeper(value, deepest):
        raise ValueError(too_deep)
    return value


def _is_deeper(value: Any, deepest: int) -> bool:
    """Whether tables and lists lie more than `deepest` inside each other; looks at one level after the other."""
    level = [value]
    for _ in range(deepest):
        rows = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for row in rows for inner in row if type(inner) in (dict, list)]
        if not level:
            return False
    return True
