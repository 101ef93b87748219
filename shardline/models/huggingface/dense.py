"""The config.json of dense families that differ from Llama: a table, and a few functions of its rows.

A row says which fields of an `Architecture` the family fixes, and which key of config.json sets which field. A family
can represent an architecture if the config.json written for it reads back as the same one. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from shardline.config.architecture import Architecture

Fields = dict[str, Any]


class DenseFamily(NamedTuple):
    """A family of models without experts."""

    model: str  # class of transformers
    defaults: Fields  # keys that config.json may leave out
    fixed: Fields  # fields with a fixed value
    keys: Mapping[str, str] = MappingProxyType({})  # field -> key
    read: Callable[[Mapping[str, Any]], Fields] = lambda config: {}  # fields that are computed from keys
    write: Callable[[Architecture], Fields] = lambda arch: {}  # the inverse: keys that are computed from fields
    windows: str = ""  # "": none; every: each layer; pattern: all but each n-th layer, by default
    pattern: int = 0
    by_layer_type: bool = False  # layers with a window have rotary settings of their own
    rotates_in_part: bool = False  # reads `partial_rotary_factor`
    scalings: tuple[str, ...] | None = None  # kinds of rope_scaling; None: all
    trained_with_dropout: bool = False  # its published config.json names dropout rates


_ALL_BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}  # where config.json leaves them out
_LLAMA_BIASES = {**_ALL_BIASES, "mlp_bias": "mlp_bias"}


# Gemma


def _scaled_embedding(config: Mapping[str, Any]) -> Fields:
    return {"embedding_scale": config["hidden_size"] ** 0.5}


def _gemma_fields(config: Mapping[str, Any]) -> Fields:
    return {**_scaled_embedding(config), "attention_scale": config["query_pre_attn_scalar"] ** -0.5}


def _gemma_keys(arch: Architecture) -> Fields:
    scale = arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
    return {"query_pre_attn_scalar": round(scale**-2), "use_bidirectional_attention": False}


_GEMMA: Fields = {"norm_kind": "rms_plus_one", "activation": "gelu_tanh"}
_GEMMA_DEFAULTS: Fields = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "head_dim": 256,
}
_GEMMA2_DEFAULTS: Fields = {
    **_GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


# Layers without rotary positions


def _smollm_fields(config: Mapping[str, Any]) -> Fields:
    layers = range(config["num_hidden_layers"])
    given = config.get("no_rope_layers")  # 1: rotary
    rotates = given or [(layer + 1) % config["no_rope_layer_interval"] != 0 for layer in layers]
    return {"rope_layers": None if all(rotates) else tuple(layer for layer in layers if rotates[layer])}


def _smollm_keys(arch: Architecture) -> Fields:
    return {
        "no_rope_layers": [int(arch.rotates(layer)) for layer in range(arch.n_layers)],
        "use_sliding_window": arch.sliding_window is not None,
    }


# Multipliers


def _granite_fields(config: Mapping[str, Any]) -> Fields:
    return {"logit_scale": 1 / config["logits_scaling"]}


def _granite_keys(arch: Architecture) -> Fields:
    scale = arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
    near = round(1 / arch.logit_scale, 9)  # the reciprocal of a reciprocal may be off by its last bit
    return {
        "logits_scaling": near if 1 / near == arch.logit_scale else 1 / arch.logit_scale,
        "attention_multiplier": scale,
    }


# Cohere


def _cohere_fields(config: Mapping[str, Any]) -> Fields:
    return {"qk_norm_over": "each_head"} if config["use_qk_norm"] else {}


def _cohere2_fields(config: Mapping[str, Any]) -> Fields:
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"]}


_COHERE: Fields = {"norm_kind": "layer", "parallel_block": True, "rope_pairs": "neighbors"}
_COHERE_DEFAULTS: Fields = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "vocab_size": 256000,
}
_COHERE_KEYS = {**_ALL_BIASES, "norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"}
_GLM_DEFAULTS: Fields = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_OLMO: Fields = {"norm_places": "after", "qk_norm": True, "qk_norm_over": "width"}

DENSE: dict[str, DenseFamily] = {
    "gemma": DenseFamily(
        "GemmaForCausalLM",
        {**_GEMMA_DEFAULTS, "num_key_value_heads": 16},
        _GEMMA,
        _ALL_BIASES,
        _scaled_embedding,
    ),
    "gemma2": DenseFamily(
        "Gemma2ForCausalLM",
        {**_GEMMA2_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {**_GEMMA, "norm_places": "both"},
        {**_ALL_BIASES, "logit_cap": "final_logit_softcapping", "score_cap": "attn_logit_softcapping"},
        _gemma_fields,
        _gemma_keys,
        windows="pattern",
        pattern=2,
    ),
    # Its attention has no cap, whatever config.json says.
    "gemma3_text": DenseFamily(
        "Gemma3ForCausalLM",
        {
            **_GEMMA2_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        {**_GEMMA, "norm_places": "both", "qk_norm": True},
        {**_ALL_BIASES, "logit_cap": "final_logit_softcapping"},
        _gemma_fields,
        _gemma_keys,
        windows="pattern",
        pattern=6,
        by_layer_type=True,
    ),
    "phi3": DenseFamily(
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        {},
        windows="every",
        rotates_in_part=True,
        scalings=("longrope",),
    ),
    "olmo2": DenseFamily(
        "Olmo2ForCausalLM", {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}, _OLMO, _ALL_BIASES
    ),
    "olmo3": DenseFamily(
        "Olmo3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
        },
        _OLMO,
        _ALL_BIASES,
        windows="pattern",
        pattern=4,
        by_layer_type=True,
    ),
    "granite": DenseFamily(
        "GraniteForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        {},
        {
            **_LLAMA_BIASES,
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
        _granite_fields,
        _granite_keys,
        trained_with_dropout=True,
    ),
    "smollm3": DenseFamily(
        "SmolLM3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
        },
        {},
        _LLAMA_BIASES,
        _smollm_fields,
        _smollm_keys,
        windows="pattern",
    ),
    "glm": DenseFamily(
        "GlmForCausalLM",
        _GLM_DEFAULTS,
        {"rope_pairs": "neighbors"},
        {"qkv_bias": "attention_bias"},
        rotates_in_part=True,
    ),
    "glm4": DenseFamily(
        "Glm4ForCausalLM",
        _GLM_DEFAULTS,
        {"rope_pairs": "neighbors", "norm_places": "both"},
        {"qkv_bias": "attention_bias"},
        rotates_in_part=True,
    ),
    "starcoder2": DenseFamily(
        "Starcoder2ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.018042,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": None,
        },
        {"norm_kind": "layer", "norm_bias": True, "activation": "gelu_tanh", "gated": False},
        {"qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias", "norm_eps": "norm_epsilon"},
        windows="every",
        trained_with_dropout=True,
    ),
    "cohere": DenseFamily(
        "CohereForCausalLM",
        {**_COHERE_DEFAULTS, "use_qk_norm": False},
        _COHERE,
        {**_COHERE_KEYS, "qk_norm": "use_qk_norm"},
        _cohere_fields,
    ),
    # Layers without a window have no rotary positions.
    "cohere2": DenseFamily(
        "Cohere2ForCausalLM",
        {**_COHERE_DEFAULTS, "sliding_window": 4096, "rope_theta": 10000.0},
        _COHERE,
        _COHERE_KEYS,
        _cohere2_fields,
        windows="pattern",
        pattern=4,
    ),
}
ACTIVATION_NAMES = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout")


def dense_fields(family: str, config: Mapping[str, Any]) -> Fields:
    """The fields from config.json beyond those that all families have."""
    row = DENSE[family]
    given = {**_NO_BIASES, **config}
    fields = {**row.fixed, **{field: given[key] for field, key in row.keys.items()}, **row.read(config)}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if fields.get("attention_scale") == head_dim**-0.5:
        del fields["attention_scale"]
    return fields


def dense_keys(arch: Architecture, family: str) -> Fields:
    """The keys of config.json beyond those that all families have."""
    row = DENSE[family]
    name = ACTIVATION_NAMES[row.fixed.get("activation", "silu")][0]
    keys = {key: getattr(arch, field) for field, key in row.keys.items()}
    return {"hidden_act": name, "hidden_activation": name, **keys, **row.write(arch)}


def usual_dense_windows(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a window where config.json does not name them."""
    row, layers = DENSE[family], range(config["num_hidden_layers"])
    if row.windows == "every":
        return tuple(layers)
    if family == "smollm3":
        rotating = _smollm_fields(config)["rope_layers"]
        return () if rotating is None else tuple(layer for layer in layers if layer not in rotating)
    named = config.get("sliding_window_pattern") if family in ("gemma3_text", "cohere2") else None
    return tuple(layer for layer in layers if (layer + 1) % (named or row.pattern))


def dropouts(config: Mapping[str, Any]) -> list[str]:
    """The keys of dropout rates that are not 0."""
    return [key for key in _DROPOUTS if config.get(key)]


# Fields that have no effect where another one is unset
_IDLE = {
    "sliding_window_layers": "sliding_window",
    "window_kind": "sliding_window",
    "window_rope_theta": "sliding_window",
    "query_scale": "rope_layers",
    "query_scale_step": "query_scale",
    "qk_norm_over": "qk_norm",
}
_FREE = ("family", "attn_mask_type", "attn_backend")


def differences(arch: Architecture, again: Architecture) -> list[str]:
    """How `again`, which a family's model would compute, differs from `arch`: one phrase per field."""
    found = []
    for name in Architecture.model_fields:
        idle = name in _IDLE and not getattr(arch, _IDLE[name]) and not getattr(again, _IDLE[name])
        ours, theirs = _meaning(arch, name), _meaning(again, name)
        if name not in _FREE and not idle and ours != theirs:
            found.append(f"has {name} = {theirs!r}")
    return found


def _meaning(arch: Architecture, name: str) -> Any:
    """A field's value, with all layers in place of a None that means them."""
    value = getattr(arch, name)
    if name in ("sliding_window_layers", "rope_layers") and value is None:
        return tuple(range(arch.n_layers))
    return value
