"""`shardline bench overlap`: what it refuses, what it prints, and that efficiencies follow from the times."""

from __future__ import annotations

import json
import os

import pytest
import torch

from shardline.cli.main import main
from shardline.comm import collectives
from shardline.parallel.tensor.autotune import CLEARLY, Measured, Shape
from shardline.parallel.tensor.backend_table import SERIAL, Choice, Product
from shardline.tools.bench import overlap
from shardline.tools.bench.overlap import _show, measure_row, together
from tests.e2e.tiny import command

KEYS = ["op", "direction", "M", "K", "N", "dtype", "world", "matmul_ms", "comm_ms", "serial_ms", "backends", "chosen"]
KEYS += ["chosen_chunks", "chosen_ms", "efficiency", "comm_hidden", "device", "torch"]
ROUNDED = 1e-4  # milliseconds, and half of the last digit of an efficiency
TINY = ["--flavor", "debugmodel", "--tp", "2", "--seq", "64"]
ON_CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
# The four projections of a block with 16 heads of 16, 256 wide, 768 inside: rows x depth x width on one of two ranks
PRODUCTS = [
    ("all_gather_linear", 64, 256, 384),
    ("linear_reduce_scatter", 64, 128, 256),
    ("all_gather_linear", 64, 256, 768),
    ("linear_reduce_scatter", 64, 384, 256),
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--backend", "rign"],
            "--backend: expected one of serial, ring, symmetric, fused, auto, got 'rign', did you mean",
        ),
        (["--tp", "1"], "one rank has nothing to overlap: --tp 2 measures two"),
        (["--tp", "3"], "16 heads cannot be shared by 3 ranks"),
        (["--seq", "63"], "1 x 63 = 63 tokens cannot be shared evenly by 2 ranks"),
        (["--seq", "33", "--batch", "3"], "3 x 33 = 99 tokens cannot be shared evenly by 2 ranks"),
        (["--nproc", "4"], "--tp 2 needs 2 ranks, but 4 were requested"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--flavor", "debugmodl"], "did you mean 'debugmodel'?"),
        (["--seq", "0"], "--seq: expected a whole number, 1 or more, got '0'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, said, capsys, monkeypatch):
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: pytest.fail("ranks were started"))
    assert main(["bench", "overlap", *TINY, *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert said in shown


def test_json_lines_of_the_four_projections():
    """`symmetric` cannot run here: that is said beside the lines, and ring is measured."""
    done = command("bench", "overlap", *TINY, "--backend", "symmetric", "--iterations", "3", "--json", env=ON_CPU)
    assert done.returncode == 0, done.stderr
    assert "note: Async TP: symmetric cannot be used here (it needs CUDA); ring runs instead" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["op"], row["M"], row["K"], row["N"]) for row in rows] == 2 * PRODUCTS
    assert [row["direction"] for row in rows] == ["forward"] * 4 + ["backward"] * 4
    for row in rows:
        assert list(row) == KEYS
        assert (row["dtype"], row["world"], row["torch"]) == ("float32", 2, torch.__version__)
        assert set(row["backends"]) == {"ring"}
        assert set(row["backends"]["ring"]) == {"ms", "chunks", "efficiency", "comm_hidden"}
        check(row)


def check(row):
    """Efficiencies follow from the times, as far as these are rounded; what is chosen is one of them."""
    of_comm = min(1.0, 1 - (row["serial_ms"] - row["matmul_ms"]) / row["comm_ms"])
    serial = {"ms": row["serial_ms"], "chunks": 1, "efficiency": 0.0, "comm_hidden": of_comm}
    exposed = row["serial_ms"] - row["matmul_ms"]
    chosen = {"serial": serial, **row["backends"]}[row["chosen"]]
    assert (row["chosen_ms"], row["chosen_chunks"], row["efficiency"]) == tuple(chosen.values())[:3]
    assert row["comm_hidden"] == pytest.approx(chosen["comm_hidden"], abs=5e-4 + 2 * ROUNDED / row["comm_ms"])
    fastest = min(entry["ms"] for entry in (serial, *row["backends"].values()))
    assert row["chosen_ms"] * (1 - CLEARLY) <= fastest + ROUNDED
    for entry in (serial, *row["backends"].values()):
        assert entry["ms"] > 0
        if exposed > ROUNDED:
            left = exposed * (1 - entry["efficiency"])
            allowed = ROUNDED * (2 + abs(1 - entry["efficiency"])) + 5e-4 * exposed
            assert left == pytest.approx(entry["ms"] - row["matmul_ms"], abs=allowed)
        of_comm = min(1.0, 1 - (entry["ms"] - row["matmul_ms"]) / row["comm_ms"])
        allowed = 5e-4 + ROUNDED * (2 + abs(1 - of_comm)) / row["comm_ms"]
        assert entry["comm_hidden"] == pytest.approx(of_comm, abs=allowed)


def known_row(monkeypatch):
    """PyTorch's own op is shown beside ours, and never chosen."""
    monkeypatch.setattr(collectives, "axis_size", lambda axis: 4)
    product = Product("all_gather_linear", "backward", 64, 256, 384, torch.bfloat16, "tp")
    ring = {Choice("ring", 1): 0.005, Choice("ring", 4): 0.0025}
    times = {SERIAL: 0.004, **ring, Choice("torch"): 0.002}
    return measure_row(Measured(product, 0.002, 0.001, times, Choice("ring", 4)), torch.device("cpu"))


def test_a_row_of_known_times(monkeypatch):
    row = known_row(monkeypatch)
    assert list(row) == KEYS
    assert row | {"device": "", "torch": ""} == {
        "op": "all_gather_linear",
        "direction": "backward",
        "M": 64,
        "K": 256,
        "N": 384,
        "dtype": "bfloat16",
        "world": 4,
        "matmul_ms": 2.0,
        "comm_ms": 1.0,
        "serial_ms": 4.0,
        "backends": {
            "ring": {"ms": 2.5, "chunks": 4, "efficiency": 0.75, "comm_hidden": 0.5},
            "torch": {"ms": 2.0, "chunks": 1, "efficiency": 1.0, "comm_hidden": 1.0},
        },
        "chosen": "ring",
        "chosen_chunks": 4,
        "chosen_ms": 2.5,
        "efficiency": 0.75,
        "comm_hidden": 0.5,
        "device": "",
        "torch": "",
    }


def test_the_table(monkeypatch, capsys):
    row = known_row(monkeypatch)
    _show([row, row | {"backends": {}, "chosen": "serial", "chosen_chunks": 1}], torch.device("cpu"))
    _, names, _, *rows, _, last, summed, of_comm = capsys.readouterr().out.splitlines()
    times = ("matmul", "comm", "serial", "ring", "torch")
    columns = ["operation", "direction", "M x K x N", *times, "chosen", "hidden of serial - matmul", "hidden of comm"]
    assert [cell.strip() for cell in names.split("┃")[1:-1]] == columns
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in rows]
    sizes = ["all_gather_linear", "backward", "64 x 256 x 384", "2.000", "1.000", "4.000"]
    assert cells == [
        [*sizes, "2.500 (4)", "2.000 (1)", "ring in 4 chunks", "0.75", "0.50"],
        [*sizes, "", "", "serial", "0.75", "0.50"],
    ]
    assert last.startswith("milliseconds (chunks), 4 ranks, bfloat16, ")
    # Ring was not in every row.
    assert summed == "all_gather_linear: serial adds 4.00 ms to the products; hidden of that: chosen 75%"
    assert of_comm == "all_gather_linear: hidden of the communication alone, mean over products: chosen 50%"


def test_products_together(monkeypatch):
    row = known_row(monkeypatch)
    long = {"matmul_ms": 20.0, "serial_ms": 26.0, "chosen_ms": 24.5, "comm_hidden": -0.125}
    long["backends"] = {"ring": {"ms": 24.5, "comm_hidden": -0.125}, "torch": {"ms": 30.0, "comm_hidden": -1.5}}
    hidden = {"op": "linear_reduce_scatter", "matmul_ms": 5.0, "serial_ms": 4.9}  # nothing exposed: nothing to say
    assert together([row, row | long, row | hidden]) == [
        "all_gather_linear: serial adds 8.00 ms to the products; hidden of that: chosen 38%, ring 38%, torch -25%",
        "all_gather_linear: hidden of the communication alone, mean over products: chosen 19%, ring 19%, torch -25%",
    ]


def test_what_is_refused_is_left_out_of_the_choice(monkeypatch):
    product = Product("all_gather_linear", "forward", 100, 64, 64, torch.bfloat16, "tp")
    ring = Choice("ring")
    monkeypatch.setattr(overlap, "candidates", lambda product, allowed: [SERIAL, ring, Choice("fused")])
    seen = Measured(product, 1.0, 1.0, {SERIAL: 2.0, ring: 1.5}, SERIAL, refused={"fused": "too small"})
    monkeypatch.setattr(overlap, "measure", lambda *arguments: seen)
    found = overlap.measure_all(Shape(product), ["serial", "ring", "fused"], torch.device("cpu"), 1)
    assert (found.chosen, found.refused) == (ring, {"fused": "too small"})
