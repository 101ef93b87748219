"""`shardline checkpoint ls | verify | show`: what is saved is told, what is broken is named, by file and byte."""

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardline.checkpoint import format as files
from shardline.cli.main import main
from shardline.storage import progress
from shardline.storage.blocks import find_damage
from shardline.storage.location import is_url, locate
from shardline.storage.progress import Progress
from tests.e2e.tiny import run

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with full checkpoints of steps 2 and 4 and the last weights, of step 5."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    last = {"checkpoint__last_save_model_only": True}
    run(folder, training__steps=5, checkpoint__enable=True, checkpoint__interval=2, **last)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run_it(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["checkpoint", *map(str, words)])
        return code, *capsys.readouterr()

    return run_it


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def a_tensor_file(step: Path) -> Path:
    return max(step.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(folder: Path, **changes: Any) -> None:
    """Write other words into a manifest, with the checksum they have."""
    path = folder / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    content["trainer"] = {**content["trainer"], "step": content["step"]}
    path.write_text(json.dumps({**content, "crc32": files.manifest_checksum(content)}))


def test_ls_has_a_line_for_each_step(folder: Path, call: Call) -> None:
    for where in (folder, folder / "checkpoint"):
        code, out, _ = call("ls", where)
        assert code == 0
        lines = [line.split() for line in out.splitlines()[2:]]
        assert [(line[0], line[1], line[-1]) for line in lines] == [
            ("2", "full", "whole"),
            ("4", "full", "whole"),
            ("5", "model", "whole"),
        ]
    found = {row["step"]: row for row in rows(call("ls", folder, "--json")[1])}
    assert found[2]["size"] == sum(p.stat().st_size for p in (folder / "checkpoint/step-2").glob("*.safetensors"))
    saved = files.find_checkpoint(folder, 2)
    assert found[2]["tensors"] == len(saved.tensors("model/")) + len(saved.tensors("optimizer/"))
    assert found[5]["tensors"] == len(saved.weights())
    one = rows(call("ls", folder / "checkpoint" / "step-2", "--json")[1])
    assert one == [found[2]]


def test_ls_names_what_is_broken_or_left_behind(folder: Path, call: Call) -> None:
    steps = folder / "checkpoint"
    for name in ("step-3.partial", "step-3.damaged", "step-7.abandoned", "step-2.replaced"):
        shutil.copytree(steps / "step-2", steps / name)
    edit(steps / "step-7.abandoned", step=7)
    shutil.copytree(steps / "step-2", steps / "step-1.replaced")
    edit(steps / "step-1.replaced", step=1)
    torn = a_tensor_file(steps / "step-4")
    torn.write_bytes(torn.read_bytes()[:-10])
    (steps / "step-5" / "manifest.json").write_text("{")
    (steps / "notes.txt").write_text("not ours")
    states = [(row["step"], row["state"]) for row in rows(call("ls", folder, "--json")[1])]
    assert [(step, state.split(":")[0]) for step, state in states] == [
        (1, "whole"),  # a rename that was cut short: the run would resume it
        (2, "whole"),
        (2, "replaced"),
        (3, "damaged"),
        (3, "partial"),
        (4, "broken"),
        (5, "broken"),
        (7, "abandoned"),
    ]
    assert f"{torn} has {torn.stat().st_size} bytes" in states[5][1]
    assert f"{steps / 'step-5' / 'manifest.json'} cannot be read" in states[6][1]
    assert [saved.step for saved in files.list_checkpoints(steps)][:2] == [1, 2]  # as the run itself sees it
    lines = call("ls", folder)[1].splitlines()
    assert any(line.endswith("partial: a save that is under way or was cut short") for line in lines)


def test_verify_reads_every_byte(folder: Path, call: Call) -> None:
    code, out, err = call("verify", folder)
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == [
        str(folder / "checkpoint" / f"step-{step}") for step in (2, 4, 5)
    ]
    damaged = a_tensor_file(folder / "checkpoint" / "step-4")
    size = damaged.stat().st_size
    for at in (3, 100, size // 2, size - 1):  # the header's length, the header, values
        flip(damaged, at)
        code, out, err = call("verify", folder)
        assert code == 2
        assert f"{damaged} is damaged: bytes 0 to {size} fail their checksum" in err
        assert f"{damaged.parent}: broken" in out
        assert call("verify", folder, "--step", "2")[0] == 0
        assert call("verify", folder, "--step=4")[0] == 2
        assert call("verify", damaged.parent)[0] == 2
        flip(damaged, at)
    assert call("verify", folder)[0] == 0
    damaged.unlink()
    code, _, err = call("verify", folder)
    assert (code, f"{damaged} is missing" in err) == (2, True)
    report = rows(call("verify", folder, "--json")[1])
    assert [row["whole"] for row in report] == [True, False, True]
    assert report[1]["problems"] == [{"file": str(damaged), "what": "is missing", "start": None, "end": None}]


def test_verify_compares_the_manifest_with_the_files(folder: Path, call: Call) -> None:
    """Bytes that are right under a manifest that says something else are no checkpoint."""
    step = folder / "checkpoint" / "step-2"
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    tensors["model/norm.weight"]["shape"][0] += 1
    edit(step, tensors=tensors)
    code, _, err = call("verify", step)
    assert (code, "does not fit the files: model/norm.weight" in err) == (2, True)


def test_a_number_that_changed_in_a_manifest_is_noticed(folder: Path, call: Call) -> None:
    path = folder / "checkpoint" / "step-2" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"tokens": 256', '"tokens": 257'))
    assert path.read_text() != text
    for command in ("ls", "verify"):
        assert "is damaged: it fails its checksum" in "".join(call(command, folder)[1:])
    assert call("verify", folder)[0] == 2


def test_failing_blocks_are_told_as_ranges(tmp_path: Path) -> None:
    data = bytes(range(250)) * 4
    path = tmp_path / "file"
    recorded = {"size": len(data), "block_bytes": 64}
    recorded["crc32"] = [zlib.crc32(data[at : at + 64]) for at in range(0, len(data), 64)]
    for flipped, expected in (
        ([], []),
        ([0], [(0, 64)]),
        ([64, 130], [(64, 192)]),
        ([5, 200, 999], [(0, 64), (192, 256), (960, 1000)]),
        (list(range(0, 1000, 49)), [(0, 1000)]),
    ):
        path.write_bytes(data)
        for at in flipped:
            flip(path, at)
        read: list[int] = []
        assert [(one.start, one.end) for one in find_damage(locate(path), recorded, read.append)] == expected
        assert sum(read) == len(data)


def test_progress_is_logged_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 200, 6))
    lines: list[str] = []
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(progress, "say", lines.append)
    with Progress("read", 4 << 30) as reading:
        for _ in range(4):
            reading.advance(1 << 30)
    assert lines[0].startswith("read: 50 %, 2.00 GiB, ")
    assert lines[-1].startswith("read: done in ")
    lines.clear()
    with Progress("read", 1 << 20) as reading:
        for _ in range(4):
            reading.advance(1 << 18)
    assert not lines


def test_show_tells_the_manifest_in_words(folder: Path, call: Call) -> None:
    code, out, _ = call("show", folder / "checkpoint" / "step-4", "--tensors")
    assert code == 0
    lines = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    lines = {name: text.strip() for name, text in lines.items()}
    assert lines["step"] == "4"
    assert lines["kind"] == "full: can be resumed"
    assert lines["tokens"] == "512"
    assert lines["data"].startswith("16 samples read of 32 tokens, in batches of 4")
    assert "n_layers 2, dim 64, n_heads 4, n_kv_heads 2" in lines["model"]
    assert lines["model/layers.1.attention.wk.weight"].split() == ["F32", "32", "x", "64", "1"]
    assert "5" in call("show", folder)[1].splitlines()[1]  # the newest
    described = rows(call("show", folder, "--json", "--tensors")[1])[0]
    assert described["tensors"]["model/norm.weight"] == {"dtype": "F32", "shape": [64], "pieces": 1}
    assert "rng" not in described["trainer"]
    assert described["architecture"]["vocab_size"] == 272


def test_what_holds_no_checkpoint(tmp_path: Path, call: Call) -> None:
    for command in ("ls", "verify", "show"):
        assert "does not exist" in call(command, tmp_path / "absent")[2]
        code, _, err = call(command, tmp_path)
        assert (code, "holds no checkpoint" in err) == (2, True)
        code, _, err = call(command, "nosuchprotocol://bucket/run")
        assert (code, "nosuchprotocol" in err) == (2, True)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    assert call("ls", tmp_path)[2].endswith(f"holds no checkpoint itself; name a run: {tmp_path / 'run'}\n")
    (tmp_path / "step-3").mkdir()
    assert "holds no checkpoint of step 4 (steps there: 3)" in call("verify", tmp_path, "--step", "4")[2]
    assert call("verify", tmp_path)[0] == 2  # its manifest is missing
    assert "step-3/manifest.json is missing" in call("show", tmp_path)[2]


def test_a_url_is_read_in_place(folder: Path, call: Call) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / "checkpoint"), "/listed/run/checkpoint", recursive=True)
    try:
        here = [{**row, "path": ""} for row in rows(call("ls", folder, "--json")[1])]
        there = [{**row, "path": ""} for row in rows(call("ls", "memory://listed/run", "--json")[1])]
        assert [{**row, "saved": 0} for row in there] == [{**row, "saved": 0} for row in here]
        assert all(row["saved"] for row in there)
        assert call("verify", "memory://listed/run")[0] == 0
        name = f"/listed/run/checkpoint/step-4/{a_tensor_file(folder / 'checkpoint/step-4').name}"
        content = bytearray(memory.cat_file(name))
        content[-1] ^= 1
        memory.pipe_file(name, bytes(content))
        code, _, err = call("verify", "memory://listed/run/checkpoint/step-4")
        assert (code, "memory://listed/run/checkpoint/step-4/" in err) == (2, True)
        assert "n_layers 2" in call("show", "memory://listed/run")[1]
    finally:
        memory.rm("/listed", recursive=True)
    assert call("ls", f"file://{folder}")[0] == 0


def test_urls_are_told_from_paths() -> None:
    assert is_url("s3://bucket/run")
    assert is_url("simplecache::s3://bucket/run")
    for text in ("outputs/run", "/a/b://c", "C:/x", "./s3://bucket", "run:1"):
        assert not is_url(text)


def test_it_answers_without_torch(folder: Path) -> None:
    for words in (["ls", str(folder)], ["verify", str(folder)], ["show", str(folder), "--tensors"]):
        code = (
            "import sys; from shardline.cli.main import main; code = main(sys.argv[1:]);"
            " sys.exit(code or 7 * bool({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code, "checkpoint", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
