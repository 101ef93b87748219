"""Async tensor parallelism in a run: the same choice on every rank, remembered, forced, said and measured."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from shardline.comm import collectives
from shardline.comm.hidden_time import Times
from shardline.comm.mesh import Mesh, world_size
from shardline.config.layout import resolve_layout
from shardline.config.load import load_config
from shardline.models.flavors import resolve
from shardline.parallel.apply import tensor_plan
from shardline.parallel.tensor import async_tp, autotune
from shardline.parallel.tensor.autotune import from_row
from shardline.parallel.tensor.backend_table import Choice, backends, choices
from shardline.parallel.tensor.serial_and_ring import Ring
from shardline.telemetry import engaged
from shardline.telemetry.serial_steps import SerialComparison, runs_serially
from shardline.telemetry.summary import tensor_summary
from tests.parity.harness import DEVICE, Harness, complete, train
from tests.parity.pool import Pool

ASYNC = {"parallelism.enable_async_tensor_parallel": True}
BACKEND = "parallelism.async_tensor_parallel_backend"
SUMMARY = "Async TP is enabled for "
DATE = "2026-01-02 03:04"
AS_BEFORE = f", measured on {DATE}"
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="symmetric memory may be there on a GPU")


class Decided(NamedTuple):
    """What one rank decided, and said."""

    chosen: dict[str, Choice]
    table: list[tuple[str, str]]  # of the log
    lines: list[str]  # of the console
    progress: list[str]
    clock: float  # all that its clock told
    drew: bool  # from the run's random numbers


def decide(
    overrides: dict[str, Any], cache: Path, measures: bool = True, real: bool = False, again: bool = False
) -> Decided:
    """A rank's part of `prepare`. Its clock is as wrong as any rank's own view may be, unless it is the `real` one."""
    config = load_config(overrides=complete(overrides, world_size()))
    mesh = Mesh(resolve_layout(config.parallelism, world_size()), DEVICE)
    chance, told, progress = random.Random(mesh.rank), [], []

    def own_clock(run: Callable[[], Any], device: torch.device, in_a_row: int) -> float:
        told.append(1e-3 * (1 + chance.random()))
        return told[-1]

    plan, arch, device = tensor_plan(config, mesh.layout), resolve(config.model), torch.device(DEVICE)
    before = torch.get_rng_state()
    with contextlib.ExitStack() as changes:
        if real:
            changes.enter_context(patch.object(autotune, "MOST_ROUNDS", 2))
        else:
            changes.enter_context(patch.object(autotune, "timed", own_clock))
        if not measures:
            changes.enter_context(patch.object(async_tp, "measure", side_effect=AssertionError("it measured")))
        changes.enter_context(patch.object(autotune, "today", lambda: DATE))
        done = async_tp.prepare(
            config, arch, mesh, plan, torch.float32, device, cache, tell=progress.append, again=again
        )
    found = {str(product): choice for product, choice in choices.chosen.items()}
    choices.reset()
    return Decided(found, done.table(), done.lines, progress, sum(told), not torch.equal(before, torch.get_rng_state()))


def tp(degree: int, **more: Any) -> dict[str, Any]:
    layout = {"parallelism.tensor_parallel_degree": degree, "parallelism.data_parallel_shard_degree": 1}
    return ASYNC | layout | {key.replace("__", "."): value for key, value in more.items()}


def measured_lines(decided: Decided) -> list[str]:
    return [f"{product}: {words}" for product, words in decided.table]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, tp(2)),
        (4, tp(4)),
        (4, tp(2, parallelism__data_parallel_replicate_degree=2)),
        (4, tp(4, parallelism__enable_sequence_parallel=False)),
    ],
    ids=["tp2", "tp4", "ddp2-tp2", "tp4-no-sequence"],
)
def test_ranks_whose_clocks_differ_choose_alike(pool: Pool, tmp_path: Path, ranks: int, overrides: Any) -> None:
    found = pool.run(ranks, decide, overrides, tmp_path)
    assert len({decided.clock for decided in found}) == ranks
    first = found[0]
    assert all(decided.chosen == first.chosen for decided in found)
    assert all(decided.table == first.table for decided in found)
    whole = overrides.get("parallelism.enable_sequence_parallel", True)
    assert len(first.chosen) == len(measured_lines(first)) == (8 if whole else 4)


def test_the_clock_is_read_and_random_numbers_stay(pool: Pool, tmp_path: Path) -> None:
    """What a run draws must not depend on whether an earlier one has measured."""
    for decided in pool.run(2, decide, tp(2), tmp_path, True, True):
        assert not decided.drew
        assert len(measured_lines(decided)) == 8
        (line,) = decided.lines
        assert re.match(rf"{SUMMARY}8 products \(8 of them measured in \d+\.\d s\): .*; they take ", line)
        assert [text.partition(",")[0] for text in decided.progress] == [
            f"Async TP: measuring backends for product {number} of 8" for number in range(1, 9)
        ]


def test_a_second_run_remembers(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(2, decide, tp(2), tmp_path)
    assert not any(AS_BEFORE in line for line in measured_lines(first[0]))
    second = pool.run(2, decide, tp(2), tmp_path, False)
    assert [decided.chosen for decided in second] == [decided.chosen for decided in first]
    for decided in second:
        assert measured_lines(decided) == [line + AS_BEFORE for line in measured_lines(first[0])]
        assert decided.lines[-1].startswith(f"{SUMMARY}8 products (measured on {DATE}): ")
        assert decided.progress == []
    # Other shapes are measured, and beside them those of before are still known.
    longer = pool.run(2, decide, tp(2, training__seq_len=64), tmp_path)
    assert not any(AS_BEFORE in line for line in measured_lines(longer[0]))
    for settings in (tp(2), tp(2, training__seq_len=64)):
        pool.run(2, decide, settings, tmp_path, False)


def test_what_is_remembered_is_measured_again_on_request(pool: Pool, tmp_path: Path) -> None:
    longer = tp(2, training__seq_len=64)
    for settings in (tp(2), longer):
        pool.run(2, decide, settings, tmp_path)
    found = pool.run(2, decide, tp(2), tmp_path, True, False, True)
    assert not any(AS_BEFORE in line for line in measured_lines(found[0]))
    assert all("8 of them measured" in decided.lines[-1] for decided in found)
    pool.run(2, decide, longer, tmp_path, False)  # other shapes are remembered still


@pytest.mark.parametrize("backend", ["serial", "ring"])
def test_a_forced_backend_is_taken(pool: Pool, tmp_path: Path, backend: str) -> None:
    """Also from what is remembered; and what was forced does not stay for the run after."""
    chosen = pool.run(2, decide, tp(2), tmp_path)[0].chosen
    for decided in pool.run(2, decide, tp(2) | {BACKEND: backend}, tmp_path, False):
        assert {choice.backend for choice in decided.chosen.values()} == {backend}
        assert all(f": {backend}" in line for line in measured_lines(decided))
    assert pool.run(2, decide, tp(2), tmp_path, False)[0].chosen == chosen


class WrongOnOneRank(Ring):
    """A few rows of a product come out wrong on rank 1."""

    def gather_linear(self, x: Any, weights: Any, axis: str, chunks: int) -> Any:
        products, full = super().gather_linear(x, weights, axis, chunks)
        if collectives.axis(axis).rank == 1:
            products[0][2:4] = products[0][4:6]
        return products, full


class OldOnOneRank(Ring):
    """Rank 1 does not wait, and finds what came in the run before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[Any, list[Any]] = {}

    def gather_linear(self, x: Any, weights: Any, axis: str, chunks: int) -> Any:
        found = super().gather_linear(x, weights, axis, chunks)
        if collectives.axis(axis).rank != 1:
            return found
        before = self.last.setdefault((weights[0].shape, chunks), [found, found])
        before.append(found)
        return before.pop(0)


def decide_with_wrong_numbers(overrides: dict[str, Any], cache: Path, wrong: type[Ring]) -> Decided:
    with patch.dict(backends, ring=wrong()):
        return decide(overrides, cache)


@pytest.mark.parametrize("wrong", [WrongOnOneRank, OldOnOneRank])
@pytest.mark.parametrize("remembered", [False, True])
def test_what_gives_wrong_numbers_is_not_used(pool: Pool, tmp_path: Path, remembered: bool, wrong: type[Ring]) -> None:
    settings = tp(2) | {BACKEND: "ring"}
    if remembered:
        assert {choice.backend for choice in pool.run(2, decide, settings, tmp_path)[0].chosen.values()} == {"ring"}
    for decided in pool.run(2, decide_with_wrong_numbers, settings, tmp_path, wrong):
        said = [line for line in measured_lines(decided) if "ring cannot be used here: its results differ" in line]
        gathering = [name for name in decided.chosen if name.startswith("all_gather_linear forward")]
        assert len(said) == len(gathering) == 2
        assert decided.lines[0].startswith("Async TP: ring cannot run 2 of 8 products: its results differ")
        assert {name for name, choice in decided.chosen.items() if choice.backend == "serial"} == set(gathering)


def test_what_was_never_tried_is_not_remembered(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, decide, tp(2) | {BACKEND: "serial"}, tmp_path)
    found = pool.run(2, decide, tp(2), tmp_path)
    assert not any(AS_BEFORE in line for line in measured_lines(found[0]))


@on_cpu
def test_symmetric_without_a_gpu_is_said_in_one_line(pool: Pool, tmp_path: Path) -> None:
    for decided in pool.run(2, decide, tp(2) | {BACKEND: "symmetric"}, tmp_path):
        assert decided.lines[0] == "Async TP: symmetric cannot be used here (it needs CUDA); ring runs instead"
        assert sum("symmetric" in line for line in decided.lines) == 1
        assert {choice.backend for choice in decided.chosen.values()} == {"ring"}


def test_one_rank_has_nothing_to_do(pool: Pool, tmp_path: Path) -> None:
    (decided,) = pool.run(1, decide, tp(1), tmp_path)
    assert decided.lines == ["Async TP has nothing to do: parallelism.tensor_parallel_degree is 1"]
    assert decided.chosen == {}
    for off in pool.run(2, decide, tp(2) | {"parallelism.enable_async_tensor_parallel": False}, tmp_path):
        assert off == ({}, [], [], [], 0, False)
    assert not list(tmp_path.iterdir())


def rows_changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The file with something else in the place of each of its rows."""

    def apply(text: bytes) -> bytes:
        content = json.loads(text)
        content["products"] = {name: change(row) for name, row in content["products"].items()}
        return json.dumps(content).encode()

    return apply


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut short": lambda text: text[: len(text) // 2],
    "not text": lambda text: b"\xff\x00\xfe",
    "of another program": lambda text: b'{"products": ["ring"]}',
    "no row": rows_changed(lambda row: 3),
    "no times": rows_changed(lambda row: {**row, "times": None}),
    "times without numbers": rows_changed(lambda row: {**row, "times": [[a, b, "fast"] for a, b, _ in row["times"]]}),
    "backends without names": rows_changed(lambda row: {**row, "times": [[[a], b, c] for a, b, c in row["times"]]}),
    "no matmul": rows_changed(lambda row: {"times": row["times"], "chosen": row["chosen"]}),
    "serial is missing": rows_changed(lambda row: {**row, "times": row["times"][1:]}),
}


@pytest.mark.slow
def test_damaged_files_are_measured_again(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(2, decide, tp(2), tmp_path)[0]
    (file,) = (tmp_path / "overlap").iterdir()
    good = file.read_bytes()
    for name, damage in DAMAGES.items():
        file.write_bytes(damage(good))
        for decided in pool.run(2, decide, tp(2), tmp_path):
            assert measured_lines(decided) == measured_lines(first), name
        assert file.read_bytes() == good, name
    assert list((tmp_path / "overlap").iterdir()) == [file]


def test_a_folder_that_cannot_be_written_stops_nothing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "overlap").write_text("a file in its place")
    assert len(measured_lines(pool.run(2, decide, tp(2), tmp_path)[0])) == 8


# ---- in training -----------------------------------------------------------------------------------------------------


def trained(settings: dict[str, Any]) -> tuple[dict[str, Choice], set[str]]:
    """What was chosen for each product in a run, and what ran without a choice."""
    with patch.object(autotune, "MOST_ROUNDS", 2):
        train(settings, None)
    found = {str(product): choice for product, choice in choices.chosen.items()}
    without = {str(product) for product in choices.reported}
    choices.reset()
    return found, without


def test_a_run_keeps_what_was_chosen_and_measures_itself(harness: Harness, pool: Pool, tmp_path: Path) -> None:
    """Validation has another batch, so its products are others, too."""
    validation = {"enable": True, "freq": 2, "steps": 1, "local_batch_size": 2}
    overrides = tp(2, training__steps=3) | {f"validation.{key}": value for key, value in validation.items()}
    folder = tmp_path / "run"
    settings = harness.settings(overrides, 2) | {
        "job.dump_folder": str(folder),
        "training.cache_folder": str(tmp_path / "cache"),
    }
    began = time.monotonic()
    found = pool.run(2, trained, settings)
    elapsed = time.monotonic() - began
    chosen, _ = found[0]
    assert found == [(chosen, set())] * 2
    assert len(chosen) == 8 + 4
    rows = json.loads((folder / async_tp.FILE).read_text())
    assert [row["product"] for row in rows] == list(chosen)
    for row in rows:
        assert from_row(None, row).chosen == chosen[row["product"]]
    ran = json.loads((folder / engaged.FILE).read_text())
    assert ran["tensor_parallel"] == {name: str(chosen[name]) for name in list(chosen)[:8]}  # not those of validation
    assert ran["other_ranks"] == {}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Of the slowest rank, which may have waited for the other before the other's step began: not below each step.
    assert sum(row["tp_comm_seconds"] for row in steps if "loss" in row) < elapsed
    steps = [row for row in steps if "loss" in row]
    assert [row["step"] for row in steps if "tp_serial_step_seconds" in row] == [2]
    assert steps[2]["tp_comm_seconds"] == steps[1]["tp_comm_seconds"] > 0
    for row in (steps[0], steps[2]):
        sent, exposed, hidden = (row[f"tp_{name}"] for name in ("comm_seconds", "exposed_seconds", "hidden_fraction"))
        assert min(sent, exposed, row["tp_overlapped_step_seconds"]) > 0
        assert hidden == pytest.approx(max(0.0, 1 - exposed / sent), abs=1e-4)
    log = (folder / "log" / "rank-0.log").read_text()
    assert log.count(SUMMARY) == 1
    assert all(f"\n{product} " in log for product in chosen)
    assert "tp communication  " in log


def trained_with_times(settings: dict[str, Any], serial: float, overlapped: float) -> list[str]:
    """The products that were measured in a run whose steps seem to take these times."""
    measured: list[str] = []
    measure = autotune.measure

    def noted(shape: Any, *arguments: Any) -> Any:
        measured.append(str(shape.product))
        return measure(shape, *arguments)

    begin = SerialComparison.begin

    def seen(self: SerialComparison, step: int) -> None:
        begin(self, step)
        self.claimed = serial if choices.serial else overlapped  # type: ignore[attr-defined]

    with (
        patch.object(autotune, "MOST_ROUNDS", 1),
        patch.object(async_tp, "measure", noted),
        patch.object(SerialComparison, "begin", seen),
        patch.object(SerialComparison, "seconds", lambda self: self.claimed),
    ):
        train(settings, None)
    choices.reset()
    return measured


@pytest.mark.parametrize(
    ("overlapped", "times"), [(2.0, 2), pytest.param(0.5, 1, marks=pytest.mark.slow)], ids=["slower", "faster"]
)
def test_choices_that_steps_contradict_are_measured_again_once(
    harness: Harness, pool: Pool, tmp_path: Path, overlapped: float, times: int
) -> None:
    overrides = tp(2, training__steps=12, parallelism__async_tensor_parallel_compare_freq=2)
    settings = harness.settings(overrides, 2) | {
        "job.dump_folder": str(tmp_path / "run"),
        "training.cache_folder": str(tmp_path / "cache"),
    }
    found = pool.run(2, trained_with_times, settings, 1.0, overlapped)
    assert found[0] == found[1]
    assert Counter(Counter(found[0]).values()) == {times: 8}
    log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    told = "overlapped steps took 2.000 s and serial ones 1.000 s; measuring the products again"
    assert log.count(told) == times - 1
    assert log.count(SUMMARY) == times


# ---- the summary -----------------------------------------------------------------------------------------------------


def overlapped(seconds: float, comm: float, hidden: float) -> dict[str, float]:
    times = {"tp_comm_seconds": comm, "tp_exposed_seconds": comm * (1 - hidden), "tp_hidden_fraction": hidden}
    return times | {"tp_overlapped_step_seconds": seconds}


def in_serial(seconds: float, comm: float) -> dict[str, float]:
    return {"tp_comm_seconds": comm, "tp_serial_step_seconds": seconds}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([overlapped(9.0, 9.0, 0.0), overlapped(1.0, 0.4, 0.75)], "0.400 s a step, 75% hidden"),
        (
            [overlapped(9.0, 9.0, 0.0), in_serial(1.2, 0.4), overlapped(1.0, 0.4, 0.5)],
            "0.400 s a step, 50% hidden; 1.20 times as fast as serial steps, measured: 1.000 s against 1.200",
        ),
        (
            [overlapped(9.0, 9.0, 0.0), in_serial(0.9, 0.4), overlapped(1.0, 0.4, 1.0)],
            "0.400 s a step, 100% hidden; 0.90 times as fast as serial steps, measured: 1.000 s against 0.900"
            " (not worth it here)",
        ),
        ([{"tp_comm_seconds": 0.5, "tp_exposed_seconds": 0.5, "tp_hidden_fraction": 0.0}], "0.500 s a step, 0% hidden"),
    ],
)
def test_the_summary_tells_what_was_gained_and_that_it_was_measured(rows: list[dict[str, float]], said: str) -> None:
    """The first row is left out where there are others."""
    assert tensor_summary(rows) == said


def test_hidden_time_is_compared_with_communication_alone() -> None:
    comparison = SerialComparison(load_config(overrides=tp(2, metrics__log_freq=1)))
    comparison.begin(2)
    assert choices.serial
    assert comparison.end(Times(0.4, 0.4), 1.2) == in_serial(1.2, 0.4)
    assert not choices.serial, "the steps between two logged ones overlap"
    comparison.begin(3)
    assert not choices.serial
    # A transfer that competes with a product takes longer than alone: 0.9 s, of which 0.1 were waited for.
    assert comparison.end(Times(0.9, 0.1), 1.0) == overlapped(1.0, 0.4, 0.75) | {"tp_exposed_seconds": 0.1}
    assert comparison.end(Times(0.9, 0.8), 1.0)["tp_hidden_fraction"] == 0.0


@pytest.mark.parametrize(
    ("changes", "serial"),
    [
        ({}, [20, 120, 220]),
        ({"metrics.log_freq": 1}, [2, 12, 22]),
        ({"parallelism.async_tensor_parallel_compare_freq": 2}, [20, 40, 60]),
        ({"parallelism.async_tensor_parallel_compare_freq": 0}, []),
        ({"parallelism.async_tensor_parallel_backend": "serial"}, []),
        ({"parallelism.enable_async_tensor_parallel": False}, []),
        ({"profiling.enable_profiling": True}, []),
    ],
)
def test_which_logged_steps_run_serially(changes: dict[str, Any], serial: list[int]) -> None:
    config = load_config(overrides={"metrics.log_freq": 10, **ASYNC, **changes})
    logged = [step for step in range(1, 300) if step == 1 or step % config.metrics.log_freq == 0]
    assert [step for step in logged if runs_serially(config, step)][:3] == serial
