"""`shardline generate`: from every kind of folder, the tokens transformers gives, the text without a lost character."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.cli.main import main
from shardline.data.tokenizer import ByteTokenizer, load_tokenizer
from shardline.tools import generate as sample
from shardline.tools.generate import TextStream
from tests.e2e.tiny import command, run

transformers = pytest.importorskip("transformers")
from tests.e2e.hf_folders import tokenizer_folder, write_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")

PROMPT = "the green wall"


def call(*words: str | Path) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids that the command generates."""
    seen: list[int] = []
    generate = sample.generate

    def recorded(*arguments: Any, **options: Any) -> Iterator[int]:
        for token in generate(*arguments, **options):
            seen.append(token)
            yield token

    monkeypatch.setattr(sample, "generate", recorded)
    return seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on bytes with a full checkpoint of step 2 and the last weights, of step 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, training__steps=4, checkpoint__enable=True, checkpoint__interval=2)
    return folder


def greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """What transformers generates, stopping where the folder's files say."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[0, *transformers.AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]]])
    seen = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, pad_token_id=319)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_greedy_tokens_equal_transformers(
    family: str, tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"Mistral": {"sliding_window": 5}, "Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 8}}
    folder = write_model(tmp_path / "hf", family, eos_token_id=1, **options.get(family, {}))
    expected = greedy(folder, PROMPT, 30)
    assert len(set(expected)) > 5
    capsys.readouterr()
    assert call("generate", folder, "--prompt", PROMPT, "--max-new-tokens", "30") == 0
    assert tokens == expected
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(expected, skip_special_tokens=True)
    assert capsys.readouterr().out == f"{PROMPT}{text}\n"


def test_an_imported_checkpoint_speaks_like_its_folder_wherever_it_lies(
    tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "hf", "Qwen3", dtype=torch.bfloat16)
    words = ("--prompt", PROMPT, "--max-new-tokens=20", "--temperature=1.2")
    assert call("generate", folder, *words) == 0
    expected, text = list(tokens), capsys.readouterr().out
    assert call("import", folder, tmp_path / "imported") == 0
    shutil.rmtree(folder)
    (tmp_path / "imported").rename(tmp_path / "moved")
    tokens.clear()
    capsys.readouterr()
    assert call("generate", tmp_path / "moved", *words) == 0
    assert (tokens, capsys.readouterr().out) == (expected, text)


@pytest.mark.parametrize("kind", ["hf", "imported"])
def test_it_stops_where_the_models_files_say(kind: str, tokens: list[int], tmp_path: Path) -> None:
    """Instruction models name several ends; a tokenizer knows one of them."""
    folder = write_model(tmp_path / "hf", eos_token_id=1)
    stop = greedy(folder, PROMPT, 12)[6]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": [1, stop]}))
    expected = greedy(folder, PROMPT, 12)
    assert expected[-1] == stop
    assert len(expected) <= 7
    assert call("import", folder, tmp_path / "imported") == 0
    assert call("generate", tmp_path / kind, "--prompt", PROMPT, "--max-new-tokens=12") == 0
    assert tokens == expected


@pytest.mark.parametrize("where", ["", "checkpoint", "checkpoint/step-2", "checkpoint/step-4"])
def test_a_run_of_bytes(where: str, trained: Path, tokens: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", trained / where, "--prompt", "The ", "--max-new-tokens", "7") == 0
    assert len(tokens) == 7
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert capsys.readouterr().out == f"The {text}\n"


def test_sampling_depends_on_the_seed_alone(trained: Path, tokens: list[int]) -> None:
    def draw(*words: str) -> list[int]:
        tokens.clear()
        assert call("generate", trained, "--prompt", "a", "--max-new-tokens=12", *words) == 0
        return list(tokens)

    hot = ("--temperature=2", "--seed=1")
    first = draw(*hot)
    assert draw(*hot) == first
    assert draw("--temperature=2", "--seed=2") != first
    assert draw(*hot, "--top-k=1") == draw()
    assert draw(*hot, "--top-p=1e-9") == draw()


def test_an_empty_prompt(trained: Path, tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", trained, "--prompt", "", "--max-new-tokens=3") == 0  # begins at the start token
    assert len(tokens) == 3
    folder = write_model(tmp_path / "hf", bos_token_id=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None}))
    assert call("generate", folder, "--prompt", "") == 2
    assert "--prompt is empty and the tokenizer has no start token" in capsys.readouterr().err


def test_a_missing_or_foreign_tokenizer_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "hf")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert call("import", folder, tmp_path / "imported") == 0
    words = ("--prompt", "a", "--max-new-tokens=1")
    for place, named in ((folder, f"no tokenizer.json at {folder}"), (tmp_path / "imported", "has no tokenizer")):
        assert call("generate", place, *words) == 2
        error = capsys.readouterr().err
        assert named in error
        assert "give --tokenizer=FOLDER" in error
        assert call("generate", place, *words, "--tokenizer=bytes") == 0
        assert call("generate", place, *words, "--tokenizer", tokenizer_folder()) == 0
    assert call("generate", trained, *words, "--tokenizer", tmp_path / "absent") == 2
    assert f"no tokenizer.json at {tmp_path / 'absent'}" in capsys.readouterr().err
    assert call("generate", trained, *words, "--tokenizer", tokenizer_folder()) == 2
    assert "has 300 ids, but the model 272" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--temperature=1",)])
def test_damaged_weights_are_an_error(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert call("generate", folder, "--prompt", "x", *words) == 2
    said = capsys.readouterr()
    assert said.out == "x\n"
    assert "error: the model's logits are not finite: its weights are damaged" in said.err


def test_folders_and_devices_that_are_not_there(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ((tmp_path / "absent",), "does not exist"),
        ((tmp_path,), "holds no checkpoint"),
        ((trained, "--device=gpu"), "--device gpu: expected cpu, cuda or cuda:N"),
        ((trained, "--device=meta"), "--device meta: expected cpu, cuda or cuda:N"),
        ((trained, "--device=cuda:99"), "--device cuda:99: there are"),
    ):
        assert call("generate", *words, "--prompt", "a") == 2
        assert message in capsys.readouterr().err


# ---- from tokens to text ---------------------------------------------------------------------------------------------

TEXT = "naïve Größe: 緑の丘 👩‍🚀 fin"


@pytest.mark.parametrize("words", [ByteTokenizer(), None], ids=["bytes", "byte-level"])
def test_characters_of_several_tokens_come_whole(words: Any) -> None:
    words = words or load_tokenizer(tokenizer_folder())
    ids = words.encode(TEXT)
    assert len(ids) > len(TEXT)
    stream = TextStream(words, words.encode("é "))
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # something was held back
    assert stream.rest() == ""


def test_nothing_is_lost_at_the_end(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(content: bytes) -> str:
        monkeypatch.setattr(sample, "generate", lambda *_, **__: iter(content))
        assert call("generate", trained, "--prompt", "é") == 0
        return capsys.readouterr().out

    assert say(TEXT.encode()) == f"é{TEXT}\n"
    assert say("one €".encode()[:-1]) == "éone \ufffd\n"
    assert say(b"\xff\xfe") == "é\ufffd\ufffd\n"
    assert say(b"a\xffb") == "éa\ufffdb\n"
    assert say("a\ufffd".encode()) == "éa\ufffd\n"  # the character itself, generated
    assert say(b"") == "é\n"


def test_spaces_between_tokens_stay(tmp_path: Path) -> None:
    """Tokenizers of the SentencePiece kind drop the space at the beginning of what they decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "▁on": 1, "▁the": 2, "▁wall": 3, "s": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(tmp_path)
    assert words.decode([2]) == "the"
    stream = TextStream(words, words.encode("on"))
    assert [stream.add(token) for token in (2, 3, 4, 2)] == [" the", " wall", "s", " the"]


def test_the_command_prints_on_any_terminal_and_ends_with_2(trained: Path, tmp_path: Path) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    words = ("generate", str(trained), "--prompt", "naïve", "--max-new-tokens", "2")
    finished = command(*words, env=ascii_only)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("na?ve")
    refused = command("generate", str(tmp_path), "--prompt", "a")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: {tmp_path} holds no checkpoint\n"
