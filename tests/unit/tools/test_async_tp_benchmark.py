"""The arithmetic of benchmarks/async_tp.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from shardline.comm import collectives

PATH = Path(__file__).parents[3] / "benchmarks" / "async_tp.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("async_tp_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_silent_collectives_have_the_shapes_of_others(benchmark, monkeypatch):
    monkeypatch.setattr(collectives, "axis_size", {"tp": 3}.get)
    quiet, x = benchmark.silence(), torch.arange(12.0).view(6, 2)
    assert quiet.gather_rows(x, "tp").equal(torch.cat([x, x, x]))
    assert quiet.scatter_rows(x, "tp").equal(x[:2] + x[2:4] + x[4:])
    assert quiet.sum_in_place(x, "tp") is x


@pytest.mark.parametrize(("words", "least"), [([], 30), (["--silent"], 40)])
def test_as_many_steps_as_count(benchmark, monkeypatch, capsys, words, least):
    assert {benchmark.kind(step, bool(words)) for step in range(1, least + 1) if benchmark.counts(step)} == {
        "serial",
        "overlapped",
        *(["silent"] if words else []),
    }
    monkeypatch.setattr(sys, "argv", ["async_tp.py", *words, f"--steps={least - 1}"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert f"--steps {least - 1}: a block of each kind that counts needs at least {least}" in capsys.readouterr().err


SECONDS = {"serial": 10.0, "overlapped": 8.5, "silent": 8.0}
EXPOSED = {"serial": 2.5, "overlapped": 0.5, "silent": 0.0}


def rows(benchmark, silent, steps):
    """A block's first step, and the first block, are slower than the rest."""
    found = []
    for step in range(1, steps + 1):
        kind = benchmark.kind(step, silent)
        late = 5.0 if step <= 10 or step % 10 == 1 else 0.0
        times = {"tp_comm_seconds": 2.5, "tp_exposed_seconds": EXPOSED[kind], "tp_hidden_fraction": 0.0}
        found.append({"step": step, "loss": 1.0, "step_seconds": SECONDS[kind] + late, **times})
    return found


@pytest.mark.parametrize("silent", [False, True])
def test_what_is_reached(benchmark, silent):
    found = benchmark.summary(rows(benchmark, silent, 90), silent)
    assert (found["serial"]["step_seconds"], found["overlapped"]["step_seconds"]) == (10.0, 8.5)
    assert found["serial"]["steps"] == (2 if silent else 4) * 9
    assert (found["speed_up"], found["bound"], found["hidden"]) == (1.176, 1.333, 0.8)
    assert found["reached"] == 0.529
    silently = {"step_seconds": 8.0, "bound": 1.25, "reached": 0.706}
    assert found.get("silent") == (silently if silent else None)
