"""Models of the Hugging Face Hub: the local folder of a name such as `owner/name`."""

from __future__ import annotations

import os
import re

from shardline.config.schema import Config
from shardline.errors import UserError

FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")


def names_hub_model(config: Config) -> bool:
    """Whether the config takes its model from the Hub: there is no folder of that name, and it looks like a model."""
    path = config.model.hf_assets_path
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith((".", "~"))
    return config.model.name == "auto" and named and not os.path.exists(path)


def with_local_model(config: Config) -> Config:
    """The config with the folder of its model, which is downloaded if it is not in the cache of the Hub's package."""
    if not names_hub_model(config):
        return config
    name = config.model.hf_assets_path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"model.hf_assets_path: there is no folder {name!r}, and to download the model of that name the package"
            " huggingface_hub is needed: pip install huggingface_hub"
        ) from None
    try:
        folder = snapshot_download(name, allow_patterns=list(FILES))
    except Exception as error:  # the package raises errors of its own, of requests and of the file system
        raise UserError(
            f"model.hf_assets_path: there is no folder {name!r}, and the model of that name cannot be downloaded"
            f" ({str(error).splitlines()[0]}); name a folder"
        ) from None
    return config.replace({"model.hf_assets_path": folder})
