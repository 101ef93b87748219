"""Writing: TOML that loads back, comments, differences, and the generated page."""

import tomllib
from pathlib import Path

from shardline.config.load import load_config
from shardline.config.schema import leaves
from shardline.config.write import diff, markdown, to_toml

ROOT = Path(__file__).parents[3]


def reload(tmp_path, text):
    (tmp_path / "again.toml").write_text(text)
    return load_config(tmp_path / "again.toml")


def test_every_key_is_written_or_said_to_be_unset():
    text = to_toml(load_config())
    tables = tomllib.loads(text)
    unset = [key for key in leaves() if _find(tables, key) is None]
    for key in unset:
        assert f"# {key.rpartition('.')[2]} is unset" in text, key
    assert len(leaves()) - len(unset) > 140


def _find(tables, key):
    for part in key.split("."):
        tables = tables.get(part) if isinstance(tables, dict) else None
    return tables


def test_whether_the_compute_type_was_given_survives(tmp_path):
    text = to_toml(load_config())
    assert "# mixed_precision_param is unset: bfloat16, or float32 on CPU" in text
    assert not reload(tmp_path, text).is_set("training.mixed_precision_param")
    given = load_config(overrides={"training.mixed_precision_param": "bfloat16"})
    assert reload(tmp_path, to_toml(given)).is_set("training.mixed_precision_param")


def test_epochs_survive_without_steps(tmp_path):
    text = to_toml(load_config(overrides={"training.epochs": 2.0}))
    again = reload(tmp_path, text)
    assert again.training.epochs == 2.0
    assert not again.is_set("training.steps")


def test_none_where_the_default_is_something(tmp_path):
    config = load_config(overrides={"parallelism.context_parallel_load_balancer": None})
    text = to_toml(config)
    assert 'context_parallel_load_balancer = "none"' in text
    assert reload(tmp_path, text) == config


def test_comments_explain_each_key(tmp_path):
    config = load_config(overrides={"training.seq_len": 7})
    text = to_toml(config, comments=True)
    assert "# int, default 2048. Tokens per sequence.\nseq_len = 7" in text
    for leaf in leaves().values():
        assert leaf.description in text
    assert reload(tmp_path, text) == config


def test_difference_of_two():
    a = load_config(overrides={"training.steps": 1, "model.overrides": {"dim": 4, "n_heads": 2}})
    b = load_config(overrides={"training.steps": 2, "model.overrides": {"dim": 8}, "debug.seed": 3})
    assert diff(a, b).splitlines() == [
        "model.overrides.dim: 4 -> 8",
        "model.overrides.n_heads: 2 -> unset",
        "training.steps: 1 -> 2",
        "debug.seed: unset -> 3",
    ]
    assert diff(a, a) == ""


def test_the_generated_page_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == markdown(), "run `make docs`"
