"""`shardline schedule`: the drawing in the terminal and as SVG, the numbers, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cli.main import main
from shardline.config.layout import Layout
from shardline.config.load import load_config
from shardline.config.names import SCHEDULES
from shardline.models.flavors import resolve
from shardline.parallel.pipeline.schedules import build_schedule
from shardline.parallel.pipeline.stages import plan_pipeline
from shardline.parallel.pipeline.timeline import in_flight, simulate
from shardline.tools.schedule import drawing
from shardline.words import ranges

DOCS = Path(__file__).parents[3] / "docs" / "parallelism.md"
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def shown(capsys, *words):
    assert main(["schedule", *words]) == 0
    return capsys.readouterr()


def test_small_ones_name_their_actions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(capsys, "--pp", "2", "--microbatches", "2").out.splitlines()
    assert out[0] == "1F1B: 2 ranks, 1 stage on each, 2 micro-batches"
    assert out[2:4] == [
        "rank 0  0F0 0F1 .   .   0B0---- .   0B1----",
        "rank 1  .   1F0 1B0---- 1F1 1B1---- .   .",
    ]
    assert "bubble 33.3% (closed form 33.3%): the share of 9 time units in which ranks are idle" in " ".join(out)
    assert out[-4:-2] == ["   0   33.3%          2              2  0", "   1   33.3%          1              1  1"]


@pytest.mark.parametrize("width", [40, 79, 120])
@pytest.mark.parametrize("name", SCHEDULES)
def test_drawings_fit_the_terminal_and_show_every_action(capsys, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    schedule = build_schedule(name, 4, 9)
    out = shown(capsys, "--pp", "4", "--microbatches", "9", "--schedule", name).out.splitlines()
    drawn = ["".join(line[8:] for line in out if line.startswith(f"rank {rank}  ")) for rank in range(4)]
    assert all(len(line) <= width for line in out if not line.startswith("rank  ") and not re.match(r" +\d", line))
    units = round(simulate(schedule).total)
    for rank, line in enumerate(drawn):
        assert len(line) == units
        assert re.sub("[.-]", "", line).upper() == "".join(action.kind for action in schedule.orders[rank])
        assert line.count(".") == round(simulate(schedule).idle[rank] * units)


def test_small_letters_are_later_stages():
    schedule = build_schedule("Interleaved1F1B", 1, 1, 3)
    assert drawing(schedule, simulate(schedule), width=17, color=False)[0] == "rank 0  Fffb-b-B-"


def test_colours_only_where_asked_for_and_the_same_text(capsys):
    schedule = build_schedule("ZBVZeroBubble", 2, 4)
    timeline = simulate(schedule)
    for width in (30, 200):
        plain, colored = (drawing(schedule, timeline, width, color) for color in (False, True))
        assert not ESCAPE.search("".join(plain))
        assert all(f"\x1b[30;{code}m" in "".join(colored) for code in (44, 104, 46, 106, 43, 103))
        assert [ESCAPE.sub("", line).rstrip() for line in colored] == [line.rstrip() for line in plain]
    assert "\x1b" not in shown(capsys, "--pp", "2", "--microbatches", "4").out, "no terminal here"


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_on_a_terminal(capsys, monkeypatch, no_color):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert ("\x1b" in shown(capsys, "--pp", "2", "--microbatches", "4").out) != no_color


def test_json(capsys):
    words = ("--pp", "4", "--microbatches", "8", "--schedule", "dualpipev", "--json")
    found = json.loads(shown(capsys, *words).out)
    schedule = build_schedule("DualPipeV", 4, 8)
    timeline = simulate(schedule)
    assert found["schedule"] == "DualPipeV"
    assert found["stages"] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert found["bubble"] == timeline.bubble
    assert found["closed_form"] is None
    assert found["in_flight"] == list(in_flight(schedule))
    assert found["actions"] == [[[str(s.action), s.start, s.end] for s in row] for row in timeline.spans]


def test_warning_of_few_microbatches(capsys):
    streams = shown(capsys, "--pp", "4", "--microbatches", "2", "--schedule", "GPipe", "--json")
    assert json.loads(streams.out)["closed_form"] == pytest.approx(3 / 5)
    assert streams.err.startswith("warning: GPipe: with 2 micro-batches for 4 stages, ranks idle for 60%")


def test_svg(capsys, tmp_path):
    path = tmp_path / "drawing.svg"
    schedule = build_schedule("ZBVZeroBubble", 4, 8)
    shown(capsys, "--pp", "4", "--microbatches", "8", "--schedule", "ZBVZeroBubble", "--svg", str(path))
    root = ElementTree.parse(path).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    boxes = [box for box in root.findall("svg:rect", space) if box.get("class") in list("FBIW")]
    tips = [box.find("svg:title", space).text.split(":")[0] for box in boxes]
    assert sorted(tips) == sorted(str(action) for order in schedule.orders for action in order)
    rows = {}
    for box in boxes:
        rows.setdefault(box.get("y"), []).append((float(box.get("x")), float(box.get("width"))))
    assert len(rows) == 4
    for found in rows.values():
        assert all(x + width <= after + 0.02 for (x, width), (after, _) in pairwise(found))
        assert max(x + width for x, width in found) <= float(root.get("width"))
    texts = [text.text for text in root.findall("svg:text", space)]
    assert texts[0] == "ZBVZeroBubble: 4 ranks, 2 stages on each, 8 micro-batches"
    assert {"rank 0", "rank 3", "F forward", "I input gradient", "W weight gradient", "idle"} <= set(texts)
    assert "B backward" not in texts


def test_files(capsys, tmp_path):
    path = tmp_path / "a <b>&.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n")
    picture = tmp_path / "drawing.svg"
    assert "file a <b>&.csv: 2 ranks, 1 stage on each" in shown(capsys, "--csv", str(path), "--svg", str(picture)).out
    assert ElementTree.parse(picture).getroot()[0].text.startswith("file a <b>&.csv: 2 ranks")
    assert main(["schedule", "--csv", str(path), "--pp", "4"]) == 2
    assert "has rows for 2 ranks, the pipeline has 4" in capsys.readouterr().err


def test_comparison(capsys):
    table = shown(capsys, "--pp", "8", "--microbatches", "32", "--compare").out
    bubbles = {
        row[1].strip(): float(row[3].strip(" %")) for row in (line.split("|") for line in table.splitlines()[2:])
    }
    assert list(bubbles) == list(SCHEDULES)
    assert bubbles["1F1B"] > bubbles["Interleaved1F1B"] > bubbles["ZBVZeroBubble"]
    words = ("--pp", "4", "--microbatches", "8", "--compare", "--stages-per-rank", "3", "--json")
    found = [json.loads(line) for line in shown(capsys, *words).out.splitlines()]
    assert [len(row["stages"][0]) for row in found] == [1, 1, 3, 3, 3, 2, 2]
    held = [row["in_flight"][0] / len(row["stages"][0]) for row in found]  # the first rank holds the most of each
    table = shown(capsys, *words[:-1]).out.splitlines()[2:]
    assert [float(line.split("|")[4]) for line in table] == pytest.approx(held, abs=0.051)


# ---- with a config ---------------------------------------------------------------------------------------------------

SIZES = {"dim": 32, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 96, "vocab_size": 320}
EXPERTS = {"n_experts": 8, "top_k": 2, "expert_dim": 24, "shared_dim": 40, "first_dense": 2, "every": 2}
LENGTH = 64


@pytest.fixture
def run_file(tmp_path):
    """Write a config of a small model, with experts or without; further keys are those of `parallelism`."""

    def write(moe=True, **keys):
        keys = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe", **keys}
        lines = ['[model]\nname = "llama3"\nflavor = "debugmodel"\n[model.overrides]']
        lines += [f"{name} = {value}" for name, value in SIZES.items()]
        lines += ["[model.overrides.moe]", *(f"{name} = {value}" for name, value in EXPERTS.items())] if moe else []
        lines += [f"[training]\nseq_len = {LENGTH}\nlocal_batch_size = 8", "[parallelism]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in keys.items()]
        path = tmp_path / "run.toml"
        path.write_text("\n".join(lines))
        return str(path)

    return write


def work(layers, last, moe):
    """Multiplications of a token's forward pass: each weight that it meets once, and all scores of attention."""
    dim, heads, kv = 32, 32, 16
    attention = dim * heads + 2 * dim * kv + heads * dim + 2 * dim + 2 * heads * LENGTH  # with two norms
    dense = 3 * dim * 96
    experts = 8 * dim + 2 * 3 * dim * 24 + 3 * dim * 40  # router, two experts, the shared one
    total = sum(attention + (experts if moe and layer in (3, 5) else dense) for layer in layers)
    return total + last * (dim + 320 * dim)


@pytest.mark.parametrize("moe", [False, True])
def test_stages_cost_what_their_layers_compute(capsys, run_file, moe):
    found = json.loads(shown(capsys, run_file(moe), "--json").out)
    layers = [own[0] for own in found["layers"]]
    assert [layer for own in layers for layer in own] == list(range(6))
    pair = [work(own, last, moe) for last, own in enumerate(layers)]
    costs = [2 * one / sum(pair) for one in pair]
    assert [own[0] for own in found["cost"]] == pytest.approx(costs)
    assert abs(costs[0] - 1) > 0.01
    assert found["with_experts"] == [[sum(layer in (3, 5) for layer in own) * moe] for own in layers]
    assert found["total"] == pytest.approx(
        3 * (sum(costs) + 7 * max(costs))
    )  # 8 micro-batches, forward and 2 x backward
    assert found["bubble"] == pytest.approx(1 - 8 * 3 * sum(costs) / (2 * found["total"]))
    assert found["transfers"] == found["sent"] == [[0], [0]]


def test_experts_change_costs_where_the_cut_is_the_same(capsys, run_file):
    parts = [["tok_embeddings", "layers.0", "layers.1", "layers.2"]]
    parts.append(["layers.3", "layers.4", "layers.5", "norm", "output"])
    dense, moe = (
        json.loads(shown(capsys, run_file(moe, module_fqns_per_model_part=parts), "--json").out)
        for moe in (False, True)
    )
    assert dense["layers"] == moe["layers"] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert moe["cost"][0][0] > dense["cost"][0][0], "two of the experts are narrower than a dense part"
    assert moe["bubble"] < dense["bubble"]


def test_layers_are_those_of_a_run(capsys, run_file):
    path = run_file(pipeline_parallel_schedule="Interleaved1F1B")
    config = load_config(path)
    plan = plan_pipeline(config, resolve(config.model), Layout(pp=2))
    found = json.loads(shown(capsys, path, "--json").out)
    assert found["schedule"] == "Interleaved1F1B"
    assert found["layers"] == [[list(stage.layers) for stage in plan.held(rank)] for rank in range(2)]


def test_the_table_of_a_config(capsys, monkeypatch, run_file):
    monkeypatch.setenv("COLUMNS", "100")
    path = run_file(pipeline_parallel_schedule="Interleaved1F1B", expert_parallel_degree=4)
    out = shown(capsys, path).out.splitlines()
    numbers = json.loads(shown(capsys, path, "--json").out)
    assert f"bubble {100 * numbers['bubble']:.1f}% (5.9% with equal stages)" in "\n".join(out)
    assert "2 columns: 1 time unit" in "\n".join(out)
    head = next(index for index, line in enumerate(out) if line.startswith("rank    idle"))
    assert out[head].split()[-5:] == ["stages", "cost", "to", "experts", "layers"]
    for rank in range(2):
        line = out[head + 1 + rank]
        costs = " ".join(f"{cost:.2f}" for cost in numbers["cost"][rank])
        sent = 2 * LENGTH * (2 * 32 * 2 + 4) * 3 // 4 / 1024  # two rows of each token, there and back in bfloat16
        assert f"{rank} {rank + 2}     {costs}  2 x, {sent:.2f} KiB" in line
        layers = ranges(layer for own in numbers["layers"][rank] for layer in own)
        assert line.endswith(f"{layers} (1 with experts)")
        held = numbers["in_flight"][rank]
        assert line.split()[2:4] == [str(held), f"{held / 2:.1f}".removesuffix(".0")]  # two stages on each rank


def test_svg_of_a_config(capsys, run_file, tmp_path):
    path = tmp_path / "drawing.svg"
    found = json.loads(shown(capsys, run_file(), "--svg", str(path), "--json").out)
    root = ElementTree.parse(path).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    widths = [float(box.get("width")) for box in root.findall("svg:rect", space) if box.get("class") == "F"]
    (first,), (second,) = found["cost"]
    assert widths[0] / widths[-1] == pytest.approx(first / second, rel=1e-3)
    assert "% with equal stages)" in root.findall("svg:text", space)[1].text


def test_options_replace_what_the_config_says(capsys, run_file, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n")
    path = run_file(pipeline_parallel_schedule_csv=str(file))
    assert main(["schedule", path]) == 2
    assert "has 2 micro-batches, a step has 8" in capsys.readouterr().err
    assert "file mine.csv: 2 ranks, 1 stage on each, 2 micro" in shown(capsys, path, "--microbatches", "2").out
    assert shown(capsys, path, "--schedule", "1f1b", "--pp", "3").out.startswith("1F1B: 3 ranks, 1 stage on each, 8 mi")
    words = ("--schedule", "LoopedBFS", "--stages-per-rank", "3")
    assert "LoopedBFS: 2 ranks, 3 stages on each" in shown(capsys, path, *words).out
    words = ("--csv", str(file), "--training.local_batch_size=2")
    assert "file mine.csv: 2 ranks, 1 stage" in shown(capsys, run_file(), *words).out


def test_comparison_of_a_config_leaves_out_what_cannot_be_cut(capsys, run_file):
    streams = shown(capsys, run_file(), "--pp", "5", "--compare", "--json")
    rows = [json.loads(line) for line in streams.out.splitlines()]
    assert [row["schedule"] for row in rows] == ["GPipe", "1F1B"]
    assert all(row["bubble"] > row["closed_form"] + 0.01 for row in rows)
    assert "note: ZBVZeroBubble is left out: 6 layers" in streams.err
    assert main(["schedule", run_file(), "--pp", "9", "--compare"]) == 2
    assert "cannot be split into stages for any schedule" in capsys.readouterr().err


@given(
    name=st.sampled_from(SCHEDULES),
    weights=st.lists(st.floats(0.25, 3), min_size=6, max_size=6),
    width=st.sampled_from((40, 79, 400)),
)
def test_unequal_stages_are_drawn_in_full(name, weights, width):
    schedule = build_schedule(name, 3, 4)
    timeline = simulate(schedule, weights=weights)
    lines = drawing(schedule, timeline, width, color=False)
    assert all(len(line) <= width for line in lines[:-1])
    for rank, order in enumerate(schedule.orders):
        drawn = "".join(line[8:].ljust(width - 8) for line in lines if line.startswith(f"rank {rank}  "))
        if "stage 2" in lines[-1]:
            assert re.findall(r"\d\w\d", drawn) == [str(action) for action in order]
        else:
            assert re.sub(r"[. -]", "", drawn).upper() == "".join(action.kind for action in order)


def test_a_stage_without_work_is_left_out_of_the_drawing(capsys, run_file):
    parts = [["tok_embeddings"], [*(f"layers.{layer}" for layer in range(6)), "norm", "output"]]
    out = shown(capsys, run_file(module_fqns_per_model_part=parts)).out
    assert re.search(r"^   0  100.0% .* 0.00  none \(0 with experts\)$", out, re.MULTILINE)


def test_the_docs_show_what_the_commands_print(capsys, monkeypatch):
    """Each `shardline schedule` in the docs is run; what it prints stands behind it."""
    monkeypatch.setenv("COLUMNS", "120")
    section = DOCS.read_text().split("## Pipeline schedules\n")[1].split("\n## ")[0]
    commands = re.findall(r"^\$ shardline schedule (.*)$", section, re.MULTILINE)
    assert len(commands) == 3
    for words in commands:
        assert shown(capsys, *words.split()).out.strip() in section


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--pp N is missing"),
        ("--pp 8", "--microbatches N is missing"),
        ("--compare --pp 8", "--microbatches N is missing"),
        ("--pp 0 --microbatches 4", "--pp"),
        ("--pp 2 --microbatches 4 --schedule 1F1C", "there is no schedule '1F1C', did you mean '1F1B'?"),
        ("--pp 2 --microbatches 4 --stages-per-rank 2", "1F1B runs with exactly 1 stage per rank, got 2"),
        ("--pp 2 --microbatches 4 --schedule ZBVZeroBubble --stages-per-rank 3", "exactly 2 stages per rank, got 3"),
        ("--pp 2 --microbatches 4 --csv x --schedule GPipe", "--csv and --schedule exclude each other"),
        ("--pp 2 --microbatches 4 --compare --svg x", "--compare and --svg exclude each other"),
        ("--csv nowhere.csv", "nowhere.csv: cannot be read: No such file or directory"),
        ("--pp 2 --microbatches 4 --svg /nowhere/x.svg", "--svg /nowhere/x.svg: cannot be written"),
        ("--preset demo", "parallelism.pipeline_parallel_degree = 1: there is no pipeline to draw"),
        ("--preset demo --pp 1000 --microbatches 1000", "make 2000000 passes; at most 200000 can be drawn"),
        ("--preset moe-demo --pp 7", "4 layers, the embedding and the output cannot make 7 pipeline stages"),
        ("--preset demo --pp 2 --schedule 1F1C", "command line: parallelism.pipeline_parallel_schedule: there is no"),
        ("--preset demo --pp 2 --csv x --schedule GPipe", "--csv and --schedule exclude each other"),
        ("--preset demo --pp 2 --compare --svg x", "--compare and --svg exclude each other"),
        ("--preset demo --pp 2 --csv nowhere.csv", "nowhere.csv: cannot be read: No such file or directory"),
        ("--preset demo --pp 2 --parallelism.expert_parallel_degree 2", "the model has no experts"),
        (
            "--preset moe-demo --pp 2 --parallelism.expert_parallel_degree 3",
            "8 experts cannot be divided evenly",
        ),
        ("nowhere.toml", "nowhere.toml: there is no such file"),
        ("--pp 1000 --microbatches 1000", "make 2000000 passes; at most 200000 can be drawn"),
    ],
)
def test_refused_in_one_line(capsys, words, message):
    assert main(["schedule", *words.split()]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert message in streams.err
    assert len(streams.err.splitlines()) == 1


def test_torch_is_not_imported():
    code = (
        "import sys; from shardline.cli.main import main;"
        " main('schedule --pp 2 --microbatches 2 --svg /dev/null'.split()); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
