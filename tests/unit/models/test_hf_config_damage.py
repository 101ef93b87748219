"""Values that no config.json should have: an error names the file and the key at once, whatever they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.config.architecture import Architecture, build
from shardline.errors import ConfigError
from shardline.models.huggingface.config import (
    _COMMON,
    _DEFAULTS,
    CLASSES,
    architecture_from_dict,
    architecture_from_hf,
    hf_config,
)
from shardline.models.huggingface.key_types import KINDS
from tests import bad_values

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 256,
}


def config_of(family: str) -> dict[str, Any]:
    """Every key that the family reads."""
    content = {**_COMMON, **_DEFAULTS[family], **SMALL, "model_type": family, "num_experts_per_tok": 1}
    return {**content, **hf_config(architecture_from_dict(content))}


def outcome(make: Callable[[Any], Architecture], given: Any) -> str:
    """The error, empty where there is none."""
    try:
        assert isinstance(make(given), Architecture)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", CLASSES)
def test_any_value_in_any_key_is_an_architecture_or_an_error(family: str) -> None:
    good = config_of(family)
    assert architecture_from_dict(good).dim == 64
    for place, (name, value) in itertools.product(list(bad_values.places(good)), bad_values.VALUES.items()):
        said = outcome(architecture_from_dict, bad_values.changed(good, place, value))
        assert len(said) < 1500, f"{bad_values.words(place)} = {name}"
        kind = KINDS.get(str(place[0]))
        if len(place) == 1 and kind is not None and value not in (None, bad_values.GONE) and not kind.test(value):
            assert said.startswith(f"{place[0]}: expected "), f"{place[0]} = {name}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected a whole number from 1 to 10,000, got 1000000000"),
        ({"architectures": 1.5}, "architectures: expected a list of names, got 1.5"),
        ({"rope_scaling": True}, "rope_scaling: expected a table, got true"),
        ({"vocab_size": 10**12}, "vocab_size: expected a whole number from 1 to 268,435,456"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a whole number from 1 to"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number above 0, got nan"),
        ({"model_type": []}, "model_type: expected a name, got []"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "rope_scaling.factor: expected a finite number"),
        ({"hidden_act": bad_values.DEEP}, "cannot be read as JSON (nested more than 100 deep)"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer: expected a whole number up to 10,000, got 1000000000"),
        ({"model_type": "gpt2", "n_embd": 10**30}, "n_embd: expected a whole number up to 9,223,372,036,854,775,807"),
        ({"model_type": "gpt2", "quantization_config": 5}, "quantization_config (unknown) is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries, but there are 4 layers"),
    ],
)
def test_the_file_and_the_key_are_named(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(bad_values.text_of({"model_type": "llama", **SMALL, **change}))
    code = main(["config", "--model.name=auto", f"--model.hf_assets_path={tmp_path}", "--model.tokenizer_path=bytes"])
    said = capsys.readouterr().err
    assert (code, f"{tmp_path / 'config.json'}: {words}" in said) == (2, True), said


def test_a_field_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 10**9, "n_layer": 1}))
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size: expected a number, 268435456 or less, got 10+$"):
        architecture_from_hf(tmp_path)


def test_layers_and_widths_that_are_absurd_together(tmp_path: Path) -> None:
    content = {"model_type": "gpt2", "vocab_size": 300, "n_layer": 9000, "n_embd": 2**20, "n_head": 8}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"n_layer x n_embd = 9,000 x 1,048,576: expected at most 33,554,432 together"
    ):
        architecture_from_hf(tmp_path)


@pytest.mark.parametrize("name", sorted(set(Architecture.model_fields) - {"foreign"}))
def test_any_override_is_an_architecture_or_an_error(name: str) -> None:
    fields = {"dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96, "vocab_size": 272}
    for value in bad_values.VALUES.values():
        if value is not bad_values.GONE:
            assert outcome(build, {**fields, name: value})[:5] in ("", "model")


def test_weights_that_no_memory_holds_are_refused_before_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"dim": 2**20, "n_layers": 1, "n_heads": 4, "ffn_dim": 2**24, "vocab_size": 2**20}
    flags = [f"--model.overrides.{name}={value}" for name, value in sizes.items()]
    assert main(["train", *flags, f"--job.dump_folder={tmp_path / 'run'}", "--training.dataset=demo"]) == 2
    assert "the weights of this rank take 2" in capsys.readouterr().err
