"""A model that transformers computes, from a folder to a folder: train, resume, export, import, generate, dry run."""

import json
import logging
from pathlib import Path

import pytest
import torch

from shardline.cli.main import main
from tests.e2e.tiny import flags, rows, run

transformers = pytest.importorskip("transformers")
from tests.foreign_types import settings, write_tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opt")
    write_tiny("opt", path)
    return path


def full(folder: Path, steps: int) -> dict:
    kept = {"checkpoint__last_save_in_hf": False, "checkpoint__last_save_model_only": False}
    return settings(folder, training__steps=steps, lr_scheduler__total_steps=4, checkpoint__interval=2, **kept)


def test_a_run_resumes_exports_and_comes_back(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardline")
    whole = run(tmp_path / "whole", **full(folder, 4))
    assert "transformers computes this model of type 'opt': it has no native implementation" in caplog.text
    assert f"{folder.name}, " in caplog.text  # as which the model is known
    assert "debugmodel" not in caplog.text
    run(tmp_path / "parts", **full(folder, 2))
    run(tmp_path / "parts", **full(folder, 4))
    assert [row["loss"] for row in rows(tmp_path / "parts")] == [row["loss"] for row in whole]
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "whole"), str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert main(["import", str(out), str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    capsys.readouterr()
    words = {}
    for place in ("whole", "out", "imported"):
        command = ["generate", str(tmp_path / place), "--prompt", "a b", "--max-new-tokens", "4", "--tokenizer=bytes"]
        assert main(command) == 0
        words[place] = capsys.readouterr().out
    assert len(set(words.values())) == 1
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_the_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", **full(folder, 2))
    other = json.loads((folder / "config.json").read_text()) | {"activation_function": "gelu"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    changed = settings(tmp_path / "other", checkpoint__initial_load_in_hf=False)
    with pytest.raises(Exception, match=r"another model \(config\.activation_function: relu -> gelu\)"):
        run(tmp_path / "run", **changed)


def test_lengths_beyond_the_positions_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"training\.seq_len = 100 is longer than the 64 positions"):
        run(tmp_path / "run", **settings(folder, training__seq_len=100))


@pytest.mark.parametrize(
    ("kind", "block"), [("opt", "model.decoder.layers.*.fc1.weight"), ("gpt2", "transformer.h.*.mlp.c_fc.weight")]
)
def test_a_dry_run_counts_parameters_and_collectives(
    kind: str, block: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The code of OPT reads values, so that its step cannot be followed without any: that is said."""
    model = write_tiny(kind, tmp_path / "model")
    options = {
        "model__name": "auto",
        "model__hf_assets_path": str(tmp_path / "model"),
        "model__tokenizer_path": "bytes",
    }
    command = ["train", *flags(tmp_path / "run", **options, model__overrides={}), "--dry-run", "--world-size", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"with copies counted once: {count:,}, the parameters of the model" in out
    assert block in out
    assert ("reduce-scatter" in out) == (kind == "gpt2")
    assert ("not known: the model's code reads values" in out) == (kind == "opt")
    assert "transformers computes this model" in out
    assert not (tmp_path / "run").exists()
