"""The rotary settings of config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

Families whose layers with a window rotate differently have one table per type of layer. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.config.architecture import SCALING_FIELDS, Architecture, RopeScaling
from shardline.errors import ConfigError
from shardline.models.huggingface.dense import DENSE


def rotary_fields(family: str, config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    row = DENSE.get(family)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        if row is None or not row.by_layer_type:
            raise ConfigError("rope_parameters per layer type are not supported")
        rope = dict(rope.get("full_attention") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and not (row is not None and row.rotates_in_part):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported (only 1.0 is)")
    legacy = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or legacy or "default"
    if family == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
    if kind == "default":
        return theta, None
    kinds = SCALING_FIELDS if row is None or row.scalings is None else row.scalings
    if kind not in kinds:
        raise ConfigError(f"rope_type {kind!r} is not supported (supported: default, {', '.join(kinds)})")
    try:
        return theta, _scaling(kind, rope, config)
    except KeyError as error:
        raise ConfigError(f"rope_type {kind!r} needs {error.args[0]}") from None
    except ValueError as error:
        raise ConfigError(f"rope_type {kind!r}: {error}") from None


def _scaling(kind: Any, rope: dict[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    """Missing keys have our defaults. llama3's are required, as is `factor`, which yarn derives if it is null."""
    needed = _NEEDED_SCALING.get(kind, ("factor",))
    values = {key: rope[key] for key in needed}
    values |= {key: rope[key] for key in SCALING_FIELDS[kind] if key in rope}
    if kind == "yarn":
        values = {key: value for key, value in values.items() if value or key not in ("beta_fast", "beta_slow")}
        if values["factor"] is None:
            values["factor"] = config["max_position_embeddings"] / _original(rope, config)
    if kind == "longrope" and not rope.get("factor"):
        values["factor"] = config["max_position_embeddings"] / _original(rope, config)
    elif kind == "longrope":
        values["factor"] = rope["factor"]
    if "original_max_position_embeddings" in SCALING_FIELDS[kind]:
        values["original_max_position_embeddings"] = _original(rope, config)
    return RopeScaling(type=kind, **values)


_NEEDED_SCALING = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def window_theta(config: Mapping[str, Any]) -> float | None:
    """The base of layers with a window, which have no scaling; None where they rotate as the others do."""
    rope = config.get("rope_parameters") or {}
    theta, full, kind = config["rope_local_base_freq"], config.get("rope_scaling"), "default"
    if rope:
        given, full = rope.get("sliding_attention") or {}, rope.get("full_attention") or {}
        if given == full:
            return None
        theta, kind = given.get("rope_theta") or theta, given.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"rope_type {kind!r} of layers with a window is not supported (only that of other layers is)")
    scaled = (full or {}).get("rope_type", (full or {}).get("type", "default")) != "default"
    same = theta == ((full or {}).get("rope_theta") or config["rope_theta"])
    return None if same and not scaled else float(theta)


def _original(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The original context length; a value at the top level takes precedence, as in transformers."""
    outside = config.get("original_max_position_embeddings")
    return outside or rope.get("original_max_position_embeddings") or config["max_position_embeddings"]


# Writing


def rotary_keys(arch: Architecture) -> dict[str, Any]:
    """Both layouts: transformers 5 reads `rope_parameters`, older versions read the other two keys."""
    scaling = None
    if (rope := arch.rope_scaling) is not None:
        values = {name: getattr(rope, name) for name in ("factor", *SCALING_FIELDS[rope.type])}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        scaling = {"rope_type": rope.type, **{name: value for name, value in values.items() if value is not None}}
        if "original_max_position_embeddings" in SCALING_FIELDS[rope.type]:
            scaling.setdefault("original_max_position_embeddings", arch.max_seq_len)
    parameters = {"rope_theta": arch.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": arch.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def dense_rotary_keys(arch: Architecture, family: str) -> dict[str, Any]:
    """The further rotary keys that some families have."""
    row, rope = DENSE[family], rotary_keys(arch)
    if row.rotates_in_part:
        for table in (rope["rope_parameters"], rope["rope_scaling"] or {}):
            table["partial_rotary_factor"] = arch.rope_fraction
        rope["partial_rotary_factor"] = arch.rope_fraction
    if family == "phi3":
        original = None if arch.rope_scaling is None else arch.rope_scaling.original_max_position_embeddings
        rope["original_max_position_embeddings"] = original or arch.max_seq_len
    if row.by_layer_type:
        full, own = rope["rope_parameters"], arch.window_rope_theta
        sliding = dict(full) if own is None else {"rope_type": "default", "rope_theta": own}
        rope["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        rope["rope_local_base_freq"] = own or arch.rope_theta
    return rope
