"""A small change of the package that switches a promise off, and the tests of which at least one must then fail."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Change(NamedTuple):
    """`old` occurs once in `file`, below shardline/. `tests` are as pytest takes them; none of them is slow."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def path(self, tree: Path) -> Path:
        return tree / "shardline" / self.file

    def applied_to(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)
