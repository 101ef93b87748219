"""`shardline bench device`: a profile of this machine that the planner reads."""

from __future__ import annotations

import json
import tomllib
from types import SimpleNamespace

import pytest
import torch

from shardline.cli.main import main
from shardline.plan.hardware import find_profile
from shardline.tools.bench import device
from tests.e2e.tiny import command

QUICK = {"SHAPES": {"cpu": ((64, 64, 64), (64, 64, 16))}, "COPIED": {"cpu": 2**20}}


@pytest.fixture
def quick(monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "_as_many", lambda seconds: 3)


def test_a_profile_is_written_that_the_planner_reads(quick, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    assert main(["bench", "device", "--write", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "products in float32" in printed
    assert f"--gpu {file}" in printed
    mine = find_profile(str(file))
    assert mine.products["float32"].achieved > 0
    assert mine.copy > 0
    assert 0 < mine.kernel < 1e-2
    given = tomllib.loads(file.read_text())
    assert given["sources"]["links.node.bandwidth"].startswith("not measured")
    assert given["sources"]["memory.copy"].startswith("measured on ")
    assert main(["plan", "--model=llama3", "--flavor=debugmodel", "--gpus=1", f"--gpu={file}", "--seq=128"]) == 0


def test_json_has_every_measurement(quick, capsys):
    assert main(["bench", "device", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"products", "attention", "copy", "host_link", "disk", "launch", "kernel"} <= set(found)


def test_a_name_that_is_no_profile_is_refused(capsys):
    assert main(["bench", "device", "--write", "mine.json"]) == 2
    assert "ends with .toml" in capsys.readouterr().err


def test_the_inner_size_of_half_rate_follows_from_two_shapes():
    rows = [{"shape": [8, 8, 4096], "rate": 100.0}, {"shape": [8, 8, 64], "rate": 50.0}]
    assert device.half_rate_inner({"products": {"float32": rows}}) == 64


@pytest.mark.parametrize("half", [0, 200, 600])
def test_the_length_of_half_the_rate_follows_from_two_lengths(half):
    assert device.half_rate_length(*(length / (length + half) for length in (device.SHORT, device.LONG))) == half


CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")


def test_rates_follow_from_seconds(quick, monkeypatch):
    """Where each call takes half a second: on a CPU a product and those of its two gradients."""
    monkeypatch.setattr(device, "timed", lambda call, place, calls=None: (call(), 0.5)[1])
    rows = device.measure_products(CPU, "float32")
    assert rows == [{"shape": [64, 64, 64], "rate": 12.0 * 64**3}, {"shape": [64, 64, 16], "rate": 12.0 * 64 * 64 * 16}]
    forward = 4 * 4 * 256 * 256 * 128  # heads, queries, half of the keys twice, and two products of each
    assert device.measure_attention(CPU, 256) == {"cpu": {"forward": forward, "backward": 2.5 * forward}}
    assert device.measure_copy(CPU) == 4 * 2**20  # read and written
    assert device._rates({"name": "a CPU", "kind": "cpu"}, "float32", rows)["achieved"] == 12.0 * 64**3


def test_the_time_of_a_call_is_the_best_of_three_rounds(monkeypatch):
    clock, each = [0.0], iter([9, 9, 1, *[2] * 3, *[1.5] * 3, *[4] * 3, 7, 7, *[5] * 4])
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(device, "_as_many", lambda seconds: 3)

    def call():
        clock[0] += next(each)

    assert device.timed(call, CPU) == 1.5
    assert device.timed(call, CPU, calls=4) == 5
    assert not list(each)


def test_the_sustained_rate_is_a_share_of_the_best_product(monkeypatch):
    rows = [{"shape": [10, 10, 10], "rate": 1000.0}, {"shape": [10, 10, 5], "rate": 4000.0}]
    monkeypatch.setattr(device, "_product", lambda place, dtype, *shape: lambda: None)
    monkeypatch.setattr(device, "timed", lambda call, place, calls: 0.5)
    assert device.sustained(GPU, {"bfloat16": rows}) == 0.5  # by itself, 1000 FLOPs took a quarter of a second
    monkeypatch.setattr(device, "timed", lambda call, place, calls: 0.2)
    assert device.sustained(GPU, {"bfloat16": rows}) == device.sustained(CPU, {"bfloat16": rows}) == 1.0


def test_latency_and_bandwidth_follow_from_two_sizes(monkeypatch):
    """All-gather of 4 ranks: three hops of 10 us, three quarters of the bytes at 1 GB/s."""

    class Rings:
        def __init__(self, *given):
            pass

        def measure(self, op, size):
            ring = 3 * 1e-5 + 0.75 * size / 1e9
            return SimpleNamespace(seconds=ring if op == "all_gather" else 4 * ring)

    monkeypatch.setattr(device, "Bench", Rings)
    monkeypatch.setattr(device.collectives, "axis", lambda name: None)
    found = device.measure_links(SimpleNamespace(world_size=4), CPU)
    assert found == pytest.approx({"ranks": 4, "latency": 1e-5, "bandwidth": 1e9, "reduce": 0.5})


@pytest.mark.slow
def test_several_ranks_measure_their_links(tmp_path):
    file = tmp_path / "two.toml"
    result = command("bench", "device", "--nproc", "2", "--write", str(file))
    assert result.returncode == 0, result.stderr
    assert "2 ranks: " in result.stdout
    assert tomllib.loads(file.read_text())["sources"]["links.node.bandwidth"].startswith("measured on ")
