"""Models by their name on the Hub: taken from its cache, or an error that says what to do."""

import json

import pytest

from shardline.config.load import load_config
from shardline.errors import UserError
from shardline.models.huggingface.hub import names_hub_model, with_local_model


def named(path: str):
    return load_config(overrides={"model.name": "auto", "model.hf_assets_path": path})


def test_a_model_in_the_cache_is_used(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--owner--small"
    snapshot = folder / "snapshots" / "0123456789"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123456789")
    (snapshot / "config.json").write_text(json.dumps({}))
    assert with_local_model(named("owner/small")).model.hf_assets_path == str(snapshot)
    with pytest.raises(UserError, match=r"there is no folder 'owner/other', and the model of that name cannot be"):
        with_local_model(named("owner/other"))


@pytest.mark.parametrize("path", ["./model", "/absolute/model", "model", "a/b/c", "~/model"])
def test_paths_are_no_names(path):
    config = named(path)
    assert not names_hub_model(config)
    assert with_local_model(config) is config
