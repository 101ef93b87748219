"""The types and ranges of the keys of config.json that are read: a wrong value is refused by name. Torch-free.

A key has the same type in every family. Null stands for a key that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardline.config.architecture import LAYERS, ROWS, WIDTH
from shardline.config.types import LARGEST, show
from shardline.errors import ConfigError

# Fields of an architecture, and the names that config.json has for them in most families.
NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "init_std": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}


def in_their_names(text: str) -> str:
    """Rewrite an error about fields of an architecture with the names that config.json has for them."""
    for ours, theirs in NAMES.items():
        text = text.replace(f"model.overrides.{ours}:", f"{theirs}:")
    return text.replace("model.overrides.", "")


class Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


def _whole(low: int, high: int) -> Kind:
    return Kind(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def _real(low: float, above: bool = False) -> Kind:
    def test(value: Any) -> bool:
        if type(value) not in (int, float) or not -1e30 <= value <= 1e30 or math.isnan(value):
            return False
        return bool(value > low if above else value >= low)

    return Kind(f"a finite number {'above' if above else 'not below'} {low:g}", test)


def _list(kind: Kind, words: str) -> Kind:
    return Kind(f"a list of {words}", lambda value: isinstance(value, list) and all(map(kind.test, value)))


_TEXT = Kind("a name", lambda value: isinstance(value, str) and len(value) <= 200)
_TABLE = Kind("a table", lambda value: isinstance(value, Mapping))
_SWITCH = Kind("true or false", lambda value: isinstance(value, bool) or (type(value) is int and value in (0, 1)))
_COUNT, _POSITIVE = _whole(0, LARGEST), _real(0, above=True)
_BY_KIND: tuple[tuple[Kind, str], ...] = (
    (
        _whole(1, WIDTH),
        "hidden_size intermediate_size intermediate_size_mlp moe_intermediate_size num_attention_heads head_dim"
        " num_key_value_heads kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_local_experts"
        " num_experts n_routed_experts num_experts_per_tok experts_per_token",
    ),
    (_whole(1, LAYERS), "num_hidden_layers"),
    (_whole(1, ROWS), "vocab_size"),
    (
        _whole(1, LARGEST),
        "max_position_embeddings original_max_position_embeddings sliding_window attention_chunk_size"
        " sliding_window_pattern decoder_sparse_step interleave_moe_layer_step no_rope_layer_interval",
    ),
    (_COUNT, "n_shared_experts n_group topk_group first_k_dense_replace max_window_layers moe_layer_freq"),
    (
        _POSITIVE,
        "rms_norm_eps layer_norm_eps norm_epsilon rope_theta rope_local_base_freq query_pre_attn_scalar floor_scale"
        " logits_scaling logit_scale embedding_multiplier residual_multiplier attention_multiplier"
        " final_logit_softcapping attn_logit_softcapping routed_scaling_factor swiglu_limit swiglu_alpha"
        " factor low_freq_factor high_freq_factor attention_factor",
    ),
    (
        _real(0),
        "initializer_range partial_rotary_factor router_jitter_noise attention_dropout resid_pdrop embd_pdrop"
        " residual_dropout embedding_dropout attn_scale beta_fast beta_slow mscale mscale_all_dim",
    ),
    (
        _SWITCH,
        "tie_word_embeddings attention_bias mlp_bias use_bias norm_topk_prob use_qk_norm use_sliding_window"
        " rope_interleave truncate",
    ),
    (_TEXT, "model_type hidden_act hidden_activation topk_method scoring_func rope_type type"),
    (_TABLE, "rope_parameters rope_scaling quantization_config text_config full_attention sliding_attention"),
    (_list(_TEXT, "names"), "architectures layer_types"),
    (_list(_SWITCH, "0 and 1"), "no_rope_layers"),
    (_list(_COUNT, "layers"), "moe_layers mlp_only_layers"),
    (_list(_POSITIVE, "finite numbers above 0"), "short_factor long_factor"),
)
KINDS = {key: kind for kind, keys in _BY_KIND for key in keys.split()}
_WIDTHS = ("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "d_ff", "d_inner", "ffn_dim")
LAYERS_BY_WIDTH = 2**25  # five times those of a model of 405 billion parameters
_ROTARY = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")  # tables with keys of these types


def check_types(config: Mapping[str, Any], inside: str = "") -> None:
    """Refuse a value of the wrong type, or one that no model has."""
    for key, kind in KINDS.items():
        value = config.get(key)
        if value is None:
            continue
        if not kind.test(value):
            raise ConfigError(f"{inside}{key}: expected {kind.words}, got {show(value)}")
        if key in _ROTARY:
            check_types(value, f"{inside}{key}.")


def check_per_layer(config: Mapping[str, Any], key: str) -> None:
    """Refuse a list that does not have one entry per layer."""
    given, layers = config.get(key), config["num_hidden_layers"]
    if given and len(given) != layers:
        raise ConfigError(f"{key} has {len(given)} entries, but there are {layers} layers")


def check_sizes(config: Mapping[str, Any], inside: str = "") -> None:
    """Refuse layer counts, and other whole numbers, so large that building the model would never end."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, f"{inside}{key}.")
        elif isinstance(value, int) and not -LARGEST <= value <= (LAYERS if _counts_layers(key) else LARGEST):
            most = LAYERS if _counts_layers(key) else LARGEST
            raise ConfigError(f"{inside}{key}: expected a whole number up to {most:,}, got {show(value)}")


def check_together(config: Mapping[str, Any]) -> None:
    """Refuse more layers of one width than fit into memory as vectors: every model is built once to inspect it."""
    numbers = {key: value for key, value in config.items() if type(value) is int}
    layers = {key: value for key, value in numbers.items() if _counts_layers(key)}
    widths = {key: value for key, value in numbers.items() if key in _WIDTHS}
    if not (layers and widths):
        return
    many, wide = max(layers, key=layers.__getitem__), max(widths, key=widths.__getitem__)
    if layers[many] * widths[wide] > LAYERS_BY_WIDTH:
        raise ConfigError(
            f"{many} x {wide} = {layers[many]:,} x {widths[wide]:,}: expected at most {LAYERS_BY_WIDTH:,} together"
        )


def _counts_layers(key: str) -> bool:
    return key.endswith(("layer", "layers", "_blocks", "n_block")) and not key.startswith(("max_", "first_", "skip_"))
