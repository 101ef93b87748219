"""Models that transformers computes: built without memory, loaded, drawn and exported under their own names."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardline.config.architecture import Architecture
from shardline.config.check import check, missing, notes
from shardline.config.load import load_config
from shardline.errors import ConfigError, UserError
from shardline.models.flavors import resolve
from shardline.models.fused_weights import layer_sizes, logical_shapes, parameter_count
from shardline.models.generate import generate
from shardline.models.huggingface.config import architecture_from_hf
from shardline.models.huggingface.files import read_hf, write_hf
from shardline.models.huggingface.foreign import ForeignDecoder, positions_in
from shardline.models.huggingface.foreign_notes import foreign_notes
from shardline.models.init import init_weights
from shardline.models.state import load_logical_state
from shardline.storage.safetensors import entries_from
from shardline.training.loss import Head

transformers = pytest.importorskip("transformers")
from tests.foreign_types import write_tiny  # noqa: E402

KINDS = ("gpt2", "phi", "ernie4_5")  # tied Conv1D; an output layer with a bias; grouped heads and rotary tables


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("foreign")
    for kind in (*KINDS, "gpt_neox"):
        write_tiny(kind, place / kind)
    return {path.name: path for path in place.iterdir()}


def built(arch: Architecture, device: str = "cpu") -> ForeignDecoder:
    return ForeignDecoder(arch).to_empty(device=device)


def loaded(folder: Path, **overrides: Any) -> ForeignDecoder:
    model = built(architecture_from_hf(folder, overrides=overrides))
    load_logical_state(model, read_hf(folder, model.arch))
    return model.eval()


@pytest.mark.parametrize("kind", [*KINDS, "gpt_neox"])
def test_logits_and_gradients_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    ours, theirs = loaded(folders[kind]), transformers.AutoModelForCausalLM.from_pretrained(folders[kind]).eval()
    tokens, labels = torch.randint(0, 272, (2, 2, 16)).unbind(0)
    assert torch.equal(ours(tokens), theirs(tokens).logits)
    assert ours.gives_logits == (kind == "phi")
    loss = Head(None, 0, None).loss(ours, ours.hidden(tokens), labels, 1 / labels.numel())
    expected = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_model_that_changes_its_logits_at_the_end_computes_them_whole(tmp_path: Path) -> None:
    """The soft cap of Gemma 2 comes after its output layer: the loss in chunks would leave it out."""
    theirs = write_tiny("gemma2", tmp_path, final_logit_softcapping=0.5).eval()
    arch = architecture_from_hf(tmp_path, "transformers")
    ours = built(arch)
    load_logical_state(ours, read_hf(tmp_path, arch))
    ours.eval()
    tokens, labels = torch.randint(0, 272, (2, 2, 16)).unbind(0)
    assert not ours.gives_logits
    loss = Head(None, 0, None).loss(ours, ours.hidden(tokens), labels, 1 / labels.numel())
    assert ours.gives_logits
    expected = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)


def test_building_takes_no_memory_for_matrices_and_keeps_tables(folders: dict[str, Path]) -> None:
    model = ForeignDecoder(architecture_from_hf(folders["ernie4_5"]))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to(torch.bfloat16).to_empty(device="cpu")
    tables = dict(model.named_buffers())
    own = dict(transformers.AutoModelForCausalLM.from_pretrained(folders["ernie4_5"]).named_buffers())
    assert tables.keys() == own.keys() != set()
    assert all(torch.equal(tables[name], own[name]) for name in own)


def test_tied_weights_stay_tied(folders: dict[str, Path]) -> None:
    model = loaded(folders["gpt2"])
    inner = model.foreign_model[0]
    assert inner.lm_head.weight is inner.transformer.wte.weight
    assert "lm_head.weight" not in logical_shapes(model.arch)
    assert model.arch.tie_word_embeddings
    assert parameter_count(model.arch) == sum(parameter.numel() for parameter in model.parameters())
    held, _ = zip(*layer_sizes(model.arch), strict=True)
    assert sum(held) == sum(p.numel() for n, p in model.named_parameters() if n.startswith("transformer.h."))


def test_initial_weights_depend_on_seed_and_name(folders: dict[str, Path]) -> None:
    arch = architecture_from_hf(folders["gpt2"])
    first, second, other = (built(arch) for _ in range(3))
    torch.manual_seed(1)
    init_weights(first, 7)
    torch.manual_seed(2)
    init_weights(second, 7)
    init_weights(other, 8)
    weights = dict(first.named_parameters())
    assert all(torch.equal(weights[name], parameter) for name, parameter in second.named_parameters())
    matrix = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(weights[matrix], dict(other.named_parameters())[matrix])
    assert weights[matrix].std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((weights["transformer.h.0.ln_1.weight"] == 1).all())
    assert bool((weights["transformer.h.0.attn.c_attn.bias"] == 0).all())


@pytest.mark.parametrize("kind", [*KINDS, "gpt_neox"])
def test_export_opens_and_holds_the_same_bits(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = read_hf(folders[kind])
    write_hf(entries_from(tensors, logical_shapes(tensors.arch)), tensors.arch, tmp_path / "out")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(place).state_dict()
        for place in (folders[kind], tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = read_hf(tmp_path / "out")
    assert all(torch.equal(again[name], tensors[name]) for name in logical_shapes(tensors.arch))


def test_names_without_their_first_part_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(folders["gpt2"] / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(1)  # as older versions stored it
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    assert torch.equal(read_hf(tmp_path)["transformer.wpe.weight"], stored["transformer.wpe.weight"])
    del bare["wpe.weight"]
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing: transformer\.wpe\.weight"):
        read_hf(tmp_path)


def test_documents_are_kept_apart_or_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    apart = loaded(folders["ernie4_5"], attn_mask_type="block_causal")
    apart.check_masks(torch.device("cpu"))
    tokens = torch.randint(0, 272, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    torch.testing.assert_close(apart.hidden(tokens, documents=documents)[:, 5:], apart.hidden(tokens[:, 5:]))
    write_tiny("bloom", tmp_path)
    mixed = loaded(tmp_path, attn_mask_type="block_causal")
    with pytest.raises(UserError, match="packed documents apart"):
        mixed.check_masks(torch.device("cpu"))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    for decodes in (True, False):
        write_tiny("bert", tmp_path / str(decodes), is_decoder=decodes)
    loaded(tmp_path / "True").check_masks(torch.device("cpu"))
    with pytest.raises(UserError, match=r"BertLMHeadModel lets tokens see later ones"):
        loaded(tmp_path / "False").check_masks(torch.device("cpu"))


def test_positions_begin_with_every_document() -> None:
    documents = torch.tensor([[4, 4, 7, 7, 7, 2], [0, 1, 1, 1, 5, 5]])
    assert positions_in(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 0, 1]]


def test_generation_follows_transformers(folders: dict[str, Path]) -> None:
    model = loaded(folders["phi"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["phi"]).eval()
    prompt = torch.tensor([[5, 6, 7]])
    expected = theirs.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
    assert list(generate(model, prompt, 6)) == expected.tolist()
    with pytest.raises(UserError, match="more than the 64 positions"):
        next(generate(model, prompt, 100))


def config(folder: Path, **changes: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(overrides={"model.name": "auto", "model.hf_assets_path": str(folder), **keys})


def test_the_config_chooses_whose_code_computes(folders: dict[str, Path], tmp_path: Path) -> None:
    assert resolve(config(folders["gpt2"]).model).family == "transformers"
    with pytest.raises(ConfigError, match="model_type 'gpt2' is not supported"):
        resolve(config(folders["gpt2"], model__implementation="native").model)
    write_tiny("llama", tmp_path / "llama")
    assert resolve(config(tmp_path / "llama").model).family == "llama"
    assert resolve(config(tmp_path / "llama", model__implementation="transformers").model).family == "transformers"
    with pytest.raises(ConfigError, match=r"model\.implementation: .*'llama3' is a family of Shardline's own"):
        check(load_config(overrides={"model.implementation": "transformers"}))


def test_native_and_foreign_llama_agree(tmp_path: Path) -> None:
    from shardline.models.decoder import Decoder

    write_tiny("llama", tmp_path)
    foreign = loaded_as(tmp_path, "transformers")
    native = Decoder(architecture_from_hf(tmp_path))
    load_logical_state(native, read_hf(tmp_path))
    tokens = torch.randint(0, 272, (2, 16))
    torch.testing.assert_close(foreign(tokens), native(tokens), rtol=1e-4, atol=1e-4)


def loaded_as(folder: Path, implementation: str) -> ForeignDecoder:
    model = built(architecture_from_hf(folder, implementation))
    load_logical_state(model, read_hf(folder, model.arch))
    return model


def test_overrides_are_fields_of_config_json(folders: dict[str, Path]) -> None:
    arch = resolve(config(folders["gpt2"], model__overrides={"n_layers": 1, "dim": 16}).model)
    assert arch.foreign is not None
    assert (arch.foreign.config["n_layer"], arch.foreign.config["n_embd"]) == (1, 16)
    assert (arch.n_layers, arch.dim) == (1, 16)
    with pytest.raises(ConfigError, match=r"model\.overrides\.qk_norm: .*no such field"):
        resolve(config(folders["gpt2"], model__overrides={"qk_norm": True}).model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism__tensor_parallel_degree": 2}, "TP with transformers"),
        ({"parallelism__context_parallel_degree": 2}, "CP allgather with transformers"),
        ({"parallelism__pipeline_parallel_degree": 2}, "PP with transformers"),
        ({"model__converters": ["quantize.linear.float8"]}, "float8 with transformers"),
        ({"optimizer__name": "Muon"}, "Muon with transformers"),
    ],
)
def test_what_needs_a_native_block_is_refused(changes: dict[str, Any], words: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config(folders["gpt2"], **changes))


def test_torchtitans_backend_is_translated(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "transformers_modeling_backend"\nflavor = "debugmodel"\nhf_assets_path = "bytes"\n'
        f'[hf_transformers]\nmodel = "{tmp_path / "model"}"\n'
    )
    found = load_config(str(file))
    assert (found.model.name, found.model.implementation) == ("auto", "transformers")
    assert found.model.hf_assets_path == str(tmp_path / "model")
    assert found.model.tokenizer_path == "bytes"
    assert any("transformers_modeling_backend" in note for note in found.alias_notes)
    arch = resolve(found.model)
    assert (arch.dim, arch.n_layers, arch.family) == (256, 2, "transformers")
    full = load_config(str(file), ["--model.flavor=full"])
    assert resolve(full.model).dim == 32
    idle = load_config(overrides={"hf_transformers.model": "x"})
    assert any("hf_transformers.model has no effect" in note for note in notes(idle))


def test_a_missing_package_is_named(folders: dict[str, Path]) -> None:
    with patch("shardline.models.huggingface.foreign_config.find_spec", lambda name: None):
        with pytest.raises(ConfigError, match=r"pip install 'shardline\[transformers\]'"):
            resolve(config(folders["gpt2"]).model)
    assert missing(config(folders["gpt2"])) == {}


def test_what_cannot_be_built_is_said(tmp_path: Path, folders: dict[str, Path]) -> None:
    def words(**content: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError) as error:
            resolve(config(tmp_path).model)
        return str(error.value)

    assert "'strange' is not one that transformers builds" in words(model_type="strange")
    assert "auto_map" in words(model_type="strange", auto_map={"AutoModel": "x.Y"})
    assert "no causal language model" in words(model_type="clip")
    gpt2 = json.loads((folders["gpt2"] / "config.json").read_text())
    assert "quantization_config (gptq)" in words(**gpt2, quantization_config={"quant_method": "gptq"})
    assert "transformers cannot build model_type 'gpt2'" in words(**{**gpt2, "n_head": 5})


def test_dropout_and_router_losses_are_said(folders: dict[str, Path]) -> None:
    arch = architecture_from_hf(folders["gpt2"])
    assert foreign_notes(arch) == []
    assert arch.foreign is not None
    content = {**arch.foreign.config, "resid_pdrop": 0.1, "router_aux_loss_coef": 0.01}
    changed = arch.model_copy(update={"foreign": arch.foreign.model_copy(update={"config": content})})
    first, second = foreign_notes(changed)
    assert "resid_pdrop = 0.1" in first
    assert "auxiliary loss" in second


def test_the_config_is_checked_without_torch(folders: dict[str, Path]) -> None:
    import subprocess

    code = (
        "import sys; from shardline.config.load import load_config; from shardline.config.check import check\n"
        f"check(load_config(overrides={{'model.name': 'auto', 'model.hf_assets_path': {str(folders['gpt2'])!r}}}))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
