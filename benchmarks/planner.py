"""How well the planner predicts: published layouts against `shardline.plan`, and the fit of other trainers' constants.

    python benchmarks/planner.py --data DIR            # a table
    python benchmarks/planner.py --data DIR --json     # one JSON object
    python benchmarks/planner.py --data DIR --fit      # writes planner_fitted.toml
    python benchmarks/planner.py --own                 # runs of this trainer: planner_own.toml

DIR holds measured_layouts.json and failed_layouts.json. Rows are split by whole groups (dataset, model, GPUs) into a
part that constants are fitted to and a part that checks them. docs/planner.md explains every number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import planner_rows
from planner_memory import peak_memory
from planner_rows import FITTED, TRAINERS, USABLE, Measured, impossible, read_failed, read_rows, traits_of

from shardline.config.load import load_config
from shardline.plan.check import judge
from shardline.plan.hardware import GIB, find_profile
from shardline.plan.simulate import step_time
from shardline.plan.traits import Traits

OWN = Path(__file__).parent / "planner_own.toml"
SINGLE_GROUPS = ("torchao", "simumax-b200")
FIT_OF = 10, 6  # of ten groups, six are fitted to


def speed(row: Measured, traits: Traits) -> float:
    """Predicted tokens/s on each GPU."""
    workload = row.workload
    seconds = step_time(workload, row.hardware, traits).total
    return workload.step_tokens / seconds / workload.layout.world_size


def gib(row: Measured, traits: Traits) -> float:
    return peak_memory(row.workload, traits).total / GIB


def is_fitted_to(row: Measured) -> bool:
    """Whole groups go to one side, by a hash of their name; a source with a single group is fitted to."""
    if row.dataset in SINGLE_GROUPS:
        return True
    name = f"{row.dataset}/{row.group[0]}/{row.group[1]}"
    total, fit = FIT_OF
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % total < fit


# ---- scores ----------------------------------------------------------------------------------------------------------


def scores(rows: Sequence[Measured]) -> dict[str, Any]:
    """The errors of a set of rows."""
    timed = [row for row in rows if row.speed]
    found: dict[str, Any] = {"rows": len(rows)}
    if timed:
        ratio = np.array([row.predicted / row.speed for row in timed])
        error = np.abs(ratio - 1)
        steady = np.array([not row.stalled for row in timed])
        found["tokens_per_s"] = {
            "rows": len(timed),
            "mape": _rounded(error.mean()),
            "median": _rounded(np.median(error)),
            "bias": _rounded((ratio - 1).mean()),
            "within_10_percent": _rounded((error <= 0.1).mean()),
            "mape_without_stalled": _rounded(error[steady].mean()) if steady.any() else None,
            "bias_without_stalled": _rounded((ratio - 1)[steady].mean()) if steady.any() else None,
            "stalled": int((~steady).sum()),
        }
        found["ranking"] = ranking(timed)
    held = [row for row in rows if row.memory]
    if held:
        ratio = np.array([row.predicted_gib / row.memory for row in held])
        error = np.abs(ratio - 1)
        found["memory"] = {
            "rows": len(held),
            "mape": _rounded(error.mean()),
            "median": _rounded(np.median(error)),
            "bias": _rounded((ratio - 1).mean()),
            "within_5_percent": _rounded((error <= 0.05).mean()),
        }
    return found


def ranking(rows: Sequence[Measured]) -> dict[str, Any]:
    """Spearman in each (model, GPUs) with 5 rows or more, and how much slower the first choice is than the best."""
    groups = defaultdict(list)
    for row in rows:
        groups[(row.dataset, *row.group)].append(row)
    large = {key: own for key, own in groups.items() if len(own) >= 5}
    each = {}
    for key, own in sorted(large.items(), key=str):
        measured = np.array([row.speed for row in own])
        predicted = np.array([row.predicted for row in own])
        regret = 1 - measured[predicted.argmax()] / measured.max()
        each["/".join(map(str, key))] = {
            "rows": len(own),
            "spearman": _rounded(spearman(measured, predicted)),
            "regret": _rounded(regret),
        }
    if not each:
        return {"groups": 0}
    return {
        "groups": len(each),
        "spearman": _rounded(np.mean([row["spearman"] for row in each.values()])),
        "regret": _rounded(np.mean([row["regret"] for row in each.values()])),
        "worst_regret": _rounded(max(row["regret"] for row in each.values())),
        "by_group": each,
    }


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [_ranks(values) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if min(r.std() for r in ranks) > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, the mean of them for equal values."""
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks


def fits_scores(ran: Sequence[Measured], failed: Sequence[Measured]) -> dict[str, Any]:
    """Precision and recall of "does not fit", with the layouts that ran as the others."""
    if not failed:
        return {"rows": 0}
    caught = [refuses(row) for row in failed]
    wrong = [refuses(row) for row in ran]
    positive = sum(map(bool, caught)) + sum(map(bool, wrong))
    return {
        "failed": len(failed),
        "ran": len(ran),
        "recall": _rounded(sum(map(bool, caught)) / len(failed)),
        "precision": _rounded(sum(map(bool, caught)) / positive) if positive else None,
        "by_memory": caught.count("memory"),
        "impossible": caught.count("layout"),
    }


def refuses(row: Measured) -> str:
    """`layout` where it cannot run at all, `memory` where the fullest rank has too little, else nothing."""
    if impossible(row):
        return "layout"
    trainer = row.trainer
    if trainer.startswith("nanotron"):
        trainer = "nanotron_piped" if row.workload.layout.pp > 1 else "nanotron"
    traits = replace(traits_of(trainer), reports_first=False)
    return "memory" if gib(row, traits) * GIB > USABLE * row.hardware.memory else ""


def _rounded(value: Any) -> float:
    return round(float(value), 4)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def fit(rows: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """The constants of every trainer, from the rows of the fit part."""
    found: dict[str, dict[str, Any]] = {}
    for trainer, table in TRAINERS.items():
        own = [row for row in rows if is_fitted_to(row) and _uses(row.trainer, trainer) and not row.doubtful]
        exact = [row for row in own if row.trainer == trainer]
        for names, chosen, predict, target in (
            (table.get("fit", ()), [r for r in (exact if trainer != "nanotron" else own) if r.speed], speed, "speed"),
            (table.get("fit_memory", ()), [r for r in own if r.memory], gib, "memory"),
        ):
            if names and len(chosen) >= 3:
                print(f"{trainer}: {target} of {len(chosen)} rows", file=sys.stderr)
                found.setdefault(trainer, {}).update(_fitted(trainer, names, chosen, predict, target))
    return found


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
    """Levenberg-Marquardt on the logarithms of constants, with Huber's loss on logarithms of errors."""
    wanted = np.log([getattr(row, target) for row in rows])
    known = {name: traits_of(name) for name in {row.trainer for row in rows}}
    x = np.log([max(_value(traits_of(trainer), name), 1e-6) for name in names])
    least, most = np.log([BOUNDS.get(name.split(".")[0], ANY) for name in names]).T

    def residuals(x: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(x), strict=True))
        made = {name: _changed(traits, values, trainer, name) for name, traits in known.items()}
        return np.log([predict(row, made[row.trainer]) for row in rows]) - wanted

    delta = 0.1 if target == "speed" else 0.05
    now = residuals(x)
    damping = 0.01
    for _ in range(12):
        weights = np.minimum(1, delta / np.maximum(np.abs(now), 1e-9))
        step = 0.02
        slopes = np.stack([(residuals(x + step * axis) - now) / step for axis in np.eye(len(x))], axis=1)
        normal, gradient = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * now)
        for _ in range(6):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -gradient)
            other = np.clip(x + np.clip(move, -0.5, 0.5), least, most)
            then = residuals(other)
            if _huber(then, delta) < _huber(now, delta):
                break
            damping *= 5
        else:
            break
        gain = 1 - _huber(then, delta) / _huber(now, delta)
        x, now, damping = other, then, max(damping / 4, 1e-4)
        if gain < 1e-3:
            break
    print(f"  median error {np.median(np.abs(np.expm1(now))):.3f}", file=sys.stderr)
    return _nested(dict(zip(names, np.exp(x), strict=True)), traits_of(trainer))


# What a constant can be: shares are below 1, and nothing is faster than the hardware by much.
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
    """Traits with fitted values; a trainer that extends the fitted one keeps what it says itself."""
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


def write_fitted(found: dict[str, dict[str, Any]]) -> None:
    lines = ["# Written by `python benchmarks/planner.py --fit`: constants that published measurements decide.", ""]
    for trainer, values in found.items():
        lines += [f"[{trainer}]", *(f"{key} = {json.dumps(value)}" for key, value in sorted(values.items())), ""]
    FITTED.write_text("\n".join(lines))


# ---- the command -----------------------------------------------------------------------------------------------------


def report(folder: Path) -> dict[str, Any]:
    rows, left_out = read_rows(folder)
    failed = read_failed(folder)
    for row in rows:
        traits = traits_of(row.trainer)
        row.predicted = speed(row, traits)
        row.predicted_gib = gib(row, traits)
    sure = [row for row in rows if not row.doubtful]
    swept = [row for row in sure if row.trainer.startswith("nanotron")]
    parts = {"fit": [r for r in sure if is_fitted_to(r)], "check": [r for r in sure if not is_fitted_to(r)]}
    return {
        "data": str(folder),
        "rows": len(rows) + len(left_out),
        "left_out": dict(_counted(reason for _, reason in left_out)),
        "doubtful": len(rows) - len(sure),
        "overall": scores(sure),
        **{name: _without_groups(scores(part)) for name, part in parts.items()},
        "by_dataset": {
            name: _without_groups(scores([row for row in sure if row.dataset == name]))
            for name in sorted({row.dataset for row in sure})
        },
        "by_dataset_check": {
            name: _without_groups(scores([row for row in parts["check"] if row.dataset == name]))
            for name in sorted({row.dataset for row in parts["check"]})
        },
        "does_not_fit": fits_scores(swept, failed),
        "does_not_fit_check": fits_scores(
            [row for row in swept if not is_fitted_to(row)], [row for row in failed if not is_fitted_to(row)]
        ),
    }


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for reason in reasons:
        found[reason] += 1
    return found


def _without_groups(found: dict[str, Any]) -> dict[str, Any]:
    if "ranking" in found:
        found["ranking"].pop("by_group", None)
    return found


def table(found: dict[str, Any]) -> str:
    names = ("MAPE", "median", "bias", "steady", "Spearm.", "regret", "memory")
    head = f"{'':<24} {'rows':>5} {' '.join(f'{name:>7}' for name in names)}"
    lines = [head]
    parts = [("overall", found["overall"]), ("fit", found["fit"]), ("check", found["check"])]
    parts += [(f"  {name}", own) for name, own in found["by_dataset"].items()]
    for name, own in parts:
        timed, ranked, held = own.get("tokens_per_s", {}), own.get("ranking", {}), own.get("memory", {})
        cells = [timed.get("mape"), timed.get("median"), timed.get("bias"), timed.get("mape_without_stalled")]
        cells += [ranked.get("spearman"), ranked.get("regret"), held.get("mape")]
        shown = [f"{'' if cell is None else f'{cell:.3f}':>7}" for cell in cells]
        lines.append(f"{name:<24} {own['rows']:>5} {' '.join(shown)}")
    for name in ("does_not_fit", "does_not_fit_check"):
        lines.append(f"{name}: {found[name]}")
    lines += [f"left out: {count} x {reason}" for reason, count in found["left_out"].items()]
    return "\n".join(lines)


# ---- this trainer ----------------------------------------------------------------------------------------------------


def own_runs() -> list[dict[str, Any]]:
    """Measured runs of this trainer on an H200, each with what the planner predicts for its config."""
    hardware = find_profile("h200")
    found = []
    for model in tomllib.loads(OWN.read_text()).values():
        for run in model["runs"]:
            config = load_config(None, [f"--{flag}" for flag in (*model["flags"], *run.get("flags", ()))])
            verdict = judge(config, hardware, 1, changes=False)
            training = config.training
            tokens = max(training.local_batch_size, training.global_batch_size) * training.seq_len
            speed, held = tokens / verdict.seconds, verdict.memory.total / GIB
            errors = {"speed_error": _rounded(speed / run["speed"] - 1), "gib_error": _rounded(held / run["gib"] - 1)}
            found.append({**run, "predicted_speed": round(speed), "predicted_gib": _rounded(held), **errors})
    return found


def own_table(runs: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':<48} {'tok/s':>7} {'said':>7} {'':>6} {'GiB':>6} {'said':>6}"]
    for run in runs:
        speed = f"{run['speed']:>7,} {run['predicted_speed']:>7,} {100 * run['speed_error']:>+5.1f}%"
        held = f"{run['gib']:>6.1f} {run['predicted_gib']:>6.1f} {100 * run['gib_error']:>+5.1f}%"
        lines.append(f"{run['name'] + ' (earlier)' * run.get('earlier', False):<48} {speed} {held}")
    for words, old in (("present version", False), ("earlier version", True)):
        part = [run for run in runs if run.get("earlier", False) == old]
        means = [np.mean([abs(run[name]) for run in part]) for name in ("speed_error", "gib_error")]
        lines.append(f"{words}, {len(part)} runs: tokens/s MAPE {means[0]:.3f}, memory MAPE {means[1]:.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with measured_layouts.json and failed_layouts.json")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--own", action="store_true", help="runs of this trainer instead")
    options = parser.parse_args()
    if options.own:
        runs = own_runs()
        print(json.dumps(runs, indent=1) if options.json else own_table(runs))
        return
    if options.data is None:
        sys.exit("--data DIR is missing: the folder with measured_layouts.json")
    if not (options.data / "measured_layouts.json").is_file():
        sys.exit(f"{options.data}: has no measured_layouts.json")
    if options.fit:
        rows, _ = read_rows(options.data)
        write_fitted(fit(rows))
        traits_of.cache_clear()
        planner_rows.fitted.cache_clear()
    found = report(options.data)
    print(json.dumps(found, indent=1) if options.json else table(found))


if __name__ == "__main__":
    main()
