"""A run in a notebook: a real kernel sends what a cell prints, and a line of it is drawn anew in place."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

FLAGS = "--preset demo --training.seq_len 32 --training.steps 8 --metrics.log_freq 4"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("RUNTIME_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    running, client = manager.start_new_kernel(cwd=str(tmp_path))
    yield client
    client.stop_channels()
    running.shutdown_kernel(now=True)


def printed(kernel: Any, cell: str) -> list[str]:
    """The texts that the kernel sends to standard output while it runs a cell."""
    texts: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "error":
            raise AssertionError("\n".join(content["traceback"]))
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            texts.append(content["text"])

    kernel.execute_interactive(cell, output_hook=keep, timeout=240)
    return texts


def in_a_cell(text: str) -> list[str]:
    """The lines that a notebook shows: after a carriage return a line is written over."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("way", ["call", "command"])
def test_a_cell_shows_rows_and_one_live_line_that_goes(kernel: Any, way: str) -> None:
    cells = {
        "call": f"from shardline.cli.main import main\nassert main('train {FLAGS}'.split()) == 0",
        "command": f"!{sys.executable} -m shardline train {FLAGS}",
    }
    text = "".join(printed(kernel, cells[way]))
    live = re.findall(r"\r *\r(\d/8 [^\r\n]*eta \d:\d\d)", text)
    assert len(live) >= 2, text[-2000:]
    lines = in_a_cell(text)
    rows = [line for line in lines if line.startswith("step ")]
    assert [row.split()[1] for row in rows] == ["1/8", "4/8", "8/8"]
    assert not [line for line in lines if "\u2501" in line]  # the bar of the live line
    assert "\x1b" not in text
