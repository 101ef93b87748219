"""How well the planner predicts published layouts and our own runs, and the fit of other trainers' constants.

    python benchmarks/planner.py --data DIR            # a table
    python benchmarks/planner.py --data DIR --json     # one JSON object
    python benchmarks/planner.py --data DIR --fit      # writes planner_fitted.toml
    python benchmarks/planner.py --data DIR --cross    # errors on held-out sources, models and GPU counts
    python benchmarks/planner.py --own                 # runs of this trainer: planner_own.toml

DIR holds measured_layouts.json and failed_layouts.json. Whole groups of rows (dataset, model, GPUs) go either into the
part to which constants are fitted or into the part that checks them. docs/planner.md explains every number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from planner_fit import cross, fit, write_fitted
from planner_rows import Measured, gib, read_failed, read_rows
from planner_sweep import USABLE, impossible
from planner_trainers import fitted, traits_of, use_constants

from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.plan.check import judge
from shardline.plan.hardware import GIB, find_profile

OWN = Path(__file__).parent / "planner_own.toml"
FILES = "measured_layouts.json", "failed_layouts.json"
SINGLE_GROUPS = ("torchao", "simumax-b200")
FIT_OF = 10, 6  # six of ten groups are used for fitting


def is_fitted_to(row: Measured) -> bool:
    """Split whole groups by a hash of their name; a source with a single group is used for fitting."""
    if row.dataset in SINGLE_GROUPS:
        return True
    name = f"{row.dataset}/{row.group[0]}/{row.group[1]}"
    total, fit = FIT_OF
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % total < fit


# ---- scores ----------------------------------------------------------------------------------------------------------


def scores(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return the errors of a set of rows."""
    timed = [row for row in rows if row.speed]
    found: dict[str, Any] = {"rows": len(rows)}
    if timed:
        ratio = np.array([row.predicted / (row.speed or 1.0) for row in timed])
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
        ratio = np.array([row.predicted_gib / (row.memory or 1.0) for row in held])
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
    """Return Spearman's rank correlation of each (model, GPUs) with 5 or more rows, and the first choice's regret."""
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
    ranks = _ranks(a), _ranks(b)
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if min(r.std() for r in ranks) > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks; equal values get their mean rank."""
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks


def fits_scores(ran: Sequence[Measured], failed: Sequence[Measured]) -> dict[str, Any]:
    """Return precision and recall of "does not fit"; the layouts that ran are the negatives."""
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
    """Return `layout` if it cannot run at all, `memory` if the fullest rank has too little memory, else nothing."""
    if row.trainer.startswith("nanotron") and impossible(row.workload):
        return "layout"
    trainer = row.trainer
    if trainer.startswith("nanotron"):
        trainer = "nanotron_piped" if row.workload.layout.pp > 1 else "nanotron"
    traits = replace(traits_of(trainer), reports_first=False)
    return "memory" if gib(row, traits) * GIB > USABLE * row.hardware.memory else ""


def _rounded(value: Any) -> float:
    return round(float(value), 4)


# ---- the command -----------------------------------------------------------------------------------------------------


def report(folder: Path) -> dict[str, Any]:
    """Return scores of all rows with constants fitted to all; `fit` and `check` use those fitted to the fit part."""
    use_constants(fitted("fit"))
    sure, failed = _sure(read_rows(folder)[0]), read_failed(folder)[0]
    parts = {"fit": [r for r in sure if is_fitted_to(r)], "check": [r for r in sure if not is_fitted_to(r)]}
    split = {name: _without_groups(scores(part)) for name, part in parts.items()}
    check = by_dataset(parts["check"])
    fits_check = fits_scores(_swept(parts["check"]), [row for row in failed if not is_fitted_to(row)])
    use_constants(fitted("all"))
    rows, left_out = read_rows(folder)
    failed, failed_left_out = read_failed(folder)
    sure = _sure(rows)
    return {
        "data": str(folder),
        "rows": len(rows) + len(left_out),
        "left_out": dict(_counted(reason for _, reason in left_out)),
        "failed_left_out": dict(_counted(reason for _, reason in failed_left_out)),
        "doubtful": len(rows) - len(sure),
        "overall": scores(sure),
        **split,
        "by_dataset": by_dataset(sure),
        "by_dataset_check": check,
        "does_not_fit": fits_scores(_swept(sure), failed),
        "does_not_fit_check": fits_check,
    }


def _sure(rows: Sequence[Measured]) -> list[Measured]:
    return [row for row in rows if not row.doubtful]


def _swept(rows: Sequence[Measured]) -> list[Measured]:
    return [row for row in rows if row.trainer.startswith("nanotron")]


def by_dataset(rows: Sequence[Measured]) -> dict[str, Any]:
    names = sorted({row.dataset for row in rows})
    return {name: _without_groups(scores([row for row in rows if row.dataset == name])) for name in names}


def report_cross(folder: Path) -> dict[str, Any]:
    """Return scores of rows whose source, model or number of GPUs was left out of the fit."""
    found = {}
    for name, rows in cross(folder).items():
        found[name] = {"overall": _without_groups(scores(rows)), "by_dataset": by_dataset(rows)}
    return found


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for reason in reasons:
        found[reason] += 1
    return found


def _without_groups(found: dict[str, Any]) -> dict[str, Any]:
    if "ranking" in found:
        found["ranking"].pop("by_group", None)
    return found


NAMES = ("MAPE", "median", "bias", "steady", "Spearm.", "regret", "memory")
HEAD = f"{'':<24} {'rows':>5} {' '.join(f'{name:>7}' for name in NAMES)}"


def table(found: dict[str, Any]) -> str:
    parts = [("overall", found["overall"]), ("fit", found["fit"]), ("check", found["check"])]
    lines = [HEAD, *(_line(name, own) for name, own in [*parts, *_indented(found["by_dataset"])])]
    for name in ("does_not_fit", "does_not_fit_check"):
        lines.append(f"{name}: {found[name]}")
    for key in ("left_out", "failed_left_out"):
        lines += [f"{key}: {count} x {reason}" for reason, count in found[key].items()]
    return "\n".join(lines)


def cross_table(found: dict[str, Any]) -> str:
    lines = [HEAD]
    for name, own in found.items():
        lines += [_line(f"other {name}", own["overall"]), *(_line(*one) for one in _indented(own["by_dataset"]))]
    return "\n".join(lines)


def _indented(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"  {name}", own) for name, own in parts.items()]


def _line(name: str, own: dict[str, Any]) -> str:
    timed, ranked, held = own.get("tokens_per_s", {}), own.get("ranking", {}), own.get("memory", {})
    cells = [timed.get("mape"), timed.get("median"), timed.get("bias"), timed.get("mape_without_stalled")]
    cells += [ranked.get("spearman"), ranked.get("regret"), held.get("mape")]
    shown = [f"{'' if cell is None else f'{cell:.3f}':>7}" for cell in cells]
    return f"{name:<24} {own['rows']:>5} {' '.join(shown)}"


# ---- this trainer ----------------------------------------------------------------------------------------------------


def own_runs() -> list[dict[str, Any]]:
    """Return measured runs of this trainer on an H200, each with the planner's prediction for its config."""
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
    parser.add_argument("--cross", action="store_true", help="cross-validate: leave out sources, models, GPU counts")
    parser.add_argument("--own", action="store_true", help="use runs of this trainer instead")
    options = parser.parse_args()
    if options.own:
        runs = own_runs()
        print(json.dumps(runs, indent=1) if options.json else own_table(runs))
        return
    if options.data is None:
        sys.exit("--data DIR is missing: the folder with measured_layouts.json")
    if not any((options.data / name).is_file() for name in FILES):
        sys.exit(f"{options.data}: has neither {' nor '.join(FILES)}")
    if options.fit:
        write_fitted({"all": fit(options.data, lambda row: True), "fit": fit(options.data, is_fitted_to)})
    if options.cross:
        crossed = report_cross(options.data)
        print(json.dumps(crossed, indent=1) if options.json else cross_table(crossed))
        return
    try:
        found = report(options.data)
    except UserError as error:
        sys.exit(str(error))
    for name in FILES:
        if not (options.data / name).is_file():
            print(f"{options.data}: has no {name}", file=sys.stderr)
    print(json.dumps(found, indent=1) if options.json else table(found))


if __name__ == "__main__":
    main()
