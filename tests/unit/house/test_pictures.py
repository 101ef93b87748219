"""Pictures of the docs are drawn by commands: what a terminal shows becomes an SVG file, a part of a page a PNG."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardline.cli.main import main
from tests.unit.show.made_run import make_run

ROOT = Path(__file__).parents[3]
SHOWS = "import time; print('\\033[36mfirst\\033[0m <b>', flush=True); print('x' * 50, flush=True); {}"


def drawn(folder: Path, *options: str, end: str = "") -> list[str]:
    """The lines of a picture, the command first."""
    picture = folder / "picture.svg"
    words = [str(ROOT / "docs" / "draw_terminal.py"), str(picture), *options, "--", sys.executable, "-c"]
    subprocess.run([sys.executable, *words, SHOWS.format(end)], check=True, timeout=60)
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    lines = [line for line in root.iter() if line.tag.endswith("}text")]
    assert 'fill="#4fd0e0">first</tspan>' in picture.read_text(encoding="utf-8")
    return ["".join(line.itertext()).rstrip() for line in lines]


def test_lines_are_those_of_a_terminal_of_that_width(tmp_path: Path) -> None:
    command, *lines = drawn(tmp_path, "--columns", "40", "--rows", "10")
    assert command.startswith("$ python")
    assert lines == ["first <b>", "x" * 40, "x" * 10]


def test_a_command_is_drawn_when_a_text_appears_and_ended(tmp_path: Path) -> None:
    assert drawn(tmp_path, "--until", "xxx", end="time.sleep(600)")[1:] == ["first <b>", "x" * 50]


@pytest.mark.slow
def test_a_picture_has_the_charts_that_are_named_alone(tmp_path: Path) -> None:
    """Cut out of a page that `shardline report` wrote, by the browser of the browser tests."""
    pytest.importorskip("playwright")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no browser")
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    sizes = []
    for titles in (["Loss"], ["Loss", "Gradient norm", "Where a step goes"], ["Loss", "--alone"]):
        picture = tmp_path / "picture.png"
        words = [str(ROOT / "docs" / "draw_page.py"), str(picture), str(page), *titles]
        subprocess.run([sys.executable, *words], check=True, timeout=60)
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        sizes.append((int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")))
    one, three, alone = sizes
    assert one[0] == three[0] == 1180 > alone[0]
    assert alone[1] < one[1] < three[1]
