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

from shardline.checkpoint.shards import held_weights
from shardline.comm.fake import fake_group
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.fused_weights import logical_shapes
from shardline.models.huggingface import files as hf
from shardline.models.huggingface.files import (
    INDEX,
    HFTensors,
    find_tensors,
    read_hf,
    stored_entries,
    write_hf,
)
from shardline.models.huggingface.stored import is_logical, stored_as
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import Entry, header_of, write_tensors
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
    maps = ('{"weight_map": 5}', '{"weight_map": {"a": {}}}', '{"weight_map": {"a": "\\u0000"}}')
    for text in ("{}", "[" * 50_000, *maps):
        (folder / INDEX).write_text(text)
        with pytest.raises(UserError, match=rf"{INDEX}: cannot be read"):
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
    def name(logical: str, family: str = "llama") -> str | None:
        how = stored_as(logical, family)
        return None if how is None else how.name

    assert name("layers.12.feed_forward.w3.bias") == "model.layers.12.mlp.up_proj.bias"
    assert name("layers.12.feed_forward.w3.weight", "llama4_text") == "model.layers.12.feed_forward.up_proj.weight"
    assert name("layers.1.moe.router.balance", "deepseek_v3") == "model.layers.1.mlp.gate.e_score_correction_bias"
    for strange in ("layers.1.attention.wqkv.weight", "layers.1.moe.experts.w1", "layers.1.feed_forward.w1", "other"):
        assert name(strange) is None
        assert not is_logical(strange)
    assert name("layers.1.moe.experts.w1.weight") is None
    assert is_logical("layers.1.moe.experts.w1.weight")


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
        given = args[0] if args and isinstance(args[0], list) else args  # a list is stacked
        for tensor in () if func.is_view else given:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self.places:
                self.bytes += tensor.nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_a_rank_reads_only_the_rows_that_it_holds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"dim": 64, "n_layers": 1, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 128, "vocab_size": 256}
    arch = Architecture(**sizes) if family == "llama" else Architecture(**sizes, moe={**EXPERTS, "n_experts": 16})
    tensors = state(arch)
    file = write_as(family, tensors, arch, tmp_path / "model.safetensors")
    ranks, rank = 8, 3
    whole, model, reads = Decoder(arch), Decoder(arch), Reads()
    load_logical_state(whole, tensors)
    mapped = hf.map_tensor

    def watched(*place: Any) -> Tensor:
        tensor = mapped(*place)
        kept.append(tensor)  # so that no other tensor is given its address
        reads.places.add(tensor.untyped_storage().data_ptr())
        assert str(file) in Path("/proc/self/maps").read_text()
        return tensor

    kept: list[Tensor] = []
    monkeypatch.setattr(hf, "map_tensor", watched)
    with fake_group(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        for name, parameter in list(model.named_parameters()):
            part = torch.zeros_like(parameter.chunk(ranks)[rank])
            sharded = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, sharded)
        with reads:
            load_logical_state(model, opened_as(family, arch, file))
        assert reads.bytes == sum(parameter.to_local().nbytes for parameter in model.parameters())
        for (name, expected), parameter in zip(whole.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.to_local(), expected.chunk(ranks)[rank]), name
        mapped = len(kept) - sum(1 for name in tensors if ".experts." not in name)
    assert mapped == {"llama": 0, "mixtral": 3 * 2, "gpt_oss": 3}[family]  # two of 16 experts, three matrices each


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = {"n_experts": 4, "top_k": 2, "expert_dim": 12}
MOE = ARCH.with_overrides({"moe": {**EXPERTS, "first_dense": 1}, "family": "qwen3_moe"})


def write_as(family: str, tensors: dict[str, Tensor], arch: Architecture, file: Path) -> Path:
    write_tensors(file, stored_entries(entries(tensors), arch, family))
    return file


def opened_as(family: str, arch: Architecture, file: Path) -> HFTensors:
    with file.open("rb") as content:
        header = header_of(content, file.stat().st_size)
    return HFTensors(arch, find_tensors(arch, family, {name: (file, row) for name, row in header.items()}))


def test_every_expert_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    tensors = state(MOE)
    stored = load_file(write(tensors, tmp_path / "out", MOE) / "model.safetensors")
    for expert in range(4):
        for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            found = stored.pop(f"model.layers.2.mlp.experts.{expert}.{theirs}.weight")
            assert torch.equal(found, tensors[f"layers.2.moe.experts.{ours}.weight"][expert])
    assert "model.layers.1.mlp.gate.weight" in stored
    assert "model.layers.0.mlp.up_proj.weight" in stored  # its first layer is dense
    assert read_hf(tmp_path / "out").arch == MOE


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_fused_experts_are_as_transformers_stores_them(family: str, tmp_path: Path) -> None:
    """Gate before up, or by turns, with the columns of a matrix first: compared on files that transformers wrote."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 30, "num_local_experts": 4}
    kind = {"llama4_text": "Llama4Text", "gpt_oss": "GptOss"}[family]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    fused = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    for name, tensor in fused.items():
        torch.nn.init.normal_(tensor, std=1 + len(name))
    save_file(fused, tmp_path / "fused.safetensors", metadata={"format": "pt"})

    moe, biases = {**EXPERTS, "expert_dim": 12}, family == "gpt_oss"
    arch = Architecture(dim=16, n_layers=1, n_heads=4, ffn_dim=8, vocab_size=30, mlp_bias=biases, moe=moe)
    with (tmp_path / "fused.safetensors").open("rb") as content:
        header = header_of(content, (tmp_path / "fused.safetensors").stat().st_size)
    names = [name for name in logical_shapes(arch) if ".experts." in name]
    assert len(names) == (6 if biases else 3)
    place = {name: (tmp_path / "fused.safetensors", row) for name, row in header.items()}
    found = {}
    for name in names:
        how = stored_as(name, family)
        assert how is not None
        found[name] = hf.Located(how, logical_shapes(arch)[name], [place[how.name]])
    tensors = HFTensors(arch, found)
    prefix = "layers.0.moe.experts."
    where = "model.layers.0." + ("mlp" if biases else "feed_forward") + ".experts."
    gate, up = fused[where + "gate_up_proj"].chunk(2, -1)
    if biases:
        gate, up = fused[where + "gate_up_proj"][..., ::2], fused[where + "gate_up_proj"][..., 1::2]
        assert torch.equal(tensors[prefix + "w1.bias"], fused[where + "gate_up_proj_bias"][:, ::2])
        assert torch.equal(tensors[prefix + "w3.bias"], fused[where + "gate_up_proj_bias"][:, 1::2])
        assert torch.equal(tensors[prefix + "w2.bias"], fused[where + "down_proj_bias"])
    assert torch.equal(tensors[prefix + "w1.weight"], gate.transpose(1, 2))
    assert torch.equal(tensors[prefix + "w3.weight"], up.transpose(1, 2))
    assert torch.equal(tensors[prefix + "w2.weight"], fused[where + "down_proj"].transpose(1, 2))
    part = (slice(1, 3), slice(5, 7))
    assert torch.equal(tensors.part(prefix + "w3.weight", part), up.transpose(1, 2)[part])

    # And back, with every bit the same, also of what has another place in the file.
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    given |= {name: torch.zeros(shape) for name, shape in logical_shapes(arch).items() if name not in given}
    written = load_file(write_as(family, given, arch, tmp_path / "ours.safetensors"))
    assert {name for name in written if ".experts." in name} == fused.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in fused.items())
    router = "model.layers.0.mlp.router.weight" if biases else "model.layers.0.feed_forward.router.weight"
    assert written[router].shape == stored[router].shape


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_every_layout_read_back_bit_by_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fused = family in ("llama4_text", "gpt_oss")
    moe = {**EXPERTS, "balance_coeff": 0.1 if family == "deepseek_v3" else 0.0}
    moe["shared_dim"] = 8 if family in ("deepseek_v3", "llama4_text") else 0
    arch = ARCH.with_overrides({"moe": moe, "mlp_bias": fused})
    tensors = {name: tensor.to(dtype) for name, tensor in state(arch).items()}
    file = write_as(family, tensors, arch, tmp_path / "model.safetensors")
    found = opened_as(family, arch, file)
    for name, tensor in tensors.items():
        assert found.dtype(name) == dtype
        assert torch.equal(found[name], tensor), name
    if family == "deepseek_v3":
        narrow = {
            entry.name: entry.dtype for entry in stored_entries(entries(state(arch)), arch, family, torch.float16)
        }
        assert narrow["model.layers.0.mlp.gate.e_score_correction_bias"] == torch.float32
        assert narrow["model.layers.0.mlp.gate.weight"] == torch.float16
        held = held_weights(Decoder(arch), torch.float16)
        wide = {piece.name for one in held for piece in one.pieces if one.dtype == torch.float32}
        assert wide == {f"model/layers.{layer}.moe.router.balance" for layer in range(3)}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_one_expert_is_held_at_a_time(family: str, tmp_path: Path) -> None:
    """Of a checkpoint that can read some rows alone, no tensor of all experts is ever made."""
    arch = ARCH.with_overrides({"moe": EXPERTS, "mlp_bias": family == "gpt_oss"})
    sizes: list[int] = []

    def part(tensor: Tensor, place: tuple[slice, ...]) -> Tensor:
        sizes.append(tensor[place].nbytes)
        return tensor[place]

    def never() -> Tensor:
        raise AssertionError("a whole tensor of experts was read")

    given = []
    for entry in entries(state(arch)):
        rows = functools.partial(part, entry.read())
        of_experts = ".experts." in entry.name and entry.name.endswith("weight")
        given.append(entry._replace(read_part=rows, read=never if of_experts else entry.read))
    write_tensors(tmp_path / "model.safetensors", stored_entries(given, arch, family))
    assert max(sizes) == 12 * 16 * 4
    assert sizes.count(12 * 16 * 4) == 3 * 3 * 4  # layers, matrices, experts


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    folder = write(state(MOE), tmp_path / "model", MOE)
    with pytest.raises(UserError, match="has 4 experts in a layer, but the model has 8"):
        read_hf(folder, MOE.with_overrides({"moe": {"n_experts": 8}}))
    with pytest.raises(UserError, match="has 4 experts in a layer, but the model has 0"):
        read_hf(folder, ARCH)
    with pytest.raises(
        UserError, match=r"wrong shape: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight is \[12, 16\]"
    ):
        read_hf(folder, MOE.with_overrides({"moe": {"expert_dim": 16}}))
    with pytest.raises(UserError, match=r"Qwen3MoeForCausalLM has no layers\.1\.moe\.shared_experts\.w1\.weight"):
        read_hf(folder, MOE.with_overrides({"moe": {"shared_dim": 16}}))


def test_experts_of_two_types_are_refused(tmp_path: Path) -> None:
    folder = write(state(MOE), tmp_path / "model", MOE)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(folder, {**tensors, name: tensors[name].bfloat16()})
    with pytest.raises(UserError, match=r"experts of layers\.1\.moe\.experts\.w3\.weight are BF16 and F32"):
        read_hf(folder)


def test_experts_that_compute_differently_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(state(MOE), tmp_path / "model", MOE)
    read_hf(folder, MOE.with_overrides({"moe": {"aux_loss_coeff": 0.1}}))
    assert not caplog.text
    read_hf(folder, MOE.with_overrides({"moe": {"top_k": 3}}))
    assert "computes differently from its config.json (moe.top_k: 2, here 3)" in caplog.text


def test_a_balancing_bias_without_a_place_starts_at_zero_and_is_missed_when_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    balanced = MOE.with_overrides({"moe": {"balance_coeff": 0.001}})
    folder = write(state(balanced), tmp_path / "model", balanced)
    assert not caplog.text
    found = read_hf(folder, balanced)
    assert found.dtype("layers.1.moe.router.balance") == torch.float32
    assert torch.equal(found["layers.1.moe.router.balance"], torch.zeros(4))
    load_logical_state(Decoder(balanced), found)
    tensors = state(balanced)
    tensors["layers.1.moe.router.balance"][2] = 0.5
    write(tensors, tmp_path / "moved", balanced)
    assert "Qwen3MoeForCausalLM has no balancing bias: layers.1.moe.router.balance is left out" in caplog.text
