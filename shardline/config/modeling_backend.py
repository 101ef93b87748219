"""TorchTitan's experiment that trains models by the code of `transformers`, in our keys. Torch-free.

model.name = "transformers_modeling_backend"   ->  model.name = "auto", model.implementation = "transformers"
hf_transformers.model = FOLDER                 ->  model.hf_assets_path
model.hf_assets_path (the tokenizer's there)   ->  model.tokenizer_path
model.flavor = "debugmodel", also by default   ->  model.overrides of a small model; "full" changes nothing
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BACKEND = "transformers_modeling_backend"
SMALL = {"dim": 256, "n_layers": 2, "n_heads": 16, "n_kv_heads": 16}
MODEL, ASSETS, TOKENIZER = "hf_transformers.model", "model.hf_assets_path", "model.tokenizer_path"


def translate_backend(values: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
    """Change the keys of a config that names TorchTitan's experiment; yields a note on each."""
    if values.get("model.name") != BACKEND:
        return
    where = origins["model.name"]
    changes: dict[str, Any] = {"model.name": "auto", "model.implementation": "transformers"}
    if ASSETS in values and values.get(TOKENIZER) is None:
        changes[TOKENIZER] = values[ASSETS]
    if values.get(MODEL):
        changes[ASSETS] = folder_of(values.pop(MODEL))
        origins[ASSETS] = origins.pop(MODEL)
    if values.pop("model.flavor", "debugmodel") == "debugmodel":
        given = [key for key in values if key.startswith("model.overrides")]
        changes |= {f"model.overrides.{name}": size for name, size in SMALL.items() if not given}
    origins.pop("model.flavor", None)
    yield f"{where}: model.name = {BACKEND!r} is read as " + ", ".join(f"{key} = {v!r}" for key, v in changes.items())
    for key, value in changes.items():
        values[key] = value
        origins.setdefault(key, where)


def folder_of(name: str) -> str:
    """Where the Hugging Face cache has the model of that name, if it is no folder; `name` where it has not."""
    if not Path(name).is_dir() and find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a name of the hub
            found = try_to_load_from_cache(name, "config.json")
            if isinstance(found, str):
                return str(Path(found).parent)
    return name
