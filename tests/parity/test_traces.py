"""What a run's own traces show of its communication: that each backend has run, and which dimensions it went over."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardline.cli.main import main
from shardline.parallel.tensor import autotune
from shardline.parallel.tensor.backend_table import Choice, choices
from tests.parity.harness import DEVICE, MODEL, Harness, train

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="counts the collectives of a host")
PROFILE = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 0, "profiler_active": 1}
SETTINGS: dict[str, Any] = {"training.steps": 2} | {f"profiling.{key}": value for key, value in PROFILE.items()}
TP: dict[str, Any] = {"parallelism.tensor_parallel_degree": 2, "parallelism.enable_async_tensor_parallel": True}


def trained(settings: dict[str, Any]) -> list[Choice]:
    with patch.object(autotune, "MOST_ROUNDS", 2):
        train(settings, None)
    chosen = list(choices.chosen.values())
    choices.reset()
    return chosen


class Traces:
    """Two steps of a run on some ranks, of which the second is traced."""

    def __init__(self, harness: Harness, folder: Path, ranks: int, overrides: dict[str, Any]) -> None:
        settings = harness.settings(SETTINGS | overrides, ranks) | {"job.dump_folder": str(folder)}
        settings["training.cache_folder"] = str(folder.parent / "cache")
        self.chosen: list[Choice] = harness.pool.run(ranks, trained, settings)[0]
        self.paths = [folder / "profile_traces" / "iteration_2" / f"rank{rank}_trace.json" for rank in range(ranks)]

    def rows(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        assert main(["trace", "overlap", *map(str, self.paths), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def events(self, rank: int) -> list[dict[str, Any]]:
        return [event for event in json.loads(self.paths[rank].read_text())["traceEvents"] if event["ph"] == "X"]


def spans(events: list[dict[str, Any]], kind: str) -> list[tuple[str, float, float]]:
    of_tp = [event for event in events if event.get("cat") == kind and event["args"]["axis"] == "tp"]
    return [(event["name"], event["ts"], event["dur"]) for event in of_tp]


def blocking(events: list[dict[str, Any]]) -> Counter[str]:
    """Collectives that the rank stood still for from beginning to end."""
    waits = set(spans(events, "communication_wait"))
    return Counter(span[0] for span in spans(events, "communication") if span in waits)


def calls(events: list[dict[str, Any]], name: str) -> int:
    return sum(event["name"] == name for event in events)


def test_forced_backends_are_those_that_ran(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """serial: collectives that the rank stands still for. ring: transfers between two ranks, some of them hidden."""
    backend = "parallelism.async_tensor_parallel_backend"
    serial, ring = (Traces(harness, tmp_path / name, 2, TP | {backend: name}) for name in ("serial", "ring"))
    products = 4 * MODEL["n_layers"]  # that gather, and as many that scatter: two in forward, two in backward
    transfers = MODEL["n_layers"] * sum(choice.chunks for choice in ring.chosen)
    assert transfers >= 2 * products
    for rank in range(2):
        plain, overlapped = serial.events(rank), ring.events(rank)
        assert blocking(plain).total() == len(spans(plain, "communication"))
        assert len(spans(overlapped, "communication")) - blocking(overlapped).total() == transfers
        for name in ("all_gather", "reduce_scatter"):
            assert blocking(plain)[name] - blocking(overlapped)[name] == products
        assert calls(plain, "c10d::_allgather_base_") - calls(overlapped, "c10d::_allgather_base_") == products
        # Sums that are scattered may travel point to point in both.
        sent, sent_at_once = (calls(events, "c10d::send") for events in (overlapped, plain))
        assert sent_at_once <= blocking(plain)["reduce_scatter"]
        assert 0 <= sent - transfers <= blocking(overlapped)["reduce_scatter"]
        assert calls(overlapped, "c10d::recv_") == sent
    of_serial, of_ring = ([row for row in run.rows(capsys) if row["dim"] == "tp"] for run in (serial, ring))
    assert len(of_serial) == len(of_ring) == 2
    for row in of_serial:
        assert row["exposed_ms"] == pytest.approx(row["communication_ms"])
    for row in of_ring:
        assert row["hidden_ms"] > 0


@pytest.mark.parametrize(
    ("ranks", "degrees", "dims"),
    [
        (2, {"data_parallel_shard_degree": 2}, {"dp_shard", "loss", "world"}),
        (
            4,
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
            {"dp_replicate", "dp_shard", "loss", "world"},
        ),
    ],
    ids=["fsdp", "hsdp"],
)
def test_sharded_data_parallelism_is_seen(
    harness: Harness,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    degrees: dict[str, int],
    dims: set[str],
) -> None:
    overrides = {f"parallelism.{key}": value for key, value in degrees.items()} | {"parallelism.fsdp_prefetch": 1}
    rows = Traces(harness, tmp_path / "run", ranks, overrides).rows(capsys)
    assert {row["dim"] for row in rows} - {"all"} == dims
    for row in rows:
        assert 0 < row["exposed_ms"] <= row["communication_ms"]
    # Weights of the next block come while one computes; gradients are waited for at once.
    assert all(row["hidden_ms"] > 0 for row in rows if row["dim"] == "dp_shard")
