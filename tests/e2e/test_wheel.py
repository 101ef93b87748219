"""The package as it is installed: a built wheel in a folder of its own, used from outside the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny import rows

ROOT = Path(__file__).parents[2]


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the wheel was unpacked by pip; what it depends on is that of the tests."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place / "dist", cwd=ROOT)
    (wheel,) = (place / "dist").glob("shardline-*.whl")
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", place / "site"]
    run(sys.executable, "-m", "pip", "install", "--quiet", *options, wheel)
    return place / "site"


@pytest.mark.slow
def test_a_wheel_trains_outside_the_repository(installed, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"SHARDLINE_CACHE": str(tmp_path / "cache")}
    outside = {"cwd": tmp_path, "env": environment}
    where = "import shardline; print(shardline.__file__)"
    found = run(sys.executable, "-P", "-c", where, **outside)
    assert found.strip() == str(installed / "shardline" / "__init__.py")
    program = installed / "bin" / "shardline"
    assert "n_layers" in run(program, "config", "--preset", "demo", **outside)
    text = tmp_path / "mine.txt"
    text.write_text("The green bottle on the wall. " * 200)
    data = [f"--{part}.dataset_path={text}" for part in ("training", "validation")]
    run(program, "train", "--preset=text", *data, "--training.steps=1", "--job.dump_folder=text", **outside)
    assert [row["step"] for row in rows(tmp_path / "text") if "loss" in row] == [1]
    assert "finetune\n  Continue training a Hugging Face" in run(program, "config", "--presets", **outside)
    words = ["train", "--preset", "demo", "--training.steps", "2"]
    assert "run folder" in run(program, *words, **outside)
    (folder,) = (tmp_path / "outputs").iterdir()
    assert [row["step"] for row in rows(folder)][-1] == 2
    run(program, "report", folder, "--out", "page.html", **outside)
    assert "uPlot" in (tmp_path / "page.html").read_text()
    assert "Permission is hereby granted" in (installed / "shardline/show/assets/vendor/uPlot-LICENSE").read_text()
    run(program, *words, "--nproc", "2", "--job.dump_folder", "two", **outside)
    assert [row["step"] for row in rows(tmp_path / "two")][-1] == 2
