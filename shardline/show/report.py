"""`shardline report`: one HTML file with the charts of up to five runs, side by side."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardline.config.schema import Config
from shardline.config.write import shown
from shardline.errors import UserError
from shardline.show.events import events
from shardline.show.page import render, write_page
from shardline.show.pictures import expert_picture, mesh_picture, pipeline_picture
from shardline.show.run_files import Row, RunFiles, read_run
from shardline.show.step_parts import AXES, PartTimes, present_ranks, rank_paces, spread, step_times
from shardline.words import counted, ranges, sized

MOST_RUNS = 5
MOST_ROWS = 2000  # of metrics in a chart; longer runs are thinned, keeping the highest and lowest losses
MOST_STEPS, MOST_RANKS = 300, 64  # in charts by rank
MOST_EVENTS = 400
ALIVE = 60.0  # seconds; a run that wrote nothing for longer than this and than ten steps counts as lost
SERIES = (
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "memory_gib", "step_seconds"),
    *("reward_margin", "reward_accuracy"),
)


def command(runs: list[str], out: str | None, watch: bool, port: int) -> int:
    folders = [Path(run) for run in runs]
    check_runs(folders)
    if watch:
        if out is not None:
            raise UserError("shardline report: --watch serves the page and --out writes it: pass only one of them")
        from shardline.show.serve import serve

        return serve(folders, port)
    path = Path(out) if out else (folders[0] if len(folders) == 1 else Path()) / "report.html"
    data = report_data(folders)
    for folder, run in zip(folders, data["runs"], strict=True):
        if not run["series"] and not run["events"]:
            raise UserError(f"{folder} has nothing to draw yet: no step was logged; --watch waits for the first one")
    write_page(path, render("report", _title(data), data))
    return 0


def check_runs(folders: Sequence[Path]) -> None:
    if len(folders) > MOST_RUNS:
        raise UserError(f"shardline report: {len(folders)} runs were given; one page holds at most {MOST_RUNS}")
    places = [folder.resolve() for folder in folders]
    twice = [folder for number, folder in enumerate(folders) if places[number] in places[:number]]
    if twice:
        raise UserError(f"shardline report: {twice[0]} was given twice; name each run once")


def watched_page(folders: Sequence[Path]) -> str:
    data = report_data(folders, watch=True)
    return render("report", _title(data), data)


def _title(data: dict[str, Any]) -> str:
    return ", ".join(run["name"] for run in data["runs"])


def report_data(folders: Sequence[Path], watch: bool = False) -> dict[str, Any]:
    """The data of everything that the page draws."""
    now, runs, data = time.time(), [], []
    for folder, name in zip(folders, run_names(folders), strict=True):
        with as_runs_write(folder):
            runs.append(read_run(folder, now))
            data.append(run_data(runs[-1], name))
    return {"made": now, "watch": watch, "axes": AXES, "runs": data, "config": config_rows(runs)}


@contextlib.contextmanager
def as_runs_write(folder: Path) -> Iterator[None]:
    """Raise a UserError for files that no run writes this way: anyone may have put them into the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error} ({error.filename})") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} cannot be drawn: its files are not as a run writes them ({kind})") from error


def run_names(folders: Sequence[Path]) -> list[str]:
    """The names of folders, or as much of their paths as distinguishes them."""
    paths = [folder.resolve() for folder in folders]
    parts = next(
        number
        for number in range(1, max(len(path.parts) for path in paths) + 1)
        if len({path.parts[-number:] for path in paths}) == len(paths)
    )
    return ["/".join(path.parts[-parts:]) for path in paths]


def run_data(run: RunFiles, name: str) -> dict[str, Any]:
    times = step_times(run, MOST_STEPS, MOST_RANKS)
    return {
        "name": name,
        "path": str(run.path),
        "state": state(run),
        "facts": list(facts(run)),
        "numbers": numbers(run),
        "series": series(run),
        "validation": {
            "step": [row["step"] for row in run.validation],
            "loss": [row["validation_loss"] for row in run.validation],
        },
        "before_resume": columns(run.before_resume, ("step", "loss")),
        "memory": memory(run),
        "parts": None if times is None else parts(times),
        "paces": paces(run, times),
        "pipeline": pipeline_picture(run),
        "mesh": mesh_picture(run),
        "experts": expert_picture(run, MOST_STEPS // 3),
        "engaged": engaged_rows(run.engaged),
        "events": events(run)[-MOST_EVENTS:],
        "missing": list(missing(run)),
    }


# ---- the head of a run -----------------------------------------------------------------------------------------------


def state(run: RunFiles) -> dict[str, Any]:
    """The state of the run, as a word and a sentence."""
    last = run.rows[-1]["step"] if run.rows else 0
    total = run.last_start.get("last_step") or int(run.config.get("training.steps", 0))
    found = {"step": last, "last_step": total}
    if 0 not in run.ranks:
        word = "finished" if last >= total > 0 else "unknown"
        return found | {"word": word, "why": "" if word == "finished" else "the run wrote no log/telemetry-0.jsonl"}
    ends = [row for row in run.ranks[0].events if row["event"] == "end"]
    if ends and ends[-1]["time"] > run.last_start["time"]:
        error, stopped = ends[-1].get("error"), ends[-1].get("stopped_by")
        if error:
            return found | {"word": "failed", "why": error}
        return found | ({"word": "stopped", "why": stopped} if stopped else {"word": "finished", "why": ""})
    last_sign = _last_time(run)
    pace = (run.rows[-1].get("step_seconds") or 0.0) if run.rows else 0.0
    if run.read_at - last_sign < max(ALIVE, 10 * pace):
        return found | {"word": "running", "why": ""}
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_sign))
    return found | {"word": "lost", "why": f"rank 0 wrote nothing since {since}, and no end"}


def _last_time(run: RunFiles) -> float:
    rows = run.ranks[0]
    times = [row["time"] for row in (*rows.starts, *rows.events, *rows.steps.values())]
    return max(times, default=0.0)


def facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Label and value of each line under a run's name."""
    model = [run.config.get(f"model.{key}", "").strip('"') for key in ("name", "flavor")]
    yield "model", " ".join(model)
    start, layout = run.last_start, run.layout
    if layout is not None:
        ranks = counted(layout.world_size, "rank")
        yield "layout", ranks if layout.world_size == 1 else f"{ranks}: {layout}"
        hosts = {of.starts[-1]["host"] for of in run.ranks.values() if of.starts}
        yield "device", f"{start['device']}, {counted(len(hosts), 'machine')}"
        yield "started", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.first_start["time"]))
    yield "folder", str(run.path)


def numbers(run: RunFiles) -> dict[str, float | int | None]:
    """The numbers at the head of the page; speeds leave out the first row, which includes one-time costs."""
    rows, later = run.rows, run.rows[1:] or run.rows
    best = min((row["validation_loss"] for row in run.validation if row["validation_loss"] is not None), default=None)
    begun = run.first_start.get("time")
    return {
        "loss": rows[-1]["loss"] if rows else None,
        "validation": best,
        "tokens_per_second": _median(later, "tokens_per_second"),
        "mfu": _median(later, "mfu"),
        "memory_gib": max((row["memory_gib"] for row in rows if row.get("memory_gib") is not None), default=None),
        "tokens": rows[-1].get("tokens") if rows else None,
        "seconds": None if begun is None else _last_time(run) - begun,
        "restarts": len(run.restarts),
    }


def _median(rows: Sequence[Row], key: str) -> float | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(known) if known else None


# ---- series ----------------------------------------------------------------------------------------------------------


def series(run: RunFiles) -> dict[str, list[Any]]:
    """Columns of the logged steps, with the time of each if rank 0 has written it."""
    kept = [run.rows[place] for place in thinned([row["loss"] for row in run.rows], MOST_ROWS)]
    found = {key: values for key, values in columns(kept, SERIES).items() if any(one is not None for one in values)}
    steps = run.ranks[0].steps if 0 in run.ranks else {}
    if steps:
        found["time"] = [steps[row["step"]]["time"] if row["step"] in steps else None for row in kept]
    return found


def columns(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Any]]:
    return {key: [_number(row.get(key), key) for row in rows] for key in keys}


def _number(value: Any, key: str) -> float | None:
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"{key} is {value!r}, not a number")
    return value


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """The indices to keep: all, or those of the highest and the lowest value in each of `most / 2` stretches."""
    if len(values) <= most:
        return list(range(len(values)))
    kept, stretches = {0, len(values) - 1}, max(most // 2, 1)
    for number in range(stretches):
        here = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        known = [place for place in here if values[place] is not None] or list(here)[:1]
        kept |= {choose(known, key=lambda place: values[place] or 0.0) for choose in (min, max)} if known else set()
    return sorted(kept)


def memory(run: RunFiles) -> dict[str, Any] | None:
    """Peak and current memory of each rank, at the steps that all of them have written."""
    ranks = spread(present_ranks(run), MOST_RANKS)
    common = set.intersection(*(set(run.ranks[rank].steps) for rank in ranks)) if ranks else set()
    if not common:
        return None
    steps = spread(sorted(common), MOST_STEPS)
    of_ranks = [[run.ranks[rank].steps[step] for step in steps] for rank in ranks]
    found = {key: [[row[f"{key}_gib"] for row in rows] for rows in of_ranks] for key in ("peak", "now")}
    return {"step": steps, "ranks": ranks, **found}


def parts(times: PartTimes) -> dict[str, Any]:
    """Where the time of steps goes: over time, as the mean of all ranks, and by rank, as the median of all steps."""
    return {
        "names": times.names,
        "step": times.steps,
        "mean": _rounded(times.mean_by_step()),
        "ranks": times.ranks,
        "by_rank": _rounded(times.median_by_rank()),
    }


def _rounded(table: list[list[float]]) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in table]


def paces(run: RunFiles, times: PartTimes | None) -> list[dict[str, Any]]:
    if times is None or run.layout is None or len(times.ranks) < 2:
        return []
    rows = rank_paces(times, run.layout)
    return [
        {
            "rank": pace.rank,
            "host": run.ranks[pace.rank].starts[-1]["host"],
            "own": pace.own,
            "waiting": pace.waiting,
            "ratio": pace.ratio,
            "phase": pace.phase,
        }
        for pace in rows
    ]


def engaged_rows(found: Row) -> list[tuple[str, str, str]]:
    """What the first step did on rank 0, and on which ranks it did something else."""
    others: Row = found.get("other_ranks", {})
    rows = []
    for key, value in found.items():
        if key not in ("other_ranks", "step"):
            different = [int(rank) for rank, of_rank in others.items() if key in of_rank]
            rows.append((key.replace("_", " "), _engaged_words(key, value), ranges(different)))
    return rows


def _engaged_words(key: str, value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{name} x {one}" if isinstance(one, int) else f"{name}: {one}" for name, one in value.items())
        return ", ".join(pairs) or "none seen"
    return sized(value) if "bytes" in key and isinstance(value, int) else str(value)


# ---- what is not there -----------------------------------------------------------------------------------------------


def missing(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """What the page cannot show for a run, why, and how to get it."""
    if not run.rows:
        yield "all curves", "metrics.jsonl has no row yet", "wait for the first logged step"
    if 0 not in run.ranks:
        why = "an older version trained this run: there is no log/telemetry-0.jsonl"
        again = "train again, or resume, with this version"
        yield "memory by rank, where a step goes, slow ranks, mesh, time of events", why, again
    elif not run.ranks[0].steps:
        yield "memory by rank, where a step goes, slow ranks", "no step is logged yet", "wait for the first logged step"
    absent = [rank for rank in range(run.last_start.get("world_size", 0)) if rank not in run.ranks]
    if absent:
        why = f"{counted(len(absent), 'rank')} wrote no log/telemetry-N.jsonl into this folder"
        yield "charts of all ranks", why, "let all machines share the run's folder, or copy their log/ here"
    if run.rows and all(row.get("mfu") is None for row in run.rows):
        yield "MFU", "the peak speed of this device is unknown", "it is known for GPUs in bfloat16 and float16"
    if not run.validation:
        yield "validation loss", "the run has no validation", "--validation.enable"
    if run.rows and not run.engaged:
        yield "what the first step did", "there is no engaged.json", "train again, or resume, with this version"
    layout = run.layout
    if layout is not None and layout.world_size == 1:
        how = "--nproc N with --parallelism.* degrees"
        yield "mesh, communication, slow ranks", "the run has one rank", how
    if layout is not None and layout.pp > 1 and pipeline_picture(run) is None:
        yield "pipeline", "no rank has written the times of its actions yet", "wait for the first logged step"
    elif layout is None or layout.pp == 1:
        yield "pipeline", "the model is not split into stages", "--parallelism.pipeline_parallel_degree=N"
    if run.rows and "expert_load_layers" not in run.rows[-1]:
        yield "expert load", "the model has no experts", "--preset moe-demo has some"
    if not run.checkpoints and run.config.get("checkpoint.enable") != "true":
        yield "checkpoints", "the run saves no checkpoints", "--checkpoint.enable"


# ---- config ----------------------------------------------------------------------------------------------------------


def config_rows(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Every key with its default and its value in each run; None: not set."""
    defaults = dict(shown(Config()))
    keys = dict.fromkeys([*defaults, *(key for run in runs for key in run.config)])
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    rows = []
    for key in sorted(keys, key=lambda key: sections.index(key.partition(".")[0])):
        values = [run.config.get(key) for run in runs]
        own = {value for value in values if value not in (None, defaults.get(key))}
        rows.append(
            {
                "key": key,
                "default": defaults.get(key),
                "values": values,
                "changed": bool(own) and key != "job.dump_folder",
                "differs": len(set(values)) > 1 and key != "job.dump_folder",
            }
        )
    return rows
