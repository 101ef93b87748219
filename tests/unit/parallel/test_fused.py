"""The order of tiles, and the fused kernels in Triton's interpreter: what they wait for comes, and comes in time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline.comm import collectives
from shardline.parallel.tensor import fused
from shardline.parallel.tensor.tile_order import column_of_tiles, gathering_shard, row_of_tiles, scattering_shard

ROOT = Path(__file__).parents[3]
TRITON = Path(sys.prefix) / "triton"  # apart: torch's compiler must not find it on a machine without a GPU


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), group=st.integers(1, 20))
def test_every_tile_comes_once(rows, columns, group):
    tiles = {
        (row_of_tiles(index, rows, columns, group), column_of_tiles(index, rows, columns, group))
        for index in range(rows * columns)
    }
    assert tiles == {(row, column) for row in range(rows) for column in range(columns)}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_shards_come_own_first_or_last_and_no_two_ranks_meet(ranks):
    gathering = [[gathering_shard(turn, own, ranks) for turn in range(ranks)] for own in range(ranks)]
    scattering = [[scattering_shard(turn, own, ranks) for turn in range(ranks)] for own in range(ranks)]
    for orders in (gathering, scattering):
        for order in (*orders, *zip(*orders, strict=True)):  # of each rank; at each turn
            assert sorted(order) == list(range(ranks))
    assert [order[0] for order in gathering] == [order[-1] for order in scattering] == list(range(ranks))


@pytest.mark.parametrize(
    ("ranks", "gpus", "world", "tiles", "division"),
    [
        (2, 8, 2, 132 * 5, (132, 5)),
        (2, 8, 2, 132 * 5 + 1, (111, 6)),  # no more than help
        (2, 8, 2, 7, (7, 1)),
        (2, 8, 2, 132 * 20, (132, 20)),
        (2, 8, 16, 128 * 20, (128, 6)),  # kernels for other axes must find a place
        (2, 1, 2, 132 * 12, (132, 6)),  # another rank's programs must find a place
        (4, 1, 4, 132 * 2 + 3, (89, 3)),
    ],
)
def test_how_tiles_are_divided(monkeypatch, ranks, gpus, world, tiles, division):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(fused, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(collectives, "axis_size", {"tp": ranks, "world": world}.get)
    assert fused._division(torch.device("cuda"), ranks, tiles) == division


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        (fused.NARROW, fused.NARROW, fused.NARROW[:4]),  # small ones are not tried
        (fused.NARROW, fused.NARROW[2:], fused.NARROW[2:4]),  # another rank's GPU decides as well
        (fused.NARROW, fused.NARROW[4:], fused.NARROW[4:]),
        (fused.NARROW[:1], fused.NARROW[1:], None),
    ],
)
def test_tiles_must_fit_the_gpus_of_all_ranks(monkeypatch, here, there, found):
    asked = []

    def fits(alone, tiles, most_registers):
        asked.append(tiles)
        return tiles in here

    monkeypatch.setattr(fused, "_fits", fits)
    monkeypatch.setattr(fused, "_gathering_alone", lambda rows, right, ranks: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(collectives, "max_in_place", lambda refused, axis: refused | int(asked[-1] not in there))
    x, right = torch.zeros(256, 64, dtype=torch.bfloat16), fused.Right(torch.zeros(128, 64), True)
    usable = fused._usable("gather", x, right, 256, 2, "tp")
    if found is None:
        with pytest.raises(RuntimeError, match="no tile of the kernel fits"):
            list(usable)
    else:
        assert tuple(usable) == found


@pytest.mark.parametrize(
    ("of_a_thread", "warps", "shared", "taken"),
    [
        (155, 8, 213_016, 160 * 256),  # one fits, by its shared memory
        (255, 8, 213_016, 65_536),
        (112, 4, 106_528, 2 * 112 * 128),
        (255, 4, 32_776, 2 * 256 * 128),  # two take all: no copy would find a place
        (96, 4, 32_776, 5 * 96 * 128),
        (255, 4, 131_128, 256 * 128),
    ],
)
def test_registers_are_those_of_all_programs_on_a_multiprocessor(of_a_thread, warps, shared, taken):
    assert fused.registers_taken(of_a_thread, warps, shared, 233_472) == taken


@pytest.mark.parametrize(("unit", "rounds"), [(1.0, 4), (0.15 / 9 / 4 / 10.5, 10), (1e-6, 24)])
def test_the_slowest_rank_chooses_tiles_in_as_many_rounds_as_take_a_moment(monkeypatch, unit, rounds):
    first, asked, elsewhere = [], [], torch.tensor([1.0 * unit, 4.0 * unit, 1.5 * unit])

    def seconds(run, tried, rounds):
        asked.append(rounds)
        return [3.0 * unit, 1.0 * unit, 2.0 * unit]

    monkeypatch.setattr(fused, "_usable", lambda *arguments: iter(fused.NARROW[:3]))
    monkeypatch.setattr(fused, "_seconds", seconds)
    monkeypatch.setattr(fused, "_gather", lambda x, rights, axis, tiles: first.extend(tiles))
    monkeypatch.setattr(collectives, "max_in_place", lambda times, axis: torch.maximum(times, elsewhere))
    x, right = torch.zeros(256, 64, dtype=torch.bfloat16), fused.Right(torch.zeros(128, 64), True)
    assert fused._tune("gather", x, right, 256, 2, "tp") == fused.NARROW[2]
    assert asked == [2, rounds]
    assert tuple(first) == fused.NARROW[:3]  # before anything is timed, as the first makes room


@pytest.mark.skipif(
    not (TRITON / "triton").is_dir(), reason=f"Triton is not in {TRITON}; make test puts it there on Linux"
)
@pytest.mark.parametrize(
    "words",
    [
        "gather 2 2 2 1 2",
        "scatter 2 4 2 1 1000 1",  # not all find a place at a time
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                *(
                    "gather 2 2 3 0",
                    "scatter 2 2 3 0 2",
                    "scatter 3 2 3 1",
                    "gather 3 1 2 1",
                    "scatter 2 2 6 0",
                    "scatter 3 2 4 1",
                    "scatter 2 3 5 2",
                    "scatter 3 1 2 1 5",
                ),
                "scatter 3 4 2 0 1000 2",
            )
        ),
    ],
)
def test_in_the_interpreter(words):
    environment = {**os.environ, "PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.parallel.fused_program", *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
