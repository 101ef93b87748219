"""TorchTitan's experiment that trains models by the code of `transformers`, in our keys. Torch-free.

model.name = "transformers_modeling_backend"   ->  model.name = "auto", model.implementation = "transformers"
hf_transformers.model = FOLDER                 ->  model.hf_assets_path
model.hf_assets_path (the tokenizer's there)   ->  model.tokenizer_path
model.flavor = "debugmodel", also by default   ->  model.overrides of a small model; "full" changes nothing
"""

from __future__ import annotations

from collections.abc import Iterator
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
        changes[ASSETS] = values.pop(MODEL)
        origins[ASSETS] = origins.pop(MODEL)
    if values.pop("model.flavor", "debugmodel") == "debugmodel":
        given = [key for key in values if key.startswith("model.overrides")]
        changes |= {f"model.overrides.{name}": size for name, size in SMALL.items() if not given}
    origins.pop("model.flavor", None)
    yield f"{where}: model.name = {BACKEND!r} is read as " + ", ".join(f"{key} = {v!r}" for key, v in changes.items())
    for key, value in changes.items():
        values[key] = value
        origins.setdefault(key, where)
