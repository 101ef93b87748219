"""Computes how much longer a tokenizer can make a text, from its file: its rules replace what other rules have written.

Four rules that each turn one character into a thousand turn it into 10^12, and the library aborts a process that runs
out of memory. So the file is checked before the library reads it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardline.errors import UserError

MOST = 1000  # characters written for one; Unicode's normal forms write up to 18
LONGEST = 65_536  # characters of a token or rule; known vocabularies have tokens of up to a few hundred
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Rules that replace characters, and the most characters that they write for one.
WRITES = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 3, "BertNormalizer": 3, "ByteLevel": 4}


class Lengths(NamedTuple):
    """How many characters one becomes: each of those in `of`, and any other one."""

    of: dict[str, float]
    other: float

    def text(self, text: str) -> float:
        return sum((self.of.get(letter, self.other) for letter in text), 0.0)

    def most(self) -> float:
        return max([self.other, *self.of.values()])


def check_growth(content: Any) -> None:
    """Refuse a tokenizer.json that can make a text more than a thousand times as long, or has a huge token."""
    if not isinstance(content, Mapping):
        return  # the library says what is wrong with it
    for part in PARTS:
        grown = growth(content.get(part))
        if grown > MOST:
            number = f"{grown:,.0f}" if grown < 1e30 else "endlessly many"
            raise UserError(f"its {part} writes up to {number} characters for one; at most {MOST:,} are allowed")
    longest = max(_lengths(content), default=0)
    if longest > LONGEST:
        raise UserError(f"it has a text of {longest:,} characters; tokens and rules may have at most {LONGEST:,}")


def growth(part: Any) -> float:
    """The most characters that a normalizer, a pre-tokenizer or a decoder writes for one."""
    lengths = Lengths({}, 1.0)
    for rule in reversed([*_rules(part)]):  # lengths before a rule follow from those after it
        lengths = _before(rule, lengths)
    return lengths.most()


def _before(rule: Mapping[str, Any], after: Lengths) -> Lengths:
    """Lengths before a rule, from those after it. A character that a rule may match has its share of the result."""
    kind, written = rule.get("type"), rule.get("content")
    if kind == "Replace" and isinstance(written, str):
        pattern = rule.get("pattern")
        matched = pattern.get("String") if isinstance(pattern, Mapping) else None
        new = after.text(written)
        if isinstance(matched, str) and matched:
            share = {letter: max(after.of.get(letter, after.other), new / len(matched)) for letter in matched}
            return Lengths(after.of | share, after.other)
        return Lengths({}, after.most() + new)  # matches any character, and the places between them
    if kind == "Prepend" and isinstance(rule.get("prepend"), str):
        return Lengths({}, after.most() + after.text(rule["prepend"]))
    if kind == "Precompiled":
        return Lengths({}, after.most() * max(_longest_of_map(rule.get("precompiled_charsmap")), 1))
    factor = WRITES.get(str(kind), 1)
    return after if factor == 1 else Lengths({}, after.most() * factor)


def _rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """The rules of a part in their order, those of sequences one by one."""
    if not isinstance(part, Mapping):
        return
    inner = next((part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part), None)
    if part.get("type") == "Sequence" and isinstance(inner, list):
        for one in inner:
            yield from _rules(one)
    else:
        yield part


def _longest_of_map(text: Any) -> int:
    """The longest text in a map of SentencePiece: a table of offsets, then texts, each ended by a zero."""
    try:
        content = base64.b64decode(text)
    except (TypeError, ValueError):
        return 1  # the library says what is wrong with it
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _lengths(content: Mapping[str, Any]) -> Iterator[int]:
    """The lengths of all texts except a normalizer's map."""
    waiting: list[Any] = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield len(value)
        elif isinstance(value, Mapping):
            yield max(map(len, value), default=0)
            waiting += (one for key, one in value.items() if key != "precompiled_charsmap" and type(one) in _HOLDS)
        elif isinstance(value, list):
            waiting += (one for one in value if type(one) in _HOLDS)


_HOLDS = (str, dict, list)
