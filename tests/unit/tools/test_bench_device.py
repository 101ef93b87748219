"""`shardline bench device`: a profile of this machine that the planner reads."""

from __future__ import annotations

import json
import tomllib

import pytest

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


@pytest.mark.slow
def test_several_ranks_measure_their_links(tmp_path):
    file = tmp_path / "two.toml"
    result = command("bench", "device", "--nproc", "2", "--write", str(file))
    assert result.returncode == 0, result.stderr
    assert "2 ranks: " in result.stdout
    assert tomllib.loads(file.read_text())["sources"]["links.node.bandwidth"].startswith("measured on ")
