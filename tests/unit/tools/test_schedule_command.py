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

from shardline.cli.main import main
from shardline.config.names import SCHEDULES
from shardline.parallel.pipeline.schedules import build_schedule
from shardline.parallel.pipeline.timeline import in_flight, simulate
from shardline.tools.schedule import drawing

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
    assert "bubble 33.3% (closed form 33.3%): the share of 9 time units in which ranks are idle" in out
    assert out[-3:-1] == ["   0   33.3%          2              2  0", "   1   33.3%          1              1  1"]


@pytest.mark.parametrize("width", [40, 79, 120])
@pytest.mark.parametrize("name", SCHEDULES)
def test_drawings_fit_the_terminal_and_show_every_action(capsys, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    schedule = build_schedule(name, 4, 9)
    out = shown(capsys, "--pp", "4", "--microbatches", "9", "--schedule", name).out.splitlines()
    drawn = ["".join(line[8:] for line in out if line.startswith(f"rank {rank}  ")) for rank in range(4)]
    assert all(len(line) <= width for line in out if re.match(r"rank \d|time", line))
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
    assert streams.err.startswith("warning: GPipe: 2 micro-batches for 4 stages leave ranks idle for 60%")


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


def test_the_docs_show_what_the_commands_print(capsys, monkeypatch):
    """Each `shardline schedule` in the docs is run; what it prints stands behind it."""
    monkeypatch.setenv("COLUMNS", "120")
    section = DOCS.read_text().split("## Pipeline schedules\n")[1].split("\n## ")[0]
    commands = re.findall(r"^\$ shardline schedule (.*)$", section, re.MULTILINE)
    assert len(commands) == 2
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
