"""Names on the Hub: what is one, what a file of that name means, and which files the card of a dataset names."""

import sys

import pytest

from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.hub import HubName, dataset_name, local_path, model_name
from shardline.run.dataset_card import named_files
from shardline.run.downloads import downloaded

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
    ],
)
def test_models_have_names(text, repo, revision):
    name = model_name(text)
    assert (name.kind, name.repo, name.revision) == ("model", repo, revision)
    assert model_name(str(name)) == name


@pytest.mark.parametrize("path", ["./model", "/absolute/model", "model", "a/b/c", "~/model", "a/b.json", "s3://a/b"])
def test_paths_are_no_names(path):
    assert model_name(path) is None
    assert dataset_name(path) is None
    assert local_path(path) == path


def test_files_of_datasets_have_names():
    name = dataset_name(f"hf://datasets/owner/name@{COMMIT}/data/**/*.jsonl")
    assert name == HubName("dataset", "owner/name", COMMIT, "data/**/*.jsonl")
    assert dataset_name(str(name)) == name
    assert dataset_name("hf://datasets/owner/name") == HubName("dataset", "owner/name", "main", "")
    converted = HubName("dataset", "owner/name", "refs/convert/parquet", "x")
    assert dataset_name("hf://datasets/owner/name@refs/convert/parquet/x") == converted


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("owner/name") is not None
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert model_name("owner/name") is None
    assert local_path("owner/name") == "owner/name"


def test_a_name_leads_into_the_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "datasets--owner--name"
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for at in ("", f"@{COMMIT}"):
        found = local_path(f"hf://datasets/owner/name{at}/data/*.jsonl")
        assert found == str(place / "snapshots" / COMMIT / "data" / "*.jsonl")
    assert local_path("hf://datasets/owner/name@other/x.jsonl") == "hf://datasets/owner/name@other/x.jsonl"


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: ["en/train-*.jsonl", "more/*.jsonl"]
  - split: test
    path: en/test.jsonl
- config_name: de
  default: true
  data_files: "de/*.jsonl"
- config_name: outside
  data_files: "../../secret/*.txt"
- config_name: absolute
  data_files: /etc/passwd
- config_name: elsewhere
  data_files: https://example.com/x.jsonl
---
# A dataset
"""


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        ("en", "train", ["en/train-*.jsonl", "more/*.jsonl"]),
        ("en", "test", ["en/test.jsonl"]),
        (None, "train", ["de/*.jsonl"]),
        ("outside", "train", None),
        ("absolute", "train", None),
        ("elsewhere", "train", None),
    ],
)
def test_a_card_names_the_files_of_a_split(tmp_path, config, split, expected):
    (tmp_path / "README.md").write_text(CARD)
    assert named_files(tmp_path / "README.md", config, split) == expected


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        ("en", "tain", "there is no split 'tain', did you mean 'train'?; splits: train, test"),
        ("fr", "train", "there is no configuration 'fr'; name one of en, de, outside, absolute, elsewhere"),
    ],
)
def test_what_a_card_does_not_have_is_named(tmp_path, config, split, expected):
    (tmp_path / "README.md").write_text(CARD)
    with pytest.raises(UserError) as caught:
        named_files(tmp_path / "README.md", config, split)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("card", ["", "# Text", "---\n: : :\n---\n", "---\nconfigs: 3\n---\n", "---\n- a\n---\n"])
def test_a_card_may_say_nothing(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    assert named_files(tmp_path / "README.md", None, "train") is None
    assert named_files(tmp_path / "none.md", None, "train") is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model.name": "auto", "model.hf_assets_path": "owner/name"}, "model.hf_assets_path: owner/name"),
        ({"model.tokenizer_path": "owner/name"}, "model.tokenizer_path: owner/name"),
        ({"training.dataset_path": "hf://datasets/owner/name"}, "training.dataset_path: hf://datasets/owner/name"),
        ({"data.sources": [{"path": "hf://datasets/owner/name/x.jsonl"}]}, "data.sources[0]: hf://datasets/owner/name"),
    ],
)
def test_the_package_is_named_where_it_is_missing(keys, named, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError) as caught:
        downloaded(load_config(overrides=keys))
    assert str(caught.value).startswith(named)
    assert "the package huggingface_hub is not installed: pip install 'shardline[hub]'" in str(caught.value)


def test_what_is_here_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    local = {"model.tokenizer_path": "bytes", "training.dataset_path": str(tmp_path), "model.hf_assets_path": "./model"}
    config = load_config(overrides=local)
    assert downloaded(config) is config
