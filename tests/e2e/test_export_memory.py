"""Export and import hold a few tensors, not the model: measured as the peak resident memory of whole processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardline.checkpoint.convert import size_of
from shardline.cli.main import main
from shardline.config.architecture import Architecture
from shardline.models.fused_weights import logical_shapes, parameter_count
from shardline.models.huggingface.files import INDEX, write_hf
from shardline.storage.safetensors import Entry

BIG = Architecture(dim=1024, n_layers=16, n_heads=16, ffn_dim=2816, vocab_size=8192, max_seq_len=4096)
SMALL = BIG.with_overrides({"dim": 64, "n_layers": 1, "ffn_dim": 64, "vocab_size": 64})
MODEL_BYTES = 2 * parameter_count(BIG)  # in bfloat16
# Of the model's size, above what the same command takes for a model of nothing. What is held does not grow with the
# model: 64 MiB of blocks that were needed in part, and copies of the largest tensor (17 MB).
SHARE = 0.5

PROGRAM = """
import sys
from shardline.cli.main import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""


def peak_bytes(*words: str | Path) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def tensors(arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for name, shape in logical_shapes(arch).items():
        yield name, torch.randn(shape, generator=generator).bfloat16()


def entries(arch: Architecture) -> list[Entry]:
    stream = tensors(arch)
    return [Entry(name, shape, torch.bfloat16, lambda: next(stream)[1]) for name, shape in logical_shapes(arch).items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, arch in (("big", BIG), ("small", SMALL)):
        write_hf(entries(arch), arch, folder / name)
    return folder


@pytest.mark.slow
def test_peak_memory_is_less_than_half_the_model(folder: Path, tmp_path: Path) -> None:
    assert MODEL_BYTES > 400e6
    small, big = tmp_path / "imported-small", tmp_path / "imported-big"
    above = {"import": -peak_bytes("import", folder / "small", small)}
    above["import"] += peak_bytes("import", folder / "big", big)
    nothing = peak_bytes("export", small, tmp_path / "nothing")
    for words in ("--max-shard-size=100MB", "--format=consolidated"):
        above[words] = peak_bytes("export", big, tmp_path / words, words) - nothing
    in_megabytes = {what: f"{size / 1e6:.0f} MB" for what, size in above.items()}
    print(in_megabytes)
    assert max(above.values()) < SHARE * MODEL_BYTES, in_megabytes


def test_the_size_of_files_is_bounded_and_indexed(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["import", str(folder / "small"), str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "out"), "--max-shard-size", "40KB"]) == 0
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert {tmp_path / "out" / name for name in index["weight_map"].values()} == set(files)
    assert index["metadata"]["total_size"] == 2 * parameter_count(SMALL)
    for path in files:
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size - 8 - length <= 40_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = dict(model.named_parameters())
    assert torch.equal(found["model.embed_tokens.weight"], dict(tensors(SMALL))["tok_embeddings.weight"])


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "-1GB", "1.5.2GB", "5 XB"])
def test_a_size_that_is_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out"), f"--max-shard-size={text}"]) == 2
    assert "expected a size such as 5GB" in capsys.readouterr().err


def test_sizes_in_words() -> None:
    assert [size_of(text) for text in ("5GB", "2GiB", "1.5kB", "100b")] == [5 * 10**9, 2 << 30, 1500, 100]


def test_one_file_has_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(tmp_path), str(tmp_path / "out"), "--format=consolidated", "--max-shard-size=1GB"]
    assert main(words) == 2
    assert "--max-shard-size is for --format hf" in capsys.readouterr().err
