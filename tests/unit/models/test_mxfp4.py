"""MXFP4 experts of gpt-oss: the numbers of transformers, and tensors of a folder that are read as if unpacked."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardline.models.huggingface.files import map_tensor, stored_rows
from shardline.models.huggingface.mxfp4 import dequantize


def packed(experts: int = 3, rows: int = 8, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=source)
    return blocks, torch.randint(0, 255, (experts, rows, columns // 32), dtype=torch.uint8, generator=source)


def test_every_number_by_hand() -> None:
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).view(1, 1, 1, 16)
    row = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor([*row, *(-number for number in row)] * 2)
    for exponent in (-20, 0, 3):
        found = dequantize(blocks, torch.tensor([[[127 + exponent]]], dtype=torch.uint8))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.float().flatten(), expected * 2.0**exponent)


def test_numbers_equal_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed()
    expected = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())  # transposed there
    assert torch.equal(dequantize(blocks, scales).transpose(1, 2), expected)


def test_packed_tensors_of_a_folder_are_read_as_one(tmp_path: Path) -> None:
    blocks, scales = packed()
    plain = torch.randn(4)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": plain}, tmp_path / "model.safetensors"
    )
    stored = stored_rows(tmp_path)
    assert stored.keys() == {name, f"{name}_bias"}
    assert (stored[name][1].shape, stored[name][1].dtype) == ((3, 64, 8), "BF16")
    whole = dequantize(blocks, scales).transpose(1, 2)
    assert torch.equal(map_tensor(*stored[name]), whole)
    assert torch.equal(map_tensor(*stored[name], slice(1, 3)), whole[1:3])


def test_the_text_part_of_a_folder_is_read(tmp_path: Path) -> None:
    names = ("language_model.model.norm.weight", "vision_model.norm.weight", "multi_modal_projector.linear_1.weight")
    save_file({name: torch.randn(2) for name in names}, tmp_path / "model.safetensors")
    assert stored_rows(tmp_path).keys() == {"model.norm.weight"}
