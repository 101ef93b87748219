"""Fits the constants of other trainers to published rows, and measures the prediction errors on held-out rows.

Only constants named in a trainer's `fit` and `fit_memory` are fitted, starting from the values in its table. Each
cross-validation leaves out whole sources, models or numbers of GPUs, fits to the rest, and predicts what was left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from planner_rows import Measured, gib, read_rows, speed
from planner_trainers import FITTED, TRAINERS, traits_of, use_constants

from shardline.plan.traits import Traits

Chosen = Callable[[Measured], bool]
FOLDS = 3  # of models and of numbers of GPUs, left out in turn
PULL = 0.03  # this logarithmic error in every row costs as much as a constant that is e times its table's value
POOLED_PULL = 0.1  # the same for an unknown trainer: known trainers are too different to determine its constants
POOLED = 24  # about how many rows of each source the constants of an unknown trainer are fitted to
ROUNDS = 2  # the second deduces again, from the first one's constants, which trainer version measured each row


def fit(folder: Path, chosen: Chosen, only: set[str] | None = None, unknown: str = "") -> dict[str, dict[str, Any]]:
    """Return the constants of every trainer (or of the families in `only`), fitted to the chosen rows."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(ROUNDS):
        use_constants(found)
        rows = [row for row in read_rows(folder, unknown)[0] if chosen(row) and not row.doubtful]
        for trainer, table in TRAINERS.items():
            if only is not None and not any(_uses(other, trainer) or _uses(trainer, other) for other in only):
                continue
            own = _pool(rows) if table.get("pooled") else [row for row in rows if _uses(row.trainer, trainer)]
            exact = own if table.get("pooled") else [row for row in own if row.trainer == trainer]
            for names, used, predict, target in (
                (
                    table.get("fit", ()),
                    [r for r in (exact if trainer != "nanotron" else own) if r.speed],
                    speed,
                    "speed",
                ),
                (table.get("fit_memory", ()), [r for r in own if r.memory], gib, "memory"),
            ):
                sources = {row.dataset for row in used}  # a single source says little about an unknown trainer
                if names and len(used) >= 3 and (len(sources) > 1 or not table.get("pooled")):
                    values = _fitted(trainer, names, used, predict, target)
                    found[trainer] = {**found.get(trainer, {}), **values}
                    use_constants(found)
    return found


def _pool(rows: Sequence[Measured]) -> list[Measured]:
    """Return about as many rows of a large source as of a small one, as if an unknown trainer had measured them."""
    sources: dict[str, list[Measured]] = {}
    for row in rows:
        if not (row.stalled or TRAINERS[row.trainer].get("faulty")):
            sources.setdefault(row.dataset, []).append(row)
    chosen = [row for own in sources.values() for row in own[:: max(1, len(own) // POOLED)]]
    return [replace(row, trainer="default") for row in chosen]


def _uses(trainer: str, base: str) -> bool:
    while trainer != base and "extends" in TRAINERS[trainer]:
        trainer = TRAINERS[trainer]["extends"]
    return trainer == base


def _fitted(
    trainer: str,
    names: Sequence[str],
    rows: Sequence[Measured],
    predict: Callable[[Measured, Traits], float],
    target: str,
) -> dict[str, Any]:
    """Fit by Levenberg-Marquardt on the logarithms of constants, with Huber's loss on logarithms of errors.

    Constants are pulled towards the values in the trainer's table, so those that the rows do not determine stay there.
    """
    wanted = np.log([getattr(row, target) for row in rows])
    known = {name: traits_of(name) for name in {row.trainer for row in rows}}
    x = np.log([max(_value(traits_of(trainer), name), 1e-6) for name in names])
    least, most = np.log([BOUNDS.get(name.split(".")[0], ANY) for name in names]).T

    def residuals(x: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(x), strict=True))
        made = {name: _changed(traits, values, trainer, name) for name, traits in known.items()}
        return np.log([predict(row, made[row.trainer]) for row in rows]) - wanted

    delta = 0.1 if target == "speed" else 0.05
    start = x.copy()
    pull = (POOLED_PULL if TRAINERS[trainer].get("pooled") else PULL) ** 2 * len(rows)
    now = residuals(x)

    def loss(x: np.ndarray, errors: np.ndarray) -> float:
        return _huber(errors, delta) + 0.5 * pull * float(((x - start) ** 2).sum())

    damping = 0.01
    for _ in range(12):
        weights = np.minimum(1, delta / np.maximum(np.abs(now), 1e-9))
        step = 0.02
        slopes = np.stack([(residuals(x + step * axis) - now) / step for axis in np.eye(len(x))], axis=1)
        normal = slopes.T @ (slopes * weights[:, None]) + pull * np.eye(len(x))
        gradient = slopes.T @ (weights * now) + pull * (x - start)
        for _ in range(6):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -gradient)
            other = np.clip(x + np.clip(move, -0.5, 0.5), least, most)
            then = residuals(other)
            if loss(other, then) < loss(x, now):
                break
            damping *= 5
        else:
            break
        gain = 1 - loss(other, then) / loss(x, now)
        x, now, damping = other, then, max(damping / 4, 1e-4)
        if gain < 1e-3:
            break
    return _nested(dict(zip(names, np.exp(x), strict=True)), traits_of(trainer))


# Bounds of constants: shares are below 1, and nothing is much faster than the hardware.
BOUNDS = {
    "products": (0.3, 1.25),
    "products_float8": (0.3, 1.2),
    "products_experts": (0.3, 1.2),
    "attention_rate": (0.2, 2.0),
    "moved": (0.5, 8.0),
    "logit_bytes": (4.0, 200.0),
    "optimizer_bytes": (10.0, 200.0),
    "tp_hidden": (0.01, 0.98),
    "ep_hidden": (0.01, 0.98),
    "network": (0.05, 1.2),
    "scattered": (0.1, 1.0),
    "delay": (0.3, 20.0),
}
ANY = (1e-7, 1e7)


def _huber(errors: np.ndarray, delta: float) -> float:
    size = np.abs(errors)
    return float(np.where(size < delta, 0.5 * size**2, delta * (size - 0.5 * delta)).sum())


def _value(traits: Traits, name: str) -> float:
    key, _, index = name.partition(".")
    value = getattr(traits, key)
    return float(value[int(index)] if index else value)


def _changed(traits: Traits, values: dict[str, float], trainer: str, own: str) -> Traits:
    """Return traits with fitted values; a trainer that extends the fitted one keeps its own values."""
    kept = set() if own == trainer else set(TRAINERS[own].get("traits", {}))
    return traits.with_values(_nested({k: v for k, v in values.items() if k.split(".")[0] not in kept}, traits))


def _nested(values: dict[str, float], traits: Traits) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        key, _, index = name.partition(".")
        if index:
            found.setdefault(key, list(getattr(traits, key)))[int(index)] = float(f"{value:.4g}")
        else:
            found[key] = float(f"{value:.4g}")
    return found


def write_fitted(parts: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write both parts: the constants from all rows, and those from the fit part."""
    lines = ["# Written by `python benchmarks/planner.py --fit`: constants fitted to published measurements.", ""]
    for part, found in parts.items():
        for trainer, values in found.items():
            own = (f"{key} = {json.dumps(value)}" for key, value in sorted(values.items()))
            lines += [f"[{part}.{trainer}]", *own, ""]
    FITTED.write_text("\n".join(lines))


# ---- cross-validation ------------------------------------------------------------------------------------------------


def cross(folder: Path) -> dict[str, list[Measured]]:
    """Return predictions of every row by constants fitted without its source, its model, or its number of GPUs."""
    use_constants({})
    rows, _ = read_rows(folder)
    sources = sorted({row.dataset for row in rows})
    by_model, by_gpus = (_dealt(rows, place) for place in (0, 1))
    found: dict[str, list[Measured]] = {"source": [], "model": [], "gpus": []}
    for source in sources:
        print(f"without {source}", file=sys.stderr)
        found["source"] += _left_out(folder, lambda row, source=source: row.dataset == source, source)
    for name, folds in (("model", by_model), ("gpus", by_gpus)):
        for fold in range(FOLDS):
            print(f"without {name} {fold + 1} of {FOLDS}", file=sys.stderr)
            found[name] += _left_out(
                folder,
                lambda row, folds=folds, fold=fold: folds[_key(row, name)] == fold,  # noqa: B023
            )
    return found


def _key(row: Measured, name: str) -> tuple[str, Any]:
    return row.dataset, row.group[("model", "gpus").index(name)]


def _dealt(rows: Sequence[Measured], place: int) -> dict[tuple[str, Any], int]:
    """Return the fold of each model (or number of GPUs) of a source: assigned in turn, in order."""
    each: dict[str, set[Any]] = {}
    for row in rows:
        each.setdefault(row.dataset, set()).add(row.group[place])
    return {(source, one): index % FOLDS for source, own in each.items() for index, one in enumerate(sorted(own))}


def _left_out(folder: Path, held: Callable[[Measured], bool], source: str = "") -> list[Measured]:
    """Return predictions of the held-out rows by a fit to the others.

    If its trainer appears in no other source, a source counts as that of an unknown trainer.
    """
    use_constants({})
    rows = read_rows(folder)[0]
    trainers = {row.trainer for row in rows if held(row)}
    others = any(_related(row.trainer, trainers) for row in rows if not held(row))
    unknown = "" if others or not source else source
    use_constants(fit(folder, lambda row: not held(row), trainers if not unknown else {"default"}))
    return [row for row in read_rows(folder, unknown)[0] if held(row) and not row.doubtful]


def _related(trainer: str, others: set[str]) -> bool:
    return any(_uses(trainer, other) or _uses(other, trainer) for other in others)
