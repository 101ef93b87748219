"""Hugging Face's config.json to an Architecture and back, for the families in `CLASSES`. Torch-free.

A key that changes the arithmetic and is not supported is refused by name. A key that a family's own model ignores is
ignored here too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardline.config.architecture import TRAINING_FIELDS, Architecture, MixtureOfExperts, build
from shardline.config.names import is_built
from shardline.config.types import show
from shardline.errors import ConfigError, UserError
from shardline.json_text import parse_json
from shardline.models.huggingface import deepseek
from shardline.models.huggingface.dense import (
    ACTIVATION_NAMES,
    DENSE,
    dense_fields,
    dense_keys,
    differences,
    dropouts,
    usual_dense_windows,
)
from shardline.models.huggingface.key_types import check_per_layer, check_types, in_their_names
from shardline.models.huggingface.rotary import dense_rotary_keys, rotary_fields, rotary_keys, window_theta

log = logging.getLogger("shardline")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    **{family: row.model for family, row in DENSE.items()},
}

# The values of keys that config.json leaves out: common ones, and those in which the families differ.
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    **deepseek.DEFAULTS,
    **{family: row.defaults for family, row in DENSE.items()},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "llama4_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
}


class _Experts(NamedTuple):
    """The experts of a family: for each field of `MixtureOfExperts` its key in config.json, or its fixed value.

    A field in neither has its default. Where a key has two names, the first one found is read and both are written.
    """

    keys: dict[str, str | tuple[str, ...]]
    fixed: dict[str, Any]


_EXPERTS = {
    "mixtral": _Experts(
        {"n_experts": "num_local_experts", "top_k": "num_experts_per_tok", "expert_dim": "intermediate_size"},
        {"normalize": True},
    ),
    "qwen3_moe": _Experts(
        {
            "n_experts": ("num_local_experts", "num_experts"),  # as transformers 5 writes it, and as published
            "top_k": "num_experts_per_tok",
            "expert_dim": "moe_intermediate_size",
            "normalize": "norm_topk_prob",
            "every": "decoder_sparse_step",
            "first_dense": "mlp_only_layers",
        },
        {},
    ),
    "llama4_text": _Experts(
        {
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
            "shared_dim": "intermediate_size",
            "every": "interleave_moe_layer_step",
        },
        {"score": "sigmoid", "scale_input": True},
    ),
    "gpt_oss": _Experts(
        {
            "n_experts": "num_local_experts",
            "top_k": ("num_experts_per_tok", "experts_per_token"),
            "expert_dim": "intermediate_size",
        },
        {"normalize": True, "router_bias": True, "activation": "clamped"},
    ),
}
_BIASED = ("llama", "qwen3", "qwen3_moe", "llama4_text", "gpt_oss")  # families that read `attention_bias`
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The folder's config.json (or another of its JSON files) as a dict."""
    path = folder / name
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}: set one that has {name}, or a name on the Hub (owner/name)")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; a Hugging Face model folder has a {name}")
    try:
        config = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return config


def architecture_from_hf(
    folder: Path, implementation: str = "auto", overrides: Mapping[str, Any] | None = None
) -> Architecture:
    """The architecture of a Hugging Face model folder, with some fields changed.

    `implementation` is model.implementation: whether transformers computes families without a native model, or all.
    """
    config = read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{folder / 'config.json'}: model_type: expected a name, got {show(kind)}")
    foreign = implementation == "transformers"
    foreign |= implementation == "auto" and not is_built(kind)
    try:
        if foreign:
            from shardline.models.huggingface.foreign_config import foreign_architecture

            return foreign_architecture(config, overrides)
        found = architecture_from_dict(config)
    except ConfigError as error:
        if str(folder) in str(error) or (
            (foreign or implementation == "transformers") and str(error).startswith("model.overrides.")
        ):
            raise
        other = "" if foreign else '; model.implementation = "transformers" has transformers compute the model'
        remedy = other if "is not supported" in str(error) or "are not supported" in str(error) else ""
        raise ConfigError(f"{folder / 'config.json'}: {in_their_names(str(error))}{remedy}") from None
    return found.with_overrides(overrides or {})


def architecture_from_dict(config: Mapping[str, Any]) -> Architecture:
    check_types(config)
    family = config.get("model_type")
    if family in ("llama4", "gemma3"):  # text and images: only the text model is read
        return architecture_from_dict(
            {**(config.get("text_config") or {}), **_shared(config), "model_type": f"{family}_text"}
        )
    if family not in CLASSES:
        raise ConfigError(f"model_type {family!r} is not supported (supported: {', '.join(CLASSES)})")
    defaults = {**_COMMON, **_DEFAULTS[family]}
    merged = {**defaults, **config}
    valued = [key for key, default in defaults.items() if default is not None and key not in _MAY_BE_NULL]
    absent = [key for key in (*_NEEDED, *valued) if merged.get(key) is None]
    if absent:
        raise ConfigError(f"{absent[0]} is {'null' if absent[0] in merged else 'missing'}")
    check_per_layer(merged, "no_rope_layers")
    _refuse(family, merged)
    theta, scaling = rotary_fields(family, merged)
    window, layers = _sliding(family, merged)
    heads = merged["num_attention_heads"]
    all_biases = bool(merged.get("attention_bias")) and family in _BIASED
    return build(
        {
            "family": family,
            "dim": merged["hidden_size"],
            "n_layers": merged["num_hidden_layers"],
            "n_heads": heads,
            "n_kv_heads": merged.get("num_key_value_heads") or heads,
            "head_dim": merged.get("head_dim") or merged["hidden_size"] // heads,  # of every family, Qwen2 too
            "ffn_dim": merged["intermediate_size"],
            "vocab_size": merged["vocab_size"],
            "max_seq_len": merged["max_position_embeddings"],
            "rope_theta": theta,
            "rope_scaling": scaling,
            "norm_eps": merged["rms_norm_eps"],
            "qkv_bias": all_biases or family == "qwen2",
            "out_bias": all_biases,
            "mlp_bias": (bool(merged.get("mlp_bias")) and family == "llama") or family == "gpt_oss",
            "qk_norm": family in ("qwen3", "qwen3_moe"),
            "sinks": family == "gpt_oss",
            "moe": _experts(family, merged),
            "tie_word_embeddings": bool(merged["tie_word_embeddings"]),
            "sliding_window": window,
            "sliding_window_layers": layers,
            "init_std": merged["initializer_range"] or _COMMON["initializer_range"],
            **(deepseek.deepseek_fields(family, merged) if family in deepseek.DEFAULTS else {}),
            **(_llama4_fields(merged) if family == "llama4_text" else {}),
            **(_dense_fields(family, merged, window, layers) if family in DENSE else {}),
        }
    )


# Keys that may be null, which turns something off or leaves it to other keys
_MAY_BE_NULL = (
    *("num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size", "rope_theta", "rope_scaling"),
    *("final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank", "initializer_range", "tie_word_embeddings"),
    *("attention_bias", "norm_topk_prob", "rope_interleave", "use_qk_norm", "attn_temperature_tuning", "use_bias"),
    *("original_max_position_embeddings", "partial_rotary_factor", "use_sliding_window", "n_group", "topk_group"),
)


def _dense_fields(
    family: str, config: Mapping[str, Any], window: int | None, layers: tuple[int, ...] | None
) -> dict[str, Any]:
    """Fields of the families in `DENSE`, some of which depend on the layers with a window."""
    fields = dense_fields(family, config)
    if family == "cohere2":
        fields["rope_layers"] = () if window is None else layers  # the other layers have no rotary positions
    if DENSE[family].rotates_in_part:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        fields["rope_fraction"] = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if DENSE[family].by_layer_type and window is not None:
        fields["window_rope_theta"] = window_theta(config)
    return fields


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model of text and images that apply to its text model too."""
    return {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}


def _llama4_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, chunks and the norm of queries and keys, which differ from those of other families."""
    layers = range(config["num_hidden_layers"])
    interval = config["no_rope_layer_interval"]
    rotates = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in layers]  # 1: rotary
    rope_layers = tuple(layer for layer in layers if rotates[layer])
    every = config["interleave_moe_layer_step"]
    held, expected = config.get("moe_layers"), [*range(every - 1, len(layers), every)]
    if held is not None and list(held) != expected:
        raise ConfigError(f"moe_layers {held} is not supported (only each {every}th layer is: {expected})")
    return {
        "ffn_dim": config["intermediate_size_mlp"],
        "rope_pairs": "neighbors",
        "rope_layers": None if len(rope_layers) == len(layers) else rope_layers,
        "rotated_norm": bool(config["use_qk_norm"]),
        "query_scale": float(config["attn_scale"]) if config["attn_temperature_tuning"] else 0.0,
        "query_scale_step": int(config["floor_scale"]),
        "window_kind": "chunked",
    }


def _refuse(family: str, config: Mapping[str, Any]) -> None:
    """Refuse keys that change the arithmetic."""
    if family == "gpt_oss" and (config["swiglu_limit"], config["swiglu_alpha"]) != (7.0, 1.702):
        limits = f"swiglu_limit {config['swiglu_limit']} and swiglu_alpha {config['swiglu_alpha']}"
        raise ConfigError(f"{limits} are not supported (only 7.0 and 1.702 are)")
    _check_activation(family, config)
    method = (config.get("quantization_config") or {}).get("quant_method", "unknown")
    if config.get("quantization_config") and (family, method) != ("gpt_oss", "mxfp4"):
        raise ConfigError(f"quantization_config ({method}) is not supported; use the unquantized weights")
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported (only false is)")
    noises = [*dropouts(config), *(["router_jitter_noise"] if config.get("router_jitter_noise") else [])]
    if noises and family in DENSE and DENSE[family].trained_with_dropout:
        rates = ", ".join(f"{key} {config[key]}" for key in noises)
        log.warning("config.json: the model was trained with %s; there is no dropout here", rates)
    elif noises:
        raise ConfigError(f"{noises[0]} {config[noises[0]]} is not supported (only 0.0 is)")
    names = config.get("architectures") or []
    if names and CLASSES[family] not in names:
        raise ConfigError(f"architectures {names} is not supported (supported: ['{CLASSES[family]}'])")


def _check_activation(family: str, config: Mapping[str, Any]) -> None:
    """Refuse any activation but the family's own; the name of Gemma's changed over time."""
    row = DENSE.get(family)
    names = ACTIVATION_NAMES["silu" if row is None else row.fixed.get("activation", "silu")]
    key = "hidden_activation" if row is not None and "hidden_activation" in row.defaults else "hidden_act"
    known = (*names, "gelu") if family == "gemma" else names
    if config[key] not in known:
        raise ConfigError(f"{key} {config[key]!r} is not supported (supported: {names[0]!r})")


def _experts(family: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if family not in _EXPERTS:
        return None
    keys, fixed = _EXPERTS[family]
    fields = dict(fixed)
    for field, names in keys.items():
        found = [config[name] for name in _both(names) if config.get(name) is not None]
        if found:
            fields[field] = found[0]
    if isinstance(fields.get("first_dense"), list):
        fields["first_dense"] = _first_dense(fields["first_dense"], fields["every"], config["num_hidden_layers"])
    return fields


def _both(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _first_dense(without: list[int], every: int, layers: int) -> int:
    """The number of dense layers at the beginning; refuse `mlp_only_layers` that names any others."""
    held = [layer for layer in range(layers) if layer not in without and (layer + 1) % every == 0]
    for first in (len(without), min(held, default=layers)):
        if held == [layer for layer in range(first, layers) if (layer + 1) % every == 0]:
            return first
    raise ConfigError(f"mlp_only_layers {without} is not supported (only layers at the beginning are)")


def _sliding(family: str, config: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that use it (None: all layers); (None, None) without a window."""
    window = config.get("attention_chunk_size" if family == "llama4_text" else "sliding_window")
    without = family == "llama" or (family in DENSE and not DENSE[family].windows)
    if without or family in deepseek.DEFAULTS or window is None:
        return None, None
    if family in ("mistral", "mixtral") or (family in DENSE and DENSE[family].windows == "every"):
        return window, None
    always = family in ("llama4_text", "gpt_oss") or (family in DENSE and family != "smollm3")
    if not always and not config.get("use_sliding_window", False):
        return None, None
    if family == "qwen3_moe":  # its model has one mask for all layers
        return window, None
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        chosen = _usual_windows(family, config)
    else:
        kind_with = "chunked_attention" if family == "llama4_text" else "sliding_attention"
        strange = sorted(set(kinds) - {kind_with, "full_attention"})
        if strange or len(kinds) != layers:
            raise ConfigError(f"layer_types must name {layers} layers, full_attention or {kind_with} {strange}")
        chosen = tuple(layer for layer, kind in enumerate(kinds) if kind == kind_with)
    if not chosen:
        return None, None
    return window, None if len(chosen) == layers else chosen


def _usual_windows(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a window where config.json does not name them."""
    layers = range(config["num_hidden_layers"])
    if family in DENSE:
        return usual_dense_windows(family, config)
    if family == "gpt_oss":
        return tuple(layers[::2])
    if family == "llama4_text":
        rope_layers = _llama4_fields(config)["rope_layers"]
        return tuple(layers) if rope_layers is None else rope_layers
    return tuple(layers[config.get("max_window_layers", 28) :])


# Writing


def export_family(arch: Architecture) -> str:
    """The first family, starting with its own, whose Hugging Face model computes exactly this architecture."""
    for family in (arch.family, *(name for name in CLASSES if name != arch.family)):
        if not _obstacles(arch, family):
            return family
    raise UserError(
        "no Hugging Face model computes this architecture: "
        + "; ".join(f"{CLASSES[family]} {_obstacles(arch, family)[0]}" for family in CLASSES)
    )


def _obstacles(arch: Architecture, family: str) -> list[str]:
    """The reasons why a family's model cannot compute the architecture."""
    every_bias, no_bias = arch.qkv_bias and arch.out_bias, not (arch.qkv_bias or arch.out_bias)
    only_qkv = arch.qkv_bias and not arch.out_bias
    part = arch.sliding_window_layers is not None
    one_window = (arch.sliding_window is not None and part, "has one window for all layers")
    chunked = arch.sliding_window is not None and arch.window_kind == "chunked"
    rules: dict[str, list[tuple[bool, str]]] = {
        "llama": [
            (arch.qk_norm, "has no QK norm"),
            (arch.sliding_window is not None, "has no sliding window"),
            (not (every_bias or no_bias), "has biases on all attention projections or on none"),
            (arch.dim % arch.n_heads != 0, "needs dim divisible by n_heads"),
        ],
        "mistral": [
            (arch.qk_norm, "has no QK norm"),
            (arch.mlp_bias or not no_bias, "has no biases"),
            one_window,
        ],
        "qwen2": [
            (arch.qk_norm, "has no QK norm"),
            (arch.mlp_bias, "has no feed-forward bias"),
            (not only_qkv, "has biases on query, key and value only"),
        ],
        "qwen3": [
            (not arch.qk_norm, "always has QK norm"),
            (arch.mlp_bias, "has no feed-forward bias"),
            (not (every_bias or no_bias), "has biases on all attention projections or on none"),
        ],
        "llama4_text": [
            (arch.qk_norm, "has no QK norm with weights"),
            (arch.mlp_bias, "has no feed-forward bias"),
            (not (every_bias or no_bias), "has biases on all attention projections or on none"),
            (arch.rope_pairs != "neighbors", "rotates neighbors"),
            (arch.sliding_window is not None and not chunked, "has chunked attention, not a sliding window"),
            (arch.moe is not None and arch.moe.shared_dim != arch.moe.expert_dim, "has one width for all experts"),
        ],
        "gpt_oss": [
            (arch.qk_norm, "has no QK norm"),
            (not arch.mlp_bias, "always has biases on the experts"),
            (not (every_bias or no_bias), "has biases on all attention projections or on none"),
        ],
    }
    rules["mixtral"], rules["qwen3_moe"] = rules["mistral"], [*rules["qwen3"], one_window]
    if family in DENSE:
        return _dense_obstacles(arch, family)
    given = [name for name in _NEW_FIELDS if getattr(arch, name) != Architecture.model_fields[name].default]
    if given:
        return [f"has no {given[0]}"]
    if family in deepseek.DEFAULTS:
        return [text for broken, text in deepseek.deepseek_obstacles(arch, family) if broken]
    others = family != "llama4_text"
    everywhere = [
        (arch.latent is not None, "has no latent attention"),
        (arch.sinks and family != "gpt_oss", "has no attention sinks"),
        (not arch.sinks and family == "gpt_oss", "always has attention sinks"),
        (others and arch.rope_pairs == "neighbors", "does not rotate neighbors"),
        (others and arch.rope_layers is not None, "has rotary positions in every layer"),
        (others and arch.rotated_norm, "has no norm after the rotation"),
        (others and chunked, "has no chunks"),
    ]
    return [text for broken, text in rules[family] + everywhere if broken] + _expert_obstacles(arch.moe, family)


# Fields that only families in `DENSE` may have
_NEW_FIELDS = (
    *("rope_fraction", "window_rope_theta", "norm_kind", "norm_bias", "norm_places", "parallel_block"),
    *("residual_scale", "embedding_scale", "logit_scale", "logit_cap", "attention_scale", "score_cap"),
    *("activation", "gated", "qk_norm_over"),
)


def _dense_obstacles(arch: Architecture, family: str) -> list[str]:
    """What the config.json for this family would change in the architecture."""
    if family in ("gemma2", "gemma3_text") and arch.dim % arch.n_heads:
        return ["needs dim divisible by n_heads"]
    try:
        return differences(arch, architecture_from_dict(_written(arch, family)))
    except ConfigError as error:
        return [f"refuses it: {error}"]


def _expert_obstacles(moe: MixtureOfExperts | None, family: str) -> list[str]:
    """The fields of the experts that a family's model cannot have; training fields do not count."""
    if moe is None or family not in _EXPERTS:
        return [] if (moe is None) == (family not in _EXPERTS) else [f"has {'no' if moe else 'always'} experts"]
    keys, fixed = _EXPERTS[family]
    always = {name: field.default for name, field in MixtureOfExperts.model_fields.items()} | fixed
    others = [name for name in always if name not in keys and name not in TRAINING_FIELDS]
    return [f"always has moe.{name} = {always[name]!r}" for name in others if getattr(moe, name) != always[name]]


def hf_config(
    arch: Architecture,
    dtype: str = "float32",
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The config.json with which transformers computes this architecture; reading it back gives the same one."""
    family = export_family(arch)
    special = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    return {**_written(arch, family), **special, "use_cache": True, "dtype": dtype, "torch_dtype": dtype}


def _written(arch: Architecture, family: str) -> dict[str, Any]:
    """The keys of config.json that an architecture determines."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "hidden_size": arch.dim,
        "num_hidden_layers": arch.n_layers,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.ffn_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_seq_len,
        "rms_norm_eps": arch.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": arch.tie_word_embeddings,
        "initializer_range": arch.init_std,
        "attention_dropout": 0.0,
        **rotary_keys(arch),
    }
    if family in DENSE:
        windows = _window_keys(arch, family) if DENSE[family].windows else {}
        return {**config, **dense_keys(arch, family), **windows, **dense_rotary_keys(arch, family)}
    if family in _BIASED:
        config["attention_bias"] = arch.qkv_bias
    if family == "llama":
        config["mlp_bias"] = arch.mlp_bias
    if family == "llama4_text":
        config.update(_llama4_keys(arch))
    elif family != "llama" and family not in deepseek.DEFAULTS:
        config.update(_window_keys(arch, family))
    if family in deepseek.DEFAULTS:
        config.update(deepseek.deepseek_keys(arch, family))
    elif arch.moe is not None:
        config.update(_expert_keys(arch.moe, family))
    return config


def _expert_keys(moe: MixtureOfExperts, family: str) -> dict[str, Any]:
    values = {name: getattr(moe, field) for field, names in _EXPERTS[family].keys.items() for name in _both(names)}
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = list(range(moe.first_dense))
    return values


def _llama4_keys(arch: Architecture) -> dict[str, Any]:
    layers, every = range(arch.n_layers), 1 if arch.moe is None else arch.moe.every
    return {
        "intermediate_size_mlp": arch.ffn_dim,
        "moe_layers": [*range(every - 1, arch.n_layers, every)],
        "no_rope_layers": [int(arch.rotates(layer)) for layer in layers],
        "use_qk_norm": arch.rotated_norm,
        "attn_temperature_tuning": arch.query_scale > 0,
        "attn_scale": arch.query_scale,
        "floor_scale": arch.query_scale_step,
        "attention_chunk_size": arch.sliding_window,
        "layer_types": _layer_types(arch, "chunked_attention"),
    }


def _layer_types(arch: Architecture, kind: str) -> list[str]:
    chosen = range(arch.n_layers) if arch.sliding_window_layers is None else arch.sliding_window_layers
    if arch.sliding_window is None:
        chosen = ()
    return [kind if layer in chosen else "full_attention" for layer in range(arch.n_layers)]


def _window_keys(arch: Architecture, family: str) -> dict[str, Any]:
    if family in DENSE:
        typed = DENSE[family].windows == "pattern"
        types = {"layer_types": _layer_types(arch, "sliding_attention")} if typed else {}
        return {"sliding_window": arch.sliding_window, **types}
    if family in ("mistral", "mixtral"):
        return {"sliding_window": arch.sliding_window}
    if family == "qwen3_moe":
        return {"use_sliding_window": arch.sliding_window is not None, "sliding_window": arch.sliding_window}
    kinds = _layer_types(arch, "sliding_attention")
    if family == "gpt_oss":
        return {"sliding_window": arch.sliding_window, "layer_types": kinds, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    if arch.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    # Older versions have only a first layer with the window; layer_types describes any choice of layers.
    first = next((layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"), arch.n_layers)
    return {
        "use_sliding_window": True,
        "sliding_window": arch.sliding_window,
        "max_window_layers": first,
        "layer_types": kinds,
    }
