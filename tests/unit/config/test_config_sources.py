"""`data.sources`: tables from TOML, YAML and flags, errors inside them, and the way back to TOML."""

import pytest

from shardline.config.check import notes
from shardline.config.load import load_config
from shardline.config.sources import source_tables
from shardline.config.write import to_toml
from shardline.errors import ConfigError

SOURCES = [
    {"path": "a.jsonl", "type": "chat_template", "train_on_eos": "none", "roles": {"user": ["human"]}},
    {"path": "b", "type": {"field_instruction": "q", "format": "{instruction}"}, "weight": 2.5},
]
TOML = """
[[data.sources]]
path = "a.jsonl"
type = "chat_template"
train_on_eos = "none"
roles = { user = ["human"] }

[[data.sources]]
path = "b"
weight = 2.5
[data.sources.type]
field_instruction = "q"
format = "{instruction}"
"""
YAML = """
data:
  sources:
    - path: a.jsonl
      type: chat_template
      split:
      train_on_eos: none
      roles: {user: [human]}
    - path: b
      type:
        field_instruction: q
        format: "{instruction}"
      weight: 2.5
"""


@pytest.mark.parametrize(("ending", "text"), [("toml", TOML), ("yaml", YAML)])
def test_tables_of_a_file_load_and_round_trip(tmp_path, ending, text):
    file = tmp_path / f"run.{ending}"
    file.write_text(text)
    config = load_config(file)
    assert config.data.sources == SOURCES
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again) == config
    tables = source_tables(config.data.sources)
    assert tables[0].train_on_eos == "none"
    assert tables[0].split is None
    assert tables[1].type.field_instruction == "q"
    assert tables[1].weight == 2.5


def test_flags_take_tables_too():
    assert load_config(None, ['--data.sources=[{path = "x", type = "alpaca"}]']).data.sources[0]["type"] == "alpaca"


@pytest.mark.parametrize(
    ("ending", "text", "expected"),
    [
        (
            "toml",
            TOML.replace("weight =", "wieght ="),
            ":10: data.sources[1].wieght: there is no such key, did you mean 'weight'?",
        ),
        ("yaml", YAML.replace("- path: b", "- pth: b"), ":9: data.sources[1]: path is missing"),
        (
            "toml",
            TOML.replace("field_instruction", "field_instrction"),
            ":12: data.sources[1].type.field_instrction: there is no such",
        ),
        ("yaml", YAML.replace('"{instruction}"', "3"), ":12: data.sources[1].type.format: expected a string, got 3"),
        (
            "toml",
            TOML.replace("2.5", "-1.0"),
            ":10: data.sources[1].weight: expected a finite number above 0, got -1.0",
        ),
        ("toml", TOML.replace('"none"', '"never"'), ":5: data.sources[0].train_on_eos: expected one of 'turn', "),
        ("toml", TOML.replace("weight = 2.5", "shards = 2"), "data.sources[1].shards_idx: is missing"),
        ("toml", "[data]\nsources = [3]", "data.sources[0]: expected a table with path and type, got 3"),
    ],
)
def test_errors_name_the_line_the_table_and_the_nearest_key(tmp_path, ending, text, expected):
    file = tmp_path / f"run.{ending}"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert expected in str(error.value)


def test_records_that_are_held_out_for_nothing_are_mentioned():
    keys = {"data.sources": [{"path": "demo"}], "data.held_out": 0.1}
    (line,) = (line for line in notes(load_config(overrides=keys)) if line.startswith("data.held_out"))
    assert line == "data.held_out keeps records out of training, but validation.enable is false, so they are not used"
    assert not any("held_out" in line for line in notes(load_config(overrides={**keys, "validation.enable": True})))
