"""NF4 is `bitsandbytes`' bit for bit, whatever is cut; 8 bits are near; kernels give the numbers of the CPU."""

import pytest
import torch

from shardline.comm.fake import fake_tensors
from shardline.models.adapted import quantized
from shardline.models.adapted.quantized import (
    QuantizedWeight,
    dequantize,
    dynamic_values,
    nf4_values,
    quantize,
    sharing,
)

SHAPES = [(96, 64), (40, 192), (64, 4096), (24, 14336)]
CPU = torch.device("cpu")


def held(found: QuantizedWeight, *place: slice) -> tuple[torch.Tensor, ...]:
    return tuple(one[place[: one.ndim]] if place else one for one in found if one is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(nf4_values(CPU), theirs.get_4bit_type("nf4", "cpu"))
    assert torch.equal(dynamic_values(CPU), theirs.create_dynamic_map())
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = quantize(weight, "nf4", None)
    assert torch.equal(ours.codes.flatten(), packed.flatten())
    assert torch.equal(ours.factors.flatten(), state.absmax)
    assert torch.equal(dequantize(held(ours), "nf4", dtype), theirs.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", SHAPES)
def test_double_quantisation_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Its own CPU kernel takes the farther of two values that are nearly as far; its general code, for other types,
    takes the nearer one. What it has stored we read as it does."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    shared = sharing(shape[1])
    ours = quantize(weight, "nf4", shared)
    factors = weight.view(-1, 64).abs().amax(1)
    rest = (factors - factors.mean()).double()
    codes, _ = torch.ops.bitsandbytes.quantize_blockwise(rest, dynamic_values(CPU), 256)
    assert torch.equal(ours.factors.flatten(), codes.flatten())
    assert (ours.factors.flatten() != state.absmax).sum() <= 0.002 * len(state.absmax)
    assert torch.equal(ours.offsets, state.offset.expand(shape[0]))
    theirs_stored = ours._replace(factors=state.absmax.view(shape[0], -1))
    assert torch.equal(dequantize(held(theirs_stored), "nf4"), theirs.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shared", [None, 2])
def test_any_cut_of_rows_and_of_columns_between_blocks_stands_for_the_same_numbers(shared: int | None) -> None:
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(1))
    whole = quantize(weight, "nf4", shared)
    wide = dequantize(held(whole), "nf4")
    assert (wide - weight).abs().max() < 0.6
    rows = held(whole, slice(5, 17))
    assert torch.equal(dequantize(rows, "nf4"), wide[5:17])
    columns = {"codes": slice(128, 256), "factors": slice(4, 8), "scales": slice(2, 4)}
    cut = [
        getattr(whole, name)[(slice(None), columns[name])] if name in columns else getattr(whole, name)
        for name in whole._fields
        if getattr(whole, name) is not None
    ]
    assert torch.equal(dequantize(tuple(cut), "nf4"), wide[:, 256:512])


def test_8_bits_are_a_factor_for_each_row() -> None:
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    found = quantize(weight, "int8", None)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert found.codes.dtype == torch.int8
    assert ((dequantize(held(found), "int8") - weight).abs() <= step / 2 + 1e-6).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [None, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_numbers_of_the_cpu(shared: int | None, dtype: torch.dtype) -> None:
    found = held(quantize(torch.randn(40, 14336), "nf4", shared))
    on_gpu = tuple(one.cuda() for one in found)
    assert torch.equal(dequantize(on_gpu, "nf4", dtype).cpu(), dequantize(found, "nf4", dtype))


def test_a_dry_run_quantises_and_leaves_no_table_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_kept", {})
    with fake_tensors():
        weight = torch.empty(24, 512)
        assert dequantize(held(quantize(weight, "nf4", 2)), "nf4").shape == weight.shape
    assert nf4_values(CPU)[-1].item() == dynamic_values(CPU)[-1].item() == 1.0
