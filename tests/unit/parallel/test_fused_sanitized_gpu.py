"""compute-sanitizer finds nothing in the fused kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RIGHT = "12 right"
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def run(*before: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*before, sys.executable, "-m", "tests.unit.parallel.fused_alone", *words]
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("programs", ["0", "1", "3"])
def test_the_kernels_alone(programs):
    done = run(words=(programs,))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == RIGHT


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    watched = ("--kernel-name", "kns=matmul", "--error-exitcode", "9")  # theirs alone: others take minutes
    done = run("compute-sanitizer", "--tool", tool, *watched, words=("2",))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert RIGHT in said
    assert "ERROR SUMMARY: 0 errors" in said or "RACECHECK SUMMARY: 0 hazards" in said, said
