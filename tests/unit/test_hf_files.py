"""Hugging Face weight files: bit-exact both ways, problems named, nothing half-written."""

import functools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.hf import INDEX, HFTensors, hf_name, read_hf, write_hf
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import Entry
from shardline.tools.dry_run.fake import fake_group
from tests.model_state import logical_state

ARCH = Architecture(
    dim=16, n_layers=3, n_heads=4, n_kv_heads=1, ffn_dim=24, vocab_size=30, qk_norm=True, family="qwen3"
)


def state(arch: Architecture = ARCH) -> dict[str, Tensor]:
    model = Decoder(arch)
    init_weights(model, 0)
    return logical_state(model)


def write(tensors: dict[str, Tensor], out: Path, arch: Architecture = ARCH, **options: Any) -> Path:
    write_hf(entries(tensors), arch, out, **options)
    return out


def entries(tensors: dict[str, Tensor]) -> list[Entry]:
    return [Entry(name, tuple(t.shape), t.dtype, functools.partial(tensors.get, name)) for name, t in tensors.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(state(), tmp_path / "model")


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("limit", [1, 4000, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_tensors_read_back_bit_by_bit(limit: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in state().items()}
    out = write(tensors, tmp_path / "out", max_shard_bytes=limit)
    found = read_hf(out)
    assert found.arch == ARCH
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == found.dtype(name) == dtype
        assert torch.equal(found[name], tensor), name
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    shards = sorted(out.glob("*.safetensors"))
    if limit == 10**9:
        assert [path.name for path in shards] == ["model.safetensors"]
        return
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    if limit == 4000:
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert len(shards) < len(tensors)
        for path in shards:
            assert sum(tensor.nbytes for tensor in load_file(path).values()) <= max(limit, largest)


def test_export_can_round_to_another_type(tmp_path: Path) -> None:
    out = write(state(), tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(read_hf(out)["output.weight"], state()["output.weight"].to(torch.bfloat16))
    model = Decoder(ARCH)
    load_logical_state(model, read_hf(out))  # widened to the model's float32 without loss
    assert torch.equal(model.output.weight, state()["output.weight"].to(torch.bfloat16).float())


def test_only_one_tensor_is_held(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def read(tensor: Tensor) -> Tensor:
        nonlocal most
        fresh = tensor.clone()
        alive.add(fresh)
        most = max(most, sum(other.nbytes for other in alive))
        return fresh

    fresh = [entry._replace(read=functools.partial(read, entry.read())) for entry in entries(state())]
    write_hf(fresh, ARCH, tmp_path / "out")
    assert most == max(tensor.nbytes for tensor in state().values())


def test_problems_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.2.mlp.up_proj.weight")
    tensors["model.layers.7.mlp.up_proj.weight"] = lost
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(30, 16, dtype=torch.int8)
    rewrite(folder, tensors)
    with pytest.raises(UserError) as error:
        read_hf(folder)
    assert "missing: model.layers.2.mlp.up_proj.weight" in str(error.value)
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in str(error.value)
    assert "wrong shape: model.norm.weight is [3], but the model needs [16]" in str(error.value)
    assert "wrong type: lm_head.weight is I8, only F64, F32, F16, BF16 are read" in str(error.value)


def test_old_rotary_buffers_are_no_surprise(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert set(read_hf(folder)) == set(state())


def test_tied_models_with_and_without_a_head(tmp_path: Path) -> None:
    arch = ARCH.with_overrides({"tie_word_embeddings": True})
    tensors = state(arch)
    out = write({**tensors, "output.weight": tensors["tok_embeddings.weight"]}, tmp_path / "out", arch)
    stored = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert set(read_hf(out)) == set(tensors)
    rewrite(out, {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    assert set(read_hf(out)) == set(tensors)
    rewrite(out, {**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        read_hf(out)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    rewrite(folder, tensors)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        read_hf(folder)


def test_files_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    good = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(good[:100])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        read_hf(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        read_hf(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="only safetensors are read"):
        read_hf(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(UserError, match="weight_map"):
        read_hf(folder)
    for file in ("absent.safetensors", "../config.json"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        with pytest.raises(UserError, match="which is not in"):
            read_hf(folder)
    (folder / "a.safetensors").write_bytes(good)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.other": "a.safetensors"}}))
    with pytest.raises(UserError, match=r"model\.other is in the index but not in the file"):
        read_hf(folder)


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    def broken() -> Tensor:
        raise OSError("the disk is full")

    given = entries(state())
    given[9] = given[9]._replace(read=broken)
    with pytest.raises(OSError, match="the disk is full"):
        write_hf(given, ARCH, tmp_path / "out", max_shard_bytes=1)
    with pytest.raises(ValueError, match=r"were not given: .*output\.weight"):
        write_hf(entries(state())[:-1], ARCH, tmp_path / "out")
    with pytest.raises(ValueError, match="is not a tensor of this model"):
        write({"norm.weight": torch.ones(2)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(UserError, match="exists and is not empty"):
        write(state(), out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    (out / "precious").unlink()
    write(state(), out)
    assert set(read_hf(out)) == set(state())


def test_tokenizer_files_and_special_tokens_come_along(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "tokenizer.json").write_text('{"a": 1}')
    (assets / "notes.txt").write_text("not for export")
    (assets / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": [6, 7]}))
    out = write(state(), tmp_path / "out", assets_from=assets)
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (out / "notes.txt").exists()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, [6, 7])


def test_unknown_names_have_no_translation() -> None:
    assert hf_name("layers.12.feed_forward.w3.bias") == "model.layers.12.mlp.up_proj.bias"
    with pytest.raises(KeyError):
        hf_name("layers.1.attention.wqkv.weight")


def test_weights_that_fit_another_arithmetic_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_hf(folder, ARCH)
    assert not caplog.text
    read_hf(folder, ARCH.with_overrides({"rope_theta": 1e4, "init_std": 0.5}))
    assert "computes differently from its config.json (rope_theta: 500000.0, here 10000.0)" in caplog.text


def test_values_that_float16_cannot_hold_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = state()
    write(tensors, tmp_path / "good", dtype=torch.float16)
    assert not caplog.messages
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 1e5)
    write(tensors, tmp_path / "bad", dtype=torch.float16)
    (said,) = caplog.messages
    assert said.startswith(f"1 of {len(tensors)} tensors have values beyond float16's largest")
    assert "norm.weight" in said


class Reads(TorchDispatchMode):
    """Counts the bytes that operations take from tensors of a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in () if func.is_view else args:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self.places:
                self.bytes += tensor.nbytes
        return func(*args, **(kwargs or {}))


def test_a_rank_reads_only_the_rows_that_it_holds(tmp_path: Path) -> None:
    arch = Architecture(dim=64, n_layers=1, n_heads=8, n_kv_heads=8, ffn_dim=128, vocab_size=256)
    tensors = state(arch)
    file = write(tensors, tmp_path / "model", arch) / "model.safetensors"
    ranks, rank = 8, 3
    whole, model, reads = Decoder(arch), Decoder(arch), Reads()
    load_logical_state(whole, tensors)

    class Watched(HFTensors):
        def __getitem__(self, name: str) -> Tensor:
            tensor = super().__getitem__(name)
            reads.places.add(tensor.untyped_storage().data_ptr())
            assert str(file) in Path("/proc/self/maps").read_text()
            return tensor

    with fake_group(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        for name, parameter in list(model.named_parameters()):
            part = torch.zeros_like(parameter.chunk(ranks)[rank])
            sharded = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, sharded)
        found = read_hf(file.parent)
        with reads:
            load_logical_state(model, Watched(found.arch, found._rows))
        assert reads.bytes == sum(parameter.to_local().nbytes for parameter in model.parameters())
        for (name, expected), parameter in zip(whole.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.to_local(), expected.chunk(ranks)[rank]), name
