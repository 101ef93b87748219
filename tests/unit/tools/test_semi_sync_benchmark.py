"""benchmarks/semi_sync.py: what it makes of the rows of a run, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.semi_sync import summary

ROOT = Path(__file__).parents[3]


def row(step: int, seconds: float, loss: float, **more) -> dict:
    return {
        "step": step,
        "step_seconds": seconds,
        "loss": loss,
        "tokens": 256 * step,
        "comm_bytes": {"workers": 512},
        **more,
    }


def test_steps_that_are_made_at_once_count_by_their_mean_time():
    """The second one takes nothing: the first three, which have the costs of the start, do not count."""
    rows = [row(step, 9.0, 5.0) for step in (1, 2, 3)] + [row(4, 0.5, 3.0), row(5, 0.0, 2.0)]
    found = summary([*rows, {"validation_loss": 2.5}])
    assert found["step_seconds"] == pytest.approx(0.25)
    assert found["samples_per_second"] == pytest.approx(8.0)
    assert (found["tokens"], found["bytes_per_token"]) == (1280, 2.0)
    assert (found["loss"], found["validation"]) == (2.0, 2.5)
    assert "staleness" not in found


def test_of_asynchronous_workers_it_says_who_made_what():
    rows = [row(n, 1.0, 2.0, staleness=n % 2, contributions={"0": 2 - n % 2, "1": n % 2}) for n in (1, 2, 3, 4)]
    found = summary(rows)
    assert found["staleness"] == 0.5
    assert found["contributions"] == {"0": 6, "1": 2}
    assert found["validation"] is None


def test_each_host_has_a_pace():
    words = [sys.executable, "benchmarks/semi_sync.py", "--hosts", "3", "--paces", "0.1", "0.2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "--paces: 2 given for --hosts 3\n")
