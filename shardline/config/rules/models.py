"""Rules of models: where they come from, and fields of the architecture that are not read."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.config.architecture import SCALING_FIELDS, RopeScaling
from shardline.config.names import has_window, scaling_type
from shardline.config.rules.rule import Rule, Test, below, idle, idle_if, note, refuse
from shardline.config.schema import Config


def _uses_assets(config: Config) -> bool:
    loads = config.checkpoint.initial_load_in_hf and config.checkpoint.initial_load_path is None
    return config.model.tokenizer_path is None or config.model.name == "auto" or loads


def _override_notes() -> list[Rule]:
    """Architecture fields that are overridden although the model does not read them."""

    def window_is_idle(field: str) -> Test:
        return lambda config: config.model.overrides.get(field) is not None and not has_window(config)

    def scale_is_idle(config: Config) -> bool:
        overrides = config.model.overrides
        turned = overrides.get("rope_layers") is None and config.model.name != "auto"
        return bool(overrides.get("query_scale")) and turned and not config.model.flavor.endswith("_irope")

    def norm_is_idle(config: Config) -> bool:
        overrides = config.model.overrides
        without = config.model.name in ("llama3", "llama4", "mixtral", "gpt_oss", "gemma2", "phi3", "phi4")
        return "qk_norm_over" in overrides and not overrides.get("qk_norm") and without

    def scaling_is_idle(field: str) -> Test:
        default = RopeScaling.model_fields[field].default

        def test(config: Config) -> bool:
            given, kind = config.model.overrides.get("rope_scaling"), scaling_type(config)
            given_field = isinstance(given, Mapping) and given.get(field, default) != default
            return given_field and kind in SCALING_FIELDS and field not in SCALING_FIELDS[kind]

        return test

    def words(config: Config) -> str:
        return f"has no effect: rope_scaling.type is {scaling_type(config)!r}"

    scaling, scale, norm = below("model.overrides", "rope_scaling query_scale qk_norm_over")
    of_window, no_window = (
        ("sliding_window_layers", "window_kind", "window_rope_theta"),
        "has no effect: the model has no sliding_window",
    )
    fields = dict.fromkeys(field for fields in SCALING_FIELDS.values() for field in fields)
    return [
        *(note(f"model.overrides.{field}", window_is_idle(field), no_window) for field in of_window),
        note(norm, norm_is_idle, "has no effect: the model has no norm of queries and keys (qk_norm)"),
        note(scale, scale_is_idle, "has no effect: every layer has rotary positions (rope_layers)"),
        *(note(f"{scaling}.{field}", scaling_is_idle(field), words) for field in fields),
    ]


REFUSED: list[Rule] = [
    refuse(
        "model.implementation",
        lambda c: c.model.implementation == "transformers" and c.model.name != "auto",
        lambda c: f"transformers builds models from a config.json, and {c.model.name!r} is a family of Shardline's own",
        remedy='set model.name = "auto" and model.hf_assets_path to a folder with a config.json',
    ),
]

IDLE: list[Rule] = [
    idle_if("model.name", ["auto"], "model.flavor"),
    idle("model.name is not 'transformers_modeling_backend'", lambda c: True, "hf_transformers.model"),
    idle("a flavor is always native", lambda c: c.model.name != "auto", "model.implementation"),
    idle(
        "model.tokenizer_path is set, and no weights are read from this folder",
        lambda c: not _uses_assets(c),
        "model.hf_assets_path",
    ),
]

NOTES = _override_notes()
