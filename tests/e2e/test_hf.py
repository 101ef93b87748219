"""Hugging Face in and out: import, export, last save; bit by bit, whole or not at all, problems named."""

import functools
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardline.checkpoint import format as files
from shardline.checkpoint.assets import tokenizer_of_run
from shardline.checkpoint.reader import TensorView
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.models.fused_weights import logical_shapes
from shardline.models.huggingface.files import INDEX, HFTensors
from shardline.run.options import TrainOptions
from shardline.training.trainer import Trainer
from tests.e2e.tiny import run, tiny_config
from tests.model_state import hf_state, logical_state

transformers = pytest.importorskip("transformers")
from tests.e2e.hf_folders import tokenizer_folder, write_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")

Maker = Callable[..., Path]
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return functools.partial(write_model, tmp_path / "original")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of a text that takes no time to tokenize."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "corpus.txt").write_text("the green bottle on the wall. " * 100)
    return {"training__dataset_path": str(folder / "corpus.txt"), "training__cache_folder": str(folder / "cache")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run with a full checkpoint of step 2 and the last weights, of step 4; and those weights."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = Trainer(tiny_config(folder, training__steps=4, checkpoint__enable=True, checkpoint__interval=2))
    trainer.train()
    return folder, hf_state(trainer.arch, logical_state(trainer.model))


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def opened(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return opened(folder)(torch.arange(40)[None] * 7 % 257).logits


def call(*words: str | Path) -> int:
    return main([str(word) for word in words])


# ---- import and export -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"dtype": torch.bfloat16, "shard": "20KB"}),
        ("Llama", {"tie_word_embeddings": True, "shard": "20KB"}),
        ("Qwen2", {"tie_word_embeddings": True, "dtype": torch.bfloat16}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": 9, "dtype": torch.float16}),
        ("Gemma2", {"sliding_window": 9, "head_dim": 16, "dtype": torch.bfloat16, "pad_token_id": 2}),
        ("Phi3", {"pad_token_id": None, "dtype": torch.bfloat16, "shard": "20KB"}),  # joined tensors
        ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
        ("Starcoder2", {"sliding_window": 9, "dtype": torch.float16}),
        ("Mixtral", {"num_local_experts": 4, "shard": "20KB"}),
        ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0], "dtype": torch.bfloat16}),
    ],
)
def test_there_and_back_is_bit_exact(family: str, options: dict[str, Any], make: Maker, tmp_path: Path) -> None:
    folder = make(family, **options)
    assert (folder / INDEX).exists() == ("shard" in options)
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out", "--format", "hf") == 0
    assert_same(stored(tmp_path / "out"), stored(folder))
    assert torch.equal(logits(tmp_path / "out"), logits(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [1, 2])
    assert config["dtype"] == str(options.get("dtype", torch.float32)).removeprefix("torch.")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the green wall")["input_ids"]
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)("the green wall")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "original", "out"]


def test_mixed_types_are_kept_and_dtype_changes_them(make: Maker, tmp_path: Path) -> None:
    folder = make(dtype=torch.bfloat16)
    tensors = {
        name: tensor.float() if "norm" in name else tensor for name, tensor in stored(folder).items()
    }  # norms in float32 beside bfloat16 matrices
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out") == 0
    assert_same(stored(tmp_path / "out"), tensors)
    assert call("import", folder, tmp_path / "wide", "--dtype", "float32") == 0
    assert call("export", tmp_path / "wide", tmp_path / "narrow", "--dtype=bfloat16") == 0
    assert {tensor.dtype for tensor in files.find_checkpoint(tmp_path / "wide").weights().values()} == {torch.float32}
    assert_same(stored(tmp_path / "narrow"), {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_consolidated_is_one_file_of_unfused_names(make: Maker, tmp_path: Path, capsys: Any) -> None:
    folder = make()
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out", "--format=consolidated", "--dtype=bfloat16") == 0
    assert "exported step 0" in capsys.readouterr().out
    found = load_file(tmp_path / "out" / "consolidated.safetensors")
    arch = files.find_checkpoint(tmp_path / "imported").architecture
    assert found.keys() == logical_shapes(arch).keys()
    assert {"layers.0.attention.wq.weight", "layers.1.feed_forward.w3.weight", "output.weight"} <= found.keys()
    expected = {name: tensor.bfloat16() for name, tensor in stored(folder).items()}
    assert_same(hf_state(arch, found), expected)
    written = json.loads((tmp_path / "out" / "architecture.json").read_text())
    assert type(arch).model_validate(written) == arch


def test_a_head_repeated_in_a_tied_file_is_left_out(make: Maker, tmp_path: Path) -> None:
    folder = make(tie_word_embeddings=True)
    tensors = stored(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out") == 0
    assert_same(stored(tmp_path / "out"), tensors)


def test_a_folder_without_a_tokenizer(make: Maker, tmp_path: Path, capsys: Any) -> None:
    folder = make()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out") == 0
    assert_same(stored(tmp_path / "out"), stored(folder))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [1, 2]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("where", ["", "checkpoint", "checkpoint/step-4"])
def test_a_trained_model_opens_in_transformers(
    where: str, trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: Any
) -> None:
    folder, weights = trained
    assert call("export", folder / where, tmp_path / "out") == 0
    assert "exported step 4" in capsys.readouterr().out
    assert_same(stored(tmp_path / "out"), weights)
    assert_same({name: p.detach() for name, p in opened(tmp_path / "out").named_parameters()}, weights)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)  # of the byte tokenizer


def test_a_full_checkpoint_exports_its_weights_alone(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    step = trained[0] / "checkpoint" / "step-2"
    saved = files.find_checkpoint(step)
    assert saved.kind == "full"
    assert call("export", step, tmp_path / "hf") == 0
    assert call("export", step, tmp_path / "one", "--format=consolidated") == 0
    expected = dict(saved.tensors("model/"))
    assert_same(load_file(tmp_path / "one" / "consolidated.safetensors"), expected)
    assert_same(stored(tmp_path / "hf"), hf_state(saved.architecture, expected))
    assert not torch.equal(expected["norm.weight"], trained[1]["model.norm.weight"])


def from_hf(folder: Path, original: Path, **changes: Any) -> Any:
    """The config of a run in `folder` whose model is `original`'s."""
    settings = {
        "model__name": "auto",
        "model__overrides": {},
        "model__hf_assets_path": str(original),
        "training__steps": 2,
        "checkpoint__enable": True,
    }
    return tiny_config(folder, **{**settings, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_save_can_be_a_hugging_face_folder(
    dtype: str, make: Maker, corpus: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    original, step = make("Qwen3", head_dim=16), tmp_path / "run" / "checkpoint" / "step-2"
    how = {"initial_load_in_hf": True, "last_save_in_hf": True, "export_dtype": dtype}
    settings = {f"checkpoint__{key}": value for key, value in how.items()} | corpus
    trainer = Trainer(from_hf(tmp_path / "run", original, **settings))
    trainer.train()
    kind = getattr(torch, dtype)
    weights = hf_state(trainer.arch, {name: tensor.to(kind) for name, tensor in logical_state(trainer.model).items()})
    assert_same(stored(step), weights)
    model = opened(step)
    assert model.dtype == kind
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == [1, 2]
    assert (step / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()

    # It is a checkpoint too: exported, sampled and started from like any other; and like other weights never resumed.
    assert call("export", tmp_path / "run", tmp_path / "one", "--format=consolidated") == 0
    found = load_file(tmp_path / "one" / "consolidated.safetensors")
    assert_same(hf_state(trainer.arch, found), weights)
    capsys.readouterr()
    assert call("generate", tmp_path / "run", "--prompt", "the wall", "--max-new-tokens=3") == 0
    assert capsys.readouterr().out.startswith("the wall")
    started = start(tmp_path / "next", original, checkpoint__initial_load_path=str(tmp_path / "run"))
    assert torch.equal(started["norm.weight"], weights["model.norm.weight"].float())
    assert Trainer(from_hf(tmp_path / "run", original, **settings)).train().finished_before
    with pytest.raises(UserError, match=r"holds weights only \(checkpoint.last_save_in_hf\)"):
        Trainer(from_hf(tmp_path / "run", original, **{**settings, "training__steps": 4}))


def test_a_tokenizer_file_of_any_name_goes_along(corpus: dict[str, str], tmp_path: Path) -> None:
    """And never one that only lies beside it."""
    other = tmp_path / "mine.json"
    shutil.copyfile(tokenizer_folder() / "tokenizer.json", other)
    (tmp_path / "tokenizer.json").write_text("not this one")
    overrides = {**tiny_config(tmp_path / "x").model.overrides, "vocab_size": 300}
    settings = {"model__overrides": overrides, "model__tokenizer_path": str(other), **corpus}
    run(tmp_path / "run", training__steps=1, checkpoint__enable=True, **settings)
    assert call("export", tmp_path / "run", tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == other.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_a_run_of_bytes_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path / "run")
    (tmp_path / "bytes").mkdir()
    (tmp_path / config.model.hf_assets_path).mkdir(parents=True)  # there, but without a tokenizer
    shutil.copyfile(tokenizer_folder() / "tokenizer.json", tmp_path / "bytes" / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    assert tokenizer_of_run(config) == "bytes"
    assert tokenizer_of_run(tiny_config(tmp_path / "run", model__tokenizer_path="bytes")) == "bytes"


# ---- starting from imported weights ----------------------------------------------------------------------------------


def start(folder: Path, original: Path, **changes: Any) -> dict[str, Tensor]:
    """The weights a new run begins with; the byte tokenizer only saves time."""
    trainer = Trainer(from_hf(folder, original, **{"model__tokenizer_path": "bytes", **changes}))
    trainer.close()
    assert trainer.progress.step == 0
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def test_an_imported_checkpoint_starts_a_run_like_its_folder(
    make: Maker, corpus: dict[str, str], tmp_path: Path
) -> None:
    original, imported = make(dtype=torch.bfloat16, shard="20KB"), tmp_path / "imported"
    assert call("import", original, imported) == 0
    direct = start(tmp_path / "a", original, checkpoint__initial_load_in_hf=True)
    assert_same(start(tmp_path / "b", original, checkpoint__initial_load_path=str(imported)), direct)
    assert {tensor.dtype for tensor in direct.values()} == {torch.float32}
    drawn = start(tmp_path / "c", original)
    assert not torch.equal(drawn["norm.weight"], direct["norm.weight"])
    shutil.rmtree(original)  # the imported checkpoint has all there is: config, weights, tokenizer
    settings = {"model__tokenizer_path": None, "checkpoint__initial_load_path": str(imported), **corpus}
    assert_same(start(tmp_path / "d", imported, **settings), direct)


def test_imported_weights_are_never_resumed(make: Maker, tmp_path: Path) -> None:
    original, imported = make(), tmp_path / "run" / "checkpoint" / "step-0"
    assert call("import", original, imported) == 0
    for options in (TrainOptions(), TrainOptions(resume=True)):
        with pytest.raises(UserError, match=r"holds weights only .* or an import"):
            Trainer(from_hf(tmp_path / "run", original, model__tokenizer_path="bytes"), options)
    whole = {"checkpoint__initial_load_path": str(imported), "checkpoint__initial_load_model_only": False}
    with pytest.raises(UserError, match=r"holds weights only; set checkpoint\.initial_load_model_only = true"):
        start(tmp_path / "b", original, **whole)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (["--model.flavor=debugmodel"], "than llama3 debugmodel (dim 32, here 256, n_layers 2, here 6, "),
        (["--model.name=qwen3", *(f"--model.overrides.{field}" for field in
          ("dim=32", "n_layers=2", "n_heads=4", "n_kv_heads=2", "head_dim=8", "ffn_dim=40", "vocab_size=320"))],
         "than qwen3 debugmodel (weights: layers.0.attention.q_norm.weight, "),
        (["--model.name=auto", "--checkpoint.initial_load_path={other}"], "{other} holds another model, of type "),
        (["--model.name=auto", "--checkpoint.initial_load_path={foreign}"], "of type 'gpt2', than model.name = 'auto'"),
    ],
)  # fmt: skip
def test_the_folder_of_another_model_is_named_as_such(model: list[str], expected: str, make: Maker, tmp_path: Path,
                                                      capsys: Any) -> None:  # fmt: skip
    """By the config alone: ranks and data are not touched, and the batch, which does not fit either, is not named."""
    original = make()
    places = {"other": str(write_model(tmp_path / "other", hidden_size=64)), "foreign": str(tmp_path / "foreign")}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "gpt2"}')
    words = [word.format(**places) for word in model]
    words += [f"--model.hf_assets_path={original}", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    capsys.readouterr()
    assert call("config", *words) == 2
    assert call("train", *words, "--nproc=2", "--training.global_batch_size=7", "--training.dataset_path=none") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert expected.format(**places) in first
    assert "use the folder's own model with model.name = 'auto'" in first


def test_what_is_there_stays_unless_overwrite_is_given(make: Maker, tmp_path: Path, capsys: Any) -> None:
    original, imported, out = make(), tmp_path / "imported", tmp_path / "out"
    imported.mkdir()  # an empty folder is free
    assert call("import", original, imported) == 0
    assert call("import", original, imported) == 2
    assert f"{imported} exists and is not empty" in capsys.readouterr().err
    assert call("import", original, imported, "--dtype=bfloat16", "--overwrite") == 0
    assert files.find_checkpoint(imported).weights().dtype("norm.weight") == torch.bfloat16

    for given in ("hf", "consolidated"):
        assert call("export", imported, out, f"--format={given}", "--overwrite") == 0
        assert call("export", imported, out, f"--format={given}") == 2
        assert "--overwrite" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["architecture.json", "consolidated.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "original", "out"]


def test_overwrite_replaces_models_only(make: Maker, tmp_path: Path, capsys: Any) -> None:
    original, precious = make(), tmp_path / "precious"
    (precious / "work").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    for out in (precious, tmp_path / "file"):
        assert call("import", original, out, "--overwrite") == 2
        assert "--overwrite does not replace it" in capsys.readouterr().err
    assert (precious / "work").is_dir()
    assert (tmp_path / "file").read_text() == "mine"
    assert call("import", original, tmp_path / "imported") == 0
    for words in (
        ("import", original, original),
        ("import", original, original / "inside"),
        ("import", original, tmp_path),
        ("export", tmp_path / "imported", tmp_path / "imported"),
    ):
        assert call(*words, "--overwrite") == 2
        assert "overlap" in capsys.readouterr().err
    assert (original / "model.safetensors").is_file()
    assert call("import", original, tmp_path / "file" / "x") == 2
    assert f"was not written: File exists ({tmp_path / 'file'})" in capsys.readouterr().err


def truncate(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])
    return f"{path}: cannot be read"


def garble_the_header(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 20 + path.read_bytes()[28:])
    return f"{path}: cannot be read"


def lose_a_shard(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    return f"names '{path.name}', which is not in {folder}"


def lose_tensors(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    return "missing: model.layers.1.mlp.up_proj.weight"


def widen_the_config(folder: Path) -> str:
    edit_config(folder, intermediate_size=48)
    return "wrong shape: model.layers.0.mlp.gate_proj.weight is [40, 32], but the model needs [48, 32]"


def another_family(folder: Path) -> str:
    edit_config(folder, model_type="gpt5", architectures=["GPT5LMHeadModel"])
    return f"{folder / 'config.json'}: model_type 'gpt5' is not one that transformers builds"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"{folder / 'config.json'}: there is no such file"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


DAMAGES = [
    truncate, garble_the_header, lose_a_shard, lose_tensors, widen_the_config, another_family, no_config,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_folder_is_named(damage: Callable[[Path], str], make: Maker, tmp_path: Path, capsys: Any) -> None:
    folder = make(shard="20KB")
    message = damage(folder)
    assert call("import", folder, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["original"]
    if damage is not no_config:
        assert call("generate", folder, "--prompt", "x") == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError) as raised:
        start(tmp_path / "run", folder, checkpoint__initial_load_in_hf=True)
    assert message in str(raised.value)


def test_a_broken_checkpoint_is_named(make: Maker, tmp_path: Path, capsys: Any) -> None:
    imported = tmp_path / "imported"
    assert call("import", make(), imported) == 0
    whole = (imported / files.shard_name(0, 1)).read_bytes()
    changed = bytearray(whole)
    changed[-100] ^= 1
    for content, message in ((whole[:-10], "it is torn or was changed"), (bytes(changed), "fail their checksum")):
        (imported / files.shard_name(0, 1)).write_bytes(content)
        for words in (("export", imported, tmp_path / "out"), ("generate", imported, "--prompt", "x")):
            assert call(*words) == 2
            error = capsys.readouterr().err
            assert message in error
            assert str(imported / files.shard_name(0, 1)) in error
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint(make: Maker, tmp_path: Path, capsys: Any) -> None:
    folder = make()
    for path, message in (
        (folder, "is a Hugging Face folder already"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "holds no checkpoint"),
    ):
        assert call("export", path, tmp_path / "out") == 2
        assert message in capsys.readouterr().err


def test_a_run_is_no_hugging_face_folder(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert call("import", tmp_path, tmp_path / "out") == 2
    assert "is a run or a checkpoint of Shardline; `shardline export` makes" in capsys.readouterr().err


def test_an_architecture_that_no_hugging_face_model_has(tmp_path: Path, capsys: Any) -> None:
    overrides = {**tiny_config(tmp_path / "x").model.overrides, "qk_norm": True, "mlp_bias": True}
    run(tmp_path / "run", model__overrides=overrides, training__steps=1, checkpoint__enable=True)
    assert call("export", tmp_path / "run", tmp_path / "out") == 2
    assert "no Hugging Face model computes this architecture" in capsys.readouterr().err
    assert call("export", tmp_path / "run", tmp_path / "out", "--format=consolidated") == 0


def test_a_full_disk_leaves_nothing(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    imported = tmp_path / "imported"
    assert call("import", make(), imported) == 0

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in imported.iterdir())
    monkeypatch.setattr("os.fsync", full)
    for words in (
        ("import", tmp_path / "original", tmp_path / "second"),
        ("import", tmp_path / "original", imported, "--overwrite"),
        ("export", imported, tmp_path / "out"),
        ("export", imported, tmp_path / "out", "--format=consolidated"),
    ):
        assert call(*words) == 2
        assert "was not written: No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "original"]
    assert sorted(path.name for path in imported.iterdir()) == before


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--format=hf", "--format=consolidated"])
def test_tensors_go_through_one_by_one(
    words: str, make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(num_hidden_layers=12, shard="20KB")
    total = sum(tensor.nbytes for tensor in stored(folder).values())
    largest = max(tensor.nbytes for tensor in stored(folder).values())
    assert total > 8 * largest
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most: list[int] = []

    def watched(read: Callable[[Any, str], Tensor]) -> Callable[[Any, str], Tensor]:
        def wrapper(mapping: Any, name: str) -> Tensor:
            tensor = read(mapping, name).clone()
            alive.add(tensor)
            most.append(sum(other.nbytes for other in alive))
            return tensor

        return wrapper

    for kind in (HFTensors, TensorView):
        monkeypatch.setattr(kind, "__getitem__", watched(kind.__getitem__))
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("export", tmp_path / "imported", tmp_path / "out", words) == 0
    assert len(most) == 2 * len(stored(folder))
    assert max(most) <= largest
