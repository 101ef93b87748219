"""The keys of config.json that only DeepSeek-V2 and -V3 have, read and written. Torch-free.

V2 chooses experts by softmax scores, V3 by sigmoid scores to which a balancing bias is added. V2 scores a group of
experts by its best one, V3 by its two best.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.config.architecture import Architecture, MixtureOfExperts
from shardline.errors import ConfigError

BALANCE_COEFF = 1e-3  # as V3 was trained: config.json has no training settings
GROUPED = "group_limited_greedy"

# The values of keys that config.json leaves out
_WIDTHS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        **_WIDTHS,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        **_WIDTHS,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
    },
}
_SIZES = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}
_EXPERTS = {
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "first_dense": "first_k_dense_replace",
    "scale": "routed_scaling_factor",
}


def deepseek_fields(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the architecture from config.json with its defaults filled in."""
    _refuse(family, config)
    pairs = "neighbors" if config.get("rope_interleave", True) else "halves"  # a key of V3 alone
    dense = config["first_k_dense_replace"] >= config["num_hidden_layers"]
    return {
        "n_kv_heads": config["num_attention_heads"],
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "latent": {ours: config[theirs] for ours, theirs in _SIZES.items()},
        "moe": None if dense else _experts(family, config),
        "rope_pairs": pairs if family == "deepseek_v3" else "neighbors",
    }


def _refuse(family: str, config: Mapping[str, Any]) -> None:
    """Refuse values that change the arithmetic."""
    methods = ("greedy", GROUPED) if family == "deepseek_v2" else ("noaux_tc",)
    supported = {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "moe_layer_freq": (1, None),
        "num_key_value_heads": (config["num_attention_heads"], None),
        "scoring_func": (DEFAULTS[family]["scoring_func"],),
        "topk_method": methods,
    }
    for key, values in supported.items():
        if config.get(key) not in values:
            words = ", ".join(repr(value) for value in values if value is not None)
            raise ConfigError(f"{key} {config[key]!r} is not supported (supported: {words})")
    numbers = [*_EXPERTS.values(), "n_shared_experts", *(key for key in _SIZES.values() if key != "q_lora_rank")]
    wrong = [key for key in numbers if not isinstance(config.get(key), int | float)]
    if wrong:
        raise ConfigError(f"{wrong[0]} is missing or not a number")


def _experts(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    third = family == "deepseek_v3"
    fields = {ours: config[theirs] for ours, theirs in _EXPERTS.items()}
    fields["shared_dim"] = config["n_shared_experts"] * config["moe_intermediate_size"]
    if third or config["topk_method"] == GROUPED:
        fields |= {"n_groups": config.get("n_group") or 1, "top_groups": config.get("topk_group") or 1}
    if third:
        normalize = bool(config["norm_topk_prob"])  # the model of V2 ignores it
        fields |= {"score": "sigmoid", "group_score": "top2", "normalize": normalize, "balance_coeff": BALANCE_COEFF}
    return fields


def deepseek_obstacles(arch: Architecture, family: str) -> list[tuple[bool, str]]:
    """(whether an obstacle exists, why the family's model then cannot compute the architecture)."""
    moe = arch.moe
    rules = [
        (arch.latent is None, "always has latent attention"),
        (arch.mlp_bias, "has no biases"),
        (arch.sliding_window is not None, "has no sliding window"),
        (family == "deepseek_v2" and arch.rope_pairs != "neighbors", "rotates neighboring dimensions"),
    ]
    return rules if moe is None else [*rules, *_expert_rules(moe, family)]


def _expert_rules(moe: MixtureOfExperts, family: str) -> list[tuple[bool, str]]:
    score, group_score = ("sigmoid", "top2") if family == "deepseek_v3" else ("softmax", "max")
    grouped = moe.n_groups != moe.top_groups
    return [
        (moe.score != score, f"has {score} scores"),
        (grouped and moe.group_score != group_score, f"scores groups by {group_score}"),
        (family == "deepseek_v2" and moe.normalize, "does not normalize scores"),
        (moe.every != 1, "has experts in every layer after the dense ones"),
        (moe.router_bias, "has no bias on the router's logits"),
        (moe.scale_input or moe.activation != "silu", "has plain experts"),
        (moe.shared_dim == 0 or moe.shared_dim % moe.expert_dim != 0, "needs a whole number of shared experts"),
    ]


def deepseek_keys(arch: Architecture, family: str) -> dict[str, Any]:
    """The keys of config.json that these families have besides the common ones; its `head_dim` is the rotary part."""
    assert arch.latent is not None
    keys: dict[str, Any] = {theirs: getattr(arch.latent, ours) for ours, theirs in _SIZES.items()}
    keys |= {"head_dim": arch.latent.rope_dim, "attention_bias": False}
    if family == "deepseek_v3":
        keys |= {"rope_interleave": arch.rope_pairs == "neighbors", "num_nextn_predict_layers": 0}
    moe = arch.moe
    if moe is None:
        return {**keys, "first_k_dense_replace": arch.n_layers}
    keys |= {theirs: getattr(moe, ours) for ours, theirs in _EXPERTS.items()}
    keys |= {
        "n_group": moe.n_groups,
        "topk_group": moe.top_groups,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
    }
    grouped = moe.n_groups != moe.top_groups
    method = "noaux_tc" if family == "deepseek_v3" else GROUPED if grouped else "greedy"
    return {**keys, "topk_method": method, "scoring_func": moe.score, "norm_topk_prob": moe.normalize}
