"""TorchTitan's checkpoints in: only when trusted, whole, and with the same logits."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardline.checkpoint.format import find_checkpoint
from shardline.checkpoint.torchtitan import DCPTensors, halves_from_pairs
from shardline.cli.main import main
from shardline.config.architecture import Architecture
from shardline.errors import UserError
from shardline.models.decoder import Decoder
from shardline.models.flavors import FLAVORS
from shardline.models.fused_weights import logical_shapes
from shardline.models.state import load_logical_state
from tests import processes
from tests.unit.checkpoint import titan

SIZES = {
    "dim": titan.DIM,
    "n_layers": titan.LAYERS,
    "n_heads": titan.HEADS,
    "n_kv_heads": titan.KV_HEADS,
    "head_dim": titan.HEAD_DIM,
    "ffn_dim": titan.FFN,
    "vocab_size": titan.VOCAB,
    "rope_theta": titan.THETA,
    "norm_eps": titan.EPS,
    "tie_word_embeddings": "false",
}
OVERRIDES = tuple(f"--model.overrides.{name}={value}" for name, value in SIZES.items())
MODEL = ("--model.name=llama3", "--model.flavor=debugmodel", *OVERRIDES)
TOKENS = torch.arange(2 * 30).view(2, 30) * 13 % titan.VOCAB
ROOT = Path(__file__).parents[3]


def write(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "step-7", titan.full_state(titan.Titan()))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["import", *map(str, words)])
        done = capsys.readouterr()
        return code, done.out + done.err

    return run


def logits(out: Path) -> torch.Tensor:
    saved = find_checkpoint(out)
    saved.verify()
    model = Decoder(saved.architecture)
    load_logical_state(model, saved.weights())
    with torch.no_grad():
        return model(TOKENS)


def theirs(model: titan.Titan) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def test_the_pickle_is_read_only_when_trusted(tmp_path: Path, call: Any) -> None:
    """The file would leave a trace if it were read."""
    trace = tmp_path / "trace"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (trace,))

    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(Trap()))
    code, text = call(tmp_path / "step-1", tmp_path / "out")
    assert code == 2
    assert "Python pickle, which can run any code when it is read" in text
    assert "--trust-pickle" in text
    assert not trace.exists()
    code, text = call(tmp_path / "step-1", tmp_path / "out", "--trust-pickle", *MODEL)
    assert (code, f"{tmp_path / 'step-1' / '.metadata'} cannot be read" in text) == (2, True)
    assert trace.exists()  # so the first call would have left it
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_llama_gives_the_same_logits(prefix: str, tmp_path: Path, call: Any) -> None:
    model = titan.Titan()
    write(tmp_path / "step-7", titan.full_state(model, prefix))
    code, text = call(tmp_path / "step-7", tmp_path / "out", "--trust-pickle", *MODEL)
    assert code == 0, text
    torch.testing.assert_close(logits(tmp_path / "out"), theirs(model), rtol=1e-5, atol=1e-5)
    saved = find_checkpoint(tmp_path / "out")
    assert (saved.kind, saved.step) == ("model", 0)
    assert saved.weights().keys() == logical_shapes(saved.architecture).keys()
    # Everything but the order of rows is bit by bit what it was; and without that order the logits differ.
    stored = dict(model.state_dict())
    for name, tensor in saved.weights().items():
        if ".wq." in name or ".wk." in name:
            assert not torch.equal(tensor, stored[name])
            assert torch.equal(tensor.sort(0).values, stored[name].sort(0).values)
        else:
            assert torch.equal(tensor, stored[name]), name
    plain = Decoder(saved.architecture)
    load_logical_state(plain, stored)
    with torch.no_grad():
        assert (plain(TOKENS) - theirs(model)).abs().max() > 0.1


def test_qwen3_keeps_its_order_of_rows(tmp_path: Path, call: Any) -> None:
    model = titan.Titan(qk_norm=True)
    write(tmp_path / "step-7", titan.full_state(model))
    words = ("--model.name=qwen3", "--model.flavor=debugmodel", *OVERRIDES)
    code, text = call(tmp_path / "step-7", tmp_path / "out", "--trust-pickle", *words)
    assert code == 0, text
    torch.testing.assert_close(logits(tmp_path / "out"), theirs(model), rtol=1e-5, atol=1e-5)
    found = find_checkpoint(tmp_path / "out").weights()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_experts_give_the_same_logits(tmp_path: Path, call: Any) -> None:
    """Their weights have no `.weight` there; the bias that balances them chooses experts here too."""
    model = titan.Titan(qk_norm=True, experts=True)
    write(tmp_path / "step-7", titan.full_state(model))
    experts = {"n_experts": titan.EXPERTS, "top_k": titan.TOP_K, "expert_dim": titan.WIDTH}
    experts |= {"shared_dim": 2 * titan.WIDTH, "first_dense": 1}
    lines = ["[model]", 'name = "qwen3"', 'flavor = "debugmodel_moe"', "[model.overrides.moe]"]
    lines += [f"{name} = {value}" for name, value in experts.items()]
    (tmp_path / "model.toml").write_text("\n".join(lines))
    words = ("--config", tmp_path / "model.toml", *OVERRIDES)
    code, text = call(tmp_path / "step-7", tmp_path / "out", "--trust-pickle", *words)
    assert code == 0, text
    torch.testing.assert_close(logits(tmp_path / "out"), theirs(model), rtol=1e-5, atol=1e-5)
    found = find_checkpoint(tmp_path / "out").weights()
    assert torch.equal(found["layers.2.moe.experts.w2.weight"], model.layers["2"].moe.experts.w2)
    assert torch.equal(found["layers.1.moe.router.balance"], model.layers["1"].moe.expert_bias)
    assert call(tmp_path / "step-7", tmp_path / "narrow", "--trust-pickle", "--dtype=bfloat16", *words)[0] == 0
    kinds = {name: tensor.dtype for name, tensor in find_checkpoint(tmp_path / "narrow").weights().items()}
    assert {name for name, kind in kinds.items() if kind != torch.bfloat16} == {
        f"layers.{layer}.moe.router.balance" for layer in (1, 2)
    }
    chosen = {name: torch.zeros_like(tensor) if "balance" in name else tensor for name, tensor in found.items()}
    plain = Decoder(find_checkpoint(tmp_path / "out").architecture)
    load_logical_state(plain, chosen)
    with torch.no_grad():
        assert (plain(TOKENS) - theirs(model)).abs().max() > 0.1


def test_rows_of_pairs_become_halves() -> None:
    rows = torch.arange(12)[:, None] * torch.ones(1, 3)
    assert halves_from_pairs(rows, 6)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert halves_from_pairs(rows[:, 0], 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]  # a bias


def test_parts_of_two_ranks(tmp_path: Path, call: Any) -> None:
    folder = tmp_path / "step-9"
    words = [sys.executable, "-m", "tests.unit.checkpoint.titan", str(folder)]
    ranks = [processes.start([*words, str(rank), "2"], cwd=ROOT) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert len(list(folder.glob("__*_*.distcp"))) >= 2
    code, text = call(folder, tmp_path / "out", "--trust-pickle", *MODEL)
    assert code == 0, text
    torch.testing.assert_close(logits(tmp_path / "out"), theirs(titan.Titan()), rtol=1e-5, atol=1e-5)


# ---- which model it is -----------------------------------------------------------------------------------------------


def state_of(arch: Architecture) -> dict[str, Any]:
    return {name: torch.full(shape, 0.5) for name, shape in logical_shapes(arch).items()}


def test_the_model_is_named_by_flags_or_a_file(tmp_path: Path, call: Any) -> None:
    arch = FLAVORS["llama3"]["debugmodel"]
    folder = write(tmp_path / "debug", state_of(arch))
    code, text = call(folder, tmp_path / "out", "--trust-pickle", "--dtype=bfloat16", "--model.flavor=debugmodel")
    assert code == 0, text
    saved = find_checkpoint(tmp_path / "out")
    assert saved.architecture == arch
    assert saved.weights()["norm.weight"].dtype == torch.bfloat16
    (tmp_path / "model.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    words = ("--config", tmp_path / "model.toml", "--model.overrides.rope_theta=1.0e4")
    assert call(folder, tmp_path / "named", "--trust-pickle", *words)[0] == 0
    assert find_checkpoint(tmp_path / "named").architecture == arch.with_overrides({"rope_theta": 1e4})


def test_a_tied_head_may_be_repeated_but_not_differ(tmp_path: Path, call: Any) -> None:
    arch = FLAVORS["qwen3"]["debugmodel"]
    state = state_of(arch)
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    words = ("--trust-pickle", "--model.name=qwen3", "--model.flavor=debugmodel")
    assert call(write(tmp_path / "same", state), tmp_path / "out", *words)[0] == 0
    assert "output.weight" not in find_checkpoint(tmp_path / "out").weights()
    state["output.weight"][3, 4] += 1
    code, text = call(write(tmp_path / "other", state), tmp_path / "second", *words)
    assert (code, "output.weight differs from tok_embeddings.weight" in text) == (2, True)


def test_a_model_that_is_not_named_is_asked_for(folder: Path, tmp_path: Path, call: Any) -> None:
    for words in ((), OVERRIDES):  # sizes alone do not say which family it is
        code, text = call(folder, tmp_path / "out", "--trust-pickle", *words)
        assert code == 2
        assert "does not record which model it is: name it with --model.name and --model.flavor" in text
    code, text = call(folder, tmp_path / "out", "--trust-pickle", "--model.flavor=8B")
    assert code == 2
    assert "wrong shape: tok_embeddings.weight is [77, 48], but the model needs [128256, 4096]" in text
    assert not (tmp_path / "out").exists()


# ---- what is broken --------------------------------------------------------------------------------------------------


def lose_a_tensor(state: dict[str, Any]) -> str:
    del state["layers.1.feed_forward.w2.weight"]
    return "missing: layers.1.feed_forward.w2.weight"


def lose_a_layer(state: dict[str, Any]) -> str:
    for name in [name for name in state if name.startswith("layers.1.")]:
        del state[name]
    return "missing: layers.1.attention_norm.weight"


def widen(state: dict[str, Any]) -> str:
    state["layers.2.attention.wv.weight"] = torch.ones(30, titan.DIM)
    return "wrong shape: layers.2.attention.wv.weight is [30, 48], but the model needs [20, 48]"


def add_a_stranger(state: dict[str, Any]) -> str:
    state["layers.0.attention.hyena.weight"] = torch.ones(4)
    return "holds tensors that no supported model has: layers.0.attention.hyena.weight"


def add_experts(state: dict[str, Any]) -> str:
    state["layers.0.moe.experts.w1"] = torch.ones(4, 2, 3)
    return "unexpected: layers.0.moe.experts.w1.weight"


def another_type(state: dict[str, Any]) -> str:
    state["norm.weight"] = torch.ones(titan.DIM, dtype=torch.complex64)
    return "norm.weight has type torch.complex64, which is not supported"


def not_a_tensor(state: dict[str, Any]) -> str:
    state["norm.weight"] = {"a": "text"}
    return "holds tensors that no supported model has: norm.weight"


DAMAGES = [lose_a_tensor, lose_a_layer, widen, add_a_stranger, add_experts, another_type, not_a_tensor]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_named(damage: Callable[[dict[str, Any]], str], tmp_path: Path, call: Any) -> None:
    state = titan.full_state(titan.Titan())
    message = damage(state)
    code, text = call(write(tmp_path / "step-7", state), tmp_path / "out", "--trust-pickle", *MODEL)
    assert code == 2
    assert message in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_files_that_are_gone_or_torn_are_named(folder: Path, tmp_path: Path, call: Any) -> None:
    words = (folder, tmp_path / "out", "--trust-pickle", *MODEL)
    file = next(folder.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 3])
    code, text = call(*words)
    assert (code, f"error: {folder}: " in text, "cannot be read (" in text) == (2, True, True)
    file.unlink()
    code, text = call(*words)
    assert (code, "FileNotFoundError" in text, file.name in text) == (2, True, True)
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    code, text = call(*words)
    assert (code, ".metadata cannot be read" in text) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_parts_that_do_not_fill_a_tensor(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["norm.weight"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"norm\.weight has 48 elements, its parts 0: it was not saved whole"):
        DCPTensors(folder, FLAVORS["llama3"]["debugmodel"])


def test_options_that_do_not_go_together(folder: Path, tmp_path: Path, call: Any) -> None:
    code, text = call(folder.parent, tmp_path / "elsewhere" / "out", "--trust-pickle")
    assert (code, f"name one of them, such as {folder}" in text) == (2, True)
    (tmp_path / "hf").mkdir()
    code, text = call(tmp_path / "hf", tmp_path / "out", "--trust-pickle")
    assert (code, "--trust-pickle is for folders of torch.distributed.checkpoint" in text) == (2, True)
    code, text = call(tmp_path / "hf", tmp_path / "out", "--model.flavor=8B")
    assert (code, "its config.json says which model it is" in text) == (2, True)
