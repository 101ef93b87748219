"""The compiler's caches belong to one version of our code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardline.config.schema import Compile
from shardline.models.init import init_weights
from shardline.storage import compiler_cache as compiler
from tests.e2e.tiny import run
from tests.unit.models.test_model_init import ARCH, Decoder

HERE = compiler.PREFIX + compiler.source_hash(compiler.PACKAGE)


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A folder for the compiler's caches, named by the user."""
    folder = tmp_path / "caches"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def cache_folder() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_a_compiled_run_uses_a_folder_of_this_version(tmp_path, given, monkeypatch):
    loaded = []
    monkeypatch.setattr("shardline.training.setup.load_compiler", loaded.append)
    monkeypatch.setattr(torch._functorch.config, "autograd_cache_allow_custom_autograd_functions", False)
    run(tmp_path / "run", compile__enable=True, compile__backend="aot_eager", training__steps=1)
    assert cache_folder() == given / HERE
    assert [how.backend for how in loaded] == ["aot_eager"]
    assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions


def test_processes_of_a_run_share_the_folder(given):
    compiler.separate_caches()
    compiler.separate_caches()  # as in a process that inherits the first one's environment
    assert cache_folder() == given / HERE


def test_another_version_has_another_folder(tmp_path, given, monkeypatch):
    compiler.separate_caches()
    (tmp_path / "package" / "models").mkdir(parents=True)
    (tmp_path / "package" / "models" / "code.py").write_text("1")
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path / "package")
    compiler.separate_caches()
    assert cache_folder().parent == given
    assert cache_folder() != given / HERE


@pytest.mark.parametrize("change", ["content", "name", "folder"])
def test_the_hash_follows_every_file(tmp_path, change):
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        (folder / "models" / "inner").mkdir(parents=True)
        (folder / "models" / "a.py").write_text("x = 1\n")
    last = folders[1] / "models" / "a.py"
    if change == "content":
        last.write_text("x = 2\n")
    else:
        last.rename(last.with_name("b.py") if change == "name" else last.parent / "inner" / "a.py")
    assert compiler.source_hash(folders[0]) != compiler.source_hash(folders[1])


def test_every_operation_and_gradient_is_in_the_hash():
    found = re.compile(r"library\.(custom_op|Library)|autograd\.Function\b")
    files = [file for file in compiler.PACKAGE.rglob("*.py") if found.search(file.read_text())]
    assert len(files) > 10
    assert {file.relative_to(compiler.PACKAGE).parts[0] for file in files} <= set(compiler.ROOMS)
    for room in compiler.ROOMS:
        assert list((compiler.PACKAGE / room).rglob("*.py"))


def test_the_compiler_is_loaded_while_weights_are_drawn():
    alone, beside, called = Decoder(ARCH), Decoder(ARCH), []
    init_weights(alone, 3)
    init_weights(beside, 3, lambda: called.append(True))
    assert called == [True]
    for a, b in zip(alone.parameters(), beside.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("how", "loaded"), [(Compile(enable=True), True), (Compile(), False)])
def test_what_is_loaded(how, loaded, monkeypatch):
    names = []
    monkeypatch.setattr(compiler.importlib, "import_module", names.append)
    compiler.load_compiler(how)
    assert ("torch._inductor.compile_fx" in names) == loaded


@pytest.mark.slow
def test_a_changed_gradient_is_not_taken_from_the_cache(tmp_path):
    shutil.copytree(compiler.PACKAGE, tmp_path / "shardline", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "shardline/models/adapted/low_rank.py"
    before = "of_a, of_b = (of_low.t() @ read, gradient.t() @ low)"
    assert before in changed.read_text()

    def gradient_norm() -> str:
        words = ("--preset=lora-demo", "--compile.enable", "--training.steps=1", "--model.overrides.n_layers=1",
                 "--training.mixed_precision_param=bfloat16", "--training.seq_len=32", "--training.local_batch_size=1",
                 f"--job.dump_folder={tmp_path / 'run'}", "--overwrite")  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        program = "import sys; from shardline.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "train", *words]  # not forked from a process with the old code
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split("grad_norm ")[1].split()[0]

    first = gradient_norm()
    changed.write_text(changed.read_text().replace(before, before.replace("gradient.t()", "3 * gradient.t()")))
    assert gradient_norm() != first
