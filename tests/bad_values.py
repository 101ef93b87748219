"""Values that do not belong where they are: every place of a JSON document gets one of each type, and absurd ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

DEEP = "<nested deeply>"
GONE = object()
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "a billion": 10**9,
    "10^15": 10**15,
    "10^400": 10**400,
    "-1.5": -1.5,
    "1e308": 1e308,
    "NaN": float("nan"),
    "empty text": "",
    "text": "abc",
    "long text": "x" * 100_000,
    "empty list": [],
    "lists": [[[]]],
    "empty table": {},
    "nested": DEEP,
    "gone": GONE,
}
Place = tuple[str | int, ...]


def places(value: Any, most: int = 3, here: Place = ()) -> Iterator[Place]:
    """Every place in a document but the first, of long lists the first ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:most]) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*here, name)
        yield from places(one, most, (*here, name))


def changed(document: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place, or without the place."""
    document = copy.deepcopy(document)
    holder = document
    for name in place[:-1]:
        holder = holder[name]
    if value is GONE:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return document


def text_of(document: Any) -> str:
    return json.dumps(document).replace(json.dumps(DEEP), "[" * 10_000 + "]" * 10_000)


def words(place: Place) -> str:
    return ".".join(map(str, place))
