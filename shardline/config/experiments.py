"""Translates TorchTitan's experiments into Shardline's keys. Nothing here imports torch.

Models that `transformers` computes:

model.name = "transformers_modeling_backend"   ->  model.name = "auto", model.implementation = "transformers"
hf_transformers.model = FOLDER                 ->  model.hf_assets_path
model.hf_assets_path (there the tokenizer's)   ->  model.tokenizer_path
model.flavor = "debugmodel", also by default   ->  model.overrides of a small model; "full" changes nothing

Replica groups and DiLoCo, for which Shardline has the keys itself:

model.name = "llama3_ft"                       ->  model.name = "llama3"
job.custom_config_module = "torchtitan.experiments.ft...."   dropped: it adds keys of [fault_tolerance]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BACKEND = "transformers_modeling_backend"
SMALL = {"dim": 256, "n_layers": 2, "n_heads": 16, "n_kv_heads": 16}
MODEL, ASSETS, TOKENIZER = "hf_transformers.model", "model.hf_assets_path", "model.tokenizer_path"


GROUPS_MODELS = ("llama3_ft", "ft/llama3", "ft.llama3")
GROUPS_MODULES = ("torchtitan.experiments.ft", "torchtitan.components.ft")
MODULE_KEYS = ("job.custom_config_module", "experimental.custom_args_module")


def translate_experiments(values: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
    """Change the keys of a config that names an experiment of TorchTitan; yields a note on each change."""
    yield from _translate_backend(values, origins)
    yield from _translate_groups(values, origins)


def _translate_groups(values: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
    if values.get("model.name") in GROUPS_MODELS:
        name, values["model.name"] = values["model.name"], "llama3"
        yield f"{origins['model.name']}: model.name = {name!r} is read as 'llama3': any model may be in replica groups"
    for key in MODULE_KEYS:
        module = values.get(key)
        if isinstance(module, str) and any(f"{module}.".startswith(f"{known}.") for known in GROUPS_MODULES):
            del values[key]
            yield f"{origins.pop(key)}: {key} = {module!r} is not needed: its keys are those of [fault_tolerance]"


def _translate_backend(values: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
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
