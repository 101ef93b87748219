"""Trainers and their constants: what is known about a row's trainer, and what was fitted to published rows."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from shardline.plan.traits import Traits

HERE = Path(__file__).parent
TRAINERS = tomllib.loads((HERE / "planner_traits.toml").read_text())
FITTED = HERE / "planner_fitted.toml"


def trainer_of(row: dict[str, Any]) -> str:
    """Return the trainer with the longest word in the dataset's name, or else in the source's."""
    for key in ("dataset", "source"):
        name = str(row.get(key) or "").lower()
        found = [
            (len(word), trainer)
            for trainer, table in TRAINERS.items()
            for word in table.get("match", ())
            if word in name
        ]
        if found:
            return max(found)[1]
    return "default"


@cache
def traits_of(trainer: str) -> Traits:
    """Return the traits of a trainer: those of the one it `extends`, its own, and the fitted ones."""
    table = TRAINERS[trainer]
    base = traits_of(table["extends"]) if "extends" in table else Traits()
    return base.with_values({"name": trainer, **table.get("traits", {}), **_constants.get(trainer, {})})


def use_constants(values: dict[str, Any]) -> None:
    """Set the trainers' constants from now on; rows read before must be read again."""
    _constants.clear()
    _constants.update(values)
    traits_of.cache_clear()


def fitted(part: str) -> dict[str, Any]:
    """Return the constants fitted to all rows (`all`), or only to the fit part (`fit`)."""
    return tomllib.loads(FITTED.read_text())[part] if FITTED.exists() else {}


_constants: dict[str, Any] = {}
