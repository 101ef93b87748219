import json

import pytest
import torch
from safetensors.torch import load_file

from shardline.errors import UserError
from shardline.storage import blocks
from shardline.storage.blocks import find_damage
from shardline.storage.location import locate
from shardline.storage.safetensors import Entry, header_of, write_tensors


def entries(tensors):
    return [Entry(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()]


@pytest.fixture
def tensors():
    return {
        "a": torch.randn(300, 17),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(33).to(torch.bfloat16),
        "ids": torch.arange(9),
    }


def test_safetensors_reads_what_was_written(tmp_path, tensors):
    write_tensors(tmp_path / "x.safetensors", entries(tensors))
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_every_flipped_byte_and_every_cut_is_found(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1024)
    path = tmp_path / "x.safetensors"
    recorded = write_tensors(path, entries(tensors))

    def damage():
        return "; ".join(map(str, find_damage(locate(path), recorded)))

    assert damage() == ""
    good = path.read_bytes()
    assert len(recorded["crc32"]) == -(-len(good) // 1024)
    for position in range(0, len(good), 997):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        start = position // 1024 * 1024
        assert f"is damaged: bytes {start} to {min(start + 1024, len(good))} fail their checksum" in damage()
    path.write_bytes(good[:-1])
    assert "torn" in damage()
    path.unlink()
    assert "missing" in damage()


def test_a_header_that_cannot_be_is_refused(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    write_tensors(path, entries(tensors))
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for content, words in (
        (good[:5], "its header would have"),
        (good[:100], "its header would have"),
        (good[:-1], "of its data cannot be ids, I64 [9]"),
        (good.replace(b"[300,17]", b"[300,18]"), "of its data cannot be a, F32 [300, 18]"),
        (good[:8] + b"{" * length + good[8 + length :], "Expecting"),
        (good[:8] + b"[]" + b" " * (length - 2) + good[8 + length :], "its header is not a table of tensors"),
        (good.replace(b"[300,17]", b"[3,null]"), "its header does not describe a"),
        (good + b"more", "its last 4 bytes belong to no tensor"),
    ):
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(ValueError) as refused:
            header_of(file, len(content))
        assert words in str(refused.value)


def test_written_in_the_entrys_type(tmp_path):
    tensor = torch.randn(5)
    write_tensors(tmp_path / "x.safetensors", [Entry("a", (5,), torch.bfloat16, lambda: tensor)])
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], tensor.to(torch.bfloat16))


def test_values_that_float16_cannot_hold_are_told(tmp_path, caplog):
    values = {"fits": [65504.0], "high": [1.0, 1e5], "low": [-7e4], "inf": [torch.inf], "b": [3e38], "c": [1e6]}
    tensors = {name: torch.tensor(numbers) for name, numbers in values.items()}
    narrow = [entry._replace(dtype=torch.float16) for entry in entries(tensors)]
    write_tensors(tmp_path / "x.safetensors", narrow)
    (said,) = caplog.messages
    assert said.startswith("4 of 6 tensors have values beyond float16's largest")
    assert "became inf: high, low, b and 1 more; bfloat16 and float32" in said
    write_tensors(tmp_path / "y.safetensors", [entry._replace(dtype=torch.bfloat16) for entry in entries(tensors)])
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("second", "words"), [([8, 16], "overlap at byte 8"), ([20, 28], "leave a hole at byte 16")])
def test_tensors_that_share_or_leave_out_bytes_are_refused(tmp_path, second, words):
    rows = {"a": [0, 16], "b": second}
    header = {name: {"dtype": "F32", "shape": [(end - first) // 4], "data_offsets": [first, end]}
              for name, (first, end) in rows.items()}  # fmt: skip
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(second[1]))
    with path.open("rb") as file, pytest.raises(ValueError, match=words):
        header_of(file, path.stat().st_size)


def test_a_type_that_no_file_holds_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(UserError, match=r"moment is torch\.float8_e4m3fn, a type that a checkpoint cannot hold"):
        write_tensors(path, entries({"moment": torch.zeros(4).to(torch.float8_e4m3fn)}))
    assert not path.exists()


def test_a_tensor_of_another_size_than_its_header_says_is_noticed(tmp_path):
    wrong = Entry("a", (4, 4), torch.float32, lambda: torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="a has -16 bytes beside the 64 of its header"):
        write_tensors(tmp_path / "x.safetensors", [wrong])
