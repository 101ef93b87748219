"""How tests are handed out to processes: in order within some files, and all of them although a process dies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import TOGETHER

ROOT = Path(__file__).parents[3]
MANY = """
import os, pytest

@pytest.mark.parametrize("number", range(30))
def test_one(number):
    if number == {dies_at}:
        os._exit(3)
"""
STEPS = """
import os, pytest

@pytest.mark.parametrize("number", range(6))
def test_step(number):
    with open("steps", "a") as file:
        print(os.getpid(), number, file=file)
"""


def run(folder: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST")}
    command = [*words, "-p", "tests.scheduling", "tests"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_files_that_belong_together(tmp_path):
    file = tmp_path / "tests" / TOGETHER[0]
    file.parent.mkdir(parents=True)
    file.write_text(STEPS)
    (tmp_path / "tests" / "test_many.py").write_text(MANY.format(dies_at=-1))
    code, said = run(tmp_path)
    assert code == 0, said
    rows = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    assert len({process for process, _ in rows}) == 1
    assert [number for _, number in rows] == list("012345")


@pytest.mark.parametrize("dies_at", [0, 11, 29])
def test_a_process_that_dies_fails_one_test_alone(tmp_path, dies_at):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_many.py").write_text(MANY.format(dies_at=dies_at))
    code, said = run(tmp_path)
    assert code == 1, said
    assert f"crashed while running 'tests/test_many.py::test_one[{dies_at}]'" in said
    assert re.search(r"1 failed, 29 passed", said), said
